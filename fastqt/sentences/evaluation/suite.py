"""Evaluates one encoder on all tasks."""

from __future__ import annotations

import contextlib
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import scipy
import sklearn
import torch
from tqdm import tqdm

from fastqt._version import __version__
from fastqt.errors import InputError, one_line
from fastqt.sentences.evaluation.alive import alive
from fastqt.sentences.evaluation.data import find
from fastqt.sentences.evaluation.encoders import PromptedEncode
from fastqt.sentences.evaluation.judged import judged_sets, read_judged
from fastqt.sentences.evaluation.table import table_lines
from fastqt.sentences.evaluation.tasks import Source, Task, sources
from fastqt.sentences.evaluation.vectors import Encode, Vectors, embed, say
from fastqt.sentences.json_text import DETAILS, to_json
from fastqt.sentences.options.commands import PAPER_GRID, EvaluationOptions, SSTTraining
from fastqt.sentences.runs.files import write_atomically


@dataclass(frozen=True)
class Results:
    """The results of each task, and how they were obtained."""

    # The figures of each task. One that is not defined is NaN, and beside it stands the reason, "undefined".
    tasks: dict[str, dict[str, Any]]
    settings: dict[str, Any]  # the arguments of `evaluate` that figures depend on
    seconds: dict[str, float]  # for encoding, and for each task
    sentences: int  # number of distinct sentences with a vector
    width: int  # of a sentence vector
    failed: dict[str, str] = field(default_factory=dict)  # why some tasks could not be evaluated
    unfinished: tuple[str, ...] = ()  # tasks that are left, in results that were kept on the way

    def table(self, baseline: Results | None = None, name: str = "random") -> str:
        """The results as text: each line has a task, the name of a figure and its value, mostly in per cent.

        Below them are the means of what several tasks have. The results of the same tasks for another
        encoder, the `baseline` of this name, stand beside, with the difference to them; then the first line
        names the columns. Below the figures stands why some are not defined, and which tasks have failed.
        """
        lines = table_lines(self.tasks, None if baseline is None else baseline.tasks, name)
        others = [] if baseline is None else baseline._remarks(f"{name} ")
        return "\n".join([*lines, *self._remarks(), *others])

    def _remarks(self, whose: str = "") -> list[str]:
        undefined = [
            f"{whose}{task}: not defined. {reason}"
            for task, figures in self.tasks.items()
            for reason in dict.fromkeys(_reasons(figures))
        ]
        return undefined + [f"{whose}{task}: failed: {reason}" for task, reason in self.failed.items()]

    def save(self, path: Path, **about: Any) -> None:
        """Writes the results as JSON, with date, processor, versions of libraries, and further entries."""
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
            text = to_json({**run, **asdict(self)}, indent=2) + "\n"
            write_atomically(path, lambda partial: partial.write_text(text, encoding="utf-8"))
        except OSError as error:
            raise InputError(f"cannot write {path}: {error.strerror}") from error


def evaluate(
    encode: Encode,
    data: str | Path,
    tasks: Sequence[str] | None = None,
    *,
    seed: int = 0,
    grid: Sequence[float] = PAPER_GRID,
    sst: SSTTraining = "phrases",
    tokenised: bool = False,
    t: float = 2.0,
    progress: bool = True,
    after_task: Callable[[Results], object] | None = None,
) -> Results:
    """Evaluates sentence vectors by the protocols of the literature; see docs/evaluation.md.

    A task that cannot be evaluated, for example because one of its files is damaged, does not keep the others
    from it: its reason is in `Results.failed`.

    Args:
        encode: a function from a list of n sentences to an array (n, d). If it has an attribute `per_task`,
            that function is applied to the vectors (n, d) of the distinct sentences of each task.
        data: directory with one folder per task.
        tasks: names such as MR or STSB; None means all tasks of which there is a file.
        seed: seed of the folds.
        grid: values of C for logistic regression, ascending.
        sst: train SST2 on all labelled "phrases", or on whole "sentences" only.
        tokenised: read the STS tasks lower-cased and tokenised, as in SentEval.
        t: the factor in the exponent of the uniformity.
        progress: show bars on a terminal, and lines on standard error where it is none.
        after_task: called after each task with the results so far, so that they can be kept.

    Returns:
        The figures of each task in `.tasks`, by their names, and `.table()`, which shows them.

    Raises:
        InputError: no task can be evaluated, a task is unknown or has no file, an option is outside its
            range, or `encode` does not return finite vectors (n, d).

    Example:
        >>> from fastqt.sentences.evaluation import evaluate, load_encoder
        >>> encode = load_encoder("word-vectors:vectors.txt").encode  # or a function of n sentences
        >>> results = evaluate(encode, "eval", tasks=["STSB"], progress=False)
        >>> list(results.tasks)
        ['STSB']
    """
    options = EvaluationOptions(seed=seed, grid=tuple(grid), sst=sst, tokenised=tokenised, t=t)
    chosen, failed = read_tasks(Path(data), tasks, options)
    if not chosen:
        raise InputError("; ".join(f"{name}: {reason}" for name, reason in failed.items()))
    if progress:
        for name, reason in failed.items():
            say(f"{name} is left out: {reason}")
    if isinstance(encode, PromptedEncode):
        chosen = {name: encode.prompted(task) for name, task in chosen.items()}
        encode = encode.plain

    start = time.perf_counter()
    texts = dict.fromkeys(chain.from_iterable(task.texts() for task in chosen.values()))
    vectors = embed(encode, texts, progress=progress)
    results = Results({}, asdict(options), {}, len(texts), vectors.matrix.shape[1], failed, tuple(chosen))
    results.seconds["encode"] = time.perf_counter() - start

    bar = tqdm(chosen.items(), unit="task", disable=None if progress else True)
    for number, (name, task) in enumerate(bar, start=1):
        bar.set_description(name)
        start = time.perf_counter()
        try:
            with alive(bar, name) if progress else contextlib.nullcontext():
                results.tasks[name] = task.evaluate(_of_task(task, vectors, encode), options)
        except Exception as error:  # the results of the other tasks are kept, whatever it is
            results.failed[name] = reason_of(error)
        seconds = time.perf_counter() - start
        results.seconds[name] = seconds

        results = replace(results, unfinished=results.unfinished[1:])
        if after_task is not None:
            after_task(results)
        if progress:
            outcome = f"failed: {failed[name]}" if name in failed else f"{seconds:.1f} s"
            say(f"{name}: {outcome}, {number} of {len(chosen)} tasks")

    if not results.tasks:
        raise InputError("; ".join(f"{name}: {reason}" for name, reason in failed.items()))
    return results


def _of_task(task: Task, vectors: Vectors, encode: Encode) -> Vectors:
    """The vectors of a task, to which the encoder's `per_task` was applied if it has one."""
    if (per_task := getattr(encode, "per_task", None)) is None:
        return vectors
    distinct = list(dict.fromkeys(task.texts()))
    return Vectors(distinct, per_task(vectors(distinct)))


def _reasons(figures: dict[str, Any]) -> Iterator[str]:
    """Why figures are not defined; the reasons of subsets stand in that of their task."""
    for name, value in figures.items():
        if name == "undefined":
            yield value
        elif isinstance(value, dict) and name not in DETAILS:
            yield from (f"{name}: {reason}" for reason in _reasons(value))


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "")


def read_tasks(
    data: Path, names: Sequence[str] | None, options: EvaluationOptions
) -> tuple[dict[str, Task], dict[str, str]]:
    """Reads tasks by name, each from a folder of the directory `data`; None means all that have a file there.

    Returns the tasks, and the reason of each one whose files are missing, damaged or of no use. A folder with
    a corpus.jsonl is a retrieval set, whose name is the folder's. `data` itself may be one. `options` decides
    which variant of a task's files is read.
    """
    if not data.is_dir():
        raise InputError(f"data: {data} is not a directory")
    all_sources = sources(options)
    available: dict[str, Callable[[], Task]] = {
        name: partial(_read, data, source)
        for name, source in all_sources.items()
        if find(data, *source.files)
    }
    available |= {name: partial(read_judged, folder) for name, folder in judged_sets(data).items()}
    if not available:
        raise InputError(
            f"data: {data} holds none of the tasks {', '.join(all_sources)}, and no retrieval set, which is "
            "a folder with a corpus.jsonl"
        )

    chosen = list(available) if names is None else list(dict.fromkeys(names))
    for name in chosen:
        if name not in {**all_sources, **available}:
            known = ", ".join({**all_sources, **available})
            raise InputError(f"tasks: want some of {known}, got {name!r}")
        if name not in available:
            files = " and ".join(f"{file}.tsv.xz" for file in all_sources[name].files)
            raise InputError(f"tasks: {name} needs {files} in {data}, which holds {', '.join(available)}")

    tasks, failed = {}, {}
    for name in chosen:
        try:
            tasks[name] = available[name]()
            tasks[name].check(options)
        except Exception as error:  # whatever it is, the other tasks can be evaluated
            tasks.pop(name, None)
            failed[name] = reason_of(error)
    return tasks, failed


def reason_of(error: Exception) -> str:
    """Why a task has failed, in words; an error that is not about its files has its kind in front."""
    return one_line(error if isinstance(error, InputError) else f"{type(error).__name__}: {error}")


def _read(data: Path, source: Source) -> Task:
    if missing := [name for name in source.files if not find(data, name)]:
        raise InputError(f"no such file: {' or '.join(f'{data / name}.tsv.xz' for name in missing)}")
    return source.read(*find(data, *source.files))
