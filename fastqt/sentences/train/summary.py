"""What a training tells at its end: figures beside those of chance and fresh weights, and what is next."""

from __future__ import annotations

import itertools
import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from fastqt.sentences.runs.checkpoint import CORPUS, METRICS
from fastqt.sentences.runs.config import TrainConfig
from fastqt.sentences.text import read_blocks
from fastqt.sentences.text.reader import STDIN
from fastqt.sentences.text.tables import is_table

HELD_OUT = "validation_"
SHARES = ("accuracy", "chance")  # what ends so is shown in per cent
NOT_SHOWN = ("step", "sentences_per_second", "seconds", "cpu_seconds", "learning_rate", "chance")
SHORT = range(4, 13)  # words of a sentence that serves as an example
LOOKED_AT = 2000  # sentences among which it is found

Line = Mapping[str, float]


def value_in_words(name: str, value: float | None) -> str:
    """A figure of metrics.jsonl: shares in per cent, and a dash for one that there is not."""
    if value is None:
        return "–"
    return f"{value:.2%}" if name.endswith(SHARES) else f"{value:.3f}"


def closing_table(directory: Path) -> str:
    """A table of the last figures of a run, in text, beside those before training and those of chance.

    They are the held-out figures if metrics.jsonl has some, and otherwise those of the last batch; "" if the
    run has reported nothing.
    """
    lines = [json.loads(line) for line in (directory / METRICS).read_text(encoding="utf-8").splitlines()]
    validated = [line for line in lines if _held_out(line)]
    if not validated:
        return _table("last batch of the corpus", {f"step {lines[-1]['step']:,}": lines[-1]}) if lines else ""
    columns: dict[str, Line] = {}
    if validated[0]["step"] == 0:
        columns["fresh weights"] = validated[0]
    if (best := _best(validated)) is not None and best is not validated[-1]:
        columns[f"step {best['step']:,}, kept"] = best
    columns[f"step {validated[-1]['step']:,}"] = validated[-1]
    names = [name for name in validated[-1] if name.startswith((HELD_OUT, "dev_"))]
    return _table("held out", {key: {name: line[name] for name in names} for key, line in columns.items()})


def _held_out(line: Line) -> bool:
    return any(name.startswith((HELD_OUT, "dev_")) for name in line)


def _best(lines: Sequence[Line]) -> Line | None:
    """The line of the model that is kept, where development pairs choose it."""
    trained = [line for line in lines if "dev_spearman" in line and line["step"]]
    return max(trained, key=lambda line: line["dev_spearman"], default=None)


def _table(title: str, columns: Mapping[str, Line]) -> str:
    last = list(columns.values())[-1]
    names = [name for name in last if name.removeprefix(HELD_OUT) not in NOT_SHOWN]
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


def next_commands(config: TrainConfig, directory: str) -> list[str]:
    """Command lines that use a trained model, with the paths and a sentence of this run.

    `directory` is the run's, as the user has named it.
    """
    text = _plain_text(config, directory)
    sentence = "a sentence" if text is None else _example(text)
    words = [
        ["neighbors", directory, text or "CORPUS", "--query", sentence],
        ["embed", directory, text or "SENTENCES", "--out", str(Path(directory, "vectors.npy"))],
        ["evaluate", directory, "--baseline", "--data", "DIR"],
    ]
    return [shlex.join(["fastqt", *each]) for each in words]


def _plain_text(config: TrainConfig, directory: str) -> str | None:
    """A text file of the run, that of validation first; None if there are only tables and rows."""
    names = [config.valid, *config.corpus]
    paths = [str(Path(directory, CORPUS)) if name == STDIN else name for name in names if name is not None]
    return next((path for path in paths if not is_table(path) and ".tsv" not in Path(path).suffixes), None)


def _example(text: str) -> str:
    """A short sentence of a text, or else its first one."""
    blocks = itertools.chain.from_iterable(block.sentences for block in read_blocks([text]))
    sentences = list(itertools.islice(blocks, LOOKED_AT))
    return next((sentence for sentence in sentences if len(sentence.split()) in SHORT), sentences[0])
