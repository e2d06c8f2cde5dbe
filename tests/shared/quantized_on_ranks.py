"""The ranges of embeddings of which each rank has some rows, beside those of one process.

The functions here run on every rank (see ranks.py).
"""

from __future__ import annotations

import torch
import torch.distributed as dist

import fastqt
from fastqt.distributed import Group
from tests.shared.sharded_losses import part


def ranges_of_all(counts: tuple[int, ...]) -> bool:
    """Whether this rank has the ranges of the rows of all ranks."""
    generator = torch.Generator().manual_seed(0)
    x = 1 + torch.rand(sum(counts), 5, generator=generator)  # 0 is in no range
    shards = "equal" if len(set(counts)) == 1 else "uneven"
    ranges = fastqt.quantization_ranges(part(x, counts, dist.get_rank()), group=Group(shards=shards))
    return torch.equal(ranges, fastqt.quantization_ranges(x))


def widths_that_differ() -> None:
    """The first rank's embeddings are wider."""
    width = 6 if dist.get_rank() == 0 else 5
    fastqt.quantization_ranges(torch.zeros(3, width), group=dist.group.WORLD)
