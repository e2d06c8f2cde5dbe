"""Losses of pairs: InfoNCE, SimCSE, CLIP and SigLIP."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastqt import backends
from fastqt.checks import check_embeddings, check_number, check_option, check_scale, input_dtype, is_traced
from fastqt.functional import MEMORY_MODES, REDUCTIONS, contrastive_loss, sigmoid_loss
from fastqt.losses import clip
from fastqt.losses.parts import log_sum_exp, reduced, scores, unit
from fastqt.problem import pairs
from fastqt.targets import Diagonal


def info_nce_loss(
    queries: Tensor,
    candidates: Tensor,
    *,
    scale: float | Tensor = 20.0,
    normalize: bool = True,
    negatives: Tensor | None = None,
    reduction: str = "mean",
    memory: str = "fast",
    backend: str | None = None,
) -> Tensor:
    """Cross-entropy of each query with its own candidate, among all candidates.

    Args:
        queries: (N, D) floating point.
        candidates: (M, D), M >= N; candidate i is query i's.
        scale: inverse temperature, a number or 0-d tensor (differentiable).
        normalize: score by cosine.
        negatives: (K, D) further candidates, nobody's own.

    Source: van den Oord et al., "Representation learning with contrastive predictive coding" (2018).
    """
    return contrastive_loss(
        queries,
        candidates,
        Diagonal(),
        diagonal="keep",
        scale=scale,
        normalize=normalize,
        negatives=negatives,
        reduction=reduction,
        memory=memory,
        backend=backend,
    )


def simcse_loss(
    z1: Tensor,
    z2: Tensor,
    z3: Tensor | None = None,
    *,
    scale: float | Tensor = 20.0,
    hard_negative_weight: float = 0.0,
    reduction: str = "mean",
    memory: str = "fast",
    backend: str | None = None,
) -> Tensor:
    """Cross-entropy of each sentence with its second view by cosine, among all second views.

    Args:
        z1, z2: (N, D) two views of N sentences, such as two passes under dropout.
        z3: (N, D) a hard negative for each sentence, and a further candidate for all others.
        scale: inverse temperature 1 / tau.
        hard_negative_weight: added to the score of a sentence with its own hard negative. Other than 0
            it takes eight matrix products of N x N x D, not six.

    Source: Gao, Yao and Chen, "SimCSE: Simple contrastive learning of sentence embeddings" (2021).
    """
    check_embeddings(z1=z1, z2=z2, z3=z3)
    check_number("hard_negative_weight", hard_negative_weight, "none")
    if z3 is not None and len(z3) != len(z1):
        raise ValueError(f"z3: want a hard negative for each of N={len(z1)} sentences, got {len(z3)}")
    if z3 is None or hard_negative_weight == 0:
        return info_nce_loss(
            z1, z2, scale=scale, negatives=z3, reduction=reduction, memory=memory, backend=backend
        )
    options: dict[str, Any] = {"scale": scale, "memory": memory, "backend": backend}
    z1, z2, z3 = (unit(z) for z in (z1, z2, z3))
    own = torch.arange(len(z1), device=z1.device)
    positive = info_nce_loss(z1, z2, normalize=False, reduction="none", **options)
    hard = log_sum_exp(z1, z3, own, hard_negative_weight, "keep", **options)
    return reduced(torch.logaddexp(positive, hard - scores(z1, z2, scale)), reduction)


def clip_loss(
    a: Tensor,
    b: Tensor,
    *,
    scale: float | Tensor,
    normalize: bool = True,
    reduction: str = "mean",
    memory: str = "fast",
    backend: str | None = None,
) -> Tensor:
    """The mean of both directions' `info_nce_loss`: a's rows among b's, and b's among a's.

    Args:
        a, b: (N, D); rows of equal index are a pair.
        scale: inverse temperature, a number or 0-d tensor (differentiable).

    Source: Radford et al., "Learning transferable visual models from natural language supervision" (2021).
    """
    check_embeddings(a=a, b=b)
    if len(a) != len(b):
        raise ValueError(f"b: want a row for each of the {len(a)} rows of a, got {len(b)}")
    if normalize:
        a, b = unit(a), unit(b)
    if not is_traced(a, b):
        check_scale(scale)
        check_option("reduction", reduction, REDUCTIONS)
        check_option("memory", memory, MEMORY_MODES)
        dtype = input_dtype(a)
        inputs = a.to(dtype), b.to(dtype)
        chosen = backends.select(backend, a.device, dtype)
        if chosen == "triton":  # unless two launches do, of small problems
            chosen = backends.for_problem(chosen, backend, pairs(*inputs, scale, memory))
        if chosen in ("cpu", "triton"):
            return clip.clip_loss(*inputs, scale, reduction, memory, chosen)
    options: dict[str, Any] = {
        "normalize": False,
        "reduction": reduction,
        "memory": memory,
        "backend": backend,
    }
    return (info_nce_loss(a, b, scale=scale, **options) + info_nce_loss(b, a, scale=scale, **options)) / 2


def siglip_loss(
    a: Tensor,
    b: Tensor,
    *,
    scale: float | Tensor,
    bias: float | Tensor,
    normalize: bool = True,
    reduction: str = "mean",
    memory: str = "fast",
    backend: str | None = None,
) -> Tensor:
    """Binary cross-entropy of every pair of rows: do they have the same index? Summed over b's rows.

    Args:
        a, b: (N, D), (M, D) with M >= N; rows of equal index are a pair.
        scale: inverse temperature, a number or 0-d tensor (differentiable).
        bias: added to all scores, a number or 0-d tensor (differentiable).

    Source: Zhai et al., "Sigmoid loss for language image pre-training" (2023).
    """
    return sigmoid_loss(
        a,
        b,
        Diagonal(),
        scale=scale,
        bias=bias,
        normalize=normalize,
        reduction=reduction,
        memory=memory,
        backend=backend,
    )
