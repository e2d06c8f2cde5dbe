"""Label smoothing where each row has one target: what it adds to the cross-entropy, without a matrix.

With a share e of the target's mass spread evenly over all C cells of the row, the cross-entropy
-sum_j ((1 - e) [j = i] + e / C) log P_ij is that of the target alone, plus e (S_ii - mean_j S_ij). The mean
of a row's scores is its score with the mean of the candidates.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from fastqt.distributed.batch import Batch
from fastqt.loss import Arguments
from fastqt.losses.common import scores
from fastqt.options import Reduction
from fastqt.problem import loss_dtype


def smoothing_loss(call: Arguments, queries: Tensor, columns: Sequence[Tensor]) -> Tensor:
    """What label smoothing adds to the loss of queries among candidates and negatives.

    Args:
        given: the arguments of the loss, of which those are this rank's.
        queries: (N, D).
        columns: (M, D) candidates, of which candidate i belongs to query i, and (K, D) further ones.
    """
    dtype, values = loss_dtype(queries), call.values
    embeddings = [x.to(dtype) for x in (queries, *columns)]
    if values["normalize"]:
        embeddings = [F.normalize(x, dim=1) for x in embeddings]
    queries, *columns = embeddings
    leads = scores(queries, columns[0][: len(queries)] - _mean_of(columns, call.batch), values["scale"])

    # Every row has a target.
    reduction: Reduction = "mean" if values["reduction"] == "mean_of_targets" else values["reduction"]
    return call.batch.reduced(values["label_smoothing"] * leads, reduction)


def _mean_of(columns: Sequence[Tensor], batch: Batch) -> Tensor:
    """The mean of the rows of several matrices, those of all ranks: (D,)."""
    total = sum((x.sum(0) for x in columns[1:]), columns[0].sum(0))
    return batch.sum_over_ranks(total) / batch.sum_of_lengths(sum(map(len, columns)), total.device)
