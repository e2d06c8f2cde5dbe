"""The one-launch kernel of csrc/cuda as nvcc compiles it, executed from its PTX by the emulator.

`EmulatedKernel.run` takes and gives what `HostKernels.run` does, so that both have the problems, the errors
and the bounds of `random_problems`.
"""

from __future__ import annotations

import functools
import shutil

import numpy as np
import pytest

from tests.csrc import building
from tests.csrc.cuda.host_execution import Array, Small, argument, encoded, numbers, outputs
from tests.emulator.blocks import translate
from tests.emulator.machine import Machine
from tests.emulator.memory import region_at
from tests.emulator.ptx import parse
from tests.emulator.reports import Reports

SOURCE, HEADERS = "tests/csrc/cuda/one_arithmetic.cu", ("csrc/cuda/*.h", "csrc/cuda/*.cuh")
NAMES = {
    "float32": "FloatArithmetic",
    "tf32": "Tf32Arithmetic",
    "bfloat16": "HalfArithmetic<bfloat16>",
    "float16": "HalfArithmetic<float16>",
}
# Of csrc/cuda/tiling.h and small_problem.h: the largest tile in m16 and n8 tiles, and the depth of a step.
LARGEST = {"float32": (8, 16), "tf32": (8, 16), "bfloat16": (10, 28), "float16": (10, 28)}
DEPTH = 32
# A barrier of the grid, in the memory that the driver gives a cooperative launch.
BARRIER_BYTES = 64

needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc")


@functools.cache
def ptx(arithmetic: str, architecture: str = "80") -> str:
    """What nvcc makes of the kernel, with the flags of setup.py that change it, and the source's lines."""
    flags = ["-ptx", "-std=c++20", "-O3", "-lineinfo", "--expt-relaxed-constexpr", "-Icsrc"]
    flags += [f"-arch=compute_{architecture}", f"-DARITHMETIC={NAMES[arithmetic]}"]
    return building.compiled("nvcc", SOURCE, flags, headers=HEADERS, suffix="ptx").read_text()


class EmulatedKernel:
    """A kernel that any problem of its arithmetic can be given.

    Args:
        arithmetic: one of NAMES.
        shared: the bytes of shared memory of a block.
    """

    def __init__(self, arithmetic: str, shared: int) -> None:
        self.arithmetic, self.shared = arithmetic, shared
        self.kernel = parse(ptx(arithmetic))
        self.code = translate(self.kernel)

    def run(
        self,
        p: Small,
        *,
        blocks: int,
        reports: Reports,
        schedule: str = "lockstep",
        seed: int = 0,
    ) -> dict[str, Array]:
        """What the kernel writes, by name; what is wrong with how it does so is added to `reports`."""
        out = outputs(p)
        problem, memory = argument(p, out)
        for name, number in (p.tiles or tiles(p, blocks)).items():
            setattr(problem, name, number)
        problem.pitch = -(-len(p.candidates) // 8) * 8
        parts = workspace(p, problem.pitch, problem.splits)
        for name, x in parts.items():
            setattr(problem, name, x.ctypes.data)
        barrier = np.zeros(BARRIER_BYTES, np.uint8)
        memory |= {**parts, "barrier": barrier}
        high, low = divmod(barrier.ctypes.data, 2**32)

        of_kernel = bytes(problem)
        assert list(self.kernel.parameters.values()) == [len(of_kernel)], "SmallProblem has other fields"
        machine = Machine(
            self.kernel,
            (blocks, 1, 1),
            [of_kernel],
            [region_at(x.ctypes.data, x.nbytes) for x in memory.values() if x.nbytes],
            self.shared,
            reports,
            schedule,
            seed,
            self.code,
            environment={1: high, 2: low},
        )
        machine.run()
        return numbers(p, out)


def workspace(p: Small, pitch: int, splits: int) -> dict[str, Array]:
    """As lay_out_workspace() has it, but every part by itself; all bits are 1, which is NaN as a number."""
    N, width = len(p.queries), encoded(np.zeros(1), p.arithmetic).itemsize
    sizes = {
        "products": 4 * splits * N * pitch,
        "coefficients": width * N * pitch,
        "remainders": width * N * pitch if width == 2 else 0,
        "exact_blocks": 8 * N,
        "coefficient_bound": 4 * N,
        "private_coefficients": 4 * N,
        "private_inverse_norms": 4 * N,
        "scale_terms": 8 * N,
    }
    # Of 64-bit numbers for their alignment; the parts' bytes are multiples of 4.
    return {name: np.full(-(-size // 8) * 2, -1, np.int32)[: size // 4] for name, size in sizes.items()}


def tiles(p: Small, blocks: int) -> dict[str, int]:
    """The fewest tiles, and so many parts of the scores' depth that every block has one if it can."""
    (N, D), M = p.queries.shape, len(p.candidates)
    m16, n8 = LARGEST[p.arithmetic]

    def down(rows: int) -> int:
        return -(-rows // (16 * m16))

    return {
        "splits": max(1, min(blocks, -(-D // (2 * DEPTH)))),
        "score_down": down(N),
        "score_across": -(-M // (8 * n8)),
        "query_down": down(N) if "queries" in p.wanted else 0,
        "candidate_down": down(M) if "candidates" in p.wanted else 0,
        "gradient_across": -(-D // (8 * n8)),
    }
