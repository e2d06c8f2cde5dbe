"""Where the positives of losses from labels lie, once rows and candidates are sorted by label.

They are listed where that takes little memory. Otherwise they lie in blocks: the positives of successive rows
are in one range of columns.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from fastqt.devices import accumulation_dtype
from fastqt.options import Memory
from fastqt.problem import room_of
from fastqt.targets.base import TargetRows, Targets

# Bytes of a block: on a CPU with memory="fast" and "low", and on a GPU.
CPU_ROOM = 48 * 2**20, 16 * 2**20
GPU_ROOM = 512 * 2**20, 40 * 2**20
CELL_BYTES = 48  # of a cell of a block: scores and their gradients in float64, products, masks
# Bytes of a pair in a list: two indices and the weight, while they are made and while they are used.
PAIR_BYTES = 64
# A GPU's engines read the candidates of listed pairs one by one; many pairs are quicker in blocks.
GPU_PAIRS = 8  # for each row
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

    Rows without a positive, and candidates that are nobody's, are left out. The tensors are where the labels
    were given: the host does not wait for a GPU that it has not given them to.
    """

    rows: Tensor  # (R,) int64, sorted by label
    row_labels: Tensor  # (R,) int64
    counts: Tensor  # (R,) int64, how many positives each of these rows has, at least 1
    own: Tensor | None  # (R,) int64 index of the candidate that is the row itself, -1: none
    begins: Tensor  # (R,) int64, where the row's label begins among the columns
    columns: Tensor  # (K,) int64 indices of candidates, sorted by label
    column_labels: Tensor  # (K,) int64
    pairs: int  # the sum of the counts
    log_counts: float  # the sum of the counts' logarithms
    room: int  # bytes of a block or of a list

    def to(self, device: torch.device) -> Positives:
        """The same with all tensors on `device`."""
        return replace(
            self,
            rows=self.rows.to(device),
            row_labels=self.row_labels.to(device),
            counts=self.counts.to(device),
            own=None if self.own is None else self.own.to(device),
            begins=self.begins.to(device),
            columns=self.columns.to(device),
            column_labels=self.column_labels.to(device),
        )

    def may_be_listed(self, on_gpu: bool) -> bool:
        """Whether a list of all pairs fits the memory, and is quicker than blocks."""
        few = not on_gpu or self.pairs <= GPU_PAIRS * len(self.rows)
        return few and self.pairs * PAIR_BYTES <= self.room

    def listed(self) -> tuple[Tensor, Tensor]:
        """The row and the candidate of each pair, (pairs,) int64, by row and then by candidate."""
        order = self.rows.argsort()
        rows, begins, own = self.rows[order], self.begins[order], None
        spans = self.counts[order]
        if self.own is not None:
            own = self.own[order]
            spans = spans + (own >= 0).long()
        starts = spans.cumsum(0) - spans
        entries = torch.arange(int(spans.sum()), device=rows.device)
        columns = self.columns[(begins - starts).repeat_interleave(spans) + entries]
        pair_rows = rows.repeat_interleave(spans)
        if own is None:
            return pair_rows, columns
        others = columns != own.repeat_interleave(spans)
        return pair_rows[others], columns[others]


def find_positives(
    labels: Tensor,  # (N,) int64
    candidate_labels: Tensor,  # (M,) int64
    # (N,) int64, the candidate of the same label that is the row itself and no positive; -1: none.
    own: Tensor | None,
    on_gpu: bool,
    memory: Memory,
) -> Positives:
    """Sorts rows and candidates by label; the host waits for the labels if these are on a GPU.

    `on_gpu` says where the embeddings are; the labels may be elsewhere.
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
    fast, low = GPU_ROOM if on_gpu else CPU_ROOM
    return Positives(
        rows=rows,
        row_labels=row_labels,
        counts=counts,
        own=None if own is None else own[having],
        begins=begins[having],
        columns=columns,
        column_labels=column_labels,
        pairs=int(counts.sum()),
        log_counts=float(counts.to(accumulation_dtype(counts.device)).log().sum()),
        room=room_of(memory, fast, low),
    )


class SameLabel(Targets):
    """All positives of a row as its targets, of equal weights."""

    def __init__(self, positives: Positives, N: int) -> None:
        rows, columns = positives.listed()
        counts = rows.new_zeros(N).index_copy_(0, positives.rows, positives.counts)
        starts = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        self._rows = TargetRows(starts, columns, 1 / counts[rows].to(accumulation_dtype(counts.device)))

    def check(self, N: int, M: int, diagonal: str) -> None:
        return

    def rows(self, N: int, M: int, device: torch.device) -> TargetRows:
        starts, columns, weights = (x.to(device) for x in self._rows.compressed())
        return TargetRows(starts, columns, weights)


def blocks_of(positives: Positives, D: int, itemsize: int) -> tuple[Block, ...]:
    """Cuts rows of D numbers into blocks of about the positives' `room`.

    The scores of other labels in a block are wasted, so that a block of several labels has few rows.
    """
    begins = positives.begins.cpu()
    spans = positives.counts if positives.own is None else positives.counts + (positives.own >= 0).long()
    ends = begins + spans.cpu()
    cells = positives.room // 2 // CELL_BYTES

    # Beside its cells a block holds rows and their gradients, and the same of columns.
    most_rows = max(LEAST_ROWS, len(positives.columns) // ROWS_SHARE)
    most_rows = min(most_rows, max(positives.room // 8 // (2 * D * itemsize), 1))
    most_columns = max(positives.room * 3 // 8 // (2 * D * itemsize), 1)

    blocks, first, R = [], 0, len(begins)
    while first < R:
        last, left = min(first + most_rows, R), int(begins[first])
        least = min(first + LEAST_ROWS, last)
        while last > least and (last - first) * (int(ends[last - 1]) - left) > cells:
            last = max((first + last) // 2, least)
        right = int(ends[last - 1])
        step = min(most_columns, max(cells // (last - first), 1))
        blocks.append(
            Block((first, last), tuple((at, min(at + step, right)) for at in range(left, right, step)))
        )
        first = last
    return tuple(blocks)
