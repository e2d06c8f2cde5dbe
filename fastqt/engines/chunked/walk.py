"""The walk over the scores: chunks of whole rows, three products each, gradients in the forward pass.

With the rows f_i of the queries F, g_j of the candidates G and the scale s, the scores are S = s F Gᵀ. No
more of them is ever in memory than a chunk of whole rows, of which the walk makes

1. the scores S of the chunk, a product; cells that are excluded become minus infinity;
2. E = exp(S - m), with each row's maximum m, and from the sums of E the losses of the rows, so that the
   gradient of a cell is dL/dS_ij = factor_i E_ij (a sigmoid has E = sigmoid(S) and other factors);
3. the gradient of the chunk's queries, dF = s factor (E G), the second product;
4. what the chunk adds to that of all candidates, dG += Eᵀ (s factor F), the third.

E is never multiplied by the row factors: they go to the smaller matrices. Each cell is computed once, in
6 N M D operations in all, and the memory beside inputs and gradients is that of a chunk.

The scores of listed targets are computed apart (see `cells`). In step 1 these cells become minus infinity,
and between 2 and 3 their exact E is put in their place.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from fastqt.devices import accumulation_dtype
from fastqt.engines.chunked.cells import ListedTargets, Places, TargetTile, are_listed
from fastqt.engines.chunked.embeddings import Embeddings, ranges
from fastqt.engines.chunked.links import Chunk, Factors, Link, Sigmoid, Softmax
from fastqt.engines.chunked.rounded import ROUNDED, Rounded, rounded_bytes, score
from fastqt.engines.products import multiply
from fastqt.problem import Gradients, Inputs, Needs, Problem, finite_scale, loss_dtype, room_of
from fastqt.steps import even_step

# Bytes of what belongs to a chunk. On a CPU it stays near the caches; elsewhere launches should be few.
ROOM = {"cpu": (24 * 2**20, 12 * 2**20)}
ROOM_ELSEWHERE = (256 * 2**20, 40 * 2**20)
LISTED_TILES, MATRIX_TILES = 1, 4  # as large as a chunk's scores, with listed targets and with a matrix


class Result(NamedTuple):
    """What a walk finds: of each row, in the dtype of accumulation, and the gradients that are needed."""

    loss: Tensor  # (N,)
    logsumexp: Tensor
    mass: Tensor
    gradients: Gradients


def chunk_rows(N: int, memory: str | int, device: torch.device, row_bytes: int) -> int:
    """How many of N rows a chunk has, where each takes `row_bytes`."""
    fast, low = ROOM.get(device.type, ROOM_ELSEWHERE)
    return even_step(N, max(min(room_of(memory, fast, low), fast) // row_bytes, 1))


def scale_on(device: torch.device, scale: float | Tensor) -> float | Tensor:
    """A scale that tensors on `device` can be multiplied by.

    The value is checked where it can be read without waiting for a device.
    """
    if isinstance(scale, Tensor) and not scale.is_cpu:
        return scale.detach()
    return finite_scale(scale)


class Walk:
    """A problem, and what is found of it.

    Args:
        p: the problem.
        weights: how much each row's loss counts: of all rows the same, or (N,).
        needs: which gradients are wanted.
        known: (N,) the logsumexp and the mass of rows of which the problem has a part of the columns.
    """

    def __init__(
        self,
        p: Problem,
        weights: float | Tensor,
        needs: Needs,
        known: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        self.p, self.needs = p, needs
        (self.N, self.D), self.M, device = p.queries.shape, len(p.candidates), p.queries.device
        self.scale = scale_on(device, p.scale)
        self.dtype = accumulation_dtype(device)

        self.queries = Embeddings(p.queries, p.normalize, wanted=False)
        self.blocks = [Embeddings(p.candidates, p.normalize, needs.candidates)]
        if p.negatives is not None:
            self.blocks.append(Embeddings(p.negatives, p.normalize, needs.negatives))
        self.width = sum(len(block.matrix) for block in self.blocks)
        self.row_negatives = None
        if p.row_negatives is not None:
            self.row_negatives = Embeddings(p.row_negatives, p.normalize, wanted=False)

        listed = are_listed(p)
        link: type[Softmax | Sigmoid] = Sigmoid if p.link == "sigmoid" else Softmax
        tiles = (LISTED_TILES if listed else MATRIX_TILES) + link.takes_spare
        tiles += self.more_tiles(link.takes_spare)
        row_bytes = (tiles * self.width + 5 * self.D) * loss_dtype(p.queries).itemsize
        row_bytes += rounded_bytes(p.queries, self.width)
        self.height = chunk_rows(self.N, p.memory, device, row_bytes)

        self.places = Places(p, self.height, self.width) if listed else None
        self.target_tile = None if listed else TargetTile(p, self.height)
        targets = None
        if self.places is not None:
            targets = ListedTargets(p, self.queries, self.blocks[0], self.scale, self.places)

        self.known = known
        self.rounded = self._rounded(weights) if p.queries.dtype in ROUNDED else None
        if not isinstance(weights, Tensor):
            weights = torch.full((self.N,), weights, dtype=self.dtype, device=device)
        self.link: Link = link(p, weights, targets, differentiates=any(needs), known=known)
        self._make_room()

    def more_tiles(self, takes_spare: bool) -> int:
        """How many more tiles there are, each as large as a chunk's scores."""
        return 0

    def _rounded(self, weights: float | Tensor) -> Rounded:
        """What products read of embeddings of 16 bits."""
        p = self.p
        largest = torch.ones((), dtype=self.dtype, device=p.queries.device)
        if p.link != "log_sum_exp":
            largest = p.targets.largest_mass(self.M) if self.known is None else self.known[1].amax()
        if p.link == "sigmoid":
            largest = largest.clamp(min=1)
        cells = self.height * self.width
        if isinstance(weights, Tensor):
            return Rounded(self.queries, self.scale, largest, weights, cells)
        return Rounded(self.queries, self.scale, largest * weights, None, cells)

    def _make_room(self) -> None:
        """Allocates the chunk and the gradients."""
        p, needs = self.p, self.needs
        new = partial(p.queries.new_empty, dtype=loss_dtype(p.queries))
        # One cell more than there are, to which what is of no interest is written.
        self._cells = new(self.height * self.width + 1)
        self._spare = new(self.height * self.width) if self.link.takes_spare else None

        self.query_gradient = p.queries.new_empty(p.queries.shape) if needs.queries else None
        self.row_negative_gradient = None
        if p.row_negatives is not None and needs.row_negatives:
            self.row_negative_gradient = p.row_negatives.new_empty(p.row_negatives.shape)
        self.row_score_gradient = None
        if p.row_scores is not None and needs.row_scores:
            self.row_score_gradient = torch.empty_like(p.row_scores)
        self.bias_gradient = None
        if p.bias is not None and needs.bias:
            self.bias_gradient = torch.zeros_like(p.bias)
        self.scale_gradient = torch.zeros((), dtype=self.dtype, device=p.queries.device)
        # Of the chunk's queries: scaled, times the row factors, and the product of E and the candidates.
        self._scaled, self._weighted, self._product = new((3, self.height, self.D))

    def run(self) -> Result:
        """Visits all chunks."""
        for rows in ranges(self.N, self.height):
            f = self.queries.rows(rows)
            scaled = torch.mul(f, self.scale, out=self._scaled[: len(f)])

            chunk, entries, places = self._scored(rows, f, scaled)
            factors = self.link.conclude(chunk)

            if any(self.needs):
                self._restore_cells(rows, entries, places)
                self._differentiate(chunk, f, scaled, factors)

        return Result(self.link.loss, self.link.logsumexp, self.link.mass, self._gradients())

    def _scored(self, rows: slice, f: Tensor, scaled: Tensor) -> tuple[Chunk, slice, Tensor | None]:
        """The scores of some rows, and where listed targets are among them."""
        n = len(f)
        S = self._cells[: n * self.width].view(n, self.width)
        self._score(rows, scaled, S)

        T = None if self.target_tile is None else self.target_tile.of_chunk(rows)
        self._filter(S, rows, T)
        self._exclude(S[:, : self.M], rows, T)
        entries, places = slice(0, 0), None
        if self.places is not None:
            entries, places = self.places.of_chunk(rows)
            self._cells.index_fill_(0, places, -torch.inf)

        spare = None if self._spare is None else self._spare[: S.numel()].view_as(S)
        return Chunk(rows, S, self._alone(rows, f), T, spare), entries, places

    def _score(self, rows: slice, scaled: Tensor, S: Tensor) -> None:
        """Writes the scores of some rows of queries, which are scaled already."""
        first = 0
        for block in self.blocks:
            cells = S[:, first : first + len(block.matrix)]
            score(cells, rows, scaled, self.queries, block, self.scale)
            first += len(block.matrix)

    def _filter(self, S: Tensor, rows: slice, T: Tensor | None) -> None:
        """Lets cells leave whose scores, which have no biases yet, are above the threshold of their row."""
        if self.p.thresholds is None:
            return
        above = (self.p.thresholds[rows] * self.scale)[:, None] < S
        if T is not None:  # Listed targets come back.
            above[:, : self.M] &= T == 0
        S.masked_fill_(above, -torch.inf)

    def _exclude(self, S: Tensor, rows: slice, T: Tensor | None) -> None:
        """Adds biases to the candidates' scores, replaces the diagonal, and excludes cells."""
        p = self.p
        if p.bias is not None:
            S.add_(p.bias)
        if p.diagonal != "keep":
            S.diagonal(rows.start).fill_(0 if p.diagonal == "zero" else -torch.inf)
        if p.mask is not None:
            S.masked_fill_(p.mask[rows], -torch.inf)
        if p.query_groups is not None and p.candidate_groups is not None:
            equal = p.query_groups[rows, None] == p.candidate_groups
            # Listed targets have left already, and come back.
            S.masked_fill_(equal if T is None else equal & (T == 0), -torch.inf)

    def _alone(self, rows: slice, f: Tensor) -> Tensor | None:
        """The score of the cell that each row has alone, in the dtype of accumulation."""
        if self.p.row_scores is not None:
            return self.p.row_scores[rows].to(self.dtype)
        if self.row_negatives is None:
            return None
        alone = (f * self.row_negatives.rows(rows)).sum(1, dtype=self.dtype)
        if self.p.thresholds is not None:
            alone.masked_fill_(alone > self.p.thresholds[rows], -torch.inf)
        return alone * self.scale

    def _restore_cells(self, rows: slice, entries: slice, places: Tensor | None) -> None:
        """Makes E that of all cells: 0 on the replaced diagonal, exact at listed targets."""
        n = rows.stop - rows.start
        if self.p.diagonal == "zero":
            self._cells[: n * self.width].view(n, -1)[:, : self.M].diagonal(rows.start).zero_()
        if places is not None:
            self._cells.index_copy_(0, places, self.link.of_listed(entries).to(self._cells.dtype))

    def _differentiate(self, chunk: Chunk, f: Tensor, scaled: Tensor, factors: Factors) -> None:
        """Adds what a chunk gives to the gradients."""
        rows, E = chunk.rows, chunk.scores
        row_factors = factors.of_rows.to(f.dtype)
        if self.bias_gradient is not None:
            self.bias_gradient.addmv_(E[:, : self.M].T, row_factors.to(self.bias_gradient.dtype))
        if self.row_score_gradient is not None and factors.alone is not None:
            self.row_score_gradient[rows] = factors.alone.to(self.row_score_gradient.dtype)

        product = self._product[: len(f)]
        self._multiply(chunk, scaled, factors, product)
        if self.row_negatives is not None and factors.alone is not None:
            of_cells = factors.alone.to(f.dtype)[:, None]
            product.addcmul_(self.row_negatives.rows(rows), of_cells)
            if self.row_negative_gradient is not None:
                gradient = self.row_negatives.through_norms(rows, scaled * of_cells)
                self.row_negative_gradient[rows] = gradient

        if self.needs.scale:
            self.scale_gradient += (product * f).sum(1, dtype=self.dtype).sum()
        if self.query_gradient is not None:
            self.query_gradient[rows] = self.queries.through_norms(rows, product.mul_(self.scale))

    def _multiply(self, chunk: Chunk, scaled: Tensor, factors: Factors, product: Tensor) -> None:
        """The products of E: that with the candidates, and what the chunk adds to their gradient."""
        E, first = chunk.scores, 0
        for block in self.blocks:
            if block.inverse_norms is not None:
                E[:, first : first + len(block.matrix)].mul_(block.inverse_norms)
            first += len(block.matrix)

        if self.rounded is None:
            missing = factors.of_rows.to(E.dtype)
            weighted = torch.mul(scaled, missing[:, None], out=self._weighted[: len(scaled)])
        else:
            E, weighted, missing = self.rounded.of_chunk(chunk.rows, E, factors.of_rows)

        wants_product, first = self.query_gradient is not None or self.needs.scale, 0
        for block in self.blocks:
            cells = E[:, first : first + len(block.matrix)]
            if wants_product:
                multiply(product, cells, block.matrix, add=first > 0)
            if block.gradient is not None:
                multiply(block.gradient, cells.T, weighted, add=True)
            first += len(block.matrix)
        product.mul_(missing[:, None])

    def _of_blocks(self) -> list[Tensor | None]:
        """The gradients of the blocks, once all chunks are visited."""
        factor = None if self.rounded is None else self.rounded.of_columns
        return [block.finished(factor) for block in self.blocks]

    def _gradients(self) -> Gradients:
        of_blocks = self._of_blocks()
        return Inputs(
            queries=self.query_gradient,
            candidates=of_blocks[0],
            negatives=of_blocks[1] if len(of_blocks) > 1 else None,
            row_negatives=self.row_negative_gradient,
            scale=self.scale_gradient if self.needs.scale else None,
            bias=self.bias_gradient,
            row_scores=self.row_score_gradient,
        )
