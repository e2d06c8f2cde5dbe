"""The positives of losses from labels in blocks: their exact scores, losses of rows, and gradients.

Rows and candidates are sorted by label. The positives of successive rows then lie in one range of columns, so
that a small product gives their scores. Of all candidates with other labels nothing is needed but their
logsumexp, which an engine has computed. Neither the scores of all cells nor the list of all pairs is formed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import NamedTuple

from fastqt.autograd.walked import Walked, adding
from fastqt.devices import accumulation_dtype
from fastqt.engines.own_products import multiply, product
from fastqt.fields import Differentiable
from fastqt.losses.positives import Block, Positives
from fastqt.torch_modes import tf32_allowed, without_autocast

T = TypeVar("T")


class SameLabelInputs(NamedTuple, Generic[T]):
    """Something of each input of a `SameLabelProblem` that there are gradients of."""

    queries: T | None = None
    candidates: T | None = None
    others: T | None = None
    scale: T | None = None


SameLabelGradients = SameLabelInputs[Tensor]


@dataclass
class SameLabelProblem(Differentiable):
    """Rows and their positives, in float32 or float64; a row without positives has loss 0."""

    queries: Tensor  # (N, D)
    candidates: Tensor  # (M, D)
    others: Tensor  # (N,) logsumexp of the candidates with other labels; -inf where there are none
    scale: float | Tensor  # ()
    positives: Positives
    blocks: tuple[Block, ...]
    link: str  # a key of LINKS

    needs_type: ClassVar[type[Any]] = SameLabelInputs


class _Tile(NamedTuple):
    """Rows against a range of sorted columns."""

    columns: Tensor  # (w,) indices of candidates
    products: Tensor  # (n, w) float64, without the scale
    no_positive: Tensor  # (n, w) bool


class _NTXent:
    """The sum over a row's positives p of softplus(others - s_p): each competes with the negatives alone."""

    def __init__(self, others: Tensor, counts: Tensor) -> None:
        self.others = others[:, None]  # (n, 1), of rows that have `counts` positives
        self.loss = torch.zeros_like(others)
        self.of_others = torch.zeros_like(others)  # the gradient

    def read(self, scores: Tensor, no_positive: Tensor) -> None:
        """Takes in the scores (n, w) of a tile; those that are of no positive are -inf."""
        lead = torch.sub(self.others, scores).masked_fill_(no_positive, -torch.inf)
        self.loss += F.softplus(lead, threshold=50).sum(1)

    def gradient(self, scores: Tensor, no_positive: Tensor) -> Tensor:
        """The gradient of a tile's scores, once all tiles were read."""
        found = torch.sub(self.others, scores).masked_fill_(no_positive, -torch.inf).sigmoid_()
        self.of_others += found.sum(1)
        return found.neg_()


class _SupCon:
    """log sum_a exp s_a - mean_p s_p, with a over all candidates and p over the row's positives.

    It is a sum of two parts that are no differences of great numbers: the logsumexp of the positives less
    their mean, which is exactly 0 for a single one, and softplus(others - logsumexp of the positives).
    """

    def __init__(self, others: Tensor, counts: Tensor) -> None:
        self.others, self.counts = others, counts
        self.logsumexp = torch.full_like(others, -torch.inf)
        self.sum = torch.zeros_like(others)

    def read(self, scores: Tensor, no_positive: Tensor) -> None:
        """As of `_NTXent`."""
        self.logsumexp = torch.logaddexp(self.logsumexp, scores.logsumexp(1))
        self.sum += scores.masked_fill(no_positive, 0).sum(1)

    @property
    def loss(self) -> Tensor:
        spread = self.logsumexp - self.sum / self.counts
        return spread + F.softplus(self.others - self.logsumexp, threshold=50)

    @property
    def of_others(self) -> Tensor:
        return torch.sigmoid(self.others - self.logsumexp)

    def gradient(self, scores: Tensor, no_positive: Tensor) -> Tensor:
        """As of `_NTXent`."""
        shares = torch.sub(scores, self.logsumexp[:, None]).exp_()  # among the positives
        # Not shares * (1 - of_others): of a single positive the digits of `of_others` would be lost.
        found = shares - (1 / self.counts)[:, None]
        return found.sub_(shares.mul_(self.of_others[:, None])).masked_fill_(no_positive, 0)


LINKS: dict[str, Callable[[Tensor, Tensor], _NTXent | _SupCon]] = {"supcon": _SupCon, "ntxent": _NTXent}


@torch.no_grad()
def _walk(p: SameLabelProblem, row_weights: Tensor | None, gradients: SameLabelGradients) -> Tensor:
    """The loss of each row, (N,) float64; adds the gradients of sum_i row_weights_i loss_i."""
    dtype = accumulation_dtype(p.queries.device)
    losses = torch.zeros(len(p.queries), dtype=dtype, device=p.queries.device)
    # Autocast is off, for it would round the products to 16 bits.
    with without_autocast(p.queries):
        for block in p.blocks:
            _visit(p, block, losses, row_weights, gradients)
    return losses


def _visit(
    p: SameLabelProblem,
    block: Block,
    losses: Tensor,
    row_weights: Tensor | None,
    gradients: SameLabelGradients,
) -> None:
    """Writes the losses of a block's rows, and adds their gradients."""
    places = slice(*block.rows)
    rows, counts = p.positives.rows[places], p.positives.counts[places].to(losses.dtype)
    queries = p.queries[rows]
    link = LINKS[p.link](p.others[rows].to(losses.dtype), counts)

    tiles = list(_tiles(p, block, queries)) if len(block.columns) == 1 else None
    for tile in tiles or _tiles(p, block, queries):
        link.read(_scores(p, tile), tile.no_positive)
    losses[rows] = link.loss
    if row_weights is None:
        return

    weights = row_weights[rows]
    of_queries = torch.zeros_like(queries)
    for tile in tiles or _tiles(p, block, queries):
        found = link.gradient(_scores(p, tile), tile.no_positive).mul_(weights[:, None])
        if gradients.scale is not None:
            gradients.scale.add_(tile.products.mul_(found).sum())
        of_products = found.mul_(p.scale).to(queries.dtype)
        if gradients.queries is not None:
            multiply(of_queries, of_products, p.candidates[tile.columns], add=True)
        if gradients.candidates is not None:
            # The columns of a tile differ, so that nothing is added atomically.
            held = gradients.candidates[tile.columns]
            gradients.candidates[tile.columns] = multiply(held, of_products.T, queries, add=True)

    if gradients.queries is not None:
        gradients.queries[rows] = of_queries
    if gradients.others is not None:
        gradients.others[rows] = (link.of_others * weights).to(queries.dtype)


def _tiles(p: SameLabelProblem, block: Block, queries: Tensor) -> Iterator[_Tile]:
    positives, rows = p.positives, slice(*block.rows)
    exact = queries.double() if queries.is_cuda and tf32_allowed() else queries
    for begin, end in block.columns:
        columns = positives.columns[begin:end]
        products = product(exact, p.candidates[columns].to(exact.dtype).T)
        no_positive = positives.row_labels[rows, None] != positives.column_labels[begin:end]
        if positives.own is not None:
            no_positive |= positives.own[rows, None] == columns
        yield _Tile(columns, products.to(accumulation_dtype(products.device)), no_positive)


def _scores(p: SameLabelProblem, tile: _Tile) -> Tensor:
    return (tile.products * p.scale).masked_fill_(tile.no_positive, -torch.inf)


SAME_LABEL = Walked(adding(_walk))
