"""The options of `fastqt train`, which depend on the model kind, as the parser and its help have them."""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Sequence

from fastqt.sentences.cli.declared import add_group, help_of, in_words
from fastqt.sentences.options.option import Option, options_of
from fastqt.sentences.runs.config import KINDS, TrainConfig


def add_training(parser: argparse.ArgumentParser) -> None:
    """Adds the options of a training to a parser, but for the corpus, in the groups of their classes."""
    options = options_of(TrainConfig)
    groups = {
        vars(record)["title"]: [options[name] for name in record.__annotations__ if name in options]
        for record in (TrainConfig, *reversed(TrainConfig.__mro__[1:]))
        if "title" in vars(record)
    }
    for title, declared in groups.items():
        add_group(parser, title, [each for each in declared if each.name != "corpus"])
    for action in parser._actions:
        if action.dest in options and options[action.dest].varies:
            action.help = _with_defaults(options[action.dest])


def _with_defaults(each: Option) -> str:
    """The help of an option whose default depends on the model kind: the declared default, and the others."""
    names = defaultdict(list)
    for kind in KINDS.values():
        if not kind.has(each.name):
            continue
        if (default := kind.default(each.name)) != each.default:
            names[default].append(kind.name)
        for encoder in kind.of_encoder:
            if (changed := kind.default(each.name, encoder)) != default:
                names[changed].append(f"{kind.name} with {encoder}")
    if "default" in each.help or not names:
        return help_of(each, each.default)
    others = "; ".join(f"{_listed(whose)} {in_words(value)}" for value, whose in names.items())
    return f"{each.help} (default: {in_words(each.default)}; {others})"


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def narrow(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """Leaves in the help of a training what the model kind has that the words of its command line name."""
    named = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    named.add_argument("--model")
    named.add_argument("--encoder", default="")
    chosen, _ = named.parse_known_args([word for word in words if word not in ("--help", "-h")])
    if (kind := KINDS.get(chosen.model)) is None:
        return
    options = options_of(TrainConfig)
    for action in parser._actions:
        if action.dest not in options or action.dest == "model":
            continue
        if not kind.has(action.dest):
            action.help = argparse.SUPPRESS
        elif options[action.dest].varies:
            default = kind.default(action.dest, chosen.encoder)
            action.help = help_of(options[action.dest], default)
