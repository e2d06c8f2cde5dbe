"""The fuzz targets: functions `run_TARGET(data)`, which say whether fastqt accepted the input."""

from __future__ import annotations

import contextlib
import importlib
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

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
        "gzip",
        "lzma",
    ),
    "evaluation": ("fastqt.sentences.evaluation", "fastqt.sentences.text", "numpy.lib"),
    "contrastive_loss": tuple(
        f"fastqt.{name}"
        for name in ["functional", "checks", "ids", "targets", "negatives", "autograd", "problem", "engines"]
    ),
}
TARGETS = tuple(INSTRUMENTED)
MODULES = {"tokenizer": "vocabulary"}  # of targets that have none of their own
MEMORY = 2 << 30  # bytes that an input may take, beyond what the process has before


def load(name: str) -> Callable[[bytes], bool]:
    """The function of a target. It raises an exception, of any type, for an input that is a finding."""
    module = importlib.import_module(f"tests.fuzz.targets.{MODULES.get(name, name)}")
    run: Callable[[bytes], bool] = getattr(module, f"run_{name}")
    return run


@contextlib.contextmanager
def memory_limited(more: int = MEMORY) -> Iterator[None]:
    """Lets allocations fail that would make the process grow by more than `more` bytes of address space."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + more, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
