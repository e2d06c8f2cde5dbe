"""Builds the native extension with its CUDA kernels where the checkout is, without installing anything."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks.gpu.sections import NotTakenError, Options, Record, Verdict, check, processors
from benchmarks.measure.errors import shortened
from benchmarks.paths import ROOT

MOST_OUTPUT = 6000  # characters of what a failed build printed
NEEDED = ("bin/nvcc", "lib64/libcudart_static.a")
PLACES = ("FASTQT_CUDA_HOME", "CUDA_HOME", "/usr/local/cuda", "nvcc on PATH")
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
    home = cuda_home()
    if home is None:
        raise NotTakenError(f"no CUDA toolkit has {' and '.join(NEEDED)}: looked beside {', '.join(PLACES)}")
    run = subprocess.run(
        COMMAND, cwd=ROOT, env=environment(home), capture_output=True, text=True, errors="replace"
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


def cuda_home() -> Path | None:
    """The folder of a CUDA toolkit, with the library that the extension links to."""
    nvcc = shutil.which("nvcc")
    named = [os.environ.get("FASTQT_CUDA_HOME"), os.environ.get("CUDA_HOME"), "/usr/local/cuda"]
    homes = [Path(name) for name in named if name] + ([Path(nvcc).resolve().parents[1]] if nvcc else [])
    return next((home for home in homes if all((home / name).exists() for name in NEEDED)), None)


def environment(home: Path) -> dict[str, str]:
    """That of the build: the toolkit that was found, and this GPU's architecture alone, which is quicker."""
    import torch

    major, minor = torch.cuda.get_device_capability()
    architecture = f"{major}.{minor}" + ("a" if (major, minor) == (9, 0) else "")
    wanted = {"TORCH_CUDA_ARCH_LIST": architecture, "MAX_JOBS": str(processors())}
    return {**os.environ, "FASTQT_CUDA_HOME": str(home), **wanted}
