"""Who computes: the backends, which of them work here, and why the others do not."""

from __future__ import annotations

import os
import platform
import sys
from importlib.util import find_spec

import torch

from fastqt._version import __version__
from fastqt.engines import cuda as cuda_schedule
from fastqt.engines import ops
from fastqt.problem import Problem

# In the order in which they are tried, with the dtypes that each computes in. "cuda" takes small problems
# only, and the place of "triton" for those.
BACKENDS = {
    "cpu": (torch.float32, torch.float64),
    "cuda": (torch.bfloat16, torch.float16, torch.float32),
    "triton": (torch.bfloat16, torch.float16, torch.float32),
    "reference": (torch.float32, torch.float64),
}


def select(requested: str | None, device: torch.device, dtype: torch.dtype) -> str:
    """The backend for tensors on `device`: the one asked for, by argument or FASTQT_BACKEND, or the best.

    Raises ValueError if the one asked for is unknown or unavailable, with the reason.
    """
    name = requested or os.environ.get("FASTQT_BACKEND") or None
    if name is None:
        return next(name for name in BACKENDS if name != "cuda" and why_not(name, device, dtype) is None)
    origin = "backend" if requested else "FASTQT_BACKEND"
    if name not in BACKENDS:
        raise ValueError(f"{origin}: want one of {', '.join(BACKENDS)}, got {name!r}")
    reason = why_not(name, device, dtype)
    if reason is not None:
        raise ValueError(f"{origin}: {name!r} is not available: {reason}")
    return name


def for_problem(chosen: str, requested: str | None, p: Problem) -> str:
    """The backend of what `select` chose, or one made for problems such as this.

    Raises ValueError if it was asked for and does not take the problem, with the reason.
    """
    if chosen == "cuda":
        reason = cuda_schedule.why_not(p)
        if reason is not None:
            raise ValueError(f"backend: 'cuda' does not take this problem: {reason}")
    elif chosen == "triton" and not requested and not os.environ.get("FASTQT_BACKEND"):
        usable = why_not("cuda", p.queries.device, p.queries.dtype) is None
        return "cuda" if usable and cuda_schedule.why_not(p) is None else chosen
    return chosen


def why_not(name: str, device: torch.device, dtype: torch.dtype = torch.float32) -> str | None:
    """Why a backend cannot compute on `device` what is given in `dtype`; None if it can."""
    if name == "cpu":
        return ops.native_error if device.type == "cpu" else f"the tensors are on {device}"
    if name == "cuda":
        if ops.cuda_error is not None or device.type != "cuda":
            return ops.cuda_error or f"the tensors are on {device}"
        if dtype is torch.float64:
            return "it has no float64"
        return cuda_schedule.why_not_on(device, dtype)
    if name == "triton":
        if find_spec("triton") is None:
            return "triton is not installed"
        if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
            return f"the tensors are on {device}, where Triton only runs with TRITON_INTERPRET=1"
        if dtype is torch.float64:
            return "it has no float64"
    return None


def show_config() -> None:
    """Prints the versions in use, and each backend with the reason if it is not usable here."""
    print(f"fastqt   {__version__}")
    print(f"torch    {torch.__version__}")
    print(f"python   {sys.version.split()[0]} on {platform.system()} {platform.machine()}")
    print(f"threads  {torch.get_num_threads()}")
    for name in BACKENDS:
        print(f"backend  {name:<10} {why_not(name, _device_of(name)) or 'usable'}")


def _device_of(name: str) -> torch.device:
    """Where a backend would compute here."""
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")
