"""The benchmarks' tab-separated files, and the cache of sentence vectors."""

from __future__ import annotations

import numpy as np
import torch
from safetensors.torch import save

from fastqt.errors import InputError
from fastqt.sentences.evaluation.data import read_labelled, read_pairs
from fastqt.sentences.evaluation.vectors import Cache, embed
from tests.fuzz.files import folder, json_text, text_file, write
from tests.fuzz.refusals import check_file_refusal
from tests.fuzz.source import Bytes

TEXTS = ["one", "two", "three"]  # in the cache
WANTED = ["one", "four"]


def run_evaluation(data: bytes) -> bool:
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
    cache = Cache(folder(), "key")
    path = write("key.safetensors", _damaged_cache(source))
    try:
        vectors = embed(_ones, WANTED, cache=cache, progress=False)
    except InputError as error:
        check_file_refusal(error, path)
        return False
    matrix = vectors(WANTED)
    assert matrix.ndim == 2
    assert matrix.dtype == np.float32
    assert np.isfinite(matrix).all()
    assert (embed(_none, WANTED, cache=cache, progress=False)(WANTED) == matrix).all()
    return True


def _damaged_cache(source: Bytes) -> bytes:
    matrix = torch.ones(
        3, source.integer(0, 4), dtype=source.choice((torch.float32, torch.float64, torch.int8))
    )
    sentences = torch.frombuffer(bytearray(json_text(source, TEXTS)) or bytearray(1), dtype=torch.uint8)
    whole = bytearray(save({"sentences": sentences, "vectors": matrix}))
    if source.flag():
        whole[source.integer(0, 65535) % len(whole)] ^= source.integer(1, 255)
    return bytes(whole)


def _ones(texts: list[str]) -> np.ndarray:
    return np.ones((len(texts), 2))


def _none(texts: list[str]) -> np.ndarray:
    raise AssertionError(f"the cache forgot {texts}")
