"""The page docs/options.md, whose tables follow from the declarations: `make lists` writes it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import MISSING
from pathlib import Path
from typing import Any

from fastqt.sentences.cli.declared import in_words
from fastqt.sentences.options.commands import (
    EmbedOptions,
    EvaluationOptions,
    ExportOptions,
    IndexOptions,
    InferenceOptions,
    MapOptions,
    MineOptions,
)
from fastqt.sentences.options.option import Option, options_of
from fastqt.sentences.runs.config import KINDS, TrainConfig

PAGE = Path(__file__).parent.parent.parent / "docs" / "options.md"
OF_COMMANDS = {
    "embed": EmbedOptions,
    "export": ExportOptions,
    "index": IndexOptions,
    "mine": MineOptions,
    "evaluate": EvaluationOptions,
    "retrieve": MapOptions,
    "inference of gloss": InferenceOptions,
}
HEAD = """# Options of the commands

The tables follow from the declarations in `fastqt/sentences/options/` and `fastqt/sentences/kinds/`, as the
command line, its `--help` and its checks do; `make lists` writes this page.
`fastqt train --model NAME --help` shows the options of one model kind with its own defaults.

A shell completes commands, options and their values, after `--model NAME` the options of that model kind,
with a line in the file that it reads when it starts:

```sh
eval "$(fastqt --completion bash)"         # in ~/.bashrc
eval "$(fastqt --completion zsh)"          # in ~/.zshrc
fastqt --completion fish | source          # in ~/.config/fish/config.fish
```
"""
RESUME = {"same": "", "move": "; `--resume`: another place", "change": "; `--resume`: may change"}


def page() -> str:
    """The whole page."""
    return "\n".join([HEAD, *_of_trainings(), *_of_commands()])


def _of_trainings() -> Iterator[str]:
    options = options_of(TrainConfig)
    for record in (TrainConfig, *reversed(TrainConfig.__mro__[1:])):
        names = [name for name in getattr(record, "__annotations__", ()) if name in options]
        if names:
            yield f"## train: {vars(record)['title']}\n"
            yield _table((options[name], _default(name)) for name in names)


def _default(name: str) -> str:
    """The default, and those of the model kinds that have another."""
    each = options_of(TrainConfig)[name]
    others = {
        kind.name: kind.default(name)
        for kind in KINDS.values()
        if each.varies and kind.has(name) and kind.default(name) != each.default
    }
    parts = [_shown(each.default), *(f"{kind} {in_words(value)}" for kind, value in others.items())]
    return "; ".join(filter(None, parts))


def _of_commands() -> Iterator[str]:
    for title, record in OF_COMMANDS.items():
        yield f"## {title}\n"
        yield _table((each, _shown(each.default)) for each in options_of(record).values())


def _shown(default: Any) -> str:
    return "" if default is None or default is False or default in ("", MISSING) else in_words(default)


def _table(rows: Iterable[tuple[Option, str]]) -> str:
    lines = ["| option | what it is | values |", "|---|---|---|"]
    for each, default in rows:
        limits = re.sub(r"\d{5,}", lambda number: f"{int(number[0]):,}", each.range_in_words())
        values = ", ".join(f"`{value}`" for value in each.choices) or re.sub(r"\.0\b", "", limits)
        flags = ["CORPUS"] if each.name == "corpus" else filter(None, [each.flag, each.also])
        flag = ", ".join(f"`{name}`" for name in flags)
        taken = "; ".join(filter(None, [values, f"by default {default}" if default else ""]))
        about = re.sub(r"--[a-z][a-z-]*", r"`\g<0>`", each.help.replace("<", "&lt;"))
        lines.append(f"| {flag} | {about}{RESUME[each.resume]} | {taken} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
