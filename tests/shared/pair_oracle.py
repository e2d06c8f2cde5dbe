"""Losses of pairs from all scores of each direction at once, with what leaves them, in float64 and torch.

It shares no code with fastqt. No loss is a difference of large numbers, so that those of learnt pairs keep
their digits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import fastqt
from fastqt.exclusions import OfIds
from tests.shared.filters import OF_IDS

# No score of a loss is as small, so that its exponential is 0 beside any other, and its gradient too.
LEAST = -1e4
DIRECTIONS = ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")
HARDNESS = (None, "in_batch_negatives", "hard_negatives", "all_negatives")


class Ids(NamedTuple):
    """A filter by ids of queries and, if these differ, of documents."""

    kind: type[OfIds]
    queries: Tensor
    documents: Tensor | None = None

    def of(self, side: str) -> Tensor:
        return self.queries if side == "query" or self.documents is None else self.documents


class Plain(NamedTuple):
    """What leaves a loss: by ids, and by a margin."""

    ids: tuple[Ids, ...] = ()
    margin: fastqt.Margin | None = None

    @property
    def exclude(self) -> list[Any]:
        of_ids = [x.kind(x.queries, x.documents) for x in self.ids]
        return [*of_ids, *([] if self.margin is None else [self.margin])]

    def between(self, rows: str, columns: str) -> Tensor:
        """Which cells of two sides leave by their ids, (N, N)."""
        return _either(OF_IDS[x.kind](x.of(rows)[:, None], x.of(columns)) for x in self.ids)

    def of_hard_negatives(self, rows: str) -> Tensor:
        """The same of hard negatives, which are in the parts of their queries and have no ids."""
        parts = [x for x in self.ids if x.kind is fastqt.Within]
        return _either(x.of(rows)[:, None] != x.queries for x in parts)

    def above(self, similar: Tensor, pair: Tensor) -> Tensor:
        """Which cells are too similar for a pair's own similarity, (N, M)."""
        if self.margin is None:
            return torch.zeros_like(similar, dtype=torch.bool)
        unit = pair.abs() if self.margin.strategy == "relative" else 1
        return similar > (pair + self.margin.margin * unit)[:, None]

    def above_of_hard(self, similar: Tensor, pair: Tensor) -> Tensor:
        """The same of a query's hard negatives, (N, N), where its own ones are on the diagonal."""
        own = torch.eye(len(pair), dtype=torch.bool)
        return self.above(similar, pair) & ~(own & self.spares)

    @property
    def spares(self) -> bool:
        """Whether the margin lets own negatives be."""
        return self.margin is not None and self.margin.spare_own_negatives


def _either(cells: Any) -> Tensor:
    found = torch.tensor(False)
    for each in cells:
        found = found | each
    return found


def cosines(a: Tensor, b: Tensor) -> Tensor:
    return F.normalize(a, dim=-1) @ F.normalize(b, dim=-1).T


def softmax(positive: Tensor, others: Sequence[Tensor], copies: int = 1) -> Tensor:
    """The cross-entropy of a positive that is there several times, without what nearly cancels."""
    least = torch.full((len(positive), 1), LEAST, dtype=torch.float64)
    lead = torch.cat([least, *others], 1).logsumexp(1) - positive - math.log(copies)
    return math.log(copies) - F.logsigmoid(-lead)


def left(scores: Tensor, *leave: Tensor) -> Tensor:
    for each in leave:
        scores = scores.masked_fill(each, -math.inf)
    return scores


def ranked(
    q: Tensor,
    d: Tensor,
    hard: Sequence[Tensor] = (),
    plain: Plain = Plain(),  # noqa: B008
    directions: Sequence[str] = ("query_to_doc",),
    mode: str = "joint",
    hardness: str | None = None,
    *,
    scale: float | Tensor,
    strength: float = 0.0,
    weight: float = 0.0,
    normalize: bool = True,
) -> Tensor:
    """The loss of each row of multiple negatives ranking; `weight` is added to own hard negatives' scores."""
    if normalize:
        q, d, *hard = (F.normalize(x, dim=1) for x in (q, d, *hard))
    eye = torch.eye(len(q), dtype=torch.bool)
    everything, pair = torch.ones_like(eye), (q * d).sum(1)
    in_batch = ~eye & (hardness in ("in_batch_negatives", "all_negatives"))
    of_own = eye & (hardness in ("hard_negatives", "all_negatives"))

    def cells(a: Tensor, b: Tensor, stay: Tensor, leave: Tensor, more: Tensor, *, own: bool) -> Tensor:
        C = a @ b.T
        scores = scale * C + torch.where(more, strength * C.detach(), 0.0) + weight * (eye & own)
        above = (plain.above_of_hard if own else plain.above)(C, pair)
        return left(scores, ~stay, leave, above)

    def block(a: Tensor, b: Tensor, rows: str, columns: str, more: Tensor) -> Tensor:
        return cells(a, b, ~eye, plain.between(rows, columns), more, own=False)

    none, of_hard = ~everything, plain.of_hard_negatives
    blocks = {
        "query_to_doc": [block(q, d, "query", "document", in_batch)],
        "query_to_query": [block(q, q, "query", "query", none)],
        "doc_to_query": [block(d, q, "document", "query", none)],
        "doc_to_doc": [block(d, d, "document", "document", none)],
    }
    for x in hard:
        to_hard = cells(q, x, everything, of_hard("query"), in_batch | of_own, own=True)
        blocks["query_to_doc"].append(to_hard)
        blocks["doc_to_doc"].append(cells(d, x, ~eye, of_hard("document"), none, own=False))

    positive = scale * pair
    if mode == "per_direction":
        return torch.stack([softmax(positive, blocks[name]) for name in directions]).mean(0)
    copies = 2 if "doc_to_query" in directions else 1
    return softmax(positive, [x for name in directions for x in blocks[name]], copies)


class Result(NamedTuple):
    """The loss of each row (N,), and the gradients of the weighted sum of them."""

    loss: np.ndarray
    queries: np.ndarray
    documents: list[np.ndarray]
    scale: float


def ranking(
    queries: np.ndarray,
    documents: Sequence[np.ndarray],
    *,
    scale: float,
    normalize: bool,
    directions: Sequence[str],
    weights: np.ndarray,
    partition_mode: str = "joint",
    hardness_mode: str | None = None,
    hardness_strength: float = 0.0,
    margin: float | None = None,
    margin_strategy: str = "absolute",
) -> Result:
    """`ranked` with its gradients, of the arguments of `multiple_negatives_ranking_loss` in numpy."""
    arrays = [np.asarray(x, dtype=np.float64) for x in (queries, *documents, scale)]
    leaves = [torch.from_numpy(x.copy()).requires_grad_() for x in arrays]
    q, d, *hard, of_scale = leaves
    how = {"scale": of_scale, "strength": hardness_strength, "normalize": normalize}
    plain = Plain(margin=None if margin is None else fastqt.Margin(margin, margin_strategy))  # type: ignore[arg-type]
    rows = ranked(q, d, hard, plain, directions, partition_mode, hardness_mode, **how)  # type: ignore[arg-type]
    gradients = torch.autograd.grad(rows @ torch.from_numpy(weights).double(), leaves)
    of_queries, *of_documents, of_number = (x.numpy() for x in gradients)
    return Result(rows.detach().numpy(), of_queries, of_documents, float(of_number))


def settings() -> list[tuple[tuple[str, ...], str]]:
    """All sets of directions with their partition modes."""
    found = []
    for bits in range(8):
        names = tuple(name for i, name in enumerate(DIRECTIONS) if i == 0 or bits >> (i - 1) & 1)
        found.append((names, "joint"))
        if set(names) <= {"query_to_doc", "doc_to_query"}:
            found.append((names, "per_direction"))
    return found
