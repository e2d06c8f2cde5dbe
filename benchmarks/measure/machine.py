"""The machine that a run was made on, without the name of its owner."""

from __future__ import annotations

import datetime
import platform
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import torch

import fastqt

PATIENCE = 5.0  # seconds within which nvidia-smi must answer


def machine(device: torch.device) -> dict[str, Any]:
    """The device, and the versions of the software that computes on it."""
    import triton

    on_gpu = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if on_gpu else "interpreter",
        "memory_bytes": torch.cuda.get_device_properties(device).total_memory if on_gpu else None,
        "driver": _driver(),
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "fastqt": fastqt.__version__,
        "date": datetime.date.today().isoformat(),
    }


def processor_and_versions() -> dict[str, Any]:
    """The processor, and the versions of the software that computes on it."""
    return {
        "machine": platform.machine(),
        "system": platform.system(),
        "cpu": _processor(),
        "threads": torch.get_num_threads(),
        "python_version": platform.python_version(),
        "torch_version": torch.__version__,
        "fastqt": fastqt.__version__,
        "date": datetime.date.today().isoformat(),
    }


def here() -> dict[str, Any]:
    """The processor and the versions, on any system, as a run of the benchmarks stores them."""
    return {
        "cpu": _processor() or platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "system": platform.system(),
        "python_version": platform.python_version(),
        "torch_version": torch.__version__,
    }


def _processor() -> str | None:
    """The processor's name on Linux, None where that does not say it, as on arm64.

    Clouds hide which of their processors it is. The numbers of its family and its model tell them apart: of
    AMD's, 25 and 17 multiplies half as many float32 at a time as 26 does.
    """
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    said = dict(reversed([line.split(":", 1) for line in lines if ":" in line]))  # of the first core
    said = {name.strip(): value.strip() for name, value in said.items()}
    if "model name" not in said:
        return None
    numbers = [
        f"{name.removeprefix('cpu ')} {said[name]}" for name in ("cpu family", "model") if name in said
    ]
    return f"{said['model name']} ({', '.join(numbers)})" if numbers else said["model name"]


def _driver() -> str | None:
    """The version of NVIDIA's driver; None where nvidia-smi is absent or fails."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    asked = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    said = subprocess.run(asked, capture_output=True, text=True, timeout=PATIENCE)
    return said.stdout.splitlines()[0].strip() if said.returncode == 0 and said.stdout else None


def slug(device: str) -> str:
    """A device's name as a part of a file name."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
