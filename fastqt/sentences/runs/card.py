"""The model card of an export: README.md, in the form of those on the Hugging Face Hub.

It follows from the files of the run, and has no times and no dates.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fastqt._version import __version__
from fastqt.errors import InputError, one_line
from fastqt.sentences.json_text import flat_figures, has_type, read_object
from fastqt.sentences.options.option import options_of
from fastqt.sentences.options.training import RunOptions
from fastqt.sentences.runs.checkpoint import CHECKPOINT, EVALUATION, METRICS, read_progress, standing
from fastqt.sentences.runs.config import TrainConfig
from fastqt.sentences.runs.files import joined_digest
from fastqt.sentences.runs.metrics_file import best_of, is_figure, read_metrics
from fastqt.sentences.runs.model import Model
from fastqt.sentences.runs.progress import Progress, read_finished

NORMALISED = "model False"  # how `fastqt evaluate` calls vectors of norm 1 in the identity that it stores
LONGEST_CELL = 1000  # characters
LARGEST_FILE = 1 << 26  # bytes of an evaluation.json


@dataclass(frozen=True)
class Usage:
    """How the files beside a card are loaded."""

    library: str  # as the Hub names libraries
    text: str


def progress_of(directory: Path) -> Progress | None:
    """The progress of a run, finished or not; None for a directory that `fastqt expand` wrote."""
    if (finished := read_finished(directory)) is not None:
        return finished
    path = directory / CHECKPOINT
    return read_progress(path) if path.exists() else None


def card_text(
    directory: Path,
    config: TrainConfig,
    model: Model,
    progress: Progress | None,
    usage: Usage,
    identity: str | None,
) -> str:
    """The card of an export of a run with this model, whose encoder has this identity."""
    parts = [
        _front_matter(config, usage),
        _opening(directory, config, model),
        "## How to load it\n",
        usage.text,
        "## Data\n",
        _data(config, progress),
        "## Options\n",
        "Those that differ from the defaults, and those whose defaults depend on the model.\n",
        _table(("option", "value"), _options(config)),
    ]
    if figures := _figures(directory, config):
        parts += ["## Figures of the training\n", *figures]
    if results := _results(directory, identity):
        parts += [
            "## Evaluation\n",
            f"By `fastqt evaluate`, from {EVALUATION}.\n",
            _table(("task", "value"), results),
        ]
    versions = [("fastqt", __version__), ("torch", torch.__version__)]
    parts += ["## Versions\n", _table(("library", "version"), versions)]

    return "\n".join(parts) + "\n"


def _front_matter(config: TrainConfig, usage: Usage) -> str:
    """The YAML that the Hub reads. The licence of the data is not known here, so there is none."""
    tags = [usage.library, "sentence-similarity", "feature-extraction", "fastqt", config.model]
    return "\n".join(
        ["---", f"library_name: {usage.library}", "tags:", *(f"- {tag}" for tag in tags), "---\n"]
    )


def _opening(directory: Path, config: TrainConfig, model: Model) -> str:
    parameters = sum(each.numel() for each in model.parameters())
    at = standing(directory, config)
    unfinished = f" The training has not ended: it stands at {at}." if at else ""
    return (
        f"# {config.model}, encoder {config.encoder}\n\n"
        f"Vectors of sentences, of width {model.embedding_dim}, from a model with {parameters:,} parameters "
        f"that `fastqt train` has trained.{unfinished}\n"
    )


def _data(config: TrainConfig, progress: Progress | None) -> str:
    """The names of the files, without their folders, with what identifies them."""
    names = [Path(name).name for name in config.corpus]
    if progress is None or len(progress.corpus_digests) != len(names):
        return _table(("file",), [(name,) for name in names])
    rows = [
        (name, f"{size:,}", f"`{digest}`")
        for name, size, digest in zip(names, progress.corpus_bytes, progress.corpus_digests, strict=True)
    ]
    sentences = f"\n{progress.sentences:,} sentences, or rows of texts.\n"
    return _table(("file", "bytes", "SHA-256"), rows) + sentences


def _options(config: TrainConfig) -> Iterator[tuple[str, str]]:
    """The options but for those that do not change the model."""
    of_the_run = {"corpus", *options_of(RunOptions)}
    for name, each in options_of(TrainConfig).items():
        value = getattr(config, name)
        default = None if each.varies else each.default
        if (
            name not in of_the_run
            and value not in (None, default)
            and (config.kind.has(name) or name == "model")
        ):
            yield f"`{each.flag}`", f"`{_shown(value, is_path=bool(each.file))}`"


def _shown(value: Any, *, is_path: bool) -> str:
    """A value as on a command line; of a path only the name, because a card is published."""
    if isinstance(value, tuple):
        return ",".join(_shown(each, is_path=is_path) for each in value)
    if is_path:
        return Path(value).name or str(value)
    return "yes" if value is True else f"{value:g}" if isinstance(value, float) else str(value)


def _figures(directory: Path, config: TrainConfig) -> list[str]:
    """The last figures of metrics.jsonl, or those of the step whose model was kept; none without reports."""
    lines = read_metrics(directory / METRICS, tell=True)
    if not lines:
        return []

    kept, which = best_of(lines, config.measure_of_best), "the best one on held-out data, which was kept"
    if kept is None:
        kept, which = lines[-1], "the last report"
    rows = [
        (name.replace("_", " "), f"{value:.4f}")
        for name, value in kept.items()
        if is_figure(name) and not math.isnan(value)
    ]
    return [f"Step {kept['step']:,}: {which}.\n", _table(("figure", "value"), rows)]


def _results(directory: Path, identity: str | None) -> list[tuple[str, str]]:
    """The figures of evaluation.json; none if it is of another model than the one that is there now."""
    path = directory / EVALUATION
    if not path.exists():
        return []
    try:
        results = read_object(path, most_bytes=LARGEST_FILE)
    except InputError:  # a file that users put there, whose damage must not keep a training from its end
        return []
    tasks = results.get("tasks")
    if results.get("identity") != joined_digest(NORMALISED, identity or "") or not has_type(tasks, dict):
        return []
    figures = flat_figures(results["tasks"])
    return [(name, f"{value:.4f}") for name, value in figures if has_type(value, float)]


def _table(head: tuple[str, ...], rows: Any) -> str:
    """A table in Markdown. A bar within a cell would end it, and a line break the table."""
    lines = [head, tuple("---" for _ in head), *rows]
    cells = [[one_line(cell, LONGEST_CELL).replace("|", "\\|") for cell in row] for row in lines]
    return "".join(f"| {' | '.join(row)} |\n" for row in cells)
