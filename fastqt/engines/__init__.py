"""The engines and their registry: which of them computes a problem, and why the others do not.

Each engine is a folder whose `ENGINE` declares what it takes (see `engine.py`). This registry alone maps
names to engines. A loss asks it once a call.
"""

from __future__ import annotations

import os
import platform
import sys

import torch
from torch import Tensor

from fastqt._version import __version__
from fastqt.devices import is_described, on_gpu
from fastqt.engines import chunked, cpu, cuda, ops, reference, report, triton
from fastqt.engines.engine import ClipComputation, Computation, ComputationOfColumns, Engine
from fastqt.problem import AnyProblem

__all__ = [
    "ENGINES",
    "ON_GPUS",
    "ClipComputation",
    "Computation",
    "ComputationOfColumns",
    "Engine",
    "choose",
    "has_kernels_for",
    "requested",
    "show_config",
    "usual",
]

# In the order in which they are tried.
ENGINES: dict[str, Engine] = {
    engine.name: engine
    for engine in (cpu.ENGINE, cuda.ENGINE, triton.ENGINE, chunked.ENGINE, reference.ENGINE)
}

ON_GPUS = ("cuda", "triton")


def requested(backend: str | None) -> str | None:
    """The engine that a user asks for by a loss's argument or by FASTQT_BACKEND, if any."""
    if backend is not None and not isinstance(backend, str):
        raise TypeError(f"backend: want a name or None, got {type(backend).__name__}")
    return backend or os.environ.get("FASTQT_BACKEND") or None


def choose(backend: str | None, p: AnyProblem, dtype: torch.dtype) -> Engine:
    """The engine for a problem: the one asked for, by argument or FASTQT_BACKEND, or the first that can.

    The problem's tensors may still have the dtype that the user gave; `dtype` is what a matrix product would
    take them in. ValueError says why the one that was asked for cannot compute the problem.
    """
    device = p.queries.device
    name = "triton" if is_described() else requested(backend)
    if name is None:
        for engine in ENGINES.values():
            if engine.why_not(p, device, dtype) is None and engine.of_kind(p) is not None:
                return engine
        return ENGINES["reference"]
    origin = "backend" if backend else "FASTQT_BACKEND"
    if name not in ENGINES:
        raise ValueError(
            f"{origin}: want one of {', '.join(ENGINES)}, got {name!r}; show_config() says which work here"
        )
    reason = ENGINES[name].why_not(p, device, dtype)
    if reason is not None:
        raise ValueError(
            f"{origin}: {name!r} is not available: {reason}; without one the best that works is taken"
        )
    return ENGINES[name]


def usual(backend: str | None, device: torch.device, dtype: torch.dtype) -> Engine:
    """The engine for problems of a device and a dtype that need nothing more: the first that computes there.

    `choose` may find another one for a problem that this one does not take.
    """
    name = "triton" if is_described() else requested(backend)
    if name in ENGINES:
        return ENGINES[name]
    return next(x for x in ENGINES.values() if x.why_not(None, device, dtype) is None)


def has_kernels_for(x: Tensor, dtype: torch.dtype) -> bool:
    """Whether Triton's kernels compute parts of a loss that no engine has, with products of a dtype.

    They do on a GPU where they run, unless FASTQT_BACKEND names another engine. On a CPU, where they are
    interpreted, they do if it names theirs.
    """
    name = requested(None) or ("triton" if on_gpu(x) else None)
    return name == "triton" and ENGINES[name].why_not(None, x.device, dtype) is None


def show_config() -> None:
    """Prints what fastqt computes with: versions, products, vector instructions, GPUs and code for them.

    For each backend it prints "usable" or the reason why not, and for each device of this machine which
    backend computes there, the first that can.

    Example:
        >>> import fastqt
        >>> fastqt.show_config()  # doctest: +ELLIPSIS
        fastqt   ...
        torch    ...
        backend  reference  usable
        device   cpu        computes with ...
    """
    found = report.gpus()
    rows = [
        ("fastqt", __version__),
        ("torch", report.versions()),
        ("python", f"{sys.version.split()[0]} on {platform.system()} {platform.machine()}"),
        ("threads", str(torch.get_num_threads())),
        ("products", report.products()),
        ("simd", report.simd()),
        ("cuda", report.cuda_code()),
        *(("gpu", gpu) for gpu in found or [f"none: {report.why_no_gpu()}"]),
    ]
    for name, text in rows:
        print(f"{name:<8} {text}")
    for name in ENGINES:
        print(f"backend  {name:<10} {_why_not_here(name, bool(found)) or 'usable'}")
    for device in report.devices():
        print(f"device   {device.type:<10} {_used_on(device)}")


def _used_on(device: torch.device) -> str:
    """What computes problems of float32 on a device, in words."""
    reasons = {name: engine.why_not(None, device, torch.float32) for name, engine in ENGINES.items()}
    usable = [name for name, reason in reasons.items() if reason is None]
    if usable[0] == "cuda":  # It takes small problems alone.
        return f"computes with cuda, and beyond small batches with {usable[1]}"
    if usable[0] != "torch":
        return f"computes with {usable[0]}"
    why = "; ".join(f"{name}: {reason}" for name, reason in reasons.items() if reason is not None)
    return f"computes with torch, in torch's own operations ({why})"


def _why_not_here(name: str, has_gpu: bool) -> str | None:
    """Why an engine cannot be used on this machine, or None."""
    on_gpu = name in ON_GPUS and has_gpu
    reason = ENGINES[name].why_not(None, torch.device("cuda" if on_gpu else "cpu"), torch.float32)
    if reason is None or has_gpu or name not in ON_GPUS:
        return reason
    if name == "cuda" and ops.cuda_error is not None:
        return ops.cuda_error
    instead = "; TRITON_INTERPRET=1 runs it slowly on a CPU" if name == "triton" else ""
    return f"it needs a GPU, and {report.why_no_gpu()}{instead}"
