"""Where the positives of losses from labels lie, once rows and candidates are sorted by label."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fastqt.problem import room_of

# Bytes of a block: on a CPU with memory="fast" and "low", and on a GPU.
CPU_ROOM = 48 * 2**20, 16 * 2**20
GPU_ROOM = 512 * 2**20, 40 * 2**20
CELL_BYTES = 48  # of a cell of a block: scores and their gradients in float64, products, masks
# Rows of a block at least and, as a share of the candidates, at most: the more rows, the more of the block's
# cells are no positives of theirs.
LEAST_ROWS, ROWS_SHARE = 64, 16


class Block(NamedTuple):
    """Successive rows, and the ranges of columns that hold all of their positives."""

    rows: tuple[int, int]
    columns: tuple[tuple[int, int], ...]


@dataclass
class Positives:
    """The positives of rows: candidates of the same label, other than the row's own.

    Rows without a positive, and candidates that are nobody's, are left out.
    """

    rows: Tensor  # (R,) int64, sorted by label
    row_labels: Tensor  # (R,) int64
    counts: Tensor  # (R,) int64, how many positives each of these rows has, at least 1
    own: Tensor | None  # (R,) int64 index of the candidate that is the row itself, -1: none
    columns: Tensor  # (K,) int64 indices of candidates, sorted by label
    column_labels: Tensor  # (K,) int64
    blocks: tuple[Block, ...]
    pairs: int  # the sum of the counts


def find_positives(
    labels: Tensor,
    candidate_labels: Tensor,
    own: Tensor | None,
    like: Tensor,
    memory: str | int,
) -> Positives:
    """Sorts rows and candidates by label; the host waits for the labels if these are on a GPU.

    Args:
        labels: (N,) int64.
        candidate_labels: (M,) int64.
        own: (N,) int64, the candidate of the same label that is the row itself and no positive, -1: none.
        like: (N, D) the queries, for their device, dtype and width.
        memory: as of `contrastive_loss`.
    """
    rows, order = labels.argsort(stable=True), candidate_labels.argsort(stable=True)
    row_labels, column_labels = labels[rows], candidate_labels[order]
    near = torch.searchsorted(row_labels, column_labels).clamp_(max=len(labels) - 1)
    wanted = row_labels[near] == column_labels
    columns, column_labels = order[wanted], column_labels[wanted]
    begins = torch.searchsorted(column_labels, row_labels)
    ends = torch.searchsorted(column_labels, row_labels, right=True)
    counts = ends - begins
    if own is not None:
        own = own[rows]
        counts -= (own >= 0).long()
    having = counts > 0
    rows, row_labels, counts = rows[having], row_labels[having], counts[having]
    spans = begins[having].cpu(), ends[having].cpu()
    # Blocks of several classes are not higher than this, as most of their cells are no positives.
    most_rows = max(LEAST_ROWS, len(candidate_labels) // ROWS_SHARE)
    fast, low = GPU_ROOM if like.is_cuda else CPU_ROOM
    room = room_of(memory, fast, low)
    blocks = tuple(_blocks(spans, most_rows, room, like.shape[1] * max(like.element_size(), 4)))
    move = lambda x: x.to(like.device, non_blocking=True)  # noqa: E731
    return Positives(
        rows=move(rows),
        row_labels=move(row_labels),
        counts=move(counts),
        own=None if own is None else move(own[having]),
        columns=move(columns),
        column_labels=move(column_labels),
        blocks=blocks,
        pairs=int(counts.sum()),
    )


def _blocks(spans: tuple[Tensor, Tensor], most_rows: int, room: int, row_bytes: int) -> Iterator[Block]:
    """Cuts rows, whose positives lie in the spans (R,) of columns, into blocks of about `room` bytes."""
    begins, ends = spans
    cells = room // 2 // CELL_BYTES
    # Beside its cells a block holds rows and their gradients, and the same of columns.
    most_rows = min(most_rows, max(room // 8 // (2 * row_bytes), 1))
    most_columns = max(room * 3 // 8 // (2 * row_bytes), 1)
    first, R = 0, len(begins)
    while first < R:
        last, left = min(first + most_rows, R), int(begins[first])
        least = min(first + LEAST_ROWS, last)
        while last > least and (last - first) * (int(ends[last - 1]) - left) > cells:
            last = max((first + last) // 2, least)
        right = int(ends[last - 1])
        step = min(most_columns, max(cells // (last - first), 1))
        ranges = tuple((at, min(at + step, right)) for at in range(left, right, step))
        yield Block((first, last), ranges)
        first = last
