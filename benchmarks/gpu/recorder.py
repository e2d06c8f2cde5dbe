"""Keeps what was launched last and what Triton compiled, so that a failure can be understood afterwards.

Each launch is also printed before it is made: where a kernel hangs or breaks the process, the section's
output ends with it.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.gpu.sections import Record, Verdict, check, progress
from benchmarks.measure.errors import shortened

PLAIN = (Tensor, torch.nn.Parameter)  # others, such as fake tensors, may lie nowhere
KEPT = 4  # of the last launches
DUMPED = (".ttgir", ".ptx", ".json")  # of what Triton keeps of a kernel; its other stages follow from these
MOST_OF_A_DUMP = 48_000  # characters of each file

log = logging.getLogger(__name__)


def described(x: Any) -> str:
    """An argument of a kernel or an operator, in words: a tensor by its dtype, shape, strides and place."""
    base = getattr(x, "base", x)  # of a tensor descriptor
    if isinstance(base, Tensor):
        dtype = str(base.dtype).removeprefix("torch.")
        block = f", blocks {tuple(x.block_shape)}" if base is not x else ""
        address = f", address % 16 = {base.data_ptr() % 16}" if type(base) in PLAIN else ""
        return f"{dtype} {tuple(base.shape)}, strides {base.stride()}, {base.device}{address}{block}"
    if isinstance(x, (list, tuple)):
        return f"[{', '.join(map(described, x))}]"
    return str(getattr(x, "value", x))


class Recorder:
    """The last launches of Triton kernels, and the last of torch's operators if it watches those."""

    def __init__(self) -> None:
        self.launches: deque[dict[str, Any]] = deque(maxlen=KEPT)
        self.begun = _newest_compilation()

    def note(self, name: str, arguments: dict[str, Any], **more: Any) -> None:
        launch = {"name": name, **more, "arguments": {k: described(x) for k, x in arguments.items()}}
        if not self.launches or launch != self.launches[-1]:
            log.info("launch %s", launch)
            self.launches.append(launch)
        progress()

    def evidence(self) -> dict[str, Any]:
        """The last launches, and what Triton compiled last since this began, if it did."""
        newest = _newest_compilation()
        compiled = {} if newest is None or newest == self.begun else _dump(newest[1])
        return {"launches": list(self.launches), "compiled": compiled}


class _Operators(TorchDispatchMode):
    """Notes each of torch's operators."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        named = {str(place): x for place, x in enumerate(args)} | kwargs
        self.recorder.note(str(function), named)
        return function(*args, **kwargs)


@contextlib.contextmanager
def recording(operators: bool = False) -> Iterator[Recorder]:
    """Notes Triton's launches, and torch's operators if wanted, in a recorder."""
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    recorder = Recorder()

    def noting(genuine: Callable[..., Any]) -> Callable[..., Any]:
        def run(kernel: Any, *args: Any, grid: Any, **kwargs: Any) -> Any:
            arguments = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
            recorder.note(kernel.__name__, arguments, grid=str(grid))
            made = genuine(kernel, *args, grid=grid, **kwargs)
            progress()  # The first launch of a kernel compiles it, which takes seconds.
            return made

        return run

    with contextlib.ExitStack() as stack:
        for kind in (JITFunction, InterpretedFunction):
            stack.enter_context(mock.patch.object(kind, "run", noting(kind.run)))
        if operators:
            stack.enter_context(_Operators(recorder))
        yield recorder


def recorded_check(name: str, test: Callable[[], Verdict], operators: bool = False) -> Record:
    """Runs a test; where it fails, the record has the last launches and what was compiled last."""
    with recording(operators) as recorder:
        record = check(name, test)
    if record["ok"] is False:
        record["evidence"] = recorder.evidence()
    return record


def _newest_compilation() -> tuple[float, Path] | None:
    """The folder in Triton's cache that was written last, with the time of that."""
    folder = os.environ.get("TRITON_CACHE_DIR")
    if folder is None or not Path(folder).is_dir():
        return None
    times = (
        (path.stat().st_mtime, path.parent)
        for path in Path(folder).rglob("*")
        if path.suffix in (*DUMPED, ".ttir", ".source")
    )
    return max(times, default=None)


def _dump(folder: Path) -> dict[str, str]:
    """What Triton keeps of a kernel in the stages that it reached."""
    files = sorted(path for path in folder.iterdir() if path.suffix in DUMPED)
    files = files or sorted(path for path in folder.iterdir() if path.suffix in (".ttir", ".source"))
    return {path.name: shortened(path.read_text(errors="replace"), MOST_OF_A_DUMP) for path in files}
