"""Target cells: those that are listed are computed apart from all others, with more digits.

Once a positive is learnt, its dL/dS is P - T, the difference of two numbers close to 1. It is found from what
the other cells have, so the exponential of the target's own score must not be among them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fastqt.devices import accumulation_dtype
from fastqt.engines.chunked.embeddings import Embeddings, ranges
from fastqt.problem import Problem, loss_dtype

BLOCK_BYTES = 8 * 2**20  # of the embeddings of cells that are scored at a time
# Where more than one cell in so many is a target, scoring each by itself takes longer than the products,
# unless the problem is small or has few targets a row.
CELLS_PER_TARGET = 64
SMALL = 2**20  # products of elements
FEW = 2  # targets a row
READABLE = ("cpu",)  # the types of devices whose values are read without a wait
NEAR = 1 / 256  # of a row's largest score: targets that are as near each other are scored with more digits


def are_listed(p: Problem) -> bool:
    """Whether the targets of a problem are few enough to be computed apart, or none."""
    if p.link == "log_sum_exp":
        return True
    if p.targets.columns is None or p.targets.background is not None:
        return False
    entries = len(p.targets.columns)
    (N, D), M = p.queries.shape, len(p.candidates)
    return entries * D <= SMALL or entries <= FEW * N or entries * CELLS_PER_TARGET <= N * M


class Places:
    """Where the targets of a chunk of rows are among its cells.

    How many entries some rows have is only known without waiting for a device if that is a CPU, or where all
    have as many. Otherwise every chunk looks at all entries, and those of other rows are at a place of no
    interest, the one behind the last cell of a chunk of `height` rows.
    """

    def __init__(self, p: Problem, height: int, width: int) -> None:
        t, N = p.targets, len(p.queries)
        starts, columns, weights = t.compressed()
        self._width, self._nowhere = width, height * width
        self.rows = torch.repeat_interleave(starts.diff(), output_size=len(columns))
        self.columns = columns.clamp(0, len(p.candidates) - 1)
        self.is_target = weights != 0

        edges = [*range(0, N, height), N]
        self._edges: list[int] | None = None
        if t.offsets is not None:
            self._edges = [min(edge * len(t.offsets), len(columns)) for edge in edges]
        elif starts.device.type in READABLE:
            self._edges = starts[edges].tolist()
        self._height = height

    def of_chunk(self, rows: slice) -> tuple[slice, Tensor]:
        """Which entries to look at for some rows, and their places in the chunk's cells as one line."""
        entries = slice(0, len(self.columns))
        if self._edges is not None:
            number = rows.start // self._height
            entries = slice(self._edges[number], self._edges[number + 1])

        row = self.rows[entries] - rows.start
        inside = self.is_target[entries] & (row >= 0) & (row < rows.stop - rows.start)
        return entries, (row * self._width + self.columns[entries]).where(inside, self._nowhere)


class ListedTargets:
    """Targets whose scores are computed from the embeddings, and added up in the dtype of accumulation.

    Attributes:
        weights, scores: (entries,) T_ij and S_ij, 0 and minus infinity where there is no target.
        rows: (entries,) the row of each.
    """

    def __init__(
        self, p: Problem, queries: Embeddings, candidates: Embeddings, scale: float | Tensor, places: Places
    ) -> None:
        dtype = accumulation_dtype(p.queries.device)
        self.places, self.rows, self._N = places, places.rows, len(p.queries)
        self.weights = p.targets.compressed()[2].to(dtype)

        scores = self.weights.new_empty(len(self.rows))
        row_bytes = 2 * p.queries.element_size() * p.queries.shape[1]
        for entries in ranges(len(scores), max(BLOCK_BYTES // row_bytes, 1)):
            row, column = places.rows[entries], places.columns[entries]
            products = p.queries[row].to(loss_dtype(p.queries)).mul_(p.candidates[column]).sum(1, dtype=dtype)
            if queries.inverse_norms is not None and candidates.inverse_norms is not None:
                products = products * queries.inverse_norms[row] * candidates.inverse_norms[column]
            scores[entries] = products * scale

        biases = torch.zeros_like(scores) if p.bias is None else p.bias[places.columns]
        scores += biases
        if scores.device.type in READABLE and loss_dtype(p.queries) != dtype:
            cancelling = self._cancelling(scores).nonzero()[:, 0]
            for again in cancelling.split(max(BLOCK_BYTES // (2 * row_bytes), 1)):
                f, g = (
                    x[at[again]].to(dtype)
                    for x, at in ((p.queries, self.rows), (p.candidates, places.columns))
                )
                if queries.inverse_norms is not None:
                    f, g = F.normalize(f, dim=1), F.normalize(g, dim=1)
                scores[again] = (f * g).sum(1) * scale + biases[again]
        self.scores = scores.masked_fill_(~places.is_target, -torch.inf)

    def _cancelling(self, scores: Tensor) -> Tensor:
        """Which entries are in rows whose targets are learnt so well that their gradients cancel.

        P and T of each then differ by little more than the rounding of the scores. Those of a single target
        do not cancel: where it is learnt, P is 1 whatever its score is.
        """
        if len(scores) <= self._N:
            return torch.zeros_like(self.places.is_target)
        there = self.places.is_target
        several = self.row_sums(there.to(scores.dtype)) > 1
        above = scores - self.weights.log()

        def of_rows(values: Tensor, reduction: str, none: float) -> Tensor:
            most = scores.new_full((self._N,), none)
            return most.scatter_reduce_(0, self.rows, values.where(there, none), reduction)

        spread = of_rows(above, "amax", -torch.inf) - of_rows(above, "amin", torch.inf)
        near = spread < NEAR * of_rows(scores.abs(), "amax", 0.0)
        return (several & near)[self.rows] & there

    def row_sums(self, values: Tensor) -> Tensor:
        """The sum of what the cells of each row have, (N,)."""
        return values.new_zeros(self._N).index_add_(0, self.rows, values)

    def logsumexp(self) -> Tensor:
        """That of the targets' scores in each row, (N,); minus infinity where there are none.

        With one target it is that target's score to the last digit.
        """
        largest = self.scores.new_full((self._N,), -torch.inf)
        largest.scatter_reduce_(0, self.rows, self.scores, "amax")
        shift = largest.masked_fill(largest.isneginf(), 0)
        return shift + self.row_sums((self.scores - shift[self.rows]).exp()).log()

    def where_targets(self, values: Tensor) -> Tensor:
        """Values of cells, 0 for entries that are no targets."""
        return values.masked_fill(~self.places.is_target, 0)


class TargetTile:
    """The targets of a chunk of rows as a matrix, where each cell may be one.

    Args:
        p: the problem.
        height: the most rows of a chunk.
    """

    def __init__(self, p: Problem, height: int) -> None:
        self.p, self.places = p, None
        if p.targets.dense is None:
            M = len(p.candidates)
            self.places = Places(p, height, M)
            self._cells = p.queries.new_empty(height * M + 1, dtype=loss_dtype(p.queries))

    def of_chunk(self, rows: slice) -> Tensor:
        """T's rows, in the dtype of the scores; the next call may overwrite them."""
        t, dtype = self.p.targets, loss_dtype(self.p.queries)
        if self.places is None:
            assert t.dense is not None
            T = t.dense[rows].to(dtype)
        else:
            entries, places = self.places.of_chunk(rows)
            self._cells.zero_().index_copy_(0, places, t.compressed()[2][entries].to(dtype))
            n = rows.stop - rows.start
            T = self._cells[: n * len(self.p.candidates)].view(n, -1)
        return T if t.background is None else T + t.background[rows, None].to(dtype)


def softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x)), with all digits."""
    return F.softplus(x, threshold=50)
