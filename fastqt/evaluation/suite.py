"""One encoder, all tasks, one set of figures."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import scipy
import sklearn
import torch
from tqdm import tqdm

from fastqt._version import __version__
from fastqt.errors import InputError
from fastqt.evaluation.classification import PAPER_GRID
from fastqt.evaluation.tasks import Options, read_tasks
from fastqt.evaluation.vectors import Cache, Encode, Vectors, embed
from fastqt.runs.checkpoint import write_text

DETAILS = ("subsets", "folds", "C", "t")  # that the table leaves to the JSON


@dataclass(frozen=True)
class Results:
    """The figures of each task, and how they came about."""

    tasks: dict[str, dict[str, Any]]
    settings: dict[str, Any]
    seconds: dict[str, float]  # of encoding and of each task
    sentences: int  # that were looked up, each once
    width: int  # of a vector

    def table(self) -> str:
        """A line a figure: task, what, how much."""
        rows = [
            (task, name, f"{value:.4f}")
            for task, figures in self.tasks.items()
            for name, value in _figures(figures)
        ]
        sizes = [max(len(row[column]) for row in rows) for column in range(3)]
        return "\n".join(f"{t:<{sizes[0]}}  {n:<{sizes[1]}}  {v:>{sizes[2]}}" for t, n, v in rows)

    def save(self, path: Path, **about: Any) -> None:
        """Writes all figures as JSON, with versions, date, processor, and what the caller adds."""
        run = {
            **about,
            "date": datetime.now(timezone.utc).date().isoformat(),
            "machine": {"processor": _processor(), "threads": torch.get_num_threads()},
            "versions": {
                "fastqt": __version__,
                "python": platform.python_version(),
                "torch": torch.__version__,
                "numpy": np.__version__,
                "scipy": scipy.__version__,
                "scikit-learn": sklearn.__version__,
            },
        }
        try:
            write_text(path, json.dumps({**run, **asdict(self)}, indent=2, allow_nan=False) + "\n")
        except OSError as error:
            raise InputError(f"cannot write {path}: {error.strerror}") from error


def evaluate(
    encode: Encode,
    data: str | Path,
    tasks: Sequence[str] | None = None,
    *,
    seed: int = 0,
    grid: Sequence[float] = PAPER_GRID,
    sst: str = "phrases",
    tokenised: bool = False,
    t: float = 2.0,
    cache: Cache | None = None,
    progress: bool = True,
) -> Results:
    """Judges sentence vectors by the protocols of the literature; see docs/evaluation.md.

    Args:
        encode: a list of sentences to an array (n, d). If it has an attribute `per_task`, that is applied to
            the vectors (n, d) of each task's distinct sentences.
        data: a directory with a folder a task.
        tasks: names such as MR or STSB; None means all whose files are there.
        seed: of the folds.
        grid: values of C for logistic regression, ascending.
        sst: train SST2 on all labelled "phrases" or on whole "sentences".
        tokenised: read the STS tasks lower-cased and tokenised, as SentEval prepares them.
        t: of uniformity.
        cache: keeps vectors on disk.
        progress: show bars on a terminal.

    Raises:
        InputError: files that are missing or damaged, an unknown task, an option out of its range, or an
            `encode` that does not return finite vectors (n, d).
    """
    options = Options(seed, tuple(grid), sst, tokenised, t)
    _check(options)
    chosen = read_tasks(Path(data), tasks, options)
    start = time.perf_counter()
    texts = chain.from_iterable(task.texts() for task in chosen.values())
    vectors = embed(encode, texts, cache=cache, progress=progress)
    seconds = {"encode": time.perf_counter() - start}
    per_task = getattr(encode, "per_task", None)
    figures = {}
    bar = tqdm(chosen.items(), unit="task", disable=None if progress else True)
    for name, task in bar:
        bar.set_description(name)
        start = time.perf_counter()
        own = vectors
        if per_task is not None:
            distinct = list(dict.fromkeys(task.texts()))
            own = Vectors(distinct, per_task(vectors(distinct)))
        figures[name] = task.judge(own, options)
        seconds[name] = time.perf_counter() - start
    return Results(figures, asdict(options), seconds, len(vectors.texts), vectors.matrix.shape[1])


def _check(options: Options) -> None:
    if not options.grid or not all(0 < C < np.inf for C in options.grid):
        raise InputError(f"grid: wanted positive numbers, got {options.grid}")
    if options.sst not in ("phrases", "sentences"):
        raise InputError(f"sst: wanted 'phrases' or 'sentences', got {options.sst!r}")
    if not 0 < options.t < np.inf:
        raise InputError(f"t: wanted a positive number, got {options.t}")


def _figures(figures: dict[str, Any], within: str = "") -> Iterator[tuple[str, float]]:
    for name, value in figures.items():
        if name in DETAILS:
            continue
        if isinstance(value, dict):
            yield from _figures(value, f"{within}{name} ")
        else:
            yield within + name, value


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "")
