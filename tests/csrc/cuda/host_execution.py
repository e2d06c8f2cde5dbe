"""The CUDA kernels built as C++ and executed on a CPU: numpy arrays in, numpy arrays out.

Running them needs numpy alone, so that a process with a sanitizer preloaded can do it too. Building them
needs a C++ compiler and pybind11.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.csrc import building

HOST = "tests/csrc/cuda/host"
HEADERS = ("csrc/cuda/*.h", "csrc/cuda/*.cuh", f"{HOST}/*.h", f"{HOST}/cuda/*.h")
# For the kernels and what executes them; the bindings only hand arguments over.
FLAGS = ("-std=c++20", "-ffp-contract=off", "-U_FORTIFY_SOURCE", "-Wall", "-Wextra", "-Werror", "-fPIC")
INCLUDE = (f"-I{HOST}", "-Icsrc")
SANITIZERS = "-fsanitize=address,undefined"
SANITIZED = ("-O0", "-g1", SANITIZERS, "-fno-sanitize-recover=undefined")
ARITHMETICS = ("float32", "tf32", "bfloat16", "float16")
DIAGONALS = ("zero", "exclude", "keep")
TILES = ("splits", "score_down", "score_across", "query_down", "candidate_down", "gradient_across")
Array = NDArray[Any]


def build(*, sanitized: bool = False) -> Path:
    """The module `small_host` for Python, from a cache if it was built before."""
    flags = (*FLAGS, *INCLUDE, *(SANITIZED if sanitized else ("-O1",)))
    sources: dict[str, Sequence[str]] = {
        f"{HOST}/bindings.cpp": (*building.binding_flags(), *INCLUDE),
        f"{HOST}/small_host.cpp": flags,
        f"{HOST}/fibres.cpp": flags,
    }
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

    def shared_bytes(self, arithmetic: str) -> int:
        return int(self._module.shared_bytes(arithmetic))

    def largest_tile(self, arithmetic: str) -> tuple[int, int]:
        """The m16 tiles and n8 tiles of the largest tile."""
        m16_tiles, n8_tiles = self._module.largest_tile(arithmetic)
        return m16_tiles, n8_tiles

    def tiles(
        self, arithmetic: str, N: int, M: int, D: int, blocks: int, wanted: str = "fg"
    ) -> dict[str, int]:
        """The tiles that are chosen where gradients of queries (f) and candidates (g) may be wanted."""
        p = self._module.SmallProblem()
        p.N, p.M, p.D = N, M, D
        for name, gradient in (("f", "dqueries"), ("g", "dcandidates")):
            if name in wanted:
                setattr(p, gradient, np.zeros(1))  # only whether there is one matters
        tiles = self._module.chosen_tiles(p, arithmetic, blocks)
        return {name: getattr(tiles, name) for name in TILES}

    def areas(
        self, index: int, m16_tiles: int, down: int, n8_tiles: int, across: int
    ) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
        """A tile, and its warps' shares of it: the first m16 tile and how many, and so for n8."""
        tile, *shares = self._module.areas(index, m16_tiles, down, n8_tiles, across)
        return tile, shares

    def run(self, p: Small, *, blocks: int = 1, seed: int = 0) -> dict[str, Array]:
        """What the kernel writes: logsumexp, mass, loss, total, and the wanted gradients by name."""
        N, D = p.queries.shape
        out = outputs(p)
        problem = self._module.SmallProblem()
        problem.N, problem.M, problem.D = N, len(p.candidates), D
        problem.mix, problem.diagonal = p.mix, DIAGONALS.index(p.diagonal)
        tiles = problem.tiles
        for name, number in (p.tiles or {}).items():
            setattr(tiles, name, number)
        for name in ("queries", "candidates", "row_negatives", "partners", "starts", "columns", "weights"):
            if (x := getattr(p, name)) is not None:
                setattr(problem, name, np.ascontiguousarray(x))
        for name, x in out.items():
            setattr(problem, f"d{name}" if name in p.wanted else name, x)
        for name, value in (("scale", "scale_value"), ("row_weights", "row_weight")):
            x = getattr(p, name)
            setattr(problem, name if isinstance(x, np.ndarray) else value, x)
        self._module.run(problem, p.arithmetic, blocks, seed)
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
