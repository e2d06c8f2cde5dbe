"""Cells that leave the scores of pairs in both directions, as the mask of one matrix of scores."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fastqt.exclusions import Exclusions, Mask, OfIds
from fastqt.options import Memory

MOST_CELLS = 2**25  # of a mask: as many as there are scores in the memory that engines keep them in


def takes_masks(total: int, memory: Memory) -> bool:
    """Whether a mask of all pairs is small beside what a loss may take."""
    return memory == "fast" and total * total <= MOST_CELLS


def mask_of_ids(ids: Sequence[OfIds]) -> Tensor:
    """(n, M) bool: the cells that any of the filters, at least one, takes out."""
    first, *others = (x.excludes(x.query_ids, x.columns) for x in ids)
    for cells in others:
        first |= cells
    return first


def mask_of_pairs(exclude: Exclusions, device: torch.device) -> Tensor | None:
    """(N, N) bool: the cells that leave the rows' softmax and the columns'; None where they differ.

    Pairs stay where ids are compared, as targets do. A user's own mask has to leave them in.
    """
    ids, users = exclude.ids(device), exclude.of(Mask)
    if len(ids) + (users is not None) < len(exclude.filters):
        return None
    if not ids:
        return None if users is None else users.cells
    mask = mask_of_ids(ids)
    mask.diagonal().fill_(False)
    return mask if users is None else mask | users.cells
