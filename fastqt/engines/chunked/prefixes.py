"""The walk of a Matryoshka loss: the losses of several prefixes of all embeddings from the products of one.

The columns between one prefix and the next are a block. With blocks F_b of the queries and G_b of the
candidates, and weights w_k of the prefixes k, the scores of a chunk are running sums, and so are their
gradients from the widest prefix down:

    R_k = sum_{b <= k} s F_b G_bᵀ            S_k = R_k, times the inverse norms of both prefixes for cosines
    Q_b = sum_{k >= b} w_k dL_k/dR_k         dF_b = s Q_b G_b         dG_b = s Q_bᵀ F_b

so that all prefixes together take 6 N M D operations, and a chunk holds one E a prefix. A prefix at norm 1
loses the part of its gradient that lies along itself, which is a product of scores and their gradients:

    dF_b -= f_b sum_{k >= b} a_k² sum_j (dL_k/dS_k)_ij (S_k)_ij      a_k the inverse norm of row i's prefix k

Queries are read at the norm 1 of their widest prefix, so that norms of any size are in no product; for them
a_k is relative to that.

Source: Kusupati et al., "Matryoshka representation learning" (2022), eq. 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastqt.engines.chunked.cells import ListedTargets
from fastqt.engines.chunked.embeddings import Embeddings, inverse_norms, ranges
from fastqt.engines.chunked.links import Chunk, Factors, Link
from fastqt.engines.chunked.walk import Result, Walk
from fastqt.norms import LEAST_NORM
from fastqt.problem import EMBEDDINGS, Gradients, Needs, Problem, prefix_of


class Norms(NamedTuple):
    """The inverse norms of the rows' prefix.

    Attributes:
        factors: (rows,) what products are multiplied by: inverse norms, relative to those of the widest
            prefix where rows are read at its norm 1.
        moves: (rows,) whether a change of the row changes its norm: a shorter one is divided by a constant.
    """

    factors: Tensor
    moves: Tensor


class Prefix(NamedTuple):
    """What a walk knows of one prefix.

    Attributes:
        block: the columns by which it is wider than the one before.
        weight: of its loss.
        link: what becomes of its scores.
        cells: room for its E of a chunk.
        queries, row_negatives, columns: the norms where scores are cosines.
        along: (M + K,) for cosines, the sum over rows of the products of scores and their gradients.
    """

    block: slice
    weight: float
    link: Link
    cells: Tensor
    queries: Norms | None
    row_negatives: Norms | None
    columns: Norms | None
    along: Tensor | None


class OfChunk(NamedTuple):
    """What is left of a prefix of a chunk of n rows.

    Attributes:
        E: (n, M + K) times `coefficients` the gradient of R; for cosines with the columns' norms.
        coefficients: (n,)
        radial: (n,) for cosines, what the queries' rows lose of their gradient.
        alone: (n,) the gradient of the product of each row and the cell that it has alone, or None.
        alone_radial: (n,) what row negatives lose, or None.
    """

    E: Tensor
    coefficients: Tensor
    radial: Tensor | None
    alone: Tensor | None
    alone_radial: Tensor | None


class PrefixWalk(Walk):
    """A problem that has `prefix_dims`, and what is found of it; the arguments as of `Walk`."""

    def __init__(self, p: Problem, weights: float | Tensor, needs: Needs) -> None:
        self._count, self._surplus = len(p.prefix_dims), p.queries.shape[1] - p.prefix_dims[-1]
        widest = prefix_of(p, p.prefix_dims[-1])
        super().__init__(widest, weights * p.prefix_weights[-1], needs)

        size, new = self.height * self.width, self.p.queries.new_empty
        self._sums = new(size)  # R, and on the way back Q
        self._of_products = new(size) if self._spare is None else self._spare
        rows = weights if isinstance(weights, Tensor) else torch.full_like(self.link.loss, weights)
        starts = (0, *p.prefix_dims[:-1])
        self.prefixes = [
            self._prefix(slice(start, end), weight, rows)
            for start, end, weight in zip(starts, p.prefix_dims, p.prefix_weights, strict=True)
        ]
        self._at = self.prefixes[0]

    def more_tiles(self, takes_spare: bool) -> int:
        """As large as a chunk's scores: R, one E a prefix, and products of both."""
        return self._count + 1 - takes_spare

    def _prefix(self, block: slice, weight: float, weights: Tensor) -> Prefix:
        whole, normalize = self.p, self.p.normalize
        is_widest = block.stop == whole.queries.shape[1]
        p = prefix_of(whole, block.stop)
        queries, candidates = (Embeddings(x, normalize, wanted=False) for x in (p.queries, p.candidates))
        link = self.link
        if not is_widest:
            targets = None
            if self.places is not None:
                targets = ListedTargets(p, queries, candidates, self.scale, self.places)
            link = type(self.link)(whole, weights * weight, targets, differentiates=any(self.needs))

        # Without gradients no E is needed once its row is concluded.
        kept = is_widest or not any(self.needs)
        cells = self._cells if kept else torch.empty_like(self._cells)
        if not normalize:
            return Prefix(block, weight, link, cells, None, None, None, None)

        columns = [_norms(x) for x in (p.candidates, p.negatives) if x is not None]
        row_negatives = None
        if p.row_negatives is not None and self.row_negatives is not None:
            row_negatives = _relative(p.row_negatives, self.row_negatives)
        return Prefix(
            block,
            weight,
            link,
            cells,
            _relative(p.queries, self.queries),
            row_negatives,
            Norms(*(torch.cat(parts) for parts in zip(*columns, strict=True))),
            candidates.matrix.new_zeros(self.width),
        )

    def run(self) -> Result:
        """Visits all chunks."""
        for rows in ranges(self.N, self.height):
            f = self.queries.rows(rows)
            scaled = torch.mul(f, self.scale, out=self._scaled[: len(f)])
            parts = []
            for prefix in self.prefixes:
                # What the steps of `Walk` read.
                self._at, self.link, self._cells = prefix, prefix.link, prefix.cells
                chunk, entries, places = self._scored(rows, f, scaled)
                factors = self.link.conclude(chunk)
                if any(self.needs):
                    self._restore_cells(rows, entries, places)
                    parts.append(self._of_chunk(chunk, factors))
            if parts:
                self._add_gradients(rows, f, scaled, parts)

        losses = torch.stack([prefix.weight * prefix.link.loss for prefix in self.prefixes]).sum(0)
        return Result(losses, self.link.logsumexp, self.link.mass, self._gradients())

    def _score(self, rows: slice, scaled: Tensor, S: Tensor) -> None:
        """Adds the products of the prefix's block to those of the blocks before, and writes its scores."""
        block, R, first = self._at.block, self._sums[: S.numel()].view_as(S), 0
        for embeddings in self.blocks:
            columns = embeddings.matrix[:, block].T
            cells = R[:, first : first + columns.shape[1]]
            cells.addmm_(scaled[:, block], columns, beta=int(block.start > 0))
            first += columns.shape[1]

        norms, of_columns = self._at.queries, self._at.columns
        if norms is None or of_columns is None:
            S.copy_(R)
        else:
            torch.mul(R, of_columns.factors, out=S)
            S.mul_(norms.factors[rows, None])

    def _alone(self, rows: slice, f: Tensor) -> Tensor | None:
        """The score of the cell that each row has alone, in the dtype of accumulation."""
        if self.row_negatives is None:
            return super()._alone(rows, f)
        prefix, r = self._at, self.row_negatives.rows(rows)
        width = slice(prefix.block.stop)
        products = (f[:, width] * r[:, width]).sum(1, dtype=self.dtype) * self.scale
        if prefix.queries is None or prefix.row_negatives is None:
            return products
        return products * prefix.queries.factors[rows] * prefix.row_negatives.factors[rows]

    def _of_chunk(self, chunk: Chunk, factors: Factors) -> OfChunk:
        """What is left of a prefix of a chunk, whose E is known and whose R is still there."""
        rows, E, alone = chunk.rows, chunk.scores, factors.alone
        if self.bias_gradient is not None:
            of_rows = factors.of_rows.to(self.bias_gradient.dtype)
            self.bias_gradient.addmv_(E[:, : self.M].T, of_rows)
        if self.row_score_gradient is not None and alone is not None:
            of_cells = self.row_score_gradient[rows]
            of_cells.copy_(alone + (of_cells if self._at.block.start else 0))

        norms, of_columns, coefficients = self._at.queries, self._at.columns, factors.of_rows.to(E.dtype)
        if norms is None or of_columns is None or self._at.along is None:
            return OfChunk(E, coefficients, None, alone, None)

        coefficients = coefficients * norms.factors[rows]
        E.mul_(of_columns.factors)
        R, products = (x[: E.numel()].view_as(E) for x in (self._sums, self._of_products))
        torch.mul(E, R, out=products)
        radial = products.sum(1) * coefficients
        self._at.along.addmv_(products.T, coefficients)

        alone_radial = None
        if alone is not None and chunk.alone is not None and self._at.row_negatives is not None:
            of_scores = (alone * chunk.alone).to(E.dtype)
            radial += of_scores
            alone_radial = _radial(of_scores, self._at.row_negatives, rows)
            alone = alone * norms.factors[rows] * self._at.row_negatives.factors[rows]
        return OfChunk(E, coefficients, _radial(radial, norms, rows), alone, alone_radial)

    def _add_gradients(self, rows: slice, f: Tensor, scaled: Tensor, parts: Sequence[OfChunk]) -> None:
        """Adds what a chunk gives to the gradients, from the widest prefix down."""
        Q, product = self._sums[: parts[0].E.numel()].view_as(parts[0].E), self._product[: len(f)]
        radial = torch.zeros_like(parts[0].coefficients)
        if self.row_negatives is not None:
            self._add_alone(rows, self.row_negatives, scaled, product, parts)

        for prefix, of_prefix in zip(reversed(self.prefixes), reversed(parts), strict=True):
            block, coefficients = prefix.block, of_prefix.coefficients[:, None]
            if prefix is self.prefixes[-1]:
                torch.mul(of_prefix.E, coefficients, out=Q)
            else:
                Q.addcmul_(of_prefix.E, coefficients)
            self._add_block(block, Q, scaled, product)
            if self.query_gradient is not None:
                gradient = torch.mul(product[:, block], self.scale, out=self.query_gradient[rows, block])
                if of_prefix.radial is not None:
                    radial += of_prefix.radial
                    gradient.addcmul_(f[:, block], radial[:, None], value=-1)

        if self.query_gradient is not None and self.queries.inverse_norms is not None:
            self.query_gradient[rows].mul_(self.queries.inverse_norms[rows, None])
        if self.needs.scale:
            self.scale_gradient += (product * f).sum(1, dtype=self.dtype).sum()

    def _add_alone(
        self,
        rows: slice,
        row_negatives: Embeddings,
        scaled: Tensor,
        product: Tensor,
        parts: Sequence[OfChunk],
    ) -> None:
        """What the cells that rows have alone give to the products, and the gradient of row negatives."""
        r, of_alone = row_negatives.rows(rows), torch.zeros_like(parts[0].coefficients)
        radial, gradient = torch.zeros_like(of_alone), self.row_negative_gradient
        for prefix, of_prefix in zip(reversed(self.prefixes), reversed(parts), strict=True):
            block = prefix.block
            if of_prefix.alone is not None:
                of_alone += of_prefix.alone
            torch.mul(r[:, block], of_alone[:, None], out=product[:, block])
            if gradient is not None:
                of_block = torch.mul(scaled[:, block], of_alone[:, None], out=gradient[rows, block])
                if of_prefix.alone_radial is not None:
                    radial += of_prefix.alone_radial
                    of_block.addcmul_(r[:, block], radial[:, None], value=-1)
        if gradient is not None and row_negatives.inverse_norms is not None:
            gradient[rows].mul_(row_negatives.inverse_norms[rows, None])

    def _add_block(self, block: slice, Q: Tensor, scaled: Tensor, product: Tensor) -> None:
        """The two products of a block of columns."""
        wants_product, first = self.query_gradient is not None or self.needs.scale, 0
        has_some = self.row_negatives is not None  # which are in the product already
        for embeddings in self.blocks:
            cells = Q[:, first : first + len(embeddings.matrix)]
            if wants_product:
                product[:, block].addmm_(cells, embeddings.matrix[:, block], beta=int(first > 0 or has_some))
            if embeddings.gradient is not None:
                embeddings.gradient[:, block].addmm_(cells.T, scaled[:, block])
            first += len(embeddings.matrix)

    def _finish_columns(self) -> None:
        """Takes off the candidates' and negatives' gradients what lies along their prefixes."""
        along = None
        for prefix in reversed(self.prefixes):
            if prefix.along is None or prefix.columns is None:
                return
            part = _radial(prefix.along, prefix.columns)
            along, first = part if along is None else along + part, 0
            for embeddings in self.blocks:
                last = first + len(embeddings.matrix)
                if embeddings.gradient is not None:
                    block = embeddings.gradient[:, prefix.block]
                    block.addcmul_(embeddings.matrix[:, prefix.block], along[first:last, None], value=-1)
                first = last

    def _of_blocks(self) -> list[Tensor | None]:
        self._finish_columns()
        return [block.gradient for block in self.blocks]

    def _gradients(self) -> Gradients:
        gradients = super()._gradients()
        if not self._surplus:
            return gradients
        wide = {name: getattr(gradients, name) for name in EMBEDDINGS}
        padded = {name: x if x is None else F.pad(x, (0, self._surplus)) for name, x in wide.items()}
        return gradients._replace(**padded)


def _norms(x: Tensor) -> Norms:
    inverse = inverse_norms(x)
    return Norms(inverse, inverse < 1 / LEAST_NORM)


def _relative(x: Tensor, widest: Embeddings) -> Norms:
    """The norms of a prefix of rows that are read at the norm 1 of their widest prefix."""
    norms = _norms(x)
    assert widest.inverse_norms is not None
    return Norms(norms.factors / widest.inverse_norms, norms.moves)


def _radial(of_scores: Tensor, norms: Norms, rows: slice = slice(None)) -> Tensor:
    """What times a row is taken off its gradient, from sums of products of scores and their gradients."""
    return (of_scores * norms.factors[rows].square()).masked_fill_(~norms.moves[rows], 0)
