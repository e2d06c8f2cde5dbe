"""SimCSE: each sentence is to find its second view among all second views and hard negatives."""

from __future__ import annotations

from collections.abc import Hashable
from functools import partial

import torch
from torch import Tensor

from fastqt.checks import check_number, check_option, check_scale
from fastqt.distributed.agreement import agree_on_rows
from fastqt.distributed.group import GroupLike
from fastqt.distributed.public import public_loss
from fastqt.functional import log_sum_exp
from fastqt.guide import check_margin_of_false_negatives
from fastqt.losses.common import filtered_scores, joined_loss, scores, similarity_thresholds
from fastqt.losses.info_nce import info_nce_loss
from fastqt.matryoshka import MatryoshkaLike, prefixes_of
from fastqt.options import Backend, MarginStrategy, Memory, Reduction
from fastqt.problem import REDUCTIONS, check_memory, reduce, unit_rows
from fastqt.torch_modes import input_dtype


@public_loss
def simcse_loss(
    z1: Tensor,
    z2: Tensor,
    z3: Tensor | None = None,
    *,
    scale: float | Tensor = 20.0,
    hard_negative_weight: float = 0.0,
    matryoshka: MatryoshkaLike | None = None,
    false_negative_margin: float | None = None,
    false_negative_margin_strategy: MarginStrategy = "absolute",
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
        false_negative_margin, false_negative_margin_strategy: as of `contrastive_loss`, for second views and
            hard negatives, these without their weight.
        reduction: "mean" over all rows, "sum", or "none".
        matryoshka: as of `contrastive_loss`. With a hard_negative_weight other
            than 0 each prefix is a loss of its own.
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
    hard_negatives = _sets(z3)

    def check(n: int) -> dict[str, Hashable]:
        check_scale(scale, z1.dtype)
        check_number("hard_negative_weight", hard_negative_weight, dtype=z1.dtype)
        check_margin_of_false_negatives(false_negative_margin, false_negative_margin_strategy, z1.dtype)
        check_option("reduction", reduction, REDUCTIONS)
        check_memory(memory)
        if z3 is None and hard_negative_weight != 0:
            raise ValueError(f"hard_negative_weight: want 0 without z3, got {hard_negative_weight}")
        if z3 is not None and not hard_negatives:
            raise ValueError(f"z3: want at least one hard negative a sentence, got shape {tuple(z3.shape)}")
        prefixes = prefixes_of(matryoshka, z1.shape[1])
        return {
            "reduction": reduction,
            "hard_negative_weight": float(hard_negative_weight),
            "matryoshka": prefixes,
            "false_negative_margin": false_negative_margin,
            "false_negative_margin_strategy": false_negative_margin_strategy,
        }

    batch, (z1, z2, *thirds) = agree_on_rows(
        group, "fastqt.simcse_loss", check, {"scale": scale}, z1=z1, z2=z2, **hard_negatives
    )
    if not hard_negative_weight:
        return info_nce_loss(
            z1,
            z2,
            scale=scale,
            negatives=None if z3 is None else _all_negatives(batch.local("z3", z3)),
            matryoshka=matryoshka,
            false_negative_margin=false_negative_margin,
            false_negative_margin_strategy=false_negative_margin_strategy,
            reduction=reduction,
            memory=memory,
            backend=backend,
            group=group,
        )

    if (prefixes := prefixes_of(matryoshka)) is not None:
        third = z3
        return prefixes.sum(
            lambda dim: simcse_loss(
                z1[:, :dim],
                z2[:, :dim],
                None if third is None else third[..., :dim],
                scale=scale,
                hard_negative_weight=hard_negative_weight,
                false_negative_margin=false_negative_margin,
                false_negative_margin_strategy=false_negative_margin_strategy,
                reduction=reduction,
                memory=memory,
                backend=backend,
                group=group,
            )
        )

    z1, *others = (unit_rows(z) for z in (z1, z2, *thirds))
    dtype = input_dtype(z1)
    second, *thirds = (batch.gather_own_first(z, dtype=dtype) for z in others)

    def losses(part: str) -> Tensor:
        views = second[: len(z1)]
        thresholds = similarity_thresholds(z1, views, false_negative_margin, false_negative_margin_strategy)
        sums = partial(
            log_sum_exp,
            z1,
            diagonal="exclude",
            scale=scale,
            thresholds=thresholds,
            memory=memory,
            backend=backend,
        )
        cells = [sums(z) for z in (second, *thirds)]
        hard = [filtered_scores(z1, third[: len(z1)], scale, thresholds) for third in thirds]
        cells += [x + hard_negative_weight for x in hard]

        return reduce(joined_loss(scores(z1, views, scale), cells), part)

    return batch.loss(reduction, (z1, second, *thirds, scale), losses)


def _all_negatives(z3: Tensor) -> Tensor:
    """The hard negatives of all sentences, (N, D) or (N K, D)."""
    return z3.flatten(0, 1) if z3.dim() == 3 else z3


def _sets(z3: Tensor | None) -> dict[str, Tensor]:
    """The first hard negative of each sentence, the second ones, and so on, (N, D) each, by their names."""
    if isinstance(z3, Tensor) and z3.dim() == 3 and z3.layout is torch.strided and not z3.is_nested:
        return {f"z3[:, {k}]": z for k, z in enumerate(z3.unbind(1))}
    return {} if z3 is None else {"z3": z3}
