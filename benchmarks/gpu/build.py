"""Builds the native extension with its CUDA kernels where the checkout is, without installing anything."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks.gpu.sections import NotTakenError, Options, Record, Verdict, check, processors
from benchmarks.gpu.smoke.machine import find_program
from benchmarks.measure.errors import shortened
from benchmarks.paths import ROOT

MOST_OUTPUT = 6000  # characters of what a failed build printed
COMMAND = (sys.executable, "setup.py", "build_ext", "--inplace")
BUILT = "from fastqt.engines import ops; print(ops.cuda_error or 'built')"


def build(options: Options) -> Iterator[Record]:
    """Builds unless a build with CUDA is already there; without nvcc the record says so."""
    yield check("the native extension with CUDA", lambda: built(options))


def built(options: Options) -> Verdict:
    if missing() == "built":
        return Verdict(True, "a build is already there")
    if options.dry_run:
        raise NotTakenError("a dry run builds nothing")
    compiler = find_program("nvcc")
    if compiler is None:
        raise NotTakenError("nvcc is neither on PATH nor in /usr/local/cuda/bin")
    run = subprocess.run(
        COMMAND, cwd=ROOT, env=environment(compiler), capture_output=True, text=True, errors="replace"
    )
    reason = missing()
    if run.returncode == 0 and reason == "built":
        return Verdict(True, "built")
    printed = shortened(run.stdout + run.stderr, MOST_OUTPUT)
    return Verdict(False, f"exit status {run.returncode}; {reason}\n{printed}")


def missing() -> str:
    """Why the one-launch kernel is not there, or "built", as a new process finds it."""
    said = subprocess.run(
        [sys.executable, "-c", BUILT], cwd=ROOT, capture_output=True, text=True, errors="replace"
    )
    lines = (said.stdout if said.returncode == 0 else said.stderr).strip().splitlines()
    return lines[-1] if lines else f"exit status {said.returncode}"


def environment(compiler: str) -> dict[str, str]:
    """That of the build: the compiler that was found, and this GPU's architecture alone, which is quicker."""
    import torch

    major, minor = torch.cuda.get_device_capability()
    architecture = f"{major}.{minor}" + ("a" if (major, minor) == (9, 0) else "")
    home = str(Path(compiler).resolve().parents[1])
    wanted = {"TORCH_CUDA_ARCH_LIST": architecture, "MAX_JOBS": str(processors())}
    return {"FASTQT_CUDA_HOME": home, **os.environ, **wanted}
