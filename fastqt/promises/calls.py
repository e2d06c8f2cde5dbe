"""What a function gives of arguments among which are promises: by a question, a rule, a change, or cells."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastqt.promises.in_place import change, changes_in_place, write
from fastqt.promises.promise import Promise, is_settled, promises_in, settled
from fastqt.promises.rules import RULES, SILENT, Watch, by_rule
from fastqt.promises.state import Function, mapped

# What a promise answers itself, as the tensor would that it stands for.
_ANSWERED = {
    getattr(Tensor, name).__get__
    for name in (
        "shape",
        "dtype",
        "device",
        "ndim",
        "layout",
        "is_cuda",
        "requires_grad",
        "is_leaf",
        "grad_fn",
    )
} | {Tensor.size, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.__len__, Tensor.is_floating_point}
# What is of the tensor itself, so that everything has to go through it from then on.
_PINS = {Tensor.register_hook, Tensor.retain_grad, Tensor.requires_grad_}


def called(
    func: Function, args: Any, kwargs: dict[str, Any], watch: Watch, promises: list[Promise] | None = None
) -> Any:
    """What a function gives of arguments among which are promises.

    Args:
        promises: those that there are, if it is known that no gradients have to go to the nodes of these.
    """
    if func in _ANSWERED and (not isinstance(args[0], Promise) or args[0].box.state.meaning is not None):
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    if promises is None:
        promises = promises_in(args, kwargs.values())
        if any(is_settled(x) for x in promises):
            args, kwargs = mapped(args, settled), {key: mapped(x, settled) for key, x in kwargs.items()}
            promises = promises_in(args, kwargs.values())
    if not promises:
        return func(*args, **kwargs)
    name = getattr(func, "__name__", str(func))
    if func in _PINS and isinstance(args[0], Promise):
        args[0].box.state.computed()
        args[0].box.state.pin()
    elif kwargs.get("out") is not None:
        return write(func, name, args, kwargs, watch)
    elif args and isinstance(args[0], Promise) and changes_in_place(func, kwargs):
        return change(func, name, args, kwargs, watch)
    else:
        answer = by_rule(func, args, kwargs, watch, promises)
        if answer is not NotImplemented:
            return answer

    def cells(x: Any) -> Any:
        if not isinstance(x, Promise):
            return x
        state = x.box.state
        value = None
        if state.known is not None:
            RULES.taken = ""
            with state.modes(grad=state.grad):
                value = state.known.value()
            if RULES.taken:
                watch.fused(name, RULES.taken)
        if value is not None:
            state.keep(value.to(x.dtype))
        elif state.meaning is None or state.meaning.is_matrix:
            watch.computes(name, x)
        return state.computed()

    return func(*mapped(args, cells), **{key: mapped(x, cells) for key, x in kwargs.items()})


def _outside(func: Function, args: Any, kwargs: dict[str, Any]) -> Any:
    return called(func, args, kwargs, SILENT)


Promise.called = staticmethod(_outside)
