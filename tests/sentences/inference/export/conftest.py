"""Runs of all kinds, and what `fastqt embed` writes for them."""

import numpy as np
import pytest

from fastqt.sentences.inference.embed import write_vectors
from fastqt.sentences.inference.encoder import SentenceEncoder
from fastqt.sentences.options.encoders import ENCODERS
from tests.shared.stored_runs import LINES, write_run
from tests.shared.tiny_bert import write_tiny_bert
from tests.shared.tokenizer_files import TOKENIZERS

# By the settings of the run. Those of a checkpoint are completed by its directory.
RUNS = {
    **{name: {"encoder": name} for name, kind in ENCODERS.items() if not kind.needs},
    "bow, unknown words dropped": {"unknown": "drop"},
    "bigru, reset-before": {"encoder": "bigru", "cell": "reset-before"},
    "two channels": {"encoder": "mc-bigru", "vectors": "vectors.txt", "trained_dim": 5},
    "frozen tables": {"encoder": "gru", "vectors": "vectors.txt", "freeze_vectors": True},
    "skip-thoughts": {"model": "skip-thoughts"},
    "simcse": {"model": "simcse", "encoder": "transformer", "masked_words": 0.1},
    "mixcse": {"model": "mixcse", "encoder": "bigru"},
}
PROMPTS = {"query_prompt": "far away : ", "document_prompt": "mats "}
RUNS["pairs"] = {"model": "pairs", "encoder": "gru", "corpus": ("pairs.tsv",), **PROMPTS}
CHECKPOINTS = {
    "pooler": {"model": "simcse", "pooling": "cls"},
    "first token": {"model": "mixcse", "pooling": "cls_before_pooler"},
    "mean": {"model": "simcse", "pooling": "mean"},
    "pairs of a checkpoint": {"model": "pairs", "corpus": ("pairs.tsv",), "pooling": "mean", **PROMPTS},
    "two checkpoints": {"model": "quickthoughts", "pooling": "mean"},
}
# With a tokenizer's file each, by the name of the tokenizer.
STATIC = {
    f"static, {name}": {"model": "pairs", "encoder": "static", "corpus": ("pairs.tsv",), "vocabulary": name}
    for name in TOKENIZERS
}


@pytest.fixture
def run(request, tmp_path):
    """The directory of the run that the test names."""
    if (settings := STATIC.get(request.param)) is not None:
        path = tmp_path / "tokenizer.json"
        TOKENIZERS[settings["vocabulary"]]().save(str(path))
        return write_run(tmp_path / "run", **settings | {"vocabulary": str(path)})
    if (settings := CHECKPOINTS.get(request.param)) is None:
        return write_run(tmp_path / "run", **RUNS[request.param])
    write_tiny_bert(tmp_path / "bert")
    of_checkpoint = {"encoder": "huggingface", "checkpoint": str(tmp_path / "bert")}
    return write_run(tmp_path / "run", **of_checkpoint, **settings)


@pytest.fixture
def wanted(run, tmp_path):
    """The vectors that `fastqt embed` writes for LINES, normalised or not."""

    def of(normalize: bool):
        (tmp_path / "lines.txt").write_text("\n".join(LINES), encoding="utf-8")
        encoder = SentenceEncoder.load(run, "cpu")
        write_vectors(encoder, str(tmp_path / "lines.txt"), tmp_path / "x.npy", normalize=normalize)
        return np.load(tmp_path / "x.npy")

    return of
