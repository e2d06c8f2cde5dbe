"""The benchmarks' tab-separated files, and the cache of sentence vectors."""

from __future__ import annotations

import io
import json

import numpy as np

from fastqt.errors import InputError
from fastqt.evaluation.data import read_labelled, read_pairs
from fastqt.evaluation.vectors import Cache, embed
from fuzz.files import folder, json_text, text_file, write
from fuzz.refusals import check_file_refusal
from fuzz.source import Bytes
from fuzz.targets.vectors import any_array

TEXTS = ["one", "two", "three"]


def run(data: bytes) -> bool:
    source = Bytes(data)
    kind = source.choice(("labelled", "pairs", "scores first", "cache"))
    if kind == "cache":
        return _read_cache(source)
    path = text_file(source, "task.tsv")
    try:
        if kind == "labelled":
            labels, texts = read_labelled(path, text=source.integer(1, 2))
            assert labels.shape == (len(texts),)
            assert len(texts) >= 1
            return True
        gold, first = (1, 2) if kind == "pairs" else (0, 1)
        pairs = read_pairs(path, gold=gold, first=first, subset=0 if kind == "pairs" else None)
    except InputError as error:
        check_file_refusal(error, path)
        return False
    assert pairs.gold.shape == pairs.subset.shape == (len(pairs.first),) == (len(pairs.second),)
    assert np.isfinite(pairs.gold).all(), "a gold score that is NaN or infinity"
    return True


def _read_cache(source: Bytes) -> bool:
    """Vectors from a damaged cache: refused, or of one width and finite for every sentence."""
    if source.flag():
        file = io.BytesIO()
        np.save(file, np.ones((3, source.integer(0, 4)), source.choice((np.float32, np.float64, np.int8))))
        matrix = write("key.npy", file.getvalue())
    else:
        matrix = write("key.npy", any_array(source))
    texts = write("key.json", json_text(source, TEXTS))
    try:
        vectors = embed(
            lambda new: np.ones((len(new), 2)), ["one", "four"], cache=Cache(folder(), "key"), progress=False
        )
    except InputError as error:
        check_file_refusal(error, matrix, texts)
        return False
    found = vectors(["one", "four"])
    assert found.ndim == 2
    assert found.dtype == np.float32
    assert np.isfinite(found).all()
    assert json.loads(texts.read_text(encoding="utf-8"))[: len(vectors.texts)] == list(vectors.texts)
    return True
