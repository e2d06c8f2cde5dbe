"""What is said about an argument that a function or a loss module does not have."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import Any

_PYTHONS = frozenset((float, int, bool, str, tuple, type(None)))
TEMPERATURES = ("temperature", "temp", "tau")  # what other libraries call 1 / scale


def check_names(
    options: Iterable[str], known: Iterable[str], owner: str, batch_arguments: Sequence[str] = ()
) -> None:
    """Raises TypeError unless all options of `owner` are known; it says what is wanted in place of the first.

    `batch_arguments` are names that each call takes instead.
    """
    names = [name for name in known if name != "self"]
    unknown = sorted(set(options) - set(names))
    if not unknown:
        return
    meant = difflib.get_close_matches(unknown[0], TEMPERATURES, 1) if "scale" in names else []
    if meant:
        advice = "; want scale, which is 1 / temperature"
    elif unknown[0] in batch_arguments:
        advice = ", want it in each call"
    else:
        near = difflib.get_close_matches(unknown[0], names, 1)
        advice = f"; the nearest is {near[0]}" if near else ""
    raise TypeError(f"{', '.join(unknown)}: no option of {owner}{advice}")


def plain_numbers(options: dict[str, Any]) -> dict[str, Any]:
    """The same options, where numpy's numbers are Python's."""
    if _PYTHONS.issuperset(map(type, options.values())):
        return options
    return {
        name: x.item() if type(x).__module__ == "numpy" and type(x).__name__ != "ndarray" else x
        for name, x in options.items()
    }
