"""Reads the tasks that are chosen, or tells why one cannot be evaluated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from fastqt.errors import InputError, one_line
from fastqt.sentences.evaluation.data import find
from fastqt.sentences.evaluation.judged import judged_sets, read_judged
from fastqt.sentences.evaluation.tasks import Source, Task, sources
from fastqt.sentences.options.evaluation import EvaluationOptions


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
