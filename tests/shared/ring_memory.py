"""The memory that a loss over a ring allocates, by what torch's allocator says of each allocation.

The functions here run on every rank (see ranks.py).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from unittest import mock

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

import fastqt
from fastqt.distributed import Group
from fastqt.engines import cpu

WIDTH = 1024
OPTIONS = {"siglip_loss": {"scale": 1.0, "bias": -1.0}, "clip_loss": {"scale": 5.0}}
SMALL = {"TILE_ROWS": 64, "TILE_COLUMNS": 64, "TILE_BYTES": 2**14, "LOW_BYTES": 2**14, "CHUNK_BYTES": 2**14}


def peak_bytes(function: Callable[[], object]) -> int:
    """By how many bytes the memory of torch's tensors grows at most while a function runs."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        function()
    events = profiler.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    held = most = 0
    for _, change in changes:
        held += change
        most = max(most, held)
    return most


def peaks(losses: list[str], rows: int, counts: list[int] | None = None) -> dict[str, dict[str, float]]:
    """The peak of each loss "without" gradients and "with" them, in shards of the rank with the most rows.

    Args:
        losses: the names of public functions.
        rows: of all ranks.
        counts: of each rank; by default all have as many.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    shards = "equal" if counts is None else "uneven"
    counts = counts or [rows // size] * size
    shard = 4 * WIDTH * max(counts)
    a, b = (torch.randn(counts[rank], WIDTH, requires_grad=True) for _ in range(2))
    group = Group(exchange="ring", shards=shards)

    def call(loss: str) -> torch.Tensor:
        return getattr(fastqt, loss)(a, b, group=group, **OPTIONS.get(loss, {}))

    def without_gradients(loss: str) -> None:
        with torch.no_grad():
            call(loss)

    def with_gradients(loss: str) -> None:
        torch.autograd.grad(call(loss), (a, b))

    found = {}
    # Scores of small tiles, so that nearly all of the memory is that of rows of embeddings.
    with mock.patch.multiple(cpu, **SMALL):
        for loss in losses:
            with_gradients(loss)
            steps = {"without": without_gradients, "with": with_gradients}
            found[loss] = {name: peak_bytes(partial(step, loss)) / shard for name, step in steps.items()}
    return found
