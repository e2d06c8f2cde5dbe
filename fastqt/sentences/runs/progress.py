"""How far a training has come: what a checkpoint holds beside tensors, and a finished run keeps."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from dataclasses import field as dataclass_field
from pathlib import Path
from typing import Any, TypeAlias

from fastqt.errors import InputError, one_line
from fastqt.sentences.json_text import field, has_type, read_object, to_json
from fastqt.sentences.runs.config import FORMAT
from fastqt.sentences.runs.files import write_atomically
from fastqt.sentences.text import Position, Span

FINISHED = "finished.json"  # the progress of a run that has ended and kept no checkpoint
LARGEST_COUNT = 1 << 62
# Of fields, by their annotations; the others are lists.
KINDS = {"int": int, "float": float, "str": str, "Sums": dict}
LARGEST_FILE = 1 << 24  # bytes of a finished.json

Sums: TypeAlias = dict[str, tuple[float, float]]
"""For each figure its sum over rows, and their number."""


@dataclass
class Progress:
    """The progress of a training: everything in a checkpoint that is not a tensor."""

    step: int = 0
    epoch: int = 0
    seconds: float = 0.0  # of training so far, including the time before it was resumed
    cpu_seconds: float = 0.0  # likewise, of all processors for rank 0
    metrics_length: int = 0  # bytes of metrics.jsonl
    sentences: int = 0  # in one epoch
    corpus_bytes: tuple[int, ...] = ()  # the size of each file of the corpus
    corpus_digests: tuple[str, ...] = ()  # SHA-256 of each file
    vocabulary_digest: str = ""  # SHA-256 of the vocabulary or the tokenizer
    best: float = -math.inf  # highest Spearman coefficient so far on the development pairs
    best_loss: float = math.inf  # lowest loss so far on held-out text, where it tells which model is kept
    since_best: int = 0  # validations since the best one
    loss_scale: float = 0.0  # of float16; 0 before the first step, and in other precisions
    steps_at_scale: int = 0  # since it has last changed
    taken: int = 0  # sentences of this epoch that all ranks have taken
    summed: Sums = dataclass_field(default_factory=dict)  # the figures of the steps since the last report
    summed_before: Sums = dataclass_field(default_factory=dict)  # those that the last report had
    # What remains of the epoch for each rank of a training that reads the corpus in its order. Empty at the
    # start of an epoch, and for models that shuffle the corpus.
    spans: tuple[tuple[Span, ...], ...] = ()


def parse_progress(values: dict[str, Any], path: Path) -> Progress:
    """Checks the values of a stored progress."""
    values = {"summed": {}, "summed_before": {}, **values}  # which older versions have not stored
    # JSON has no infinity: null is what no validation has been better than yet.
    for name, worst in (("best", -math.inf), ("best_loss", math.inf)):
        if values.get(name, worst) is None:
            values[name] = worst
    if unknown := values.keys() - {each.name for each in fields(Progress)}:
        raise InputError(f"{path} is damaged: progress: unknown {one_line(sorted(unknown))}")

    for each in fields(Progress):
        value = field(values, each.name, KINDS.get(str(each.type), list), path)
        in_range = True
        if each.name in ("best", "best_loss"):
            in_range = value <= 1 if each.name == "best" else value > -math.inf
        elif isinstance(value, int | float):
            in_range = 0 <= value < LARGEST_COUNT
        if not in_range:
            raise InputError(f"{path} is damaged: {each.name}: want a number in its range, got {value!r:.40}")

    sizes, digests = values["corpus_bytes"], values["corpus_digests"]
    if not all(has_type(size, int) and 0 <= size < LARGEST_COUNT for size in sizes):
        raise InputError(f"{path} is damaged: corpus_bytes: want sizes of files")
    if len(digests) != len(sizes):
        raise InputError(f"{path} is damaged: corpus_digests: want {len(sizes)}, got {len(digests)}")
    files = {"corpus_bytes": tuple(sizes), "corpus_digests": tuple(digests)}
    sums = {name: _sums(values[name], name, path) for name in ("summed", "summed_before")}
    return Progress(**{**values, **files, **sums, "spans": _spans(values["spans"], len(sizes), path)})


def _sums(values: dict[str, Any], name: str, path: Path) -> Sums:
    """The sums of figures; null is that of one which was not finite."""
    sums = {}
    for figure, pair in values.items():
        if not has_type(pair, list) or len(pair) != 2:
            raise InputError(f"{path} is damaged: {name}: want a sum and a number of rows for each figure")
        total, rows = (math.nan if value is None else value for value in pair)
        if not has_type(total, float) or not has_type(rows, float) or not 0 <= rows < LARGEST_COUNT:
            raise InputError(f"{path} is damaged: {name}: want a sum and a number of rows for each figure")
        sums[figure] = float(total), float(rows)
    return sums


def _spans(values: list[Any], files: int, path: Path) -> tuple[tuple[Span, ...], ...]:
    return tuple(tuple(_span(span, files, path) for span in _list(share, path)) for share in values)


def _span(values: Any, files: int, path: Path) -> Span:
    match values:
        case [list() as start, int() as sentences] if has_type(sentences, int) and (
            0 < sentences < LARGEST_COUNT
        ):
            return Span(_position(start, files, path), sentences)
    raise InputError(f"{path} is damaged: spans: want the starts and sizes of parts of the corpus")


def _list(values: Any, path: Path) -> list[Any]:
    if not isinstance(values, list):
        raise InputError(f"{path} is damaged: spans: want a list for each rank")
    return values


def _position(values: Any, files: int, path: Path) -> Position:
    least, beyond = (0, 0, 0, -1), (files, *(3 * [LARGEST_COUNT]))
    if (
        not has_type(values, list)
        or len(values) != len(least)
        or not all(has_type(value, int) for value in values)
        or not all(low <= value < high for low, value, high in zip(least, values, beyond, strict=True))
    ):
        raise InputError(f"{path} is damaged: position: want a place in one of {files} files")
    return Position(*values)


def save_finished(directory: Path, progress: Progress) -> None:
    """Writes the progress of a run that has ended, from which `--resume` knows that nothing is left to do."""
    text = to_json({"format": FORMAT, "progress": asdict(progress)}) + "\n"
    write_atomically(directory / FINISHED, lambda partial: partial.write_text(text, encoding="utf-8"))


def read_finished(directory: Path) -> Progress | None:
    """Reads what `save_finished` wrote; None if there is no such file."""
    path = directory / FINISHED
    try:
        values = read_object(path, most_bytes=LARGEST_FILE)
    except FileNotFoundError:
        return None
    if values.keys() != {"format", "progress"} or values["format"] != FORMAT:
        raise InputError(f"{path} is not the progress of a run of this version of fastqt")
    return parse_progress(field(values, "progress", dict, path), path)
