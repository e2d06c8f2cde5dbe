"""Word vectors in the JSON of wink's embeddings."""

import gzip
import json
import math

import numpy as np
import pytest

from fastqt.errors import InputError
from fastqt.sentences.text import limits
from fastqt.sentences.text.vectors import read_vectors, width_of

VECTORS = {"the": [0.5, -1.25, 3], ",": [1, 2, 3], "naïve": [1e-3, 0.0, -7], "The": [9, 9, 9]}


def document(**changes):
    """What the package's file holds: behind each vector are its norm and its number."""
    rows = {
        word: [*vector, math.hypot(*vector), number] for number, (word, vector) in enumerate(VECTORS.items())
    }
    head = {"precision": 8, "l2NormIndex": 3, "wordIndex": 4, "size": len(rows), "dimensions": 3}
    whole = {**head, "words": list(rows), "vectors": rows, "unkVector": [0, 0, 0, 0, -1]}
    return {name: value for name, value in (whole | changes).items() if value is not None}


def write(path, whole):
    path.write_text(json.dumps(whole, separators=(",", ":")))
    return path


@pytest.mark.parametrize("name", ["x.json", "x.json.gz"])
def test_vectors_are_the_first_numbers_of_each_list(tmp_path, name):
    path = write(tmp_path / "x.json", document())
    if name.endswith(".gz"):
        (tmp_path / name).write_bytes(gzip.compress(path.read_bytes()))
    words, vectors, counts = read_vectors(tmp_path / name)
    assert words == list(VECTORS)
    assert vectors.dtype == np.float32
    assert np.array_equal(vectors, np.array(list(VECTORS.values()), dtype=np.float32))
    assert counts is None
    assert width_of(tmp_path / name) == 3


def test_wanted_words_alone_are_kept(tmp_path):
    path = write(tmp_path / "x.json", document())
    words, vectors, _ = read_vectors(path, {"naïve", "absent", "the"})
    assert words == ["the", "naïve"]
    assert np.array_equal(vectors, np.array([VECTORS["the"], VECTORS["naïve"]], dtype=np.float32))
    words, vectors, _ = read_vectors(path, set())
    assert words == []
    assert vectors.shape == (0, 3)


ROW = [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dimensions": None}, "want `dimensions`, a number, before `vectors`, got none"),
        ({"dimensions": "3"}, "dimensions: want 1 to 65,536, got '3'"),
        ({"dimensions": 0}, "dimensions: want 1 to 65,536, got 0"),
        ({"dimensions": True}, "dimensions: want 1 to 65,536, got True"),
        ({"dimensions": 6}, "vectors: want 6 numbers for 'the', got 5"),
        ({"size": 3}, "vectors: want 3 as `size` says, got 4"),
        ({"size": [4]}, r"vectors: want \[4\] as `size` says"),
        ({"vectors": None}, "want an object `vectors` with a list of numbers for each word, got none"),
        ({"vectors": {}, "size": 0}, "want an object `vectors` with a list of numbers for each word, got no"),
        ({"vectors": [ROW]}, r"want '{', got '\['"),
        ({"vectors": {"a": ROW, "b": ROW[:4]}}, "vectors: want 5 numbers for 'b', got 4"),
        ({"vectors": {"a": [*ROW[:2], True, 4, 5]}}, "vectors: want a list of numbers for 'a'"),
        ({"vectors": {"a": [*ROW[:2], None, 4, 5]}}, "vectors: want a list of numbers for 'a'"),
        ({"vectors": {"a\n": 3}}, r"vectors: want a list of numbers for 'a\\\\n'"),
        ({"vectors": {"a": [1, float("nan"), *ROW[:3]]}, "size": 1}, "vectors: want finite numbers"),
        ({"vectors": {"a": [1, 1e300, *ROW[:3]]}, "size": 1}, "vectors: want finite numbers"),
        ({"vectors": {"a": [1, 10**400, *ROW[:3]]}, "size": 1}, "vectors: want finite numbers, got a larger"),
        ({"vectors": {"\ud800": ROW}}, "want words of Unicode, got half a character"),
        ({"words": "the"}, r"want '\[', got '\"'"),
    ],
    ids=range(19),
)
def test_what_does_not_fit_is_named(tmp_path, changes, message):
    path = write(tmp_path / "x.json", document(**changes))
    with pytest.raises(InputError, match=rf"x\.json.*{message}") as caught:
        read_vectors(path)
    assert str(caught.value).isprintable()


def test_a_word_that_occurs_twice_is_refused(tmp_path):
    path = write(tmp_path / "x.json", document())
    path.write_text(path.read_text().replace('"The":', '"the":'))
    with pytest.raises(InputError, match="vectors: the word 'the' occurs twice"):
        read_vectors(path)


def test_a_field_that_occurs_twice_is_refused(tmp_path):
    path = write(tmp_path / "x.json", document())
    path.write_text(path.read_text().replace('"precision":8', '"dimensions":5'))
    for read in (read_vectors, width_of):
        with pytest.raises(InputError, match=r"x\.json is damaged: the key 'dimensions' occurs twice"):
            read(path)


def test_every_cut_of_the_file_is_refused(tmp_path):
    whole = write(tmp_path / "x.json", document()).read_bytes()
    for length in range(0, len(whole), 3):
        (tmp_path / "x.json").write_bytes(whole[:length])
        with pytest.raises(InputError, match=r"x\.json"):
            read_vectors(tmp_path / "x.json")


def test_vectors_larger_than_memory_are_refused(tmp_path, monkeypatch):
    path = write(tmp_path / "x.json", document())
    monkeypatch.setattr(limits, "machine_memory", lambda: 800)
    with pytest.raises(InputError, match=r"x\.json: vectors: want at most half of this machine's memory"):
        read_vectors(path)
