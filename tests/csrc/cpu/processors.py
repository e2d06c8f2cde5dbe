"""The processors that the C++ of the CPU engine is compiled for, and how what is compiled for them runs here.

A processor of another kind, or an older one, is emulated by qemu's programs (Debian's qemu-user), and what
runs on arm64 comes from a cross compiler (Debian's g++-aarch64-linux-gnu). A test is skipped where these are
not installed.
"""

from __future__ import annotations

import platform
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO

import numpy as np
import pytest

from tests.csrc import building

# Those of the package, in setup.py.
OPTIMISED = ("-O3", "-std=c++20", "-fopenmp-simd", "-fno-trapping-math", "-fno-math-errno", "-Icsrc")
SOURCES = (
    *("tests/csrc/cpu/vector_functions.cpp", "csrc/cpu/row_passes.cpp"),
    "csrc/cpu/panel_product.cpp",
)
PROGRAM = "tests/csrc/cpu/passes.cpp"
CLANGS = (*(f"clang++-{version}" for version in range(19, 13, -1)), "clang++")
INTERFACE = ("-O0", "-std=c++20", "-Icsrc")  # its flags: it only hands arguments over
HEADERS = (
    *("csrc/cpu/row_passes.h", "csrc/cpu/vector_math.h"),
    *("csrc/cpu/panel_product.h", "csrc/cpu/micro_kernel.h", "csrc/cpu/panel_packing.h"),
    "tests/csrc/cpu/vector_functions.h",
)


@dataclass(frozen=True)
class Processor:
    """A build of the passes, and the processor that runs it.

    Args:
        compiler: "g++", "clang" or "cross".
        flags: of the compiler, beside those of all builds.
        feature: what /proc/cpuinfo must name, if the build runs without an emulator.
        emulator: the command that runs the build, if so.
        slack: how many bytes beyond an array the emulator may read where the processor would not.
    """

    compiler: str = "g++"
    flags: tuple[str, ...] = ()
    feature: str | None = None
    emulator: tuple[str, ...] = ()
    slack: int = 0

    def command(self) -> str | None:
        """The compiler's command, if there is one."""
        if self.compiler == "clang":
            return next(filter(None, map(shutil.which, CLANGS)), None)
        if self.compiler == "g++":
            return building.compiler()
        return shutil.which("aarch64-linux-gnu-g++")

    def why_not(self) -> str | None:
        """Why builds for this processor cannot be made or run here."""
        if not sys.platform.startswith("linux"):
            return "wants Linux"
        if self.compiler != "cross" and self.flags != () and platform.machine() != "x86_64":
            return "wants a compiler for x86-64"
        if self.command() is None:
            return f"no {'aarch64-linux-gnu-g++' if self.compiler == 'cross' else self.compiler}"
        if self.emulator and shutil.which(self.emulator[0]) is None:
            return f"no {self.emulator[0]}"
        features = Path("/proc/cpuinfo").read_text().split()
        return f"this processor has no {self.feature}" if self.feature not in (None, *features) else None

    def built(
        self,
        sources: Mapping[str, Sequence[str]],
        *,
        headers: Iterable[str],
        versions: Iterable[str] = (),
    ) -> Path:
        """The program of `sources`, each with the flags to compile it."""
        # The libraries of another processor are not those of this machine, so that the program has its own.
        link = ("-static",) if self.compiler == "cross" else ()
        return building.build(sources, headers=headers, link=link, versions=versions, command=self.command())

    def run(self, program: Path, *arguments: str) -> list[str]:
        """The command that runs a program which was built for this processor."""
        return [*self.emulator, str(program), *arguments]


def level(name: str) -> tuple[str, ...]:
    return f"-march={name}", "-DFASTQT_CLONES="


CAPPED = ("qemu-x86_64", "-cpu")
# "clones" is a build like that of the package, which has all x86 levels and chooses by itself.
PROCESSORS = {
    "x86-64": Processor(flags=level("x86-64"), feature="sse2"),
    "x86-64-v3": Processor(flags=level("x86-64-v3"), feature="avx2"),
    "x86-64-v4": Processor(flags=level("x86-64-v4"), feature="avx512vl"),
    "clones": Processor(),
    "clones of clang": Processor("clang"),
    # qemu 7.2 reads a whole vector for a fused multiply-add of one number in memory.
    "clones, no AVX-512": Processor(feature="sse2", emulator=(*CAPPED, "Haswell"), slack=32),
    "clones, no AVX": Processor(feature="sse2", emulator=(*CAPPED, "Nehalem")),
    "arm64": Processor("cross", emulator=("qemu-aarch64",)),
}
# What `make test` keeps.
OFTEN = ("x86-64", "clones")
processors = pytest.mark.parametrize(
    "processor",
    [pytest.param(name, marks=[pytest.mark.slow] * (name not in OFTEN)) for name in PROCESSORS],
)


class Passes:
    """The functions of row_passes.h and panel_product.h in csrc/cpu, and map_NAME for those of
    vector_math.h.

    They take 1-D arrays, which they write to as in C++, and numbers. The dtype of the first array chooses
    between the functions of a name; uint16 holds bfloat16.
    """

    def __init__(self, command: list[str]) -> None:
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def __getattr__(self, name: str):
        def call(first: np.ndarray, *others: np.ndarray | float) -> float:
            arguments = (first, *others)
            arrays = [each for each in arguments if isinstance(each, np.ndarray)]
            request = [f"{name} {first.dtype}\n".encode(), *map(_packed, arguments)]
            try:
                _stream(self._process.stdin).write(b"".join(request))
                _stream(self._process.stdin).flush()
                (result,) = struct.unpack("d", self._received(8))
                for array in arrays:
                    array[:] = np.frombuffer(self._received(array.nbytes), array.dtype)
            except BrokenPipeError:
                self._fail()
            return result

        return call

    def _received(self, count: int) -> bytes:
        data = _stream(self._process.stdout).read(count)
        if len(data) < count:
            self._fail()
        return data

    def _fail(self) -> None:
        raise RuntimeError(f"the program of the passes has ended: {self._process.wait()}")

    def close(self) -> None:
        with self._process:
            _stream(self._process.stdin).close()


def _stream(stream: IO[bytes] | None) -> IO[bytes]:
    assert stream is not None
    return stream


def _packed(argument: np.ndarray | float) -> bytes:
    if isinstance(argument, np.ndarray):
        return struct.pack("q", argument.nbytes) + argument.tobytes()
    return struct.pack("d" if isinstance(argument, float | np.floating) else "q", argument)


@cache
def passes(name: str) -> Passes:
    """The passes on a processor. The test is skipped where they cannot be built or run."""
    processor = PROCESSORS[name]
    if (reason := processor.why_not()) is not None:
        pytest.skip(reason)
    sources = {PROGRAM: INTERFACE, **dict.fromkeys(SOURCES, (*OPTIMISED, *processor.flags))}
    program = processor.built(sources, headers=HEADERS)
    return Passes(processor.run(program, str(processor.slack)))


def bound(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """What sums of at most 192 terms in float32, which are then added up, may be off by."""
    terms = min(a.shape[1], 192) + a.shape[1] // 192 + 3
    return np.float64(terms * 2.0**-24) * (np.abs(a).astype(np.float64) @ np.abs(b)) + 1e-30
