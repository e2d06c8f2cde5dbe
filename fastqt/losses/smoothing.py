"""Label smoothing where each row has one target: what it adds to the cross-entropy, without a matrix.

With a share e of the target's mass spread evenly over all C cells of the row, the cross-entropy
-sum_j ((1 - e) [j = i] + e / C) log P_ij is that of the target alone, plus e (S_ii - mean_j S_ij). The mean
of a row's scores is its score with the mean of the candidates.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from fastqt.checks import check_number
from fastqt.distributed.batch import Batch
from fastqt.losses.common import scores
from fastqt.options import TargetReduction
from fastqt.problem import loss_dtype


def check_label_smoothing(value: object) -> None:
    """Raises ValueError or TypeError unless `value` is a number from 0 to 1."""
    check_number("label_smoothing", value)
    assert isinstance(value, (int, float))
    if not 0 <= value <= 1:
        raise ValueError(f"label_smoothing: want a number in 0..1, got {value}")


def smoothing_loss(
    label_smoothing: float,  # the share of the mass that is spread
    queries: Tensor,  # (N, D), this rank's
    # This rank's candidates (M, D), of which candidate i belongs to query i, and further ones.
    columns: Sequence[Tensor],
    batch: Batch,  # the rows of all ranks
    *,
    scale: float | Tensor,
    normalize: bool,
    reduction: TargetReduction,
) -> Tensor:
    """What label smoothing adds to the loss of queries among candidates and negatives; checked arguments."""
    dtype = loss_dtype(queries)
    embeddings = [x.to(dtype) for x in (queries, *columns)]
    queries, *columns = (F.normalize(x, dim=1) for x in embeddings) if normalize else embeddings
    mean = _mean_of(columns, batch)
    rows = label_smoothing * scores(queries, columns[0][: len(queries)] - mean, scale)
    # Every row has a target.
    return batch.reduced(rows, "mean" if reduction == "mean_of_targets" else reduction)


def _mean_of(columns: Sequence[Tensor], batch: Batch) -> Tensor:
    """The mean of the rows of several matrices, those of all ranks: (D,)."""
    total = sum((x.sum(0) for x in columns[1:]), columns[0].sum(0))
    return batch.sum_over_ranks(total) / batch.sum_of_lengths(sum(map(len, columns)), total.device)
