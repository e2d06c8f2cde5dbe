"""The memory of the tensors that a loss over a ring makes.

The functions here run on every rank (see ranks.py).
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fastqt
from fastqt.distributed import Group
from fastqt.engines.cpu import contrastive

WIDTH = 1024
OPTIONS = {"siglip_loss": {"scale": 1.0, "bias": -1.0}, "clip_loss": {"scale": 5.0}}
SMALL = {"TILE_ROWS": 64, "TILE_COLUMNS": 64, "TILE_BYTES": 2**14, "LOW_BYTES": 2**14, "CHUNK_BYTES": 2**14}


class Live(TorchDispatchMode):
    """The memory of the tensors that are made in its context and still there, after every operator.

    Attributes:
        most: its greatest size in bytes.
    """

    def __init__(self, *given: Tensor) -> None:
        super().__init__()
        self.given = {StorageWeakRef(x.untyped_storage()).cdata for x in given}
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for x in tree_leaves(found):
            if isinstance(x, Tensor):
                storage = x.untyped_storage()
                reference = StorageWeakRef(storage)
                if reference.cdata not in self.given:
                    self.made[reference.cdata] = reference, storage.nbytes()
        self.made = {key: made for key, made in self.made.items() if not made[0].expired()}
        self.most = max(self.most, sum(nbytes for _, nbytes in self.made.values()))
        return found


def peaks(losses: list[str], counts: list[int]) -> dict[str, dict[str, float]]:
    """The peak of each loss "without" gradients and "with" them, in shards of the rank with the most rows.

    Args:
        losses: the names of public functions.
        counts: the number of rows of each rank.
    """
    rank = dist.get_rank()
    shards = "equal" if len(set(counts)) == 1 else "uneven"
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
    with mock.patch.multiple(contrastive, **SMALL):
        for loss in losses:
            with_gradients(loss)
            steps = {"without": without_gradients, "with": with_gradients}
            found[loss] = {}
            for name, step in steps.items():
                with Live(a, b) as live:
                    step(loss)
                found[loss][name] = live.most / shard
    return found
