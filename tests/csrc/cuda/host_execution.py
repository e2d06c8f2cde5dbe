"""The CUDA kernels built as C++ and executed on a CPU: numpy arrays in, numpy arrays out.

Running them needs numpy alone, so that a process with a sanitizer preloaded can do it too. Building them
needs a C++ compiler and pybind11.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.csrc import building

HOST = "tests/csrc/cuda/host"
HEADERS = ("csrc/cuda/*.h", "csrc/cuda/*.cuh", f"{HOST}/*.h", f"{HOST}/cuda/*.h")
FLAGS = ("-std=c++20", "-ffp-contract=off", "-U_FORTIFY_SOURCE", "-Wall", "-Wextra", "-Werror", "-fPIC")
INCLUDE = (f"-I{HOST}", "-Icsrc")
SANITIZERS = "-fsanitize=address,undefined"
SANITIZED = ("-O0", "-g1", SANITIZERS, "-fno-sanitize-recover=undefined")
ARITHMETICS = ("float32", "tf32", "bfloat16", "float16")
DIAGONALS = ("zero", "exclude", "keep")
TILES = ("splits", "score_down", "score_across", "query_down", "candidate_down", "gradient_across")
Array = NDArray[Any]


_POINTERS_BEFORE = ("queries", "candidates", "row_negatives", "partners")
_POINTERS_AFTER = (
    *("logsumexp", "mass", "loss", "total"),
    *("dqueries", "dcandidates", "drow_negatives", "dscale"),
)
_WORKSPACE = ("products", "coefficients", "remainders", "exact_blocks", "coefficient_bound")
_WORKSPACE += ("private_coefficients", "private_inverse_norms", "scale_terms")


class SmallProblem(ctypes.Structure):
    """The kernel's only argument, as small_problem.h declares it."""

    _fields_ = (
        *((name, ctypes.c_int) for name in "NMD"),
        *((name, ctypes.c_void_p) for name in _POINTERS_BEFORE),
        ("mix", ctypes.c_float),
        ("scale", ctypes.c_void_p),
        ("scale_value", ctypes.c_float),
        ("diagonal", ctypes.c_int),
        *((name, ctypes.c_void_p) for name in ("starts", "columns", "weights", "row_weights")),
        ("row_weight", ctypes.c_double),
        *((name, ctypes.c_void_p) for name in _POINTERS_AFTER),
        *((name, ctypes.c_int) for name in (*TILES, "pitch")),
        *((name, ctypes.c_void_p) for name in _WORKSPACE),
    )


def build(*, sanitized: bool = False) -> Path:
    """The module `small_host` for Python, from a cache if it was built before."""
    flags = (*FLAGS, *INCLUDE, *(SANITIZED if sanitized else ("-O1",)))
    sources = {f"{HOST}/small_host.cpp": (*flags, *building.binding_flags()), f"{HOST}/fibres.cpp": flags}
    link = (*building.MODULE, *((SANITIZERS,) if sanitized else ()))
    return building.build(sources, headers=HEADERS, link=link)


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
        self._module = building.imported("small_host", library)

    def sizes(self, arithmetic: str) -> tuple[int, int, int]:
        """The m16 tiles and n8 tiles of the largest tile, and the bytes of a block's shared memory."""
        m16_tiles, n8_tiles, shared_bytes = self._module.sizes(arithmetic)
        return m16_tiles, n8_tiles, shared_bytes

    def tiles(
        self, arithmetic: str, N: int, M: int, D: int, blocks: int, wanted: str = "fg"
    ) -> dict[str, int]:
        """The tiles that are chosen where gradients of queries (f) and candidates (g) may be wanted."""
        p = SmallProblem(N=N, M=M, D=D)
        p.dqueries, p.dcandidates = "f" in wanted, "g" in wanted  # of which only null matters
        self._module.choose(p, arithmetic, blocks)
        return {name: getattr(p, name) for name in TILES}

    def areas(self, *tiling: int) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
        """A tile, and its warps' shares of it: the first m16 tile and how many, and so for n8."""
        tile, shares = self._module.areas(*tiling)
        return tile, shares

    def run(self, p: Small, *, blocks: int = 1, seed: int = 0) -> dict[str, Array]:
        """What the kernel writes: logsumexp, mass, loss, total, and the wanted gradients by name."""
        out = outputs(p)
        problem, memory = argument(p, out)
        self._module.run(problem, p.arithmetic, blocks, seed)
        del memory  # which has to live until now
        return numbers(p, out)


def argument(p: Small, out: dict[str, Array]) -> tuple[SmallProblem, dict[str, Array]]:
    """The kernel's argument without a workspace, and all arrays that it points to, by their fields."""
    (N, D), M = p.queries.shape, len(p.candidates)
    problem = SmallProblem(N=N, M=M, D=D, mix=p.mix, diagonal=DIAGONALS.index(p.diagonal), **(p.tiles or {}))
    names = ("queries", "candidates", "row_negatives", "partners", "starts", "columns", "weights")
    memory = {name: np.array(x, order="C") for name in names if (x := getattr(p, name)) is not None}
    for name, value in (("scale", "scale_value"), ("row_weights", "row_weight")):
        if isinstance(x := getattr(p, name), np.ndarray):
            memory[name] = x.copy()
        else:
            setattr(problem, value, x)
    memory |= {f"d{name}" if name in p.wanted else name: x for name, x in out.items()}
    for name, x in memory.items():
        setattr(problem, name, x.ctypes.data)
    return problem, memory


def numbers(p: Small, out: dict[str, Array]) -> dict[str, Array]:
    return {name: decoded(x, p.arithmetic) if x.dtype != np.float64 else x for name, x in out.items()}


def outputs(p: Small) -> dict[str, Array]:
    """NaN wherever the kernel is to write."""
    N = len(p.queries)
    out: dict[str, Array] = {name: np.full(N, np.nan) for name in ("logsumexp", "mass", "loss")}
    out["total"] = np.full((), np.nan, np.float32)
    for name in p.wanted:
        given = getattr(p, name)
        if name == "scale":
            out[name] = np.full((), np.nan)
        elif given is not None:
            out[name] = encoded(np.full(given.shape, np.nan), p.arithmetic)
    return out


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
