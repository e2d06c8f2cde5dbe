"""The benchmarks' tab-separated files."""

from __future__ import annotations

import numpy as np

from fastqt.errors import InputError
from fastqt.sentences.evaluation.data import read_labelled, read_pairs
from tests.fuzz.files import text_file
from tests.fuzz.refusals import check_file_refusal
from tests.fuzz.source import Bytes


def run_evaluation(data: bytes) -> bool:
    source = Bytes(data)
    # By the first byte, as the stored inputs have it.
    kind = source.choice(("labelled", "pairs", "scores first", "labelled"))
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
