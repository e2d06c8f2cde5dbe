"""The shapes that are measured on a GPU. Nothing here imports torch."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.gpu.sections import Options


@dataclass(frozen=True)
class Shape:
    N: int
    M: int
    D: int

    @property
    def name(self) -> str:
        sides = f"{self.N:,}" if self.N == self.M else f"{self.N:,} × {self.M:,}"
        return f"{sides}, D={self.D:,}"


SHAPES = (
    Shape(65536, 65536, 768),
    Shape(8192, 128256, 4096),  # a linear cross-entropy over a large vocabulary
    Shape(16384, 16384, 1024),
    Shape(8192, 8192, 2400),
    Shape(400, 400, 1000),  # the QuickThoughts paper's batch, and the next two its wider sentence vectors
    Shape(400, 400, 2400),
    Shape(400, 400, 4800),
    Shape(1024, 1024, 768),
    Shape(32768, 32768, 768),
    Shape(2048, 2048, 768),  # too large for the one-launch kernel, yet small enough that launches matter
)
QUICK_SHAPES = (SHAPES[2], SHAPES[7])
DRY_SHAPES = (Shape(6, 6, 8), Shape(5, 9, 8))

LARGEST_GRAPHED = 16384  # rows; in graphs launches cost next to nothing
LARGEST_WINDOW = 4096  # rows; eager PyTorch needs a dense target matrix
ONE_LAUNCH_ROWS = 1024  # the most that the one-launch kernel takes
LOW_MEMORY = (SHAPES[0], SHAPES[2], SHAPES[3], DRY_SHAPES[0])


def measured(options: Options) -> tuple[Shape, ...]:
    return DRY_SHAPES if options.dry_run else QUICK_SHAPES if options.quick else SHAPES
