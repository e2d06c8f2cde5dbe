"""Label smoothing where each row has one target: what it adds to the cross-entropy, without a matrix.

With a share e of the target's mass spread evenly over all C cells of the row, the cross-entropy
-sum_j ((1 - e) [j = i] + e / C) log P_ij is that of the target alone, plus e (S_ii - mean_j S_ij). The mean
of a row's scores is its score with the mean of the candidates.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fastqt.checks import check_number
from fastqt.distributed import collectives
from fastqt.distributed.shards import Shards
from fastqt.losses.common import scores
from fastqt.options import TargetReduction
from fastqt.problem import loss_dtype, reduce


def check_label_smoothing(value: object) -> None:
    """Raises ValueError or TypeError unless `value` is a number from 0 to 1."""
    check_number("label_smoothing", value)
    assert isinstance(value, (int, float))
    if not 0 <= value <= 1:
        raise ValueError(f"label_smoothing: want a number in 0..1, got {value}")


def smoothing_loss(
    label_smoothing: float,
    queries: Tensor,
    candidates: Tensor,
    negatives: Tensor | None = None,
    *,
    scale: float | Tensor,
    normalize: bool,
    reduction: TargetReduction,
    shards: Shards | None = None,
) -> Tensor:
    """What label smoothing adds to the loss of queries among candidates and negatives; checked arguments.

    Args:
        label_smoothing: the share of the mass that is spread.
        queries, candidates: (N, D), (M, D), this rank's; candidate i belongs to query i.
        negatives: (K, D) further candidates.
        scale, normalize, reduction: as of `contrastive_loss`.
        shards: how the rows lie on the ranks of a group.
    """
    dtype = loss_dtype(queries)
    given = (x.to(dtype) for x in (queries, candidates, negatives) if x is not None)
    queries, *columns = (F.normalize(x, dim=1) for x in given) if normalize else given
    mean = _mean_of(columns, shards)
    rows = label_smoothing * scores(queries, columns[0][: len(queries)] - mean, scale)
    reduction = "mean" if reduction == "mean_of_targets" else reduction  # Every row has a target.
    if shards is None:
        return reduce(rows, reduction)
    local = rows if reduction == "none" else rows.sum()
    return collectives.reduced(local, reduction, shards.total("rows"), shards.group)


def _mean_of(columns: list[Tensor], shards: Shards | None) -> Tensor:
    """The mean of the rows of several matrices, those of all ranks in a group: (D,)."""
    total = sum((x.sum(0) for x in columns[1:]), columns[0].sum(0))
    count: int | Tensor = sum(map(len, columns))
    if shards is None:
        return total / count
    group = shards.group
    total = collectives.gather(total[None], (1,) * group.size, group).sum(0)
    if group.shards == "equal":
        return total / (count * group.size)
    return total / collectives.add_up(torch.tensor(count, device=total.device), group)
