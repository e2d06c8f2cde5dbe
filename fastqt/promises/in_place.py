"""Functions that change a promise in place, and with it its views; and those that write to `out`.

A promise that has no views stands for what a rule makes of it from then on. Otherwise it is computed, with
all that was made of it before, and the function changes the tensor.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastqt.promises.promise import Promise
from fastqt.promises.rules import RULES, Watch, state_of
from fastqt.promises.scores import Meaning
from fastqt.promises.state import Function, State, before_change, mapped, parts

CHANGES: dict[Function, bool] = {}  # whether a function that is known changes its first argument


def changes_in_place(func: Function, kwargs: dict[str, Any]) -> bool:
    """Whether a function changes its first argument, or one named `out`."""
    changes = CHANGES.get(func)
    if changes is None:
        changes = _changes_its_first(func)
        if not torch.compiler.is_compiling():  # A graph depends on no dictionary that grows.
            CHANGES[func] = changes
    return changes or kwargs.get("out") is not None


def _changes_its_first(func: Function) -> bool:
    """Whether a function changes its first argument, as its name says."""
    name = getattr(func, "__name__", "")
    operator = (
        name.startswith("__i") and name.endswith("__") and name not in ("__index__", "__int__", "__invert__")
    )
    named = name.endswith("_") and not name.endswith("__")
    return named or operator or name in ("__setitem__", "__set__")


def changed_by_rule(func: Function, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a promise, the first argument, stands for what a function in place makes of it from now on."""
    promise, box = args[0], args[0].box
    instead = RULES.in_place.get(func)
    rule = None if instead is None else RULES.of.get(instead)
    has_new_leaf = torch.is_grad_enabled() and any(
        isinstance(x, Tensor) and x.requires_grad for x in parts((args[1:], tuple(kwargs.values())))
    )
    if not box.is_alone or rule is None or instead is None or has_new_leaf:
        return False
    answer = rule(*args, **kwargs)
    is_same = isinstance(answer, Meaning) and tuple(answer.shape) == tuple(promise.shape)
    if not is_same or answer.dtype not in (None, promise.dtype):
        return False
    box.state, box.base = state_of(instead, args, kwargs, answer), None
    return True


def change(func: Function, name: str, args: Any, kwargs: dict[str, Any], watch: Watch) -> Any:
    """A function that changes its first argument, a promise."""
    promise, box = args[0], args[0].box
    if changed_by_rule(func, args, kwargs):
        return promise

    family = box.base or box
    watch.computes(name, promise)
    for each in (family, *family.views):
        if each.state.cells is not None:
            each.state.keep(each.state.cells)
    # What was made of the old cells keeps them.
    for other in [*watch.live, family]:
        other.state.computed()
    for view in family.views:
        # Its value may have come from what is known of it.
        if view.state.meaning is not None and not _share_memory(
            view.state.computed(), family.state.computed()
        ):
            view.state = State(
                view.state.function, (family.state, *view.state.args[1:]), view.state.keywords, None
            )
            view.state.computed()
    target = box.state.computed()
    before_change([target])
    rest, named = mapped(args[1:], _cells), {key: mapped(x, _cells) for key, x in kwargs.items()}
    with torch._C.DisableTorchFunctionSubclass():
        func(target, *rest, **named)
    for each in (family, *family.views):
        each.state.pin()
        each.state.keep(each.state.computed())
    return promise


def write(func: Function, name: str, args: Any, kwargs: dict[str, Any], watch: Watch) -> Any:
    """A function that writes its result to `out`."""
    out, others = kwargs["out"], {key: x for key, x in kwargs.items() if key != "out"}
    if isinstance(out, Promise):

        def into(target: Tensor, *rest: Any, **named: Any) -> Any:
            return func(*rest, **named, out=target)

        return change(into, name, (out, *args), others, watch)
    args, others = mapped(args, _cells), {key: mapped(x, _cells) for key, x in others.items()}
    return func(*args, **others, out=out)


def _cells(x: Any) -> Any:
    return x.box.state.computed() if isinstance(x, Promise) else x


def _share_memory(a: Tensor, b: Tensor) -> bool:
    return bool(a.untyped_storage()._cdata == b.untyped_storage()._cdata)
