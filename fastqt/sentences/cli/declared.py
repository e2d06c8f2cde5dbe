"""The arguments of a command line that follow from declared options."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection
from dataclasses import MISSING
from typing import Any

from fastqt.sentences.cli.kinds import Appended, integer, number, path, several
from fastqt.sentences.options.option import Option, options_of

READERS: dict[type, Callable[[str], Any]] = {int: integer, float: number, str: str}
LETTERS = {int: "N", float: "X", str: "TEXT"}


def add_options(parser: argparse.ArgumentParser, record: Any, *, without: Collection[str] = ()) -> None:
    """Adds an argument for each option of a record but for some; their values are those of a new record."""
    for name, each in options_of(record).items():
        if name not in without:
            _add(parser, each, default=each.default)


def add_group(parser: argparse.ArgumentParser, title: str, options: Collection[Option]) -> None:
    """Adds a group of arguments that are in the parsed result only if they are on the command line.

    A resumed training keeps the stored values of all others.
    """
    group = parser.add_argument_group(title)
    for each in options:
        _add(group, each, default=argparse.SUPPRESS)
        if each.resume == "change" and each.optional:
            group.add_argument(
                f"--no-{each.flag.removeprefix('--')}",
                dest=each.name,
                action="store_const",
                const=None,
                default=argparse.SUPPRESS,
                help=f"resume a run without the {each.flag} that it had",
            )


def _add(parser: argparse._ActionsContainer, each: Option, *, default: Any) -> None:
    shared: dict[str, Any] = {"dest": each.name, "help": help_of(each, each.default)}
    if each.default is MISSING:
        shared["required"] = True
    else:
        shared["default"] = default

    if each.kind is bool:
        given_only = default is argparse.SUPPRESS  # which may be set back
        action = argparse.BooleanOptionalAction if given_only else "store_true"
        parser.add_argument(each.flag, action=action, **shared)
    elif each.repeats:
        parser.add_argument(each.flag, action=Appended, type=_reader(each), metavar=_letter(each), **shared)
    elif each.choices and each.count == 1:
        parser.add_argument(each.flag, choices=each.choices, **shared)
    else:
        reader = _reader(each) if each.count == 1 else several(_reader(each), each.count)
        parser.add_argument(each.flag, type=reader, metavar=_letter(each), **shared)


def _reader(each: Option) -> Callable[[str], Any]:
    return path if each.file else READERS[each.kind]


def _letter(each: Option) -> str:
    if each.file:
        return each.file
    letter = LETTERS[each.kind]
    return letter if each.count == 1 or each.repeats else f"{letter},{letter}"


def help_of(each: Option, default: Any) -> str:
    """What --help says of an option, with its default where the declaration does not say it."""
    if default in (None, "", MISSING) or each.kind is bool or "default" in each.help:
        return each.help
    return f"{each.help} (default: {in_words(default)})"


def in_words(value: Any) -> str:
    """A default as --help shows it."""
    if isinstance(value, tuple):
        return ",".join(map(in_words, value))
    return value if isinstance(value, str) else f"{value:,}" if isinstance(value, int) else f"{value:g}"
