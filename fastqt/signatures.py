"""What is said about an argument that a function or a loss module does not have."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import ParamSpec, TypeVar

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

TEMPERATURES = ("temperature", "temp", "tau")  # what other libraries call 1 / scale


def named_options(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """A loss function that says what is wanted in place of an option that it does not have.

    Its signature stays. The names are looked up before the call, so that no other TypeError is taken for one
    about names.
    """
    names = frozenset(inspect.signature(function).parameters)

    @functools.wraps(function)
    def checked(*arguments: Parameters.args, **options: Parameters.kwargs) -> Result:
        for name in options:
            if name not in names:
                check_names(options, names, function.__name__)
        return function(*arguments, **options)

    return checked


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
