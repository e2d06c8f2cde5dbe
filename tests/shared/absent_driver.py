"""A CUDA driver that is not there, so that Triton's launches run up to the call of the driver, without a GPU.

Nothing is compiled: what Triton would have compiled is kept in place of a kernel.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton.compiler
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime.driver import driver

Launched = Callable[..., None]  # of the kernel and all that the launcher of the driver is given


class AbsentDriver:
    """What Triton asks a driver for at a launch."""

    def __init__(self) -> None:
        self.device, self.stream = 0, 7

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return self.stream

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


class NotCompiled(CompiledKernel):
    """In place of a compiled kernel: what it would be compiled from, and a launcher that does nothing."""

    def __init__(self, source: Any, launched: Launched | None) -> None:
        self.src, self.name, self.hash = source, source.fn.__name__, str(id(self))
        self.module, self._module_pid = object(), None  # nothing is to be unloaded
        self.function, self.packed_metadata, self.metadata = 1, (4, 1, 0), SimpleNamespace()
        self._run = _nothing if launched is None else lambda *arguments: launched(self, *arguments)


def _nothing(*arguments: Any) -> None:
    pass


@contextlib.contextmanager
def absent_driver(launched: Launched | None = None) -> Iterator[AbsentDriver]:
    """Triton finds a driver here; what would be launched is handed over, if anybody wants it.

    Kernels that are launched meanwhile keep what was not compiled: a process does nothing else with them.
    """

    def compiled(source: Any, target: Any = None, options: Any = None, **_: Any) -> NotCompiled:
        return NotCompiled(source, launched)

    absent = AbsentDriver()
    with (
        mock.patch.object(driver, "_active", absent),
        mock.patch.object(triton.compiler, "compile", compiled),
        mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=False),
    ):
        yield absent
