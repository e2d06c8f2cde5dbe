"""The lines of metrics.jsonl, some of which a crash or an editor may have damaged."""

from __future__ import annotations

from pathlib import Path

from fastqt.errors import InputError
from fastqt.sentences.errors import warn
from fastqt.sentences.json_text import has_type, null_is_nan, parse_object

LARGEST_FIGURE = 1 << 63  # integers beyond it are damage, and may be too long for a float


def read_metrics(path: Path, *, tell: bool = False) -> list[dict[str, float]]:
    """The lines of a metrics.jsonl, which have a step and other figures; none without a file.

    Null is NaN there. Metrics only tell of a training, so lines that hold something else are left out, and
    `tell` warns of them.
    """
    if not path.exists():
        return []
    try:
        texts = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from error

    lines, damaged = [], []
    for number, text in enumerate(texts, start=1):
        if not text.strip():
            continue
        try:
            values = null_is_nan(parse_object(text, path))
        except InputError:
            values = {}
        if has_type(values.get("step"), int) and values["step"] >= 0:
            lines.append({name: value for name, value in values.items() if _is_figure(value)})
        else:
            damaged.append(number)

    if damaged and tell:
        warn(f"{path} is damaged in {len(damaged)} of its lines, first in line {damaged[0]}: left out")
    return lines


def _is_figure(value: object) -> bool:
    return has_type(value, float) and not (isinstance(value, int) and abs(value) > LARGEST_FIGURE)
