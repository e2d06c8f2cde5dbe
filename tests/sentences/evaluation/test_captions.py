"""Images and captions: maps, ranks, chance, and the protocol from files."""

import gzip
import io
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch

from fastqt.errors import InputError
from fastqt.sentences.evaluation import retrieval
from fastqt.sentences.evaluation.captions import (
    Caption,
    MapOptions,
    check_parts,
    evaluate_retrieval,
    read_captions,
    read_features,
    split_by_share,
)
from fastqt.sentences.evaluation.retrieval import Pairs, chance, fit_maps
from tests.shared.novels import novel
from tests.shared.tolerances import FLOAT32


def planted(images=120, captions=3, seed=0):
    """Images, their captions as noisy linear functions of the images, and the owner of each caption."""
    generator = np.random.default_rng(seed)
    x = generator.standard_normal((images, 12))
    owners = generator.permutation(np.repeat(np.arange(images), captions))
    y = x[owners] @ np.random.default_rng(99).standard_normal((12, 20))
    return x, y + 0.3 * generator.standard_normal(y.shape), owners


def test_the_maps_that_are_best_on_the_development_pairs_are_kept():
    x, y, owners = planted(40)
    dev = Pairs(*planted(25, seed=1))
    options = {"dim": 8, "batch_size": 30, "learning_rate": 0.02}  # too high: later maps are worse again
    each = [fit_maps(x, y, owners, **options, epochs=epochs) for epochs in range(1, 13)]
    scores = [sum(sum(found[:3]) for found in maps.retrieve(*dev)) for maps in each]
    best = 1 + int(np.argmax(scores))
    kept = fit_maps(x, y, owners, **options, epochs=12, dev=dev, patience=12)
    assert kept.epochs == best
    assert torch.equal(kept.image.weight, each[best - 1].image.weight)
    assert each[-1].epochs == 12
    # The first pass after which as many were in vain ends the training.
    in_vain = highest = first = 0
    for number, score in enumerate(scores, start=1):
        in_vain, highest, first = (0, score, number) if score > highest else (in_vain + 1, highest, first)
        if in_vain == 2:
            break
    assert fit_maps(x, y, owners, **options, epochs=12, dev=dev, patience=2).epochs == first


@pytest.mark.parametrize("owners", [range(30), [*range(12), *range(12), *range(6)], [0] * 9 + [1]])
def test_chance_is_what_random_orders_find(owners):
    owners = np.array(owners)
    images = owners.max() + 1
    generator = np.random.default_rng(0)
    ranks_of_images, ranks_of_captions = [], []
    for _ in range(4000):
        order = 1 + generator.permutation(len(owners))
        ranks_of_images += [order[owners == image].min() for image in range(images)]
        ranks_of_captions += [1 + generator.integers(images)]
    for found, ranks in zip(chance(owners, images), (ranks_of_images, ranks_of_captions), strict=True):
        shares = [np.mean(np.array(ranks) <= limit) for limit in (1, 5, 10)]
        assert found[:3] == pytest.approx(shares, abs=0.03)  # 4,000 draws err by 0.008
        assert found.median_rank == pytest.approx(np.median(ranks), abs=1)


def test_the_margin_loss_with_all_contrasts_and_with_a_sample():
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(8, 5, generator=generator, dtype=torch.float64) for _ in range(2))
    owners = torch.tensor([0, 1, 2, 3, 4, 5, 0, 1])
    scores, wanted = (x @ y.T).tolist(), 0.0
    for i in range(8):
        for j in range(8):
            if owners[i] != owners[j]:
                wanted += max(0, 0.2 - scores[i][i] + scores[i][j]) + max(
                    0, 0.2 - scores[i][i] + scores[j][i]
                )
    assert retrieval.margin_loss(x, y, owners, 0.2, 50).item() == pytest.approx(wanted / 8, rel=FLOAT32)
    torch.manual_seed(0)
    few = [retrieval.margin_loss(x, y, owners, 0.2, 2).item() for _ in range(2000)]
    # Two of six contrasts are sampled, or two of seven if no other row has the same owner.
    bounds = sorted((wanted / 8 * 2 / 7, wanted / 8 * 2 / 6))
    assert bounds[0] * 0.98 < np.mean(few) < bounds[1] * 1.02


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", ">f4"])
def test_features_are_read_as_float32(tmp_path, dtype):
    wanted = np.arange(6).reshape(2, 3) / 8
    for array in (wanted.astype(dtype), np.asfortranarray(wanted.astype(dtype))):
        np.save(tmp_path / "x.npy", array)
        found = read_features(tmp_path / "x.npy")
        assert found.dtype == np.float32
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (
            np.ones(3),
            r"x\.npy: want rows \(n, d\) of .*, got shape \(3,\) of float64",
        ),
        (np.ones((2, 2), dtype=int), "of a floating-point type in an .npy, got .* int64"),
        (np.array([[np.nan]]), "want finite numbers of 32 bits"),
        (np.array([[1e300]]), "want finite numbers of 32 bits"),
        (b"no array", r"x\.npy is no \.npy, or is damaged"),
        (None, r"no such file: .*x\.npy"),
    ],
)
def test_other_features_are_refused(tmp_path, array, message):
    path = tmp_path / "x.npy"
    if isinstance(array, bytes):
        path.write_bytes(array)
    elif array is not None:
        np.save(path, array)
    with pytest.raises(InputError, match=message):
        read_features(path)


def test_features_cut_short_and_a_folder_are_refused(tmp_path):
    path = tmp_path / "x.npy"
    np.save(path, np.ones((4, 5)))
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(InputError, match=r"x\.npy is no \.npy, or is damaged"):
        read_features(path)
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
    with pytest.raises(InputError, match="test: want images that are in no other part, got image 1, which"):
        check_parts(parts, ("train", "dev", "test"))
    parts[2][1] = Caption("f", 4)
    check_parts(parts, ("train", "dev", "test"))


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
