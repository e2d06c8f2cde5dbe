"""What an option is: a declaration, from which its check, its place on a command line and its help follow."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from functools import cache, partial
from types import NoneType, UnionType
from typing import (
    TYPE_CHECKING,
    Any,
    Literal,
    TypeAlias,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from fastqt.errors import InputError
from fastqt.sentences.json_text import NAMES, has_type

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform

Resume: TypeAlias = Literal["same", "move", "change"]
"""What a resumed training may do with an option: keep it, name another place of its file, or change it."""

T = TypeVar("T")


def option(
    default: Any = MISSING,
    help: str = "",
    *,
    choices: Sequence[str] = (),
    at_least: float = -math.inf,
    above: float = -math.inf,
    below: float = math.inf,
    at_most: float = math.inf,
    varies: bool = False,
    file: str = "",
    flag: str = "",
    also: str = "",
    positional: bool = False,
    repeats: bool = False,
    spaced: bool = False,
    resume: Resume = "same",
    alone: str = "",
) -> Any:
    """Declares an option: a field of a record, whose annotation is the type of the values.

    Args:
        default: the value where none is given. Without it the option is required.
        help: what it is, for --help; the default is added.
        choices: all values that are allowed, where they are not the `Literal` of the annotation.
        at_least, above, below, at_most: the range of a number, or of each of several.
        varies: the default depends on the model kind, whose entry has it where it is not `default`.
        file: what stands for the value in --help, if that is a path or a positional argument.
        flag: the option on a command line, where that does not follow from its name.
        also: another name of it there.
        positional: it is an argument without a flag.
        repeats: several values are given by repeating the option, and not with commas between them.
        spaced: several values are given with blanks between them.
        resume: what a resumed training may do with it.
        alone: the value where the option stands on the command line without one.
    """
    ranges = {"at_least": at_least, "above": above, "below": below, "at_most": at_most}
    rest = {"varies": varies, "file": file, "flag": flag, "also": also, "positional": positional}
    rest |= {"repeats": repeats, "spaced": spaced, "resume": resume, "alone": alone}
    metadata = {"help": help, "default": default, "choices": tuple(choices), **ranges, **rest}
    if default is MISSING:
        return field(metadata=metadata)
    return field(default=None if varies else default, metadata=metadata)


@dataclass(frozen=True)
class Option:
    """A declared option; for what `option` is given see there."""

    name: str
    kind: type  # of a value, or of each of several: int, float, str or bool
    count: int | None  # of values; None for any number of them
    optional: bool  # whether None is a value
    help: str
    default: Any
    choices: tuple[str, ...]
    at_least: float
    above: float
    below: float
    at_most: float
    varies: bool
    file: str
    flag: str  # as it stands on a command line
    also: str  # likewise, or ""
    positional: bool
    repeats: bool
    spaced: bool
    resume: Resume
    alone: str

    def check(self, value: Any) -> None:
        """Checks a value; InputError names the option, what is wanted, and what was given."""
        if (value is None and (self.optional or self.varies)) or value == () == self.default:
            return
        if self.count == 1:
            self._check_one(value)
            return
        if not isinstance(value, tuple) or (self.count or len(value)) != len(value) or not value:
            wanted = "two numbers" if self.count else "paths" if self.file else "one value or several"
            raise InputError(f"{self.name}: want {wanted}, got {value!r:.100}")
        for each in value:
            self._check_one(each)

    def _check_one(self, value: Any) -> None:
        if not has_type(value, self.kind):
            raise InputError(f"{self.name}: want {NAMES[self.kind]}, got {value!r:.100}")
        if self.choices and value not in self.choices:
            raise InputError(f"{self.name}: want one of {', '.join(self.choices)}, got {value!r:.100}")
        if self.file and not value:
            raise InputError(f"{self.name}: want a path, got an empty text")
        if isinstance(value, int | float):
            self._check_range(value)

    def _check_range(self, value: float) -> None:
        in_range = self.at_least <= value <= self.at_most and self.above < value < self.below
        if abs(value) > sys.float_info.max or not (in_range or self.range_in_words()):
            raise InputError(f"{self.name}: want a finite number, got {value!r:.100}")
        if not in_range:
            raise InputError(f"{self.name}: want {self.range_in_words()}, got {value!r:.100}")

    def range_in_words(self) -> str:
        """The range, such as "at least 0 and less than 1"; "" without one."""
        limits = {
            "at least": self.at_least,
            "more than": self.above,
            "less than": self.below,
            "at most": self.at_most,
        }
        return " and ".join(f"{words} {each}" for words, each in limits.items() if math.isfinite(each))


@cache
def _fields_of(record: Any) -> dict[str, Field[Any]]:
    return {each.name: each for each in fields(record) if each.metadata}


def has_option(record: type, name: str) -> bool:
    """Whether a record has an option."""
    return name in _fields_of(record)


def default_of(record: type, name: str) -> Any:
    """The declared default of an option. Unlike `options_of`, this evaluates no annotations."""
    return _fields_of(record)[name].metadata["default"]


def options_of(record: type) -> dict[str, Option]:
    """The options of a record by their names, in the order in which they are declared."""
    return _options_of(record)


@cache
def _options_of(record: Any) -> dict[str, Option]:
    hints = get_type_hints(record)
    declared = _fields_of(record).items()
    return {name: _option(name, hints[name], dict(each.metadata)) for name, each in declared}


def _option(name: str, hint: Any, declared: dict[str, Any]) -> Option:
    optional = get_origin(hint) in (Union, UnionType)
    if optional:
        (hint,) = (each for each in get_args(hint) if each is not NoneType)
    count: int | None = 1
    if get_origin(hint) is tuple:
        hint, *others = get_args(hint)
        count = None if others == [...] else 1 + len(others)
    if get_origin(hint) is Literal:
        hint, declared["choices"] = str, get_args(hint)
    declared["flag"] = declared["flag"] or (f"--{name.replace('_', '-')}" if name[1:] else f"-{name}")
    return Option(name, hint, count, optional, **declared)


def check_options(record: Any) -> None:
    """Checks the type and the range of each option of a record."""
    for name, each in options_of(record.__class__).items():
        each.check(getattr(record, name))


@dataclass(frozen=True)
class Options:
    """A record of options, each within its range."""

    def __post_init__(self) -> None:
        check_options(self)


if TYPE_CHECKING:

    @dataclass_transform(frozen_default=True)
    def part(cls: type[T]) -> type[T]:
        """Makes a class a part of a record: its fields are all that is wanted, and no instance is made."""

else:
    part = partial(dataclass, frozen=True, init=False, repr=False, eq=False)
