"""What a setting of a training is: its default, its help text, and the values that it may have."""

from __future__ import annotations

import math
import sys
from dataclasses import Field, field
from typing import Any

from fastqt.errors import InputError
from fastqt.sentences.json_text import NAMES, has_type

KINDS = {"int": int, "float": float, "str": str, "bool": bool}  # of the settings


def option(
    default: Any,
    help: str,
    *,
    choices: tuple[str, ...] = (),
    at_least: float | None = None,
    below: float = math.inf,
) -> Any:
    """Declares a setting that is also a command-line option: a field of a dataclass.

    A default of None means no value, or that in `fastqt.sentences.runs.defaults`. `choices` are all values
    that are allowed, unless it is empty; a number is at least `at_least` and less than `below`.
    """
    return field(
        default=default, metadata={"help": help, "choices": choices, "at_least": at_least, "below": below}
    )


def check_setting(setting: Field[Any], value: Any) -> None:
    """Checks the type and the range of a setting."""
    kind = str(setting.type)
    if kind == "tuple[str, ...]":
        if not isinstance(value, tuple) or not all(isinstance(each, str) and each for each in value):
            raise InputError(f"{setting.name}: want paths, got {value!r:.100}")
        return

    if kind == "tuple[float, float]":
        if not isinstance(value, tuple) or len(value) != 2:
            raise InputError(f"{setting.name}: want two numbers, got {value!r:.100}")
        for number in value:
            _check_value(setting, "float", number)
        return

    if kind.startswith("tuple["):  # of any length, or None
        if value is None:
            return
        if not isinstance(value, tuple) or not value:
            raise InputError(f"{setting.name}: want one value or several, got {value!r:.100}")
        for each in value:
            _check_value(setting, kind.removeprefix("tuple[").partition(",")[0], each)
        return

    _check_value(setting, kind, value)


def _check_value(setting: Field[Any], kind: str, value: Any) -> None:
    """Checks one value of a type that is named, such as "int" or "str | None"."""
    if value is None and setting.default is None and not str(setting.type).startswith("tuple"):
        return
    if not has_type(value, KINDS[kind.removesuffix(" | None")]):
        wanted = NAMES[KINDS[kind.removesuffix(" | None")]]
        raise InputError(f"{setting.name}: want {wanted}, got {value!r:.100}")
    choices, at_least = setting.metadata["choices"], setting.metadata["at_least"]
    if choices and value not in choices:
        raise InputError(f"{setting.name}: want one of {', '.join(choices)}, got {value!r:.100}")
    below = setting.metadata["below"]
    if at_least is not None and not at_least <= value < below:
        limit = "" if below == math.inf else f" and less than {below}"
        raise InputError(f"{setting.name}: want at least {at_least}{limit}, got {value!r:.100}")
    if isinstance(value, int | float) and not abs(value) <= sys.float_info.max:
        raise InputError(f"{setting.name}: want a finite number, got {value!r:.100}")
