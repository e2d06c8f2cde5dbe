"""This rank's rows of an argument, of which there may be none."""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor

from fastqt.distributed.group import Group


def local_rows(ranks: Group | None, name: str, x: Tensor) -> Tensor:
    """A rank's own rows of a tensor, of which a DTensor holds a part; in one process the tensor itself.

    Raises:
        ValueError: a DTensor that is not sharded by its rows alone.
    """
    # Whoever has made a DTensor has imported its module, which takes a second.
    module = sys.modules.get("torch.distributed.tensor")
    if ranks is None or module is None or not isinstance(x, module.DTensor):
        return x
    if len(x.placements) != 1 or not x.placements[0].is_shard(0):
        raise ValueError(f"{name}: want a DTensor of placements (Shard(0),), got {tuple(x.placements)}")
    local: Tensor = x.to_local()
    return local


def with_a_row(ranks: Group | None, x: Any) -> Any:
    """A matrix without rows, which a rank of uneven shards may have, with one row; others as they are."""
    if ranks is None or ranks.shards != "uneven":
        return x
    empty = isinstance(x, Tensor) and x.dim() > 1 and not len(x)
    return x.new_empty(1, *x.shape[1:]) if empty else x
