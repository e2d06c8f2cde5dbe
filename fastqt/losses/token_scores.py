"""The MaxSim scores of queries with documents, for losses of scores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fastqt.checks import check_backward
from fastqt.fields import with_tensors, without_tensors
from fastqt.loss import Arguments, loss
from fastqt.losses.maxsim import (
    Documents,
    MaxSim,
    MaxSimProblem,
    Queries,
    TokenMask,
    check_masks,
    problem_of,
)
from fastqt.losses.scored import ScoreNeeds, slices
from fastqt.problem import loss_dtype


@loss(check=check_masks)
def maxsim_scores(
    call: Arguments,
    queries: Queries,
    documents: Documents,
    *,
    query_mask: TokenMask = None,
    document_mask: TokenMask = None,
    normalize: bool = True,
) -> Tensor:
    """ColBERT's MaxSim of each query with each document, as a matrix.

    The score of query i with document j is the sum over the query's tokens t of max_u <q_it, d_ju>. The
    scores of tokens are made in tiles, and no matrix of them is stored: the backward pass makes them once
    more. Where all documents are candidates of a softmax, `maxsim_loss` stores no scores of texts either.
    A late-interaction model that learns from a teacher's scores, or from its own dense ones, takes these.

    Args:
        queries: (N, Tq, D) floating point, a vector for each token.
        documents: (M, Td, D), dtype and device as `queries`.
        query_mask, document_mask: (N, Tq) and (M, Td) bool, True where there is a token, as of `maxsim_loss`.
        normalize: tokens count at norm 1; otherwise as they are.

    Returns:
        (N, M), float64 for float64 tokens, float32 otherwise; 0 for a query and minus infinity for a document
        without tokens. It is differentiable once, and of equal maxima the gradient flows to the first.

    Raises:
        ValueError, TypeError: naming the argument, what is wanted and what came.

    Example:
        >>> import torch, fastqt
        >>> queries, documents = torch.randn(8, 5, 16), torch.randn(24, 9, 16)
        >>> fastqt.maxsim_scores(queries, documents).shape
        torch.Size([8, 24])
        >>> fastqt.maxsim_scores(torch.eye(2)[:, None], torch.eye(2)[None])  # each token is in the document
        tensor([[1.],
                [1.]])

    Source: Khattab and Zaharia, "ColBERT: Efficient and effective passage search via contextualized late
    interaction over BERT" (2020), eq. 3.
    """
    p = problem_of(queries, documents, query_mask, document_mask, normalize)
    return _scores(p, call.function, p.queries, p.candidates).to(loss_dtype(queries))


class _Scores(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, p: MaxSimProblem, function: str, queries: Tensor, documents: Tensor) -> Tensor:
        ctx.function = function
        ctx.problem, tensors = without_tensors(p)
        ctx.save_for_backward(*tensors)
        scoring = MaxSim(p, None, ScoreNeeds())
        chunks = [scoring.scores(rows) for rows in slices(len(queries), scoring.rows_at_once)]
        return torch.cat(chunks)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        check_backward(ctx.function, upstream[0])
        # Reading saved tensors checks that nothing has changed them in place.
        p: MaxSimProblem = with_tensors(ctx.problem, ctx.saved_tensors)
        ones = torch.ones(len(p.queries), dtype=upstream[0].dtype, device=p.queries.device)
        scoring = MaxSim(p, ones, ScoreNeeds(*ctx.needs_input_grad[2:]))
        for rows in slices(len(p.queries), scoring.rows_at_once):
            without_tokens = scoring.scores(rows).isneginf()
            scoring.add(rows, upstream[0][rows].masked_fill(without_tokens, 0))
        of_queries, of_documents, _ = scoring.gradients()
        return None, None, of_queries, of_documents


# torch gives `apply` no types.
_scores: Callable[..., Tensor] = _Scores.apply
