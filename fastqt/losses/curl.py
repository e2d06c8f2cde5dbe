"""CURL's losses, of a positive and a negative or of the means of blocks of them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fastqt.checks import check_embeddings, check_option
from fastqt.losses.common import device_of
from fastqt.problem import REDUCTIONS, reduce
from fastqt.targets import Window

BLOCK_NEGATIVES = ("shift", "complement", "random")


def curl_loss(queries: Tensor, positives: Tensor, negatives: Tensor, *, reduction: str = "mean") -> Tensor:
    """log(1 + exp(-<f_i, g+_i - g-_i>)): each query's positive is to score above its negative.

    Args:
        queries, positives, negatives: (N, D).
        reduction: "mean" over the rows, "sum", or "none".

    Returns:
        A scalar, or (N,) for reduction="none".

    Raises:
        ValueError, TypeError: naming the argument, what is wanted and what came.

    Source: Arora et al., "A theoretical analysis of contrastive unsupervised representation learning" (2019).
    """
    check_embeddings(queries=queries, positives=positives, negatives=negatives)
    check_option("reduction", reduction, REDUCTIONS)
    if not len(queries) == len(positives) == len(negatives):
        lengths = f"{len(queries)}, {len(positives)} and {len(negatives)}"
        raise ValueError(f"positives, negatives: want a row for each query, got {lengths} rows")
    margins = (queries * (positives - negatives)).sum(1)
    return reduce(-F.logsigmoid(margins), reduction)  # softplus rounds beyond 20


def curl_block_loss(
    queries: Tensor,
    candidates: Tensor,
    *,
    context_size: int = 1,
    document_ids: Tensor | None = None,
    negatives: str = "shift",
    generator: torch.Generator | None = None,
    reduction: str = "mean",
) -> Tensor:
    """`curl_loss` of each query with the mean of its neighbours against the mean of as many others.

    Args:
        queries, candidates: (N, D).
        context_size: half-width k of the window of neighbours; for "shift", 2 k + 1 <= N // 2.
        document_ids: (N,) integers; the window stays within equal ids.
        negatives: "shift": the neighbours of the row N // 2 further on, circularly; "complement": all
            that are neither the sentence nor a neighbour; "random": a permutation's neighbours.
        generator: draws the permutation of "random"; torch's default generator if None.
        reduction: "mean" over the rows, "sum", or "none".

    Returns:
        A scalar, or (N,) for reduction="none".

    Raises:
        ValueError, TypeError: naming the argument, what is wanted and what came.

    Source: Arora et al., "A theoretical analysis of contrastive unsupervised representation learning"
    (2019), section 6, on windows of sentences.
    """
    check_embeddings(queries=queries, candidates=candidates)
    check_option("negatives", negatives, BLOCK_NEGATIVES)
    check_option("reduction", reduction, REDUCTIONS)
    N, M, device = len(queries), len(candidates), queries.device
    if N != M:
        raise ValueError(f"candidates: want one for each of N={N} queries, got {M}")
    window = Window(context_size, document_ids=document_ids)
    window.check(N, M, "zero")
    starts, columns, weights = window.rows(N, M, device).compressed()

    def means(matrix: Tensor, weights: Tensor) -> Tensor:
        weights = weights.to(matrix.dtype)
        return F.embedding_bag(columns, matrix, starts[:-1], mode="sum", per_sample_weights=weights)

    if negatives == "complement":
        counts = means(candidates.new_ones(N, 1), (weights > 0)) + 1
        if bool((counts >= N).any()):
            raise ValueError(f"context_size: leaves no sentence of N={N} for negatives='complement'")
        others = (candidates.sum(0) - candidates - means(candidates, weights > 0)) / (N - counts)
    elif negatives == "shift":
        if 2 * context_size + 1 > N // 2:
            raise ValueError(
                f"context_size: want 2 k + 1 <= N // 2 for negatives='shift', got k={context_size} and N={N}"
            )
        others = means(candidates.roll(-(N // 2), 0), weights)
    else:
        permutation = torch.randperm(N, generator=generator, device=device_of(generator, device))
        others = means(candidates[permutation.to(device)], weights)
    return curl_loss(queries, means(candidates, weights), others, reduction=reduction)
