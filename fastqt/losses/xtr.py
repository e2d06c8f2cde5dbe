"""XTR, late interaction of the tokens that a search of the batch would retrieve.

A query's token retrieves the `top_k` tokens of all documents that it scores highest with. The score of a
document is the sum over the query's tokens of the best retrieved token of the document, divided by how many
of the query's tokens have retrieved one of it. Scores are made for some of the queries' tokens at a time. All
else is as in `fastqt.losses.maxsim`: places of maxima are kept until the gradients of their rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fastqt import autograd
from fastqt.checks import require
from fastqt.devices import accumulation_dtype
from fastqt.engines.own_products import product_read
from fastqt.losses.maxsim import MaxSim, MaxSimProblem, cross_entropy, problem_of
from fastqt.losses.scored import ScoreNeeds, ScoreOperator, slices
from fastqt.problem import loss_dtype
from fastqt.torch_modes import without_autocast

# How many scores of tokens there are at a time, of some of the queries' tokens with all of the documents'.
SCORES_AT_ONCE, CPU_SCORES_AT_ONCE = 2**25, 2**22


@dataclass
class XtrProblem(MaxSimProblem):
    """Queries and documents of a vector for each token, and what a token of a query retrieves."""

    query_mask: Tensor  # (N, T) bool
    top_k: int


def xtr_loss(
    queries: Tensor,  # (N, T, D)
    documents: Tensor,  # (M, U, D), of which the first N are the queries' own
    query_mask: Tensor,  # (N, T) bool
    document_mask: Tensor,  # (M, U) bool
    *,
    scale: float | Tensor,
    top_k: int,
) -> Tensor:
    """The mean cross-entropy of each query with its own document, by XTR's scores, a scalar.

    Of tokens that score exactly as the last one that is retrieved all are retrieved.

    Source: Lee et al., "Rethinking the role of token retrieval in multi-vector retrieval" (2023), eq. 5.
    """
    have_tokens = document_mask[: len(queries)].any(1).all()
    require(have_tokens, "document_mask: want at least one token of the document of each query")
    p = problem_of(queries, documents, query_mask, document_mask, normalize=False)
    excluded, first = None, 0
    of_xtr = XtrProblem(p.queries, p.candidates, scale, p.reads, p.bias, excluded, first, query_mask, top_k)
    return autograd.loss_of(of_xtr, "mean", XTR, "xtr_loss").to(loss_dtype(queries))


class Xtr(MaxSim):
    """Scores that are means of the maxima that are retrieved."""

    p: XtrProblem

    def __init__(self, p: XtrProblem, row_weights: Tensor | None, needs: ScoreNeeds) -> None:
        super().__init__(p, row_weights, needs)
        self.kernels = None
        self.shares: Tensor | None = None

    def maxima(self, rows: slice) -> tuple[Tensor, Tensor | None]:
        p = self.p
        tokens, N = p.queries[rows].flatten(0, 1), rows.stop - rows.start
        maxima, places, retrieved = _retrieved(tokens, p)
        retrieved &= p.query_mask[rows].reshape(-1, 1)

        counts = retrieved.view(N, -1, retrieved.shape[1]).sum(1).clamp_(min=1)
        kept = maxima.masked_fill(~retrieved, 0).view(N, -1, maxima.shape[1])
        means = kept.sum(1, dtype=accumulation_dtype(tokens.device)) / counts
        if p.bias is not None:
            means.masked_fill_(p.bias.isneginf().all(1), -torch.inf)
        if not self.wants_places:
            return means, None
        self.shares = retrieved.to(maxima.dtype) / counts.repeat_interleave(p.queries.shape[1], 0)
        return means, places

    def weights_of_maxima(self, d_scores: Tensor, dtype: torch.dtype) -> Tensor:
        assert self.shares is not None
        return super().weights_of_maxima(d_scores, dtype) * self.shares


def _retrieved(
    tokens: Tensor,  # (R, D), of some queries
    p: XtrProblem,
) -> tuple[Tensor, Tensor, Tensor]:
    """The maxima over each document's tokens, (R, M), their places, and whether they are retrieved."""
    (M, U, _), R = p.candidates.shape, len(tokens)
    maxima = tokens.new_empty(R, M)
    places = tokens.new_empty(R, M, dtype=torch.int32)
    retrieved = tokens.new_empty(R, M, dtype=torch.bool)

    at_once = CPU_SCORES_AT_ONCE if tokens.is_cpu else SCORES_AT_ONCE
    columns = p.candidates.flatten(0, 1).T
    for tile in slices(R, max(at_once // (M * U), 1)):
        with without_autocast(tokens):
            products = product_read(tokens[tile], columns, p.reads)
        if p.bias is not None:
            products += p.bias.flatten()
        last = products.topk(min(p.top_k, M * U), sorted=False).values.amin(1, keepdim=True)
        most, places[tile] = products.view(-1, M, U).max(2)
        retrieved[tile] = (most >= last) & (most > -torch.inf)
        maxima[tile] = most
    return maxima, places, retrieved


XTR = ScoreOperator("xtr", XtrProblem, cross_entropy, Xtr)
