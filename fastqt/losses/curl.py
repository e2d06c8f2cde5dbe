"""CURL's losses, of a positive and a negative or of the means of blocks of them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fastqt.arguments import ContextSize, Rows
from fastqt.checks import require
from fastqt.distributed.group import GroupLike
from fastqt.loss import Arguments, loss
from fastqt.losses.common import check_window, device_of
from fastqt.options import BlockNegatives, Reduction
from fastqt.problem import loss_dtype, reduce
from fastqt.targets import Targets, Window


@loss("CURLLoss")
def curl_loss(
    call: Arguments,
    queries: Rows,
    positives: Rows,
    negatives: Rows,
    *,
    reduction: Reduction = "mean",
    group: GroupLike | None = None,
) -> Tensor:
    """log(1 + exp(-<f_i, g+_i - g-_i>)): each query's positive is to score above its negative.

    Args:
        queries, positives, negatives: (N, D) floating point; float16 and bfloat16 are computed in float32.
        reduction: "mean" over the rows, "sum", or "none".
        group: as of `contrastive_loss`.

    Returns:
        A scalar, or (N,) for reduction="none"; float64 for float64 inputs, float32 otherwise.

    Raises:
        ValueError, TypeError: naming the argument, what is wanted and what came.

    Example:
        >>> import torch, fastqt
        >>> queries, positives, negatives = torch.randn(3, 8, 16)
        >>> fastqt.curl_loss(queries, positives, negatives, reduction="none").shape
        torch.Size([8])
        >>> round(fastqt.curl_loss(queries, positives, positives).item(), 4)  # log 2
        0.6931

    Source: Arora et al., "A theoretical analysis of contrastive unsupervised representation learning" (2019).
    """
    return call.batch.reduced(_losses(queries, positives, negatives), reduction)


def _losses(
    queries: Tensor, positives: Tensor, negatives: Tensor, has_positive: Tensor | None = None
) -> Tensor:
    """The loss of each row, (N,); 0 and without gradient where `has_positive`, (N,) bool, is False."""
    dtype = loss_dtype(queries)
    differences = positives.to(dtype) - negatives.to(dtype)
    if has_positive is not None:
        # The zeros keep a candidate that is not finite out of the gradient too, where the loss is 0.
        differences = differences.where(has_positive[:, None], 0)
    losses = -F.logsigmoid((queries.to(dtype) * differences).sum(1))  # softplus rounds beyond 20
    return losses if has_positive is None else losses.where(has_positive, 0)


@loss("CURLBlockLoss", check=check_window)
def curl_block_loss(
    call: Arguments,
    queries: Rows,
    candidates: Rows,
    *,
    context_size: ContextSize = 1,
    document_ids: Tensor | None = None,
    negatives: BlockNegatives = "shift",
    generator: torch.Generator | None = None,
    reduction: Reduction = "mean",
    group: GroupLike | None = None,
) -> Tensor:
    """`curl_loss` of each query with the mean of its neighbours against the mean of as many others.

    A row without a neighbour, such as the only sentence of a document, adds nothing to the loss and gets no
    gradient from it. "mean" divides by all N rows, as the mean of `contrastive_loss` does.

    Args:
        queries, candidates: (N, D) floating point; float16 and bfloat16 are computed in float32.
        context_size: half-width k of the window of neighbours; for "shift", 2 k + 1 <= N // 2.
        document_ids: (N,) integers; the window stays within equal ids.
        negatives: "shift": the neighbours of the row N // 2 further on, circularly; "complement": all
            that are neither the sentence nor a neighbour; "random": a permutation's neighbours.
        generator: draws the permutation of "random"; torch's default generator if None. A generator breaks
            the graph of torch.compile.
        reduction: "mean" over the rows, "sum", or "none".
        group: as of `contrastive_loss`; the permutation is drawn on its first rank.

    Returns:
        A scalar, or (N,) for reduction="none"; float64 for float64 inputs, float32 otherwise.

    Raises:
        ValueError, TypeError: naming the argument, what is wanted and what came.

    Example:
        >>> import torch, fastqt
        >>> queries, candidates = torch.randn(2, 12, 16)  # of twelve sentences in their order
        >>> fastqt.curl_block_loss(queries, candidates, context_size=2).shape
        torch.Size([])
        >>> generator = torch.Generator().manual_seed(0)
        >>> fastqt.curl_block_loss(queries, candidates, negatives="random", generator=generator).shape
        torch.Size([])

    Source: Arora et al., "A theoretical analysis of contrastive unsupervised representation learning"
    (2019), section 6, on windows of sentences.
    """
    batch = call.batch
    n, N = len(queries), batch.total()
    window = batch.targets(Window(context_size, document_ids=document_ids))
    gathered = batch.gather(candidates)
    order = None
    if negatives == "random":
        device = device_of(generator, queries.device)
        order = batch.of_first_rank(torch.randperm(N, generator=generator, device=device).to(queries.device))

    def losses(part: str) -> Tensor:
        blocks = _blocks(window, gathered, n, batch.first(), context_size, negatives, order)
        return reduce(_losses(queries, *blocks), part)

    with batch.agreeing():
        window.check(n, N, "zero")
    return batch.loss(reduction, (queries, gathered), losses)


def _blocks(
    window: Targets,
    candidates: Tensor,  # (N, D)
    n: int,
    first: int,
    context_size: int,
    negatives: BlockNegatives,
    order: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The means of neighbours and those of others, (n, D) each, for the n rows from `first` on.

    And (n,) bool, whether a row has a neighbour.
    """
    N, candidates = len(candidates), candidates.to(loss_dtype(candidates))
    starts, columns, weights = window.rows(n, N, candidates.device).compressed()

    def means(matrix: Tensor, weights: Tensor) -> Tensor:
        weights = weights.to(matrix.dtype)
        return F.embedding_bag(columns, matrix, starts[:-1], mode="sum", per_sample_weights=weights)

    neighbours = means(candidates.new_ones(N, 1), weights > 0)
    if negatives == "complement":
        counts = neighbours + 1
        require(
            (counts < N).all(),
            "context_size: leaves no sentence of N={N} for negatives='complement'",
            N=N,
        )
        own = candidates[first : first + n]
        others = (candidates.sum(0) - own - means(candidates, weights > 0)) / (N - counts)
    elif negatives == "shift":
        if 2 * context_size + 1 > N // 2:
            raise ValueError(
                f"context_size: want 2 k + 1 <= N // 2 for negatives='shift', got k={context_size} and N={N}"
            )
        others = means(candidates.roll(-(N // 2), 0), weights)
    else:
        others = means(candidates[order], weights)
    return means(candidates, weights), others, neighbours[:, 0] > 0
