"""CURL's losses, of a positive and a negative or of the means of blocks of them."""

from __future__ import annotations

from collections.abc import Hashable
from functools import partial
from typing import get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from fastqt.checks import check_embeddings, check_option, require
from fastqt.distributed import collectives
from fastqt.distributed.group import Group, GroupLike, as_group
from fastqt.distributed.shards import Shards, agree_on_rows, local_rows, shard_rows
from fastqt.losses.common import device_of
from fastqt.options import BlockNegatives, Reduction
from fastqt.problem import REDUCTIONS, loss_dtype, reduce
from fastqt.targets import Targets, Window

BLOCK_NEGATIVES: tuple[str, ...] = get_args(BlockNegatives)


def curl_loss(
    queries: Tensor,
    positives: Tensor,
    negatives: Tensor,
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
    if group is not None:
        given = {"queries": queries, "positives": positives, "negatives": negatives}
        shards = agree_on_rows(as_group(group), "fastqt.curl_loss", partial(_facts, reduction), **given)
        own = (local_rows(name, x) for name, x in given.items())
        return _reduced(shards, _losses(*own), reduction)
    check_embeddings(queries=queries, positives=positives, negatives=negatives)
    check_option("reduction", reduction, REDUCTIONS)
    if not len(queries) == len(positives) == len(negatives):
        lengths = f"{len(queries)}, {len(positives)} and {len(negatives)}"
        raise ValueError(f"positives, negatives: want a row for each query, got {lengths} rows")
    return reduce(_losses(queries, positives, negatives), reduction)


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


def _facts(reduction: Reduction, **more: Hashable) -> dict[str, Hashable]:
    check_option("reduction", reduction, REDUCTIONS)
    return {"reduction": reduction, **more}


def _reduced(shards: Shards, rows: Tensor, reduction: Reduction) -> Tensor:
    local = rows if reduction == "none" else rows.sum()
    return collectives.reduced(local, reduction, shards.total("rows"), shards.group)


def curl_block_loss(
    queries: Tensor,
    candidates: Tensor,
    *,
    context_size: int = 1,
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
    if group is not None:
        rest = context_size, document_ids, negatives, generator, reduction
        return _blocks_over_group(as_group(group), queries, candidates, *rest)
    check_embeddings(queries=queries, candidates=candidates)
    check_option("negatives", negatives, BLOCK_NEGATIVES)
    check_option("reduction", reduction, REDUCTIONS)
    N, M = len(queries), len(candidates)
    if N != M:
        raise ValueError(f"candidates: want one for each of N={N} queries, got {M}")
    window = Window(context_size, document_ids=document_ids)
    window.check(N, M, "zero")
    order = _order(negatives, N, queries.device, generator)
    blocks = _blocks(window, candidates, N, 0, context_size, negatives, order)
    return reduce(_losses(queries, *blocks), reduction)


def _order(
    negatives: BlockNegatives, N: int, device: torch.device, generator: torch.Generator | None
) -> Tensor | None:
    """The permutation of "random"; None for the others."""
    if negatives != "random":
        return None
    return torch.randperm(N, generator=generator, device=device_of(generator, device)).to(device)


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
            f"context_size: leaves no sentence of N={N} for negatives='complement'",
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


def _blocks_over_group(
    group: Group,
    queries: Tensor,
    candidates: Tensor,
    context_size: int,
    document_ids: Tensor | None,
    negatives: BlockNegatives,
    generator: torch.Generator | None,
    reduction: Reduction,
) -> Tensor:
    """The loss of all ranks' sentences."""

    def facts() -> dict[str, Hashable]:
        check_option("negatives", negatives, BLOCK_NEGATIVES)
        Window(context_size, document_ids=document_ids).check_queries(len(local_rows("queries", queries)))
        given = {"document_ids given": document_ids is not None, "context_size": context_size}
        return _facts(reduction, negatives=negatives, **given)

    shards = agree_on_rows(group, "fastqt.curl_block_loss", facts, queries=queries, candidates=candidates)
    queries, candidates = local_rows("queries", queries), local_rows("candidates", candidates)
    group, n = shards.group, len(queries)
    counts, N, first = shards.counts["rows"], shards.total("rows"), shards.first("rows")
    gathered = collectives.gather(candidates, counts, group)
    order = _order(negatives, N, queries.device, generator)
    if order is not None:
        order = collectives.of_first_rank(order, group)
    window = Window(context_size, document_ids=document_ids).of_shard(shard_rows(shards, "rows", "rows"))
    with shards.agreeing():
        window.check(n, N, "zero")
        if n:
            rows = _losses(queries, *_blocks(window, gathered, n, first, context_size, negatives, order))
        else:
            rows = collectives.nothing((queries, gathered), "none")
    return _reduced(shards, rows, reduction)
