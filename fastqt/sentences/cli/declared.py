"""The arguments of a command line that follow from declared options."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection
from dataclasses import MISSING
from typing import Any

from fastqt.sentences.options.option import Option, options_of

LETTERS = {int: "N", float: "X", str: "TEXT"}


def path(text: str) -> str:
    """A path. An empty text, which an unset variable of a shell gives, would be the current directory."""
    if not text:
        raise argparse.ArgumentTypeError("want a path, got an empty text")
    return text


def integer(text: str) -> int:
    """A whole number of at most 64 bits."""
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"want a whole number, got {text!r}") from None
    if not -(2**63) <= value < 2**63:
        raise argparse.ArgumentTypeError(f"want a whole number of at most 64 bits, got {text}")
    return value


def number(text: str) -> float:
    """A number."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"want a number, got {text!r}") from None


READERS: dict[type, Callable[[str], Any]] = {int: integer, float: number, str: str}


def several(kind: Callable[[str], Any], count: int | None = None) -> Callable[[str], tuple[Any, ...]]:
    """Values of a kind with commas between them, as many as `count` if that is given."""

    def values(text: str) -> tuple[Any, ...]:
        read = tuple(kind(each.strip()) for each in text.split(","))
        if count is not None and len(read) != count:
            raise argparse.ArgumentTypeError(f"want {count} values with commas between them, got {text!r}")
        return read

    return values


class Appended(argparse.Action):
    """An option that may be repeated: its values become a tuple."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        setattr(namespace, self.dest, (*(getattr(namespace, self.dest, None) or ()), values))


def add_options(parser: argparse.ArgumentParser, record: Any) -> None:
    """Adds an argument for each option of a record; their values are those of a new record."""
    for each in options_of(record).values():
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
    reader = path if each.file else READERS.get(each.kind, str)
    shared: dict[str, Any] = {"help": help_of(each, each.default)}
    if each.positional:
        count = None if each.count == 1 else "+" if each.default is MISSING else "*"
        choices = each.choices or None
        parser.add_argument(each.name, nargs=count, type=reader, choices=choices, metavar=each.file, **shared)
        return

    flags = [each.flag, *([each.also] if each.also else [])]
    shared |= {"dest": each.name, "required": each.default is MISSING}
    shared |= {} if each.default is MISSING else {"default": default}
    if each.kind is bool:
        given_only = default is argparse.SUPPRESS  # which may be set back
        action = argparse.BooleanOptionalAction if given_only else "store_true"
        del shared["required"]
        parser.add_argument(*flags, action=action, **shared)
    elif each.alone:
        parser.add_argument(*flags, nargs="?", const=each.alone, type=reader, metavar=_letter(each), **shared)
    elif each.repeats:
        parser.add_argument(*flags, action=Appended, type=reader, metavar=_letter(each), **shared)
    elif each.choices and each.count == 1:
        metavar = "NAME" if _has_many(each) else None
        parser.add_argument(*flags, choices=each.choices, metavar=metavar, **shared)
    elif each.spaced:
        parser.add_argument(*flags, nargs="+", type=reader, metavar=_letter(each), **shared)
    else:
        reader = reader if each.count == 1 else several(reader, each.count)
        parser.add_argument(*flags, type=reader, metavar=_letter(each), **shared)


def _letter(each: Option) -> str:
    if each.file:
        return each.file
    letter = LETTERS[each.kind]
    return letter if each.count == 1 or each.repeats or each.spaced else f"{letter},{letter}"


def _has_many(each: Option) -> bool:
    """Whether the choices of an option together are a word of the usage that is wider than a terminal."""
    return len(",".join(each.choices)) > 60


def about(each: Option) -> str:
    """What --help says of an option beside its default."""
    return f"{each.help}: {', '.join(each.choices)}" if _has_many(each) else each.help


def help_of(each: Option, default: Any) -> str:
    """What --help says of an option, with its default where the declaration does not say it."""
    if default in (None, "", (), MISSING) or each.kind is bool or "default" in each.help:
        return about(each)
    return f"{about(each)} (default: {in_words(default)})"


def in_words(value: Any) -> str:
    """A default as --help shows it."""
    if isinstance(value, tuple):
        return ",".join(map(in_words, value))
    return value if isinstance(value, str) else f"{value:,}" if isinstance(value, int) else f"{value:g}"
