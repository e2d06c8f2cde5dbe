"""Who computes: the backends, which of them work here, and why the others do not."""

from __future__ import annotations

import os
import platform
import sys

import torch

from fastqt import ops

BACKENDS = ("cpu", "reference")


def select(requested: str | None, device: torch.device) -> str:
    """The backend for tensors on `device`: the one asked for, by argument or FASTQT_BACKEND, or the best.

    Raises ValueError if the one asked for is unknown or unavailable, with the reason.
    """
    name = requested or os.environ.get("FASTQT_BACKEND") or None
    if name is None:
        return "cpu" if why_not("cpu", device) is None else "reference"
    origin = "backend" if requested else "FASTQT_BACKEND"
    if name not in BACKENDS:
        raise ValueError(f"{origin}: want one of {', '.join(BACKENDS)}, got {name!r}")
    reason = why_not(name, device)
    if reason is not None:
        raise ValueError(f"{origin}: {name!r} is not available: {reason}")
    return name


def why_not(name: str, device: torch.device) -> str | None:
    """Why a backend cannot compute on `device`; None if it can."""
    if name == "cpu":
        if device.type != "cpu":
            return f"the tensors are on {device}"
        return ops.native_error
    return None


def show_config() -> None:
    """Prints the versions in use, and each backend with the reason if it is not usable here."""
    import fastqt

    print(f"fastqt   {fastqt.__version__}")
    print(f"torch    {torch.__version__}")
    print(f"python   {sys.version.split()[0]} on {platform.system()} {platform.machine()}")
    print(f"threads  {torch.get_num_threads()}")
    for name in BACKENDS:
        print(f"backend  {name:<10} {why_not(name, torch.device('cpu')) or 'usable'}")
