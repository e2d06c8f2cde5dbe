"""The image-caption protocol from files: what is read, divided, learnt and refused."""

import gzip
import io
from itertools import chain
from pathlib import Path

import numpy as np
import pytest

from fastqt.errors import InputError
from fastqt.sentences.evaluation.captions import (
    Caption,
    MapOptions,
    check_parts,
    evaluate_retrieval,
    read_captions,
    read_features,
    split_by_share,
)
from tests.shared.novels import novel


def write_array(path, array):
    np.save(path, array, allow_pickle=True)
    return path


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", ">f4"])
def test_features_are_read_as_float32(tmp_path, dtype):
    wanted = np.arange(6).reshape(2, 3) / 8
    found = read_features(write_array(tmp_path / "x.npy", wanted.astype(dtype)))
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, wanted)
    turned = write_array(tmp_path / "f.npy", np.asfortranarray(wanted.astype(dtype)))
    np.testing.assert_array_equal(read_features(turned), wanted)


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.ones(3), r"x\.npy: want 2 dimensions and a dtype of kind f, got shape \(3,\) and float64"),
        (np.ones((2, 2), dtype=int), "want 2 dimensions and a dtype of kind f, got .* int64"),
        (np.array([["a"]], dtype=object), "want 2 dimensions and a dtype of kind f, got .* object"),
        (np.ones((0, 2)), r"want a value at least, got shape \(0, 2\)"),
        (np.array([[np.nan]]), "want finite numbers of 32 bits"),
        (np.array([[1e300]]), "want finite numbers of 32 bits"),
    ],
)
def test_other_arrays_are_refused(tmp_path, array, message):
    with pytest.raises(InputError, match=message):
        read_features(write_array(tmp_path / "x.npy", array))


def test_missing_and_damaged_files_of_features_are_refused(tmp_path):
    path = write_array(tmp_path / "x.npy", np.ones((4, 5)))
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(InputError, match=r"x\.npy: want 160 bytes for shape \(4, 5\) of float64, got 152"):
        read_features(path)
    path.write_text("no array")
    with pytest.raises(InputError, match=r"x\.npy: want an array of numpy's format, got a damaged header"):
        read_features(path)
    with pytest.raises(InputError, match=r"no such file: .*none\.npy"):
        read_features(tmp_path / "none.npy")
    with pytest.raises(InputError, match=r"cannot read .*: Is a directory"):
        read_features(tmp_path)


def test_captions_of_a_text_and_of_a_table(tmp_path, monkeypatch):
    text = tmp_path / "captions.txt"
    text.write_text("a dog\n\n  a cat \n")
    assert read_captions(str(text), 3) == [Caption("a dog", 0), Caption("a cat", 2)]
    table = tmp_path / "captions.tsv.gz"
    table.write_bytes(gzip.compress(b"a dog\t2\n\na\tcat\t0\na hound\t 2\n"))
    assert read_captions(str(table), 3) == [Caption("a dog", 2), Caption("a\tcat", 0), Caption("a hound", 2)]
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"a dog\n")))
    assert read_captions("-", 1) == [Caption("a dog", 0)]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("c.txt", "a\nb\nc\n", r"c\.txt: line 3: want an image from 0 to 1, got 2"),
        ("c.tsv", "a\t0\nb\t2\n", r"c\.tsv: line 2: want an image from 0 to 1, got 2"),
        ("c.tsv", "a\t0\nb\n", r"line 2: want a caption, a tab and the number of its image, got 'b'"),
        ("c.tsv", "a\t-1\n", "want a caption, a tab and the number of its image, got "),
        ("c.tsv", "\t1\n", "want a caption, a tab and the number of its image, got '1'"),
        ("c.tsv", "a\t" + "9" * 5000 + "\n", "want a caption, a tab and the number of its image"),
        ("c.txt", "\n \n", r"c\.txt holds no caption"),
    ],
)
def test_lines_that_name_no_image_are_refused(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(InputError, match=message):
        read_captions(str(tmp_path / name), 2)


def test_parts_by_share_are_disjoint_seeded_and_of_whole_images():
    captions = [Caption(f"caption {number}", 3 * (number % 40)) for number in range(100)]
    parts = split_by_share(captions, 0.1, 0)
    images = [{each.image for each in part} for part in parts]
    assert [len(part) for part in images] == [32, 4, 4]
    assert len(set.union(*images)) == 40
    assert sorted(chain(*parts)) == sorted(captions)
    assert parts == split_by_share(captions, 0.1, 0)
    assert parts != split_by_share(captions, 0.1, 1)
    for share in (0, 0.5, -1, float("nan")):
        with pytest.raises(InputError, match=r"share: want a number between 0 and 0\.5, got "):
            split_by_share(captions, share, 0)
    with pytest.raises(InputError, match="share: want at least 2 images in a part, got 1 of 40"):
        split_by_share(captions, 0.02, 0)


def test_parts_with_an_image_in_common_are_refused():
    parts = [[Caption("a", 0), Caption("b", 1)], [Caption("c", 2), Caption("d", 3)], [Caption("e", 5)]]
    with pytest.raises(InputError, match="test: want captions of at least 2 images, got 1"):
        check_parts(parts, ("train", "dev", "test"))
    parts[2].append(Caption("f", 1))
    with pytest.raises(
        InputError, match="test: want images that are in no other part, got image 1, which is"
    ):
        check_parts(parts, ("train", "dev", "test"))
    parts[2][1] = Caption("f", 4)
    check_parts(parts, ("train", "dev", "test"))


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"dim": 0}, "dim: want at least 1, got 0"),
        ({"patience": 0}, "patience: want at least 1, got 0"),
        ({"margin": -0.1}, "margin: want a number of at least 0, got -0.1"),
        ({"margin": float("nan")}, "margin: want a number of at least 0, got nan"),
        ({"seed": -1}, "seed: want 0 to 4294967295, got -1"),
    ],
)
def test_options_outside_their_range_are_refused(option, message):
    with pytest.raises(InputError, match=message):
        MapOptions(**option)


def letters(texts):
    """How often a text has each letter: vectors that need no training."""
    return np.array([[text.lower().count(letter) for letter in "etaoinshrdlu"] for text in texts], float)


def test_sentences_of_novels_are_found_by_features_that_depend_on_them(tmp_path):
    text = Path(novel(tmp_path / "text.txt", 500)).read_text(encoding="utf-8")
    lines = sorted({line for line in text.splitlines() if len(line) > 60})
    generator = np.random.default_rng(0)
    captions = [Caption(line.strip(), number) for number, line in enumerate(lines)]
    features = (letters(lines) @ generator.standard_normal((12, 20))).astype(np.float32)
    parts = split_by_share(captions, 0.15, 0)
    options = MapOptions(dim=24, epochs=30)
    results = evaluate_retrieval(letters, features, parts, options, progress=False)
    size = len(parts[2])
    for figures in results.tasks.values():
        assert figures["R@1"] > 0.5
        assert figures["median rank"] == 1
        assert figures["chance"]["R@5"] == pytest.approx(5 / size)
    assert results.settings["parts"]["test"] == {"images": size, "captions": size}
    assert 1 <= results.settings["epochs_trained"] <= 30
    unrelated = generator.permutation(features)
    results = evaluate_retrieval(letters, unrelated, parts, options, progress=False)
    for figures in results.tasks.values():
        assert figures["R@10"] < 3 * figures["chance"]["R@10"]


def test_vectors_that_are_all_alike_find_what_chance_does():
    captions = [Caption(f"caption {number}", number) for number in range(60)]
    features = np.random.default_rng(0).standard_normal((60, 4)).astype(np.float32)
    parts = split_by_share(captions, 0.3, 0)
    results = evaluate_retrieval(
        lambda texts: np.ones((len(texts), 3)), features, parts, MapOptions(dim=4), progress=False
    )
    for figures in results.tasks.values():
        chance = figures.pop("chance")
        assert figures == pytest.approx(chance)
        assert chance["median rank"] == 9.5  # in the middle of 18
