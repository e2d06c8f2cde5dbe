"""Each command refuses each wrong value of each option that it declares, in a line that names the option."""

import math
from pathlib import Path

import pytest

from fastqt.sentences.cli import main
from fastqt.sentences.options.commands import (
    EmbedOptions,
    EvaluationOptions,
    ExportOptions,
    IndexOptions,
    InferenceOptions,
    MapOptions,
    MineOptions,
)
from fastqt.sentences.options.option import options_of
from fastqt.sentences.runs.config import KINDS, TrainConfig

# What a command has beside its declared options; nothing of it is there.
COMMANDS = {
    "train": (TrainConfig, "c.tsv --out run"),
    "embed": (EmbedOptions, "run c.txt --out v.npy"),
    "neighbors": (InferenceOptions, "run c.txt --query a"),
    "export": (ExportOptions, "run --out out"),
    "mine": (MineOptions, "run p.tsv --out n.tsv"),
    "index": (IndexOptions, "run c.txt --out c.index"),
    "evaluate": (EvaluationOptions, "run --data eval"),
    "retrieve": (MapOptions, "run --features x.npy --captions c.txt"),
}
OPTIONS = [(command, name) for command, (record, _) in COMMANDS.items() for name in options_of(record)]
OPTIONS = [(command, name) for command, name in OPTIONS if name not in ("corpus", "grid")]


def outside(option):
    """Values outside the range of a number, of the type that it has."""
    step = 1 if option.kind is int else 1e-9
    limits = [
        (option.at_least, option.at_least - step * max(1, abs(option.at_least))),
        (option.above, option.above),
        (option.below, option.below),
        (option.at_most, option.at_most + step),
    ]
    return [value for limit, value in limits if math.isfinite(limit)]


def wrong_values(option):
    """Texts that no value of an option is written as."""
    if option.kind is str:
        words = ["?"] if option.choices else [""] if option.file else []
    else:
        words = ["x", ""] + [repr(value) for value in outside(option)]
        words += ["1.5", "9" * 30] if option.kind is int else ["nan", "inf"]
    if option.count not in (1, None):
        words = [",".join([word] * option.count) for word in words] + ["0.5"]
    return words


@pytest.mark.parametrize(("command", "name"), OPTIONS, ids=map(" ".join, OPTIONS))
def test_a_wrong_value_is_refused_by_name_and_nothing_is_written(
    command, name, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    record, rest = COMMANDS[command]
    option = options_of(record)[name]
    words = [command, *rest.split()]
    if command == "train" and name != "model":
        words += ["--model", next(kind.name for kind in KINDS.values() if kind.has(name))]
    if option.kind is bool:
        lines = [[f"{option.flag}=maybe"]]
    else:
        lines = [
            [f"{option.flag}={word}"] if len(option.name) > 1 else [option.flag, word]
            for word in wrong_values(option)
        ]
    for line in lines:
        try:
            status = main([*words, *line])
        except SystemExit as error:
            status = error.code
        out, err = capsys.readouterr()
        assert (status, out) == (2, ""), line
        assert err.startswith("fastqt: "), line
        assert err.count("\n") == 1, line
        assert name in err.replace("-", "_"), line
        assert not list(Path().iterdir()), line
