"""What a training tells before its first step, and at its end: figures, and what went wrong."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from fastqt.sentences.runs.checkpoint import METRICS
from fastqt.sentences.runs.config import DEV_MEASURE
from fastqt.sentences.runs.metrics_file import HELD_OUT, Line, best_of, is_figure, read_metrics
from fastqt.sentences.text import Lexicon, Vocabulary
from fastqt.sentences.train.objectives import Objective
from fastqt.sentences.train.progress import PARTS, SHARES
from fastqt.sentences.train.views import OneEncoderObjective

NEAR_CHANCE = 1.5  # times chance, below which accuracies are near it
REPETITIONS = 0.01  # share of rows that repeat a text of their batch, from which that is told
COLLAPSED = -0.1  # uniformity above which vectors are nearly equal
DIVERGED = 1.2  # times the first loss, above which the last one has risen
PAIRED = "with a query and its positive in each row and no text in two rows of a batch"
ORDERED = "with its sentences in the order in which they were written"


def value_in_words(name: str, value: float | None) -> str:
    """A figure of metrics.jsonl: shares in per cent, and a dash for one that there is not."""
    if value is None or math.isnan(value):
        return "–"
    return f"{value:.2%}" if name.endswith(SHARES) else f"{value:.3f}"


def closing_table(directory: Path, measure: str | None = DEV_MEASURE) -> str:
    """A table of the last figures of a run, in text, beside those before training and those of chance.

    They are the held-out figures if metrics.jsonl has some, and otherwise those of the last report; "" if the
    run has reported nothing. `measure` is the figure that tells which model is kept, if one does.
    """
    lines = read_metrics(directory / METRICS, tell=True)
    validated = [line for line in lines if _held_out(line)]
    if not validated:
        return _table("corpus, last report", {f"step {lines[-1]['step']:,}": lines[-1]}) if lines else ""
    columns: dict[str, Line] = {}
    best = best_of(validated, measure)
    if validated[0]["step"] == 0:
        columns["fresh weights, kept" if best is validated[0] else "fresh weights"] = validated[0]
    if best is not None and best["step"] and best is not validated[-1]:
        columns[f"step {best['step']:,}, kept"] = best
    columns[f"step {validated[-1]['step']:,}"] = validated[-1]
    names = [name for name in validated[-1] if name.startswith((HELD_OUT, "dev_"))]
    shown = {key: {name: line[name] for name in names if name in line} for key, line in columns.items()}
    return _table("held out", shown)


def speed(directory: Path) -> str:
    """How fast a run was over all of its reports, and which shares each part of a step took; "" if unknown.

    A run that waits for its text more than for everything else says so.
    """
    lines = [line for line in _lines(directory) if "tokens_per_second" in line]
    seconds = {part: sum(line.get(f"{part}_seconds", 0.0) for line in lines) for part in PARTS}
    total = sum(seconds.values())
    if not total:
        return ""
    rates = [
        sum(line.get(f"{unit}_per_second", 0.0) for line in lines) / len(lines)
        for unit in ("sentences", "tokens")
    ]
    shares = ", ".join(f"{part} {value / total:.0%}" for part, value in seconds.items())
    text = f"{rates[0]:,.0f} sentences/s, {rates[1]:,.0f} tokens/s; time: {shares}"
    if seconds["data"] > total / 2:
        text += "\nReading takes most of the time: unpack a compressed corpus, or put it on a faster disk."
    return text


def diagnoses(directory: Path) -> list[str]:
    """What a run's figures say went wrong, in words, and what to try; empty if nothing did."""
    lines = [line for line in _lines(directory) if "loss" in line]
    if not lines:
        return []
    first, last = lines[0], lines[-1]
    said = _worse_on_pairs(directory)
    held_out = HELD_OUT if f"{HELD_OUT}chance" in last else ""
    of_pairs = f"{held_out}accuracy" in last
    names = ("accuracy",) if of_pairs else ("forward_accuracy", "backward_accuracy")
    accuracies = [last.get(f"{held_out}{name}", 0.0) for name in names]
    chance = last.get(f"{held_out}chance")
    if chance is not None and sum(accuracies) < len(accuracies) * NEAR_CHANCE * chance:
        rows = PAIRED if of_pairs else ORDERED
        said.append(
            "The accuracies are near chance: this model has learnt little or nothing. Try more steps "
            "(--epochs, --steps, or a smaller --batch-size, which makes more of them of the same text), more "
            f"text, another --learning-rate, or a corpus {rows}."
        )

    if (even := last.get("uniformity")) is not None and even > COLLAPSED:
        said.append(
            f"The vectors have collapsed: uniformity is {even:.3f}, and 0 where all are equal. Try a lower "
            "--learning-rate, --warmup, or a higher --scale."
        )

    if last["loss"] > DIVERGED * first["loss"] > 0:
        said.append(
            f"The loss has risen from {first['loss']:.3f} at step {first['step']:,} to {last['loss']:.3f}. "
            "Try a lower --learning-rate, --warmup, or a smaller --clip."
        )

    if 0 < last.get("loss_scale", 1.0) < 1:
        said.append(
            f"Gradients overflow float16 even where the loss is multiplied by {last['loss_scale']:.2g}, and "
            "such steps are left out. Try --precision bfloat16."
        )
    return said


def _worse_on_pairs(directory: Path) -> list[str]:
    """That the model of the first validation, before training, is the best on development pairs."""
    lines = [line for line in _lines(directory) if DEV_MEASURE in line]
    if len(lines) < 2 or lines[0]["step"] or best_of(lines, DEV_MEASURE) is not lines[0]:
        return []
    best = max(line[DEV_MEASURE] for line in lines[1:])
    return [
        f"Training has made the model worse on --dev: Spearman's coefficient was {lines[0][DEV_MEASURE]:.3f} "
        f"before the first step, and {best:.3f} at best after it. The model from before the first step is "
        "kept. Try a lower --learning-rate, more text, or --valid-every with fewer steps."
    ]


def _lines(directory: Path) -> list[dict[str, float]]:
    return read_metrics(directory / METRICS)


def _held_out(line: Line) -> bool:
    return any(name.startswith((HELD_OUT, "dev_")) for name in line)


def _table(title: str, columns: Mapping[str, Line]) -> str:
    last = list(columns.values())[-1]
    names = [name for name in last if is_figure(name) and name.removeprefix(HELD_OUT) != "chance"]
    with_chance = any(_chance(name, last) is not None for name in names)
    rows = [[title, *columns, *(["chance"] if with_chance else [])]]
    for name in names:
        values = [value_in_words(name, line.get(name)) for line in columns.values()]
        if with_chance:
            values.append(value_in_words(name, _chance(name, last)))
        rows.append([name.removeprefix(HELD_OUT).replace("_", " "), *values])
    return in_columns(rows)


def _chance(name: str, line: Line) -> float | None:
    """What random vectors reach."""
    if name == "dev_spearman":
        return 0.0
    held_out = HELD_OUT if name.startswith(HELD_OUT) else ""
    return line.get(f"{held_out}chance") if name.endswith("accuracy") else None


def in_columns(rows: Sequence[Sequence[str]]) -> str:
    """Rows as text: the first column is flush left, the others are flush right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join([f"{first:<{widths[0]}}", *(f"{x:>{n}}" for x, n in zip(others, widths[1:], strict=True))])
        for first, *others in rows
    )


def opening(objective: Objective[Any], last_step: int) -> str:
    """The lines that a training begins with: corpus, vocabulary, model, device, steps, and any held-out text.

    The vocabulary tells how many words the corpus has if it was built from it.
    """
    training, config = objective.training, objective.config
    vocabulary, progress = training.vocabulary, training.progress
    epoch = objective.steps(progress.sentences)
    unit = "rows" if config.reads_rows else "sentences"
    batch = f"{config.batch_size:,} {unit}"
    if objective.ranks.size > 1:
        batch = f"{batch} in each of {objective.ranks.size} processes"
    parameters = sum(each.numel() for each in objective.model.parameters())

    rows = {
        "corpus": f"{', '.join(training.corpus)}: {progress.sentences:,} {unit}{_words(vocabulary)}",
        "vocabulary": f"{len(vocabulary):,} entries",
        "model": f"{config.model}, encoder {config.encoder}: {parameters:,} parameters",
        "device": _device(objective.device),
        "training": f"{epoch:,} batches an epoch, of {batch}; up to step {last_step:,}",
    }

    if progress.step:
        rows["training"] += f", from step {progress.step:,}"
    if config.teacher is not None:
        rows["teacher"] = ", ".join(config.teacher)
    if config.valid is not None:
        rows["held out"] = f"{config.valid}: {len(objective.held_out):,} batches"
    if config.dev is not None:
        rows["pairs"] = config.dev
    if said := _repetitions(objective):
        rows["repetitions"] = said
    return "\n".join(f"{name:<11} {text}" for name, text in rows.items())


def _repetitions(objective: Objective[Any]) -> str:
    """What is to be known of rows that repeat a text of their batch, if that is worth a word."""
    if not isinstance(objective, OneEncoderObjective):
        return ""
    repeating, rows = objective.repetitions()
    if not repeating or repeating < REPETITIONS * rows:
        return ""
    said = f"{repeating / rows:.0%} of rows have a text that another row of their batch has too"
    if objective.config.batch_sampler == "random":
        return f"{said}, a wrong negative: --batch-sampler no-duplicates keeps such rows apart"
    return f"{said}: the corpus has too few others to keep them apart"


def _words(vocabulary: Lexicon) -> str:
    counts = vocabulary.counts if isinstance(vocabulary, Vocabulary) else None
    if counts is None:
        return ""
    total = int(counts.sum())
    return f", {total:,} words, {counts[0] / max(total, 1):.2%} of them not in the vocabulary"


def _device(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{device}, {torch.cuda.get_device_name(device)}"
    threads = torch.get_num_threads()
    return f"{device}, {threads} thread{'s' if threads > 1 else ''}"
