"""The spread-out regulariser (GOR), from inner products of columns in place of all pairs of rows."""

from __future__ import annotations

import torch
from torch import Tensor

from fastqt.arguments import NotNegative, Rows
from fastqt.devices import accumulation_dtype
from fastqt.distributed.batch import Batch
from fastqt.distributed.group import GroupLike
from fastqt.loss import Arguments, loss
from fastqt.losses.grams import gram, sums
from fastqt.problem import loss_dtype, unit_rows


def _fit(mean_weight: float, second_moment_weight: float) -> None:
    if not mean_weight and not second_moment_weight:
        raise ValueError("mean_weight: want a number above 0 where second_moment_weight is 0, got 0")


@loss("SpreadOutLoss", check=_fit)
def spread_out_loss(
    call: Arguments,
    embeddings: Rows,
    *,
    mean_weight: NotNegative = 1.0,
    second_moment_weight: NotNegative = 1.0,
    hinge: bool = True,
    normalize: bool = True,
    group: GroupLike | None = None,
) -> Tensor:
    """Global orthogonal regularisation (GOR): scores of rows with other rows as of random directions.

    With M1 the mean of the scores of all rows with all other rows, and M2 that of their squares, it is
    mean_weight M1^2 + second_moment_weight max(0, M2 - 1 / D). Random unit vectors of width D have M1 = 0 and
    M2 = 1 / D. It is added to another loss, once for each side of the pairs.

    M2 follows from the inner products of columns: the sum of all squared scores is the squared norm of X^T X,
    D x D. Two products of N x D x D give loss and gradients; where there are fewer rows than columns, two of
    N x N x D do. The memory beside copies of the rows is a few matrices of min(N, D)^2.

    Args:
        embeddings: (N, D) floating point; float16 and bfloat16 are computed in float32. One row has a loss
            of 0.
        mean_weight: a number >= 0; with 0 nothing is computed for M1.
        second_moment_weight: a number >= 0; with 0 nothing is computed for M2, and it takes O(N D).
        hinge: with False the second term is M2 itself, as EmbeddingGemma has it (beside a mean_weight of 0).
        normalize: score by cosine, otherwise by the inner product.
        group: as of `contrastive_loss`. All rows of all ranks are one batch. What travels is X^T X of each
            rank, which are added up, or all rows where they are at most D; and no gradients.

    Returns:
        A scalar, of the whole batch; float64 for float64 inputs, float32 otherwise.

    Raises:
        ValueError, TypeError: naming the argument, what is wanted and what came.

    Example:
        >>> import torch, fastqt
        >>> round(fastqt.spread_out_loss(torch.ones(8, 4)).item(), 4)  # all alike: 1 + (1 - 1 / 4)
        1.75
        >>> fastqt.spread_out_loss(torch.eye(4)).item()
        0.0
        >>> queries, passages = torch.randn(2, 8, 16)
        >>> of_gemma = {"mean_weight": 0.0, "hinge": False}
        >>> sum(fastqt.spread_out_loss(x, **of_gemma) for x in (queries, passages)).shape
        torch.Size([])

    Source: Zhang et al., "Learning spread-out local feature descriptors" (2017); Vera et al.,
    "EmbeddingGemma" (2025).
    """
    batch = call.batch
    dtype = loss_dtype(embeddings)
    rows = embeddings.to(dtype)
    if normalize:
        rows = unit_rows(rows)

    N, D = batch.total(), rows.shape[1]
    cells = N * (N - 1)
    total, squares, fourths = _sums(batch, rows)
    value = 0 * squares
    if mean_weight and cells:
        value = value + mean_weight * ((total.square().sum() - squares) / cells).square()
    if second_moment_weight and cells:
        square_scores = _few_rows(batch, rows) if N <= D else _many_rows(batch, rows, squares, fourths)
        moment = square_scores / cells
        value = value + second_moment_weight * ((moment - 1 / D).relu() if hinge else moment)
    return value.to(dtype)


def _sums(batch: Batch, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of all ranks' rows their sum (D,), and the sums of their squared norms and of the squares of these."""
    dtype = accumulation_dtype(rows.device)
    total, squares = sums(rows, dtype)
    local = torch.cat([total, torch.stack([squares.sum(), squares.square().sum()])])
    everywhere = batch.sum_replicated(local)
    return everywhere[:-2], everywhere[-2], everywhere[-1]


def _few_rows(batch: Batch, rows: Tensor) -> Tensor:
    """The sum of the squared scores of all rows with all other rows, from the scores."""
    scores = gram(batch.gather_replicated(rows).T)
    others = scores - scores.diagonal().diag_embed()
    return others.square().sum(dtype=accumulation_dtype(rows.device))


def _many_rows(
    batch: Batch,
    rows: Tensor,
    squares: Tensor,  # () the sum of all squared norms, which is the trace of the Gram matrix
    fourths: Tensor,  # () that of their squares, which are the squared scores of rows with themselves
) -> Tensor:
    """The same from the columns' Gram matrix G.

    |G|^2 = |G - m I|^2 + 2 m tr G - m^2 D for any m. With the mean of the diagonal for m, which is N / D of
    unit rows, what is added up in float32 is not much greater than its deviations are.
    """
    columns = batch.sum_replicated(gram(rows))
    D = columns.shape[0]
    mean = (squares.detach() / D).to(columns.dtype)
    deviations = columns - mean * torch.eye(D, dtype=columns.dtype, device=columns.device)
    m = mean.to(squares.dtype)
    return deviations.square().sum(dtype=squares.dtype) + 2 * m * squares - m * m * D - fourths
