"""Filters by the similarities that the loss itself computes: a margin above the target's, or thresholds."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import torch
from torch import Tensor

from fastqt.checks import FLOAT32_MAX, FLOATING, check_flag, check_number, check_option, check_tensor
from fastqt.exclusions.filter import Cells, Filter, check_length
from fastqt.exclusions.guide import MARGIN_STRATEGIES
from fastqt.options import MarginStrategy


@dataclass(frozen=True)
class Margin(Filter):
    """Excludes candidates that are more similar to a query than its target by a margin.

    A cell leaves the loss where its similarity, a product or a cosine, is above t + margin, with t that of
    the row's target, of several the least similar. Targets stay, and so do exact copies of them with a margin
    of 0, what `diagonal` replaces, scores that are given, and rows without a target. It takes no product
    more, since engines compare the scores that they have anyway.

    So that copies stay, a threshold is higher by D + 8 roundings, of 2**-24 in float32 and 2**-53 in float64,
    of the product of the target's and the query's norms, of cosines by 2 D + 16; where a CPU multiplies
    bfloat16, by 2**-8 of its size. Similarities are as exact as that, so those above by twice as much leave
    for certain. No gradient flows through the choice. It wants targets as indices, pairs, windows or sparse
    rows, not smoothed, similarity="dot", and a positive 1 / temperature.

    Args:
        margin: a finite number. It is added, where a `Guide` of the same embeddings would take it off.
        strategy: "absolute", or "relative": above t + |t| * margin.
        spare_own_negatives: lets the negatives of a row's own be, which somebody has chosen for it: the
            `row_negatives` of the general losses, and a query's own hard negatives, which other queries may
            still find too similar.

    Raises:
        ValueError, TypeError: naming the argument, what is wanted and what came.

    Example:
        >>> import torch, fastqt
        >>> queries = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
        >>> candidates = torch.tensor([[1.0, 1.0], [1.0, 0.0]])  # the second is more like the first query
        >>> fastqt.info_nce_loss(queries, candidates, exclude=fastqt.Margin(0.1), reduction="none")[0].item()
        0.0

    Source: Zhang et al., "Qwen3 Embedding: Advancing text embedding and reranking through foundation models"
    (2025), eq. 2.
    """

    margin: float
    strategy: MarginStrategy = "absolute"
    spare_own_negatives: bool = False

    def __post_init__(self) -> None:
        check_number("margin", self.margin)
        check_flag("spare_own_negatives", self.spare_own_negatives)
        check_option("strategy", self.strategy, MARGIN_STRATEGIES)

    def check(self, name: str, cells: Cells) -> None:
        if cells.dtype is not torch.float64 and abs(self.margin) > FLOAT32_MAX:
            raise ValueError(
                f"{name}: want a margin that float32 holds, at most {FLOAT32_MAX:.4g}, got {self.margin}"
            )

    def alike(self) -> Hashable:
        return self

    def turned(self) -> Margin:
        return self


@dataclass(frozen=True, eq=False)
class Above(Filter):
    """Excludes candidates whose similarity to a query is above a threshold of that query.

    As by `Margin`, with thresholds that are known. Infinity and NaN let all candidates stay.

    Args:
        thresholds: (N,) floating point; no gradient flows to them.
        spare_own_negatives: as of `Margin`.

    Raises:
        ValueError, TypeError: naming the argument, what is wanted and what came.

    Example:
        >>> import torch, fastqt
        >>> above = fastqt.Above(torch.tensor([2.0]))
        >>> query, candidates = torch.tensor([[1.0]]), torch.tensor([[3.0], [2.0], [2.0]])
        >>> fastqt.log_sum_exp(query, candidates, exclude=above).sub(2).exp()  # the first candidate has left
        tensor([2.])
    """

    thresholds: Tensor
    spare_own_negatives: bool = False

    def __post_init__(self) -> None:
        check_flag("spare_own_negatives", self.spare_own_negatives)
        check_tensor("thresholds", self.thresholds)
        if self.thresholds.dtype not in FLOATING or self.thresholds.dim() != 1:
            raise TypeError(
                "thresholds: want (N,) numbers of floating point of 16 to 64 bits, got shape "
                f"{tuple(self.thresholds.shape)} of {self.thresholds.dtype}"
            )

    def check(self, name: str, cells: Cells) -> None:
        check_length(name, "thresholds", self.thresholds, cells.N)
        if self.thresholds.device != cells.device:
            raise ValueError(
                f"{name}: want thresholds on {cells.device} as queries, got {self.thresholds.device}"
            )

    def alike(self) -> Hashable:
        return self.name(), self.spare_own_negatives
