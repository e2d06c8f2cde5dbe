"""Evaluation mode for a while, which several threads may ask of the same modules."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

_changing = threading.Lock()
# How many ask for a module's evaluation mode at the moment, and the mode that it had before the first did.
_asked: dict[nn.Module, tuple[int, bool]] = {}


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Puts a module and all modules in it into evaluation mode; afterwards each has its own mode again.

    Where several threads do so at the same time, a module's mode comes back with the last of them.
    """
    with _changing:
        modules = [*module.modules()]
        for each in modules:
            count, mode = _asked.get(each, (0, each.training))
            _asked[each] = count + 1, mode
        if any(each.training for each in modules):
            module.eval()

    try:
        yield
    finally:
        with _changing:
            for each in modules:
                count, mode = _asked.pop(each)
                if count > 1:
                    _asked[each] = count - 1, mode
                elif each.training != mode:
                    each.training = mode
