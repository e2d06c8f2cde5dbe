"""Pre-trained word vectors as JSON, and as an .npy beside a table of their words."""

from __future__ import annotations

import importlib
from pathlib import Path

import numpy as np

from fastqt.errors import InputError
from fastqt.sentences.text.vectors import read_vectors, vectors_of, width_of
from tests.fuzz.files import folder, json_text, write
from tests.fuzz.refusals import check_file_refusal
from tests.fuzz.source import Bytes
from tests.fuzz.targets.vectors import any_array

WORDS = ["the", ",", "naïve"]
ROWS = {word: [0.5, -1, 2.25, 2.5, number] for number, word in enumerate(WORDS)}
WHOLE = {"precision": 8, "size": 3, "dimensions": 3, "words": WORDS, "vectors": ROWS, "unkVector": [0, -1]}


def run(data: bytes) -> bool:
    source = Bytes(data)
    if source.choice(("json", "npy")) == "json":
        path = write("vectors.json", json_text(source, WHOLE))
    else:
        path = index().with_name("vectors.npy")
        path.write_bytes(any_array(source))

    try:
        words, vectors, counts = read_vectors(path)
    except InputError as error:
        check_file_refusal(error, path, index())
        return False

    assert vectors.dtype == np.float32
    assert vectors.shape == (len(words), width_of(path))
    assert vectors.shape[1] >= 1, "vectors of no columns"
    assert np.isfinite(vectors).all(), "NaN or infinity"
    assert all(type(word) is str and word.encode() is not None for word in words)
    assert counts is None

    rows = vectors_of(path, [words[-1], "absent\n"])
    assert rows.places.tolist() == [0]
    assert np.array_equal(rows.vectors[0], vectors[words.index(words[-1])])
    return True


def index() -> Path:
    """A table of words in a folder of its own, which is written once."""
    path = folder() / "array" / "index.parquet"
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        arrow, parquet = (importlib.import_module(name) for name in ("pyarrow", "pyarrow.parquet"))
        parquet.write_table(arrow.table({"index": WORDS}), path)
    return path
