"""The kinds of values of options: from the words of a command line, or the reason why not."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any


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


def several(kind: Callable[[str], Any], count: int | None = None) -> Callable[[str], tuple[Any, ...]]:
    """Values of a kind with commas between them, as many as `count` if that is given."""

    def values(text: str) -> tuple[Any, ...]:
        read = tuple(kind(each.strip()) for each in text.split(","))
        if count is not None and len(read) != count:
            raise argparse.ArgumentTypeError(f"want {count} values with commas between them, got {text!r}")
        return read

    return values


class Appended(argparse.Action):
    """An option that may be repeated: its values become a tuple, which has no default."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        setattr(namespace, self.dest, (*getattr(namespace, self.dest, ()), values))


def add_value(
    parser: argparse.ArgumentParser,
    flag: str,
    kind: Callable[[str], float],
    default: float,
    help: str,
    letter: str | None = None,
) -> None:
    """Adds an option with a number; its help says the default too."""
    parser.add_argument(
        flag, type=kind, default=default, metavar=letter, help=f"{help} (default: {default:g})"
    )


def add_device(parser: argparse.ArgumentParser) -> None:
    """Adds the option of the device to compute on."""
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
