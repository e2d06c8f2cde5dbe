"""Cells that leave the scores of pairs in both directions, as the mask of one matrix of scores."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from fastqt.engines.guide_rows import guide_masks
from fastqt.exclusions import Exclusions, Guide, Margin, Mask, OfIds
from fastqt.functional.call import Call
from fastqt.functional.false_negatives import with_thresholds
from fastqt.options import Memory
from fastqt.targets import Diagonal
from fastqt.torch_modes import input_dtype

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


class Leaving(NamedTuple):
    """What leaves a matrix of pairs, as a `ClipProblem` has it."""

    mask: Tensor | None
    column_mask: Tensor | None
    thresholds: Tensor | None


def leaving_pairs(exclude: Exclusions, a: Tensor, b: Tensor, *, of_cosines: bool) -> Leaving | None:
    """What the filters of a loss of a's rows among b's, and of b's among a's, take out.

    None where no engine of both directions compares similarities as the others do. Pairs stay where ids or
    similarities are compared, as targets do; a user's own mask has to leave them in.
    """
    margin, guide, users = exclude.of(Margin), exclude.of(Guide), exclude.of(Mask)
    if margin is not None and of_cosines and input_dtype(a) is torch.float16:
        return None  # whose rows are rounded before
    thresholds = None
    if margin is not None:
        pairs = Call("softmax", Diagonal(), a, b, normalize=of_cosines)
        # A pair's row and its column have one threshold, which follows from the pair's similarity.
        thresholds = with_thresholds(replace(pairs, margin=exclude.of(Margin))).thresholds

    ids = exclude.ids(a.device)
    masks = [mask_of_ids(ids)] if ids else []
    of_columns = None
    if guide is not None:
        of_guide = guide_masks(guide)
        of_columns = _joined([*masks, of_guide[1]], users)
        masks.append(of_guide[0])
    return Leaving(_joined(masks, users), of_columns, thresholds)


def _joined(masks: Sequence[Tensor], users: Mask | None) -> Tensor | None:
    """The cells of any mask without the pairs, and those that a user's own mask has."""
    if not masks:
        return None if users is None else users.cells
    mask = functools.reduce(torch.logical_or, masks)
    mask.diagonal().fill_(False)
    return mask if users is None else mask | users.cells
