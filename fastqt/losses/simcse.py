"""SimCSE: each sentence is to find its second view among all second views and hard negatives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fastqt.checks import (
    check_embeddings,
    check_number,
    check_option,
    check_paired,
    check_scale,
    check_tensor,
    input_dtype,
)
from fastqt.distributed import collectives
from fastqt.distributed.group import Group, GroupLike, as_group
from fastqt.distributed.shards import agree_on_rows, local_rows
from fastqt.functional import log_sum_exp
from fastqt.losses.common import joined_loss, scores
from fastqt.losses.info_nce import info_nce_loss
from fastqt.options import Backend, Memory, Reduction
from fastqt.problem import REDUCTIONS, check_memory, reduce, unit_rows


def simcse_loss(
    z1: Tensor,
    z2: Tensor,
    z3: Tensor | None = None,
    *,
    scale: float | Tensor = 20.0,
    hard_negative_weight: float = 0.0,
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
        reduction, memory, backend, group: as of `contrastive_loss`.

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
    if group is not None:
        return _over_group(
            as_group(group), z1, z2, z3, scale, hard_negative_weight, reduction, memory, backend
        )
    check_embeddings(("z3",), z1=z1, z2=z2, z3=_all_negatives(z3))
    check_scale(scale, z1.dtype)
    check_number("hard_negative_weight", hard_negative_weight, dtype=z1.dtype)
    check_option("reduction", reduction, REDUCTIONS)
    check_paired("z1", len(z1), "z2", len(z2))
    if z3 is None and hard_negative_weight != 0:
        raise ValueError(f"hard_negative_weight: want 0 without z3, got {hard_negative_weight}")
    if z3 is not None and len(z3) != len(z1):
        raise ValueError(f"z3: want a hard negative for each of N={len(z1)} sentences, got {len(z3)}")
    if z3 is None or hard_negative_weight == 0:
        negatives = _all_negatives(z3)
        return info_nce_loss(
            z1, z2, scale=scale, negatives=negatives, reduction=reduction, memory=memory, backend=backend
        )
    z1, z2, *thirds = (unit_rows(z) for z in (z1, z2, *_sets(z3)))
    rows = _weighted(z1, z2, thirds, scale, hard_negative_weight, memory, backend)
    return reduce(rows, reduction)


def _all_negatives(z3: Tensor | None) -> Tensor | None:
    """The hard negatives of all sentences, (N, D) or (N K, D)."""
    if z3 is None:
        return None
    check_tensor("z3", z3)
    return z3.flatten(0, 1) if z3.dim() == 3 else z3


def _sets(z3: Tensor | None) -> tuple[Tensor, ...]:
    """The first hard negative of each sentence, the second ones, and so on: (N, D) each."""
    if isinstance(z3, Tensor) and z3.dim() == 3:
        return z3.unbind(1)
    return () if z3 is None else (z3,)


def _weighted(
    z1: Tensor,
    second: Tensor,
    thirds: Sequence[Tensor],
    scale: float | Tensor,
    hard_negative_weight: float,
    memory: Memory,
    backend: Backend | None,
) -> Tensor:
    """The losses of n sentences, whose own second views and hard negatives come first; rows of norm 1."""
    options: dict[str, Any] = {"scale": scale, "memory": memory, "backend": backend}
    others = [log_sum_exp(z1, z, diagonal="exclude", **options) for z in (second, *thirds)]
    others += [scores(z1, third[: len(z1)], scale) + hard_negative_weight for third in thirds]
    return joined_loss(scores(z1, second[: len(z1)], scale), others)


def _over_group(
    group: Group,
    z1: Tensor,
    z2: Tensor,
    z3: Tensor | None,
    scale: float | Tensor,
    hard_negative_weight: float,
    reduction: Reduction,
    memory: Memory,
    backend: Backend | None,
) -> Tensor:
    """The loss of all ranks' sentences."""

    def check() -> dict[str, Any]:
        check_scale(scale, z1.dtype)
        check_number("hard_negative_weight", hard_negative_weight, dtype=z1.dtype)
        check_option("reduction", reduction, REDUCTIONS)
        check_memory(memory)
        if z3 is None and hard_negative_weight != 0:
            raise ValueError(f"hard_negative_weight: want 0 without z3, got {hard_negative_weight}")
        if z3 is not None and not sets:
            raise ValueError(f"z3: want at least one hard negative a sentence, got shape {tuple(z3.shape)}")
        return {"reduction": reduction, "hard_negative_weight": float(hard_negative_weight)}

    sets = {"z3": z3} if z3 is None or z3.dim() != 3 else {f"z3[:, {k}]": z for k, z in enumerate(_sets(z3))}
    shards = agree_on_rows(group, "fastqt.simcse_loss", check, {"scale": scale}, z1=z1, z2=z2, **sets)
    group, z1, z2 = shards.group, local_rows("z1", z1), local_rows("z2", z2)
    z3 = None if z3 is None else local_rows("z3", z3)
    if z3 is None or hard_negative_weight == 0:
        return info_nce_loss(
            *(z1, z2),
            scale=scale,
            negatives=_all_negatives(z3),
            reduction=reduction,
            memory=memory,
            backend=backend,
            group=group,
        )
    u1, *others = (unit_rows(z) for z in (z1, z2, *_sets(z3)))
    counts, dtype = shards.counts["rows"], input_dtype(u1)
    second, *thirds = (collectives.gather_own_first(u, counts, group, dtype) for u in others)
    with shards.agreeing():
        if not len(z1):
            local = collectives.nothing((u1, second, *thirds, scale), reduction)
        else:
            rows = _weighted(u1, second, thirds, scale, hard_negative_weight, memory, backend)
            local = rows if reduction == "none" else rows.sum()
    return collectives.reduced(local, reduction, shards.total("rows"), group)
