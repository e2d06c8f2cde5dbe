"""What the machine is and has: versions, driver, GPU, compilers; or why that cannot be found out."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.gpu.sections import NotTakenError, Options, Record, Verdict, check, processors
from benchmarks.measure.errors import words

PATIENCE = 5.0  # seconds that a program gets to say its version
PACKAGES = ("setuptools", "ninja", "numpy", "nvidia-ml-py")
GPU_FACTS = (
    "name",
    "multi_processor_count",
    "L2_cache_size",
    "total_memory",
    "shared_memory_per_block_optin",
)
GPU_STATE = ("driver_version", "clocks.sm", "clocks.max.sm", "power.draw", "power.limit", "persistence_mode")


def machine_facts(options: Options) -> Iterator[Record]:
    """One record of the machine, and a check of each thing without which later sections fail."""
    facts = {"packages": {name: asked(lambda name=name: metadata.version(name)) for name in PACKAGES}}
    facts["compilers"] = {name: asked(lambda name=name: version_of(name)) for name in ("cc", "c++", "nvcc")}
    facts["state"] = asked(gpu_state)
    facts["gpu"] = None if options.dry_run else asked(gpu_facts)
    facts["cores"] = processors()
    yield {"kind": "machine", **asked(lambda: common_facts(options), {}), **facts}
    yield check("fastqt and its Triton kernels can be imported", import_kernels)
    yield check("Triton can build its launcher: Python.h and a C compiler", launcher)
    yield check("Triton's cache can be written", writable_cache)
    yield check("the one-launch kernel is built", one_launch_built)
    if not options.dry_run:
        yield check("a product on the device", lambda: first_product(options))


def asked(question: Callable[[], Any], otherwise: Any = None) -> Any:
    """The answer to a question about the machine; if there is none, the reason in words."""
    try:
        return question()
    except Exception as error:  # whatever is missing must not keep the other facts from being known
        reason = words(error)
        return {**otherwise, "reason": reason} if isinstance(otherwise, dict) else f"not known: {reason}"


def common_facts(options: Options) -> dict[str, Any]:
    from benchmarks.measure.machine import machine

    return machine(options.device)


def version_of(program: str) -> str:
    """The last line of what a compiler says of its version."""
    place = find_program(program)
    if place is None:
        raise FileNotFoundError(f"{program} is neither on PATH nor in /usr/local/cuda/bin")
    said = subprocess.run([place, "--version"], capture_output=True, text=True, timeout=PATIENCE, check=True)
    lines = said.stdout.strip().splitlines()
    return lines[-1] if program == "nvcc" else lines[0]


def find_program(name: str) -> str | None:
    return shutil.which(name) or shutil.which(name, path="/usr/local/cuda/bin")


def gpu_state() -> dict[str, str]:
    """What nvidia-smi says of the driver, the clocks and the power."""
    tool = find_program("nvidia-smi")
    if tool is None:
        raise FileNotFoundError("nvidia-smi is not on PATH")
    command = [tool, f"--query-gpu={','.join(GPU_STATE)}", "--format=csv,noheader"]
    said = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=True)
    return dict(zip(GPU_STATE, said.stdout.splitlines()[0].split(", "), strict=True))


def gpu_facts() -> dict[str, Any]:
    import torch

    gpu = torch.cuda.get_device_properties(torch.cuda.current_device())
    facts = {name: getattr(gpu, name, None) for name in GPU_FACTS}
    return {**facts, "capability": f"{gpu.major}.{gpu.minor}"}


def import_kernels() -> Verdict:
    places = list(importlib.import_module("fastqt.kernels").__path__)
    importlib.import_module("fastqt.kernels.scores")
    importlib.import_module("fastqt.functional")
    return Verdict(True, f"{len(places)} folder of kernels")


def launcher() -> Verdict:
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    missing = [
        name for name, there in (("Python.h", header.exists()), ("a C compiler", compiler)) if not there
    ]
    return Verdict(not missing, f"missing: {', '.join(missing)}" if missing else "both are there")


def writable_cache() -> Verdict:
    folder = Path(os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(b"x")
    return Verdict(True, "a file was written there")


def one_launch_built() -> Verdict:
    from fastqt.engines import ops

    if ops.cuda_error is not None:
        raise NotTakenError(ops.cuda_error)
    return Verdict(True, "fastqt._C has it")


def first_product(options: Options) -> Verdict:
    import torch

    x = torch.randn(256, 256, device=options.device, dtype=torch.bfloat16)
    error = float(((x @ x).double() - x.double() @ x.double()).norm() / (x.double() @ x.double()).norm())
    return Verdict(error < 2.0**-7, f"relative error {error:.1e}")
