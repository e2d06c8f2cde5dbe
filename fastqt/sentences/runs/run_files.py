"""The names of a run's files, and what a command must not write to."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from fastqt.errors import InputError
from fastqt.sentences.runs.checkpoint import CHECKPOINT, CONFIG, METRICS, MODEL, VECTORS, VOCABULARY
from fastqt.sentences.runs.lexicon import HUGGINGFACE
from fastqt.sentences.runs.progress import FINISHED

# config.json is the first one that a training writes, and the last one is a folder.
RUN_FILES = (CONFIG, VOCABULARY, VECTORS, METRICS, MODEL, CHECKPOINT, FINISHED, HUGGINGFACE)


def check_is_not_read(out: str | Path, inputs: Iterable[str | Path]) -> None:
    """Checks, before any work, that a file to write is none of those that are read, nor of a run that is."""
    if not Path(out).is_file():
        return
    for path in map(Path, inputs):
        of_run = [path / name for name in RUN_FILES] + list((path / HUGGINGFACE).glob("*"))
        for file in of_run if path.is_dir() else [path]:
            if file.is_file() and os.path.samefile(file, out):
                raise InputError(f"cannot write {out}: {file} is read, and would be lost; want another name")
