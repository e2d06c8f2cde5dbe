"""Kernels compiled before a training's first step, in parallel, on tensors that stand for those of a GPU."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastqt.devices import AMD, described, properties, target_of, usable_processors
from fastqt.engines import triton as engine
from fastqt.options import Target


@dataclass(frozen=True)
class _Gpu:
    """What schedules and tables of tiles ask of a GPU, by torch's names; sizes in bytes."""

    name: str
    major: int
    minor: int
    multi_processor_count: int
    shared_memory_per_block_optin: int
    total_memory: int


# GPUs of these kinds with fewer multiprocessors may take other tiles at sizes that fill them less often.
TARGETS = {
    "sm_80": _Gpu("NVIDIA A100-SXM4-80GB", 8, 0, 108, 163 * 1024, 79 * 2**30),
    "sm_90": _Gpu("NVIDIA H100 80GB HBM3", 9, 0, 132, 227 * 1024, 79 * 2**30),
    "sm_100": _Gpu("NVIDIA B200", 10, 0, 148, 227 * 1024, 178 * 2**30),
}
WARP = 32


@dataclass(frozen=True)
class Compiled:
    """What `warm_up` has done.

    Attributes:
        kernels: the name of each kernel that the loss launches, compiled now or before. One that is compiled
            for several kinds of arguments comes several times.
        target: what for, as "sm_90".
        seconds: what that took.
    """

    kernels: tuple[str, ...]
    target: str
    seconds: float

    def __str__(self) -> str:
        counts = Counter(self.kernels)
        names = [name if n == 1 else f"{n} × {name}" for name, n in sorted(counts.items())]
        kernels = "1 kernel" if len(self.kernels) == 1 else f"{len(self.kernels)} kernels"
        return f"{kernels} for {self.target} in {self.seconds:.1f} s: {', '.join(names)}"


def warm_up(
    loss: Callable[..., Tensor],
    *inputs: Tensor | tuple[int, ...],
    dtype: torch.dtype = torch.bfloat16,
    target: Target | None = None,
    workers: int | None = None,
    **options: Any,
) -> Compiled:
    """Compiles what a loss and its backward pass launch on a GPU, so that the first step does not wait.

    Kernels are compiled at once in as many threads as there are processors, into Triton's cache, where this
    process and later ones find them. No kernel is launched, and no memory of the GPU is taken. It is the
    engine "triton" whose kernels are compiled; the engine "cuda", which takes small problems, has nothing to
    compile. Call it once for the usual batch, and once for the last one of an epoch if that is another.

    Args:
        loss: a loss of this package, or a function that calls one.
        *inputs: what it is given by position: shapes of matrices that want a gradient, as (N, D), or tensors
            on any device, whose dtypes, strides and `requires_grad` count. A tensor on the meta device has
            values of 0.
        dtype: of the inputs that are given as shapes; that of autocast where a training uses it.
        target: "sm_80", "sm_90" or "sm_100", on a machine without a GPU; by default the GPU that is there.
        workers: threads; by default as many as there are processors.
        **options: what the loss is given by name. Tensors are as of `inputs`, and `backend` may not be
            another than "triton".

    Returns:
        the kernels and the seconds. To print it is to tell them.

    Raises:
        RuntimeError: there is no GPU and no target, or Triton is not there, or interprets.
        ValueError: the target is unknown, or not that of the GPU that is there, or as of the loss.

    Example:
        >>> import fastqt
        >>> fastqt.warm_up(fastqt.info_nce_loss, (4096, 768), (4096, 768))  # doctest: +SKIP
    """
    if options.get("backend") not in (None, "triton"):
        raise ValueError(
            f"backend: want 'triton' or None, whose kernels are compiled, got {options['backend']!r}"
        )
    begin = time.perf_counter()

    with _triton_for(target) as gpu:
        arguments = [_stand_in(x, dtype) for x in inputs]
        named = {name: _stand_in(x, dtype) if isinstance(x, Tensor) else x for name, x in options.items()}
        leaves = [x for x in (*arguments, *named.values()) if isinstance(x, Tensor) and x.requires_grad]

        with _Compiler(workers) as compiler, compiler.takes_launches(), described(gpu):
            made = loss(*arguments, **named)
            if leaves and made.requires_grad:
                torch.autograd.grad(made, leaves, torch.ones_like(made), allow_unused=True)
        kernels = compiler.kernels()

    return Compiled(kernels, target_of(gpu), time.perf_counter() - begin)


def compile_ahead(
    calls: Iterable[Callable[[], object]], *, target: str | None = None, workers: int | None = None
) -> tuple[str, ...]:
    """Compiles what calls of losses launch, at once in as many threads as there are processors.

    An error of a call or of the compiler is left to the call that is made afterwards, which has it too.

    Args:
        calls: of losses whose tensors are the host's and stand for those of the GPU.
        target, workers: as of `warm_up`.

    Returns:
        the names of the kernels.
    """
    with _triton_for(target) as gpu:
        with _Compiler(workers) as compiler, compiler.takes_launches(), described(gpu):
            for call in calls:
                try:
                    call()
                except Exception:  # of any kind: where the call is made, it is raised again
                    continue
        return compiler.compiled_kernels()


class _Compiler:
    """Compiles each kernel that is handed over once, in threads."""

    def __init__(self, workers: int | None) -> None:
        self._pool = ThreadPoolExecutor(workers or usable_processors())
        self._compiled: dict[Hashable, tuple[str, Future[Any]]] = {}

    def __enter__(self) -> _Compiler:
        return self

    def __exit__(self, failed: Any, *_: object) -> None:
        self._pool.shutdown(cancel_futures=failed is not None)

    def takes_launches(self) -> contextlib.AbstractContextManager[None]:
        """What this thread would launch is compiled."""
        from fastqt.kernels.plan import handed_over

        replaced: contextlib.AbstractContextManager[None] = handed_over(self._compile)
        return replaced

    def kernels(self) -> tuple[str, ...]:
        """The names of all that is compiled; the error of the first that is not.

        What Triton compiles once for launches that are written in two ways is told once.
        """
        names = {compiled.result().hash: name for name, compiled in self._compiled.values()}
        return tuple(sorted(names.values()))

    def compiled_kernels(self) -> tuple[str, ...]:
        """The names of those that could be compiled, one for each kind of launch."""
        return tuple(sorted(name for name, made in self._compiled.values() if made.exception() is None))

    def _compile(self, kernel: Any, key: Hashable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if key not in self._compiled:
            made = self._pool.submit(kernel.run, *args, grid=(1,), warmup=True, **kwargs)
            self._compiled[key] = kernel.__name__, made


def _stand_in(x: Tensor | tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor of the host for one of the GPU."""
    if not isinstance(x, Tensor):
        return torch.zeros(x, dtype=dtype, device="cpu", requires_grad=True)
    if x.is_meta:
        made = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cpu").zero_()
    else:
        made = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cpu").copy_(x.detach())
    return made.requires_grad_(x.requires_grad)


@contextlib.contextmanager
def _triton_for(target: str | None) -> Iterator[Any]:
    """Triton compiles for a GPU, whose properties are given."""
    if not engine.INSTALLED:
        raise RuntimeError("want Triton, which compiles the kernels, and it is not installed")
    if target is not None and target not in TARGETS:
        raise ValueError(f"target: want one of {', '.join(TARGETS)}, got {target!r}")

    from triton.runtime.driver import driver

    from fastqt.kernels.launch import INTERPRETED

    if INTERPRETED or AMD:
        raise RuntimeError(
            "want a Triton that compiles, and it interprets kernels here; unset TRITON_INTERPRET"
            if INTERPRETED
            else "want a CUDA GPU, got one of AMD's, whose kernels are compiled when they are first launched"
        )

    if torch.cuda.is_available():
        gpu = properties(torch.device("cuda", torch.cuda.current_device()))
        there = target_of(gpu)
        if target not in (None, there):
            raise ValueError(f"target: want {there!r}, the GPU that is there, or no GPU; got {target!r}")
        yield gpu
    elif target is None:
        raise RuntimeError(
            f"want a GPU to compile for, and torch finds none; name it by target, one of {', '.join(TARGETS)}"
        )
    else:
        driver.set_active(_AbsentDriver(TARGETS[target]))
        try:
            yield TARGETS[target]
        finally:
            driver.set_active(None)  # so that Triton looks for a GPU again


class _AbsentDriver:
    """What Triton asks of the driver of a GPU that is not there, where nothing is launched."""

    def __init__(self, gpu: _Gpu) -> None:
        self._gpu = gpu

    def get_current_device(self) -> int:
        # Triton keeps by this number what it has compiled for.
        return -(10 * self._gpu.major + self._gpu.minor)

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 10 * self._gpu.major + self._gpu.minor, WARP)
