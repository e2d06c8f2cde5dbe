"""The CUDA kernels built as C++ and executed on a CPU: numpy arrays in, numpy arrays out.

Needs numpy alone, so that a process with a sanitizer preloaded can use it too.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
SOURCES = [HERE / "host" / "fibres.cpp", HERE / "host" / "small_host.cpp"]
FLAGS = ["-std=c++20", "-O1", "-ffp-contract=off", "-U_FORTIFY_SOURCE", "-Wall", "-Wextra", "-Werror"]
SANITIZED = ["-O0", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]
ARITHMETICS = ("float32", "tf32", "bfloat16", "float16")
DIAGONALS = ("zero", "exclude", "keep")
TILES = ("splits", "score_down", "score_across", "query_down", "candidate_down", "gradient_across")
Array = NDArray[Any]


def compiler() -> str | None:
    return next((path for name in ("g++", "c++", "clang++") if (path := shutil.which(name))), None)


def build(*, sanitized: bool = False, sources: Path = ROOT / "csrc") -> Path:
    """The library of the kernels below `sources`, from a cache if it was built before."""
    path = compiler()
    assert path is not None
    flags = [*FLAGS, *(SANITIZED if sanitized else []), f"-I{HERE / 'host'}", f"-I{sources}"]
    read = [*(sources / "cuda").glob("*"), *(HERE / "host").rglob("*.*")]
    digest = hashlib.sha256(" ".join([path, *FLAGS, str(sanitized)]).encode())
    for file in sorted(read):
        if file.is_file():
            digest.update(file.name.encode() + file.read_bytes())
    cache = Path(tempfile.gettempdir()) / f"fastqt-host-{os.getuid()}"
    cache.mkdir(mode=0o700, exist_ok=True)
    library = cache / f"{digest.hexdigest()[:16]}.so"
    if not library.exists():
        unfinished = library.with_suffix(f".{os.getpid()}")
        command = [path, *flags, "-shared", "-fPIC", *map(str, SOURCES), "-o", str(unfinished)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")
        unfinished.rename(library)
    return library


class _Problem(ctypes.Structure):
    """`SmallProblem` of csrc/cuda/small_problem.h."""

    _fields_ = [
        *((name, ctypes.c_int) for name in ("N", "M", "D")),
        *((name, ctypes.c_void_p) for name in ("queries", "candidates", "row_negatives", "partners")),
        ("mix", ctypes.c_float),
        ("scale", ctypes.c_void_p),
        ("scale_value", ctypes.c_float),
        ("diagonal", ctypes.c_int),
        *((name, ctypes.c_void_p) for name in ("starts", "columns", "weights", "row_weights")),
        ("row_weight", ctypes.c_double),
        *((name, ctypes.c_void_p) for name in ("logsumexp", "mass", "loss", "total")),
        *((name, ctypes.c_void_p) for name in ("dqueries", "dcandidates", "drow_negatives", "dscale")),
        *((name, ctypes.c_int) for name in (*TILES, "pitch")),
        *((f"workspace_{n}", ctypes.c_void_p) for n in range(8)),
    ]


@dataclass
class Small:
    """A problem as the kernel takes it, elements in `arithmetic` (see `encoded`)."""

    arithmetic: str
    queries: Array  # (N, D)
    candidates: Array  # (M, D)
    starts: Array  # (N + 1,) int64
    columns: Array  # int64
    weights: Array  # float64
    diagonal: str = "zero"
    scale: float | Array = 1.0  # a number, or () float32
    row_negatives: Array | None = None  # (N, D)
    partners: Array | None = None  # (N,) int64
    mix: float = 1.0
    row_weights: float | Array = 1.0  # a number, or (N,) float64
    wanted: tuple[str, ...] = ("queries", "candidates", "row_negatives", "scale")
    tiles: dict[str, int] | None = None  # by name; None: as the kernel's operator chooses


class HostKernels:
    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        self._library.fastqt_small_host.restype = ctypes.c_char_p
        self._library.fastqt_small_host.argtypes = [
            ctypes.c_void_p,
            ctypes.c_int,
            ctypes.c_int,
            ctypes.c_uint64,
        ]
        assert self._library.fastqt_small_problem_bytes() == ctypes.sizeof(_Problem)

    def shared_bytes(self, arithmetic: str) -> int:
        return int(self._library.fastqt_small_shared_bytes(ARITHMETICS.index(arithmetic)))

    def most(self, arithmetic: str) -> tuple[int, int]:
        """Strips of 16 rows and eights of columns of the largest tile."""
        strips, eights = ctypes.c_int(), ctypes.c_int()
        self._library.fastqt_small_most(
            ARITHMETICS.index(arithmetic), ctypes.byref(strips), ctypes.byref(eights)
        )
        return strips.value, eights.value

    def tiles(
        self, arithmetic: str, N: int, M: int, D: int, blocks: int, wanted: str = "fg"
    ) -> dict[str, int]:
        """What is chosen for a problem whose gradients of queries (f) and candidates (g) may be wanted."""
        p = _Problem(N=N, M=M, D=D)
        p.dqueries, p.dcandidates = (1 if name in wanted else None for name in "fg")
        self._library.fastqt_small_tiles(ctypes.byref(p), ARITHMETICS.index(arithmetic), blocks)
        return {name: int(getattr(p, name)) for name in TILES}

    def areas(self, index: int, strips: int, down: int, eights: int, across: int) -> tuple[Array, Array]:
        """A tile, and its warps' shares of it: first strip, strips, first eight, eights."""
        tile, shares = np.zeros(4, np.int32), np.zeros((8, 4), np.int32)
        self._library.fastqt_small_areas(
            *(index, strips, down, eights, across),
            *(x.ctypes.data_as(ctypes.c_void_p) for x in (tile, shares)),
        )
        return tile, shares

    def run(self, p: Small, *, blocks: int = 1, seed: int = 0) -> dict[str, Array]:
        """What the kernel writes: logsumexp, mass, loss, total, and the wanted gradients by name."""
        N, D = p.queries.shape
        out = {name: np.full(N, np.nan) for name in ("logsumexp", "mass", "loss")}
        out["total"] = np.full((), np.nan, np.float32)
        for name in p.wanted:
            given = getattr(p, name)
            if name == "scale":
                out[name] = np.full((), np.nan)
            elif given is not None:
                out[name] = encoded(np.full(given.shape, np.nan), p.arithmetic)
        kept = {  # the kernel writes through these addresses
            name: np.ascontiguousarray(x)
            for name in ("queries", "candidates", "row_negatives", "partners", "starts", "columns", "weights")
            if (x := getattr(p, name)) is not None
        }
        problem = _Problem(N=N, M=len(p.candidates), D=D, mix=p.mix, diagonal=DIAGONALS.index(p.diagonal))
        for name, number in (p.tiles or {}).items():
            setattr(problem, name, number)
        for name, x in kept.items():
            setattr(problem, name, x.ctypes.data)
        for name in ("logsumexp", "mass", "loss", "total"):
            setattr(problem, name, out[name].ctypes.data)
        for name in p.wanted:
            if name in out:
                setattr(problem, f"d{name}", out[name].ctypes.data)
        for name, value in (("scale", "scale_value"), ("row_weights", "row_weight")):
            x = getattr(p, name)
            if isinstance(x, np.ndarray):
                setattr(problem, name, x.ctypes.data)
            else:
                setattr(problem, value, x)
        arithmetic = ARITHMETICS.index(p.arithmetic)
        error = self._library.fastqt_small_host(ctypes.byref(problem), arithmetic, blocks, seed).decode()
        if error:
            raise RuntimeError(error)
        return {name: decoded(x, p.arithmetic) if x.dtype != np.float64 else x for name, x in out.items()}


def encoded(x: Array, arithmetic: str) -> Array:
    """Numbers as the elements of an arithmetic, rounded to nearest even; bfloat16 as its bits."""
    if arithmetic == "float16":
        return x.astype(np.float16)
    x = x.astype(np.float32)
    if arithmetic != "bfloat16":
        return x
    bits = np.ascontiguousarray(x).view(np.uint32).reshape(x.shape)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def decoded(x: Array, arithmetic: str) -> Array:
    """The inverse of `encoded`, in float64."""
    if x.dtype == np.uint16:
        return (x.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return x.astype(np.float64)
