"""What a public loss does around its formula: it knows its options by name, and no rank is left waiting.

A loss checks some arguments before the ranks agree on its call. What is wrong there at one rank is made known
to the others here, in one place, in the exchange by which they agree.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

from fastqt.distributed.agreement import public_call, refuse
from fastqt.signatures import check_names, plain_numbers

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def public_loss(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """A loss function that says what is wanted in place of an option that it does not have.

    Its signature stays. The names are looked up before the call, so that no other TypeError is taken for one
    about names. With `group=`, what it raises before the ranks have agreed all ranks raise.
    """
    names = frozenset(inspect.signature(function).parameters)
    name = f"fastqt.{function.__name__}"

    def checked(*arguments: Parameters.args, **options: Parameters.kwargs) -> Result:
        for option in options:
            if option not in names:
                check_names(options, names, function.__name__)
        if torch.compiler.is_compiling():
            return function(*arguments, **options)
        return function(*arguments, **plain_numbers(options))

    @functools.wraps(function)
    def called(*arguments: Parameters.args, **options: Parameters.kwargs) -> Result:
        group: Any = options.get("group")
        if group is None or torch.compiler.is_compiling():
            return checked(*arguments, **options)
        with public_call(name) as call:
            try:
                return checked(*arguments, **options)
            except Exception as error:  # raised again, whatever it is
                if not call.agreeing:
                    refuse(group, error)
                raise

    return called
