"""SimCSE: each sentence is to find its second view among all second views and hard negatives."""

from __future__ import annotations

from typing import Annotated, Any

import torch
from torch import Tensor

from fastqt.arguments import Argument, Rows, Scale
from fastqt.distributed.group import GroupLike
from fastqt.exclusions import Margin
from fastqt.loss import Arguments, loss
from fastqt.losses.common import joined_loss
from fastqt.losses.debiasing import Prior, is_debiased
from fastqt.losses.info_nce import info_nce_loss
from fastqt.losses.pair_scores import PairExclude, PairScores, with_hard_negatives
from fastqt.matryoshka import MatryoshkaLike
from fastqt.options import Backend, Memory, Reduction
from fastqt.problem import reduce, unit_rows


def _sets(name: str, z3: Any) -> dict[str, Tensor]:
    """The first hard negative of each sentence, the second ones, and so on, (N, D) each, by their names."""
    if isinstance(z3, Tensor) and z3.dim() == 3 and z3.layout is torch.strided and not z3.is_nested:
        if not z3.shape[1]:
            raise ValueError(
                f"{name}: want at least one hard negative a sentence, got shape {tuple(z3.shape)}"
            )
        return {f"{name}[:, {k}]": z for k, z in enumerate(z3.unbind(1))}
    return {name: z3}


HardNegatives = Annotated[Tensor | None, Argument(rows="rows", matrices=_sets)]


def _fit(z3: Tensor | None, hard_negative_weight: float) -> None:
    if z3 is None and hard_negative_weight != 0:
        raise ValueError(f"hard_negative_weight: want 0 without z3, got {hard_negative_weight}")


@loss("SimCSELoss", check=_fit, sums_prefixes=False)
def simcse_loss(
    call: Arguments,
    z1: Rows,
    z2: Rows,
    z3: HardNegatives = None,
    *,
    scale: Scale = 20.0,
    hard_negative_weight: float = 0.0,
    tau_plus: Prior = 0.0,
    exclude: PairExclude = None,
    matryoshka: MatryoshkaLike | None = None,
    reduction: Reduction = "mean",
    memory: Memory = "fast",
    backend: Backend | None = None,
    group: GroupLike | None = None,
) -> Tensor:
    """Cross-entropy of each sentence with its second view by cosine, among all second views.

    Args:
        z1, z2: (N, D) two views of N sentences, such as two passes under dropout.
        z3: (N, D) a hard negative for each sentence, and a further candidate for all others; or (N, K, D), K
            hard negatives for each.
        scale: 1 / temperature.
        hard_negative_weight: added to the scores of a sentence with its own hard negatives. A weight other
            than 0 takes 4 (1 + K) matrix products of N x N x D in place of 3 (1 + K).
        tau_plus: as of `info_nce_loss`; the negatives are those with their weights.
        exclude: a margin and filters by ids, as of `contrastive_loss`. A margin is of second views and of
            hard negatives, these without their weight; ids are those of second views, and a hard negative is
            in the part of its sentence.
        reduction: "mean" over all rows, "sum", or "none".
        matryoshka: as of `contrastive_loss`. With a hard_negative_weight other than 0 each prefix is a loss
            of its own.
        memory, backend, group: as of `contrastive_loss`.

    Returns:
        A scalar, or (N,) for reduction="none".

    Raises:
        ValueError, TypeError: naming the argument, what is wanted and what came.

    Example:
        >>> import torch, fastqt
        >>> z1, z2, z3 = torch.randn(3, 8, 16)  # two views, and a hard negative for each sentence
        >>> fastqt.simcse_loss(z1, z2, z3, scale=1 / 0.05, reduction="none").shape  # a temperature of 0.05
        torch.Size([8])
        >>> round(fastqt.simcse_loss(torch.eye(4), torch.eye(4), scale=1.0).item(), 4)  # log(e + 3) - 1
        0.7437

    Source: Gao, Yao and Chen, "SimCSE: Simple contrastive learning of sentence embeddings" (2021).
    """
    margin = None if call.values["exclude"] is None else call.values["exclude"].of(Margin)
    spares = margin is not None and margin.spare_own_negatives
    if z3 is not None and (hard_negative_weight or spares):
        return call.sum_over_prefixes(lambda dim: _weighted(call, z1[:, :dim], z2[:, :dim], z3[..., :dim]))

    # (N, D), or K hard negatives for each of N sentences.
    negatives = None if z3 is None else z3.flatten(0, -2)
    count = z3.shape[1] if z3 is not None and z3.dim() == 3 else 1
    return call.to(
        info_nce_loss,
        {"rows": "rows", "candidates": "rows", "negatives": ("rows", count)},
        queries=z1,
        candidates=z2,
        negatives=negatives,
        exclude=with_hard_negatives(call.values["exclude"], len(z1), negatives, repeated="each"),
    )


def _weighted(call: Arguments, z1: Tensor, z2: Tensor, z3: Tensor) -> Tensor:
    """The loss in which a sentence's own hard negatives have another score than for others."""
    values, sets = call.values, z3.unbind(1) if z3.dim() == 3 else (z3,)
    queries, views, *hard = (unit_rows(z) for z in (z1, z2, *sets))
    pairs = PairScores(call, queries, views, hard)
    leaves = queries, pairs.every("document"), *pairs.every_hard, values["scale"]

    def losses(part: str) -> Tensor:
        others = _cells(pairs, values["hard_negative_weight"])
        if is_debiased(values["tau_plus"]):
            with torch.no_grad():
                log_counts = _cells(pairs.of_nothing(), 0.0)
            others = [pairs.true_negatives(pairs.positive, others, log_counts)]
        return reduce(joined_loss(pairs.positive, others), part)

    return call.batch.loss(values["reduction"], leaves, losses)


def _cells(pairs: PairScores, weight: float) -> list[Tensor]:
    """The logsumexps of each sentence with all but its second view, (n,) each."""
    cells = [pairs.others("query", "document"), *pairs.with_hard("query")]
    return cells + [x + weight for x in pairs.with_own_hard()]
