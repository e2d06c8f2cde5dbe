"""The fuzz targets, a module each, with a function `run(data)` that says whether the input was accepted."""

from __future__ import annotations

import importlib
from collections.abc import Callable

# The modules of which each target counts the coverage.
INSTRUMENTED = {
    "corpus": ("fastqt.sentences.text", "gzip", "lzma", "_compression"),
    "vocabulary": ("fastqt.sentences.text",),
    "tokenizer": ("fastqt.sentences.text",),
    "config": ("fastqt.sentences.runs", "fastqt.sentences.inference"),
    "checkpoint": ("fastqt.sentences.runs",),
    "vectors": (
        "fastqt.sentences.text",
        "fastqt.sentences.evaluation",
        "numpy.lib",
        "zipfile",
        "gzip",
        "lzma",
    ),
    "word_vectors": ("fastqt.sentences.text", "numpy.lib", "json"),
    "evaluation": ("fastqt.sentences.evaluation", "fastqt.sentences.text", "numpy.lib"),
    "contrastive_loss": (
        "fastqt.functional",
        "fastqt.checks",
        "fastqt.ids",
        "fastqt.targets",
        "fastqt.negatives",
        "fastqt.autograd",
        "fastqt.problem",
        "fastqt.engines",
    ),
}
TARGETS = tuple(INSTRUMENTED)


def load(name: str) -> Callable[[bytes], bool]:
    """The function of a target: takes an input, and returns whether fastqt accepted it.

    It raises an exception, of any type, for an input that is a finding.
    """
    run: Callable[[bytes], bool] = importlib.import_module(f"tests.fuzz.targets.{name}").run
    return run
