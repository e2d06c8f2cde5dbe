"""The losses of the literature, each as targets, negatives or a link of the two general ones.

All take `reduction` ("mean" over rows, "sum", or "none" for (N,)), and where they rest on
`contrastive_loss` or `sigmoid_loss` also the `memory` and `backend` of these. None forms a score matrix.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastqt import backends, released_mixcse
from fastqt.checks import check_embeddings, check_number, check_option, check_scale, input_dtype
from fastqt.functional import REDUCTIONS, contrastive_loss, sigmoid_loss
from fastqt.negatives import Mixed
from fastqt.targets import Bags, Diagonal, Window, as_ids


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
    z1, z2, z3 = (_unit(z) for z in (z1, z2, z3))
    own = torch.arange(len(z1), device=z1.device)
    positive = info_nce_loss(z1, z2, normalize=False, reduction="none", **options)
    hard = _log_sum_exp(z1, z3, own, hard_negative_weight, "keep", **options)
    return _reduced(torch.logaddexp(positive, hard - _scores(z1, z2, scale)), reduction)


def mixcse_loss(
    z1: Tensor,
    z2: Tensor,
    *,
    mix: float = 0.2,
    scale: float | Tensor = 20.0,
    form: str = "slides",
    partner: str = "next",
    generator: torch.Generator | None = None,
    blocks: str = "both",
    masked_cell: str = "zero",
    hard_negative_weight: float = 0.0,
    stop_gradient: bool = True,
    reduction: str = "mean",
    memory: str = "fast",
    backend: str | None = None,
) -> Tensor:
    """SimCSE's loss with mixtures of views as further, hard negatives; cosines throughout.

    form="slides": each sentence i has one private negative, normalise(mix * h_i + (1 - mix) * h_j) of
    second views h at norm 1, its positive and that of its partner j.

    form="released", as the authors' code has it: with m_i = mix * z2_i + (1 - mix) * z2_j and a_i the same
    of z1, the scores of row i are [cos(z1_i, z2) | cos(z1_i, m) | cos(a_i, z2)], 3 N columns, where cells
    whose mixture holds the sentence as the partner are masked.

    Args:
        z1, z2: (N, D) two views of N >= 2 sentences.
        mix: the share of a sentence's own view, 0 <= mix <= 1.
        scale: inverse temperature 1 / tau.
        form: "slides" or "released".
        partner: "next" row (the first one for the last), or "random": one cycle through all rows.
        generator: of the random cycle; torch's default one if None.
        blocks: "both" of the mixed blocks of the released form, or "candidates": only m.
        masked_cell: score 0 ("zero") or none ("exclude") for masked cells of the released form.
        hard_negative_weight: added to the scores of a sentence with its own mixtures in the released form.
        stop_gradient: no gradient flows through mixtures.

    Source: Zhang et al., "Unsupervised sentence representation via contrastive learning with mixing
    negatives" (AAAI 2022).
    """
    check_embeddings(z1=z1, z2=z2)
    check_option("form", form, ("slides", "released"))
    check_option("partner", partner, ("next", "random"))
    check_option("blocks", blocks, ("both", "candidates"))
    check_option("masked_cell", masked_cell, ("zero", "exclude"))
    check_number("hard_negative_weight", hard_negative_weight, "none")
    N = len(z1)
    if len(z2) != N or N < 2:
        raise ValueError(f"z2: want two views of at least 2 sentences, got {N} and {len(z2)} rows")
    order = _rows(N, z1.device) if partner == "next" else _random_order(N, z1.device, generator)
    partners = torch.empty_like(order).scatter_(0, order, order.roll(-1))
    options: dict[str, Any] = {"scale": scale, "memory": memory, "backend": backend}
    if form == "slides":
        h = _unit(z2)
        negatives = Mixed(mix, partners) if stop_gradient else _mixed(h, mix, partners)
        return contrastive_loss(
            *(_unit(z1), h, Diagonal()),
            **options,
            diagonal="keep",
            row_negatives=negatives,
            reduction=reduction,
        )
    Mixed(mix)  # refuses what is no share
    if backends.select(backend, z1.device, input_dtype(z1)) == "cpu" and not torch.compiler.is_compiling():
        check_scale(scale)
        check_option("reduction", reduction, REDUCTIONS)
        chosen = released_mixcse.Options(
            blocks == "both", masked_cell == "exclude", hard_negative_weight, stop_gradient
        )
        loss = _released_on_cpu(z1[order], z2[order], mix, scale, reduction, chosen)
        return loss if reduction != "none" else torch.empty_like(loss).index_copy(0, order, loss)
    mixtures = [_mixed(z, mix, partners) for z in (z1, z2)]
    a, m = (x.detach() if stop_gradient else x for x in mixtures)
    z1, z2 = _unit(z1), _unit(z2)
    # Columns in an order that brings the masked cells, m_j with partner i and z2_j of a_i's partner j,
    # to the diagonal; a sentence's own mixture is then in another column.
    before = torch.empty_like(partners).scatter_(0, partners, _rows(N, z1.device))
    positive = _scores(z1, z2, scale)
    losses = [info_nce_loss(z1, z2, normalize=False, reduction="none", **options)]
    weighted = (hard_negative_weight, masked_cell)
    losses.append(_log_sum_exp(z1, m[before], partners, *weighted, **options) - positive)
    if blocks == "both":
        losses.append(_log_sum_exp(a, z2[partners], before, *weighted, **options) - positive)
    return _reduced(torch.stack(losses).logsumexp(0), reduction)


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
        a, b = _unit(a), _unit(b)
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


def curl_loss(queries: Tensor, positives: Tensor, negatives: Tensor, *, reduction: str = "mean") -> Tensor:
    """log(1 + exp(-<f_i, g+_i - g-_i>)): each query's positive is to score above its negative.

    Args:
        queries, positives, negatives: (N, D).

    Source: Arora et al., "A theoretical analysis of contrastive unsupervised representation learning" (2019).
    """
    check_embeddings(queries=queries, positives=positives, negatives=negatives)
    check_option("reduction", reduction, REDUCTIONS)
    if not len(queries) == len(positives) == len(negatives):
        lengths = f"{len(queries)}, {len(positives)} and {len(negatives)}"
        raise ValueError(f"positives, negatives: want a row for each query, got {lengths} rows")
    margins = (queries * (positives - negatives)).sum(1)
    return _reduced(F.softplus(-margins), reduction)


def curl_block_loss(
    queries: Tensor,
    candidates: Tensor,
    *,
    context_size: int = 1,
    document_ids: Tensor | None = None,
    negatives: str = "shift",
    generator: torch.Generator | None = None,
    reduction: str = "mean",
) -> Tensor:
    """`curl_loss` of each query with the mean of its neighbours against the mean of as many others.

    Args:
        queries, candidates: (N, D).
        context_size: half-width k of the window of neighbours; for "shift", 2 k + 1 <= N // 2.
        document_ids: (N,) integers; the window stays within equal ids.
        negatives: "shift": the neighbours of the row N // 2 further on, circularly; "complement": all
            that are neither the sentence nor a neighbour; "random": a permutation's neighbours.
        generator: of the random permutation; torch's default one if None.

    Source: Arora et al., "A theoretical analysis of contrastive unsupervised representation learning"
    (2019), section 6, on windows of sentences.
    """
    check_embeddings(queries=queries, candidates=candidates)
    check_option("negatives", negatives, ("shift", "complement", "random"))
    N, M, device = len(queries), len(candidates), queries.device
    if N != M:
        raise ValueError(f"candidates: want one for each of N={N} queries, got {M}")
    window = Window(context_size, document_ids=document_ids)
    window.check(N, M, "zero")
    starts, columns, weights = window.rows(N, M, device).compressed()

    def means(matrix: Tensor, weights: Tensor) -> Tensor:
        weights = weights.to(matrix.dtype)
        return F.embedding_bag(columns, matrix, starts[:-1], mode="sum", per_sample_weights=weights)

    if negatives == "complement":
        counts = means(candidates.new_ones(N, 1), (weights > 0)) + 1
        if bool((counts >= N).any()):
            raise ValueError(f"context_size: leaves no sentence of N={N} for negatives='complement'")
        others = (candidates.sum(0) - candidates - means(candidates, weights > 0)) / (N - counts)
    elif negatives == "shift":
        if 2 * context_size + 1 > N // 2:
            raise ValueError(
                f"context_size: want 2 k + 1 <= N // 2 for negatives='shift', got k={context_size} and N={N}"
            )
        others = means(candidates.roll(-(N // 2), 0), weights)
    else:
        permutation = torch.randperm(N, generator=generator, device=_device(generator, device))
        others = means(candidates[permutation.to(device)], weights)
    return curl_loss(queries, means(candidates, weights), others, reduction=reduction)


def gloss_bow_loss(
    latents: Tensor,
    weight: Tensor,
    bias: Tensor,
    token_ids: Tensor,
    offsets: Tensor,
    *,
    reduction: str = "mean",
    memory: str = "fast",
    backend: str | None = None,
) -> Tensor:
    """Binary cross-entropy, summed over the vocabulary, of which words a sentence's latent vector names.

    Args:
        latents: (B, D) floating point.
        weight: (V, D), bias: (V,): the decoder, of logits latents @ weight.T + bias.
        token_ids: (T,) integers in [0, V), all sentences' words one after the other; one that is named
            twice counts once.
        offsets: (B,) integers, where each sentence's words begin, as of `torch.nn.EmbeddingBag`.

    Source: GLOSS, generative latent optimisation of sentence representations: the bag-of-words decoder.
    """
    check_embeddings(latents=latents, weight=weight)
    targets = Bags("token_ids", token_ids, offsets)
    return sigmoid_loss(
        latents, weight, targets, bias=bias, reduction=reduction, memory=memory, backend=backend
    )


def gloss_pos_loss(
    latents: Tensor,
    positions: Tensor,
    weight: Tensor,
    bias: Tensor,
    token_ids: Tensor,
    lengths: Tensor,
    *,
    reduction: str = "mean",
    memory: str = "fast",
    backend: str | None = None,
) -> Tensor:
    """Cross-entropy, summed over a sentence's places, of the word at each place given its latent vector.

    Args:
        latents: (B, D) floating point.
        positions: (L, D), a vector for each place, added to the latent one.
        weight: (V, D), bias: (V,): the decoder, of logits (latent + position) @ weight.T + bias.
        token_ids: (B, L) integers in [0, V), padded on the right with anything.
        lengths: (B,) integers in [0, L].

    Source: GLOSS, generative latent optimisation of sentence representations: the positional decoder.
    """
    check_embeddings(latents=latents, positions=positions, weight=weight)
    check_option("reduction", reduction, REDUCTIONS)
    B, L, device = len(latents), len(positions), latents.device
    if tuple(token_ids.shape) != (B, L):
        raise ValueError(f"token_ids: want shape (B, L) = ({B}, {L}), got {tuple(token_ids.shape)}")
    lengths = as_ids("lengths", lengths).to(device)
    if lengths.numel() != B or (lengths < 0).any() or (lengths > L).any():
        raise ValueError(f"lengths: want one in 0..{L} for each of B={B} sentences")
    sentence, place = (_rows(L, device) < lengths[:, None]).nonzero(as_tuple=True)
    if not len(sentence):  # no word at all
        return _reduced(latents.sum(1) * 0, reduction)
    loss = contrastive_loss(
        latents[sentence] + positions[place],
        weight,
        token_ids.to(device)[sentence, place],
        diagonal="keep",
        bias=bias,
        reduction="none" if reduction == "none" else "sum",
        memory=memory,
        backend=backend,
    )
    if reduction == "none":
        return loss.new_zeros(B).index_add(0, sentence, loss)
    return loss / B if reduction == "mean" else loss


def _log_sum_exp(
    queries: Tensor,
    candidates: Tensor,
    own: Tensor,  # (N,) a column for each row, not on the diagonal unless that is kept
    weight: float,
    diagonal: str,
    *,
    scale: float | Tensor,
    memory: str,
    backend: str | None,
) -> Tensor:
    """log sum_j exp(s_ij) of each row, (N,), with `weight` added to the score of its own column."""
    less_own = contrastive_loss(
        *(queries, candidates, own),
        diagonal=diagonal,
        scale=scale,
        reduction="none",
        memory=memory,
        backend=backend,
    )
    own_scores = _scores(queries, candidates[own], scale)
    # log(exp(l) + exp(w) - 1) for l = less_own >= 0
    return own_scores + less_own + torch.log1p(math.expm1(weight) * torch.exp(-less_own))


def _scores(a: Tensor, b: Tensor, scale: float | Tensor) -> Tensor:
    """The scores of rows with rows, (N,)."""
    dtype = torch.promote_types(a.dtype, torch.float32)
    return scale * (a.to(dtype) * b.to(dtype)).sum(1)


def _released_on_cpu(
    z1: Tensor,
    z2: Tensor,
    mix: float,
    scale: float | Tensor,
    reduction: str,
    options: released_mixcse.Options,
) -> Tensor:
    """The released form's loss of sentences whose partners are the next ones."""
    u, v = (_unit(z).to(input_dtype(z)) for z in (z1, z2))
    dtype = torch.promote_types(u.dtype, torch.float32)

    def shares(z: Tensor) -> tuple[Tensor, Tensor]:
        z = z.detach().to(dtype) if options.stop_gradient else z.to(dtype)
        norms = torch.linalg.vector_norm(z, dim=1)
        mixture = torch.linalg.vector_norm(mix * z + (1 - mix) * z.roll(-1, 0), dim=1).clamp(min=1e-12)
        return mix * norms / mixture, (1 - mix) * norms.roll(-1) / mixture

    value = scale.to(dtype) if isinstance(scale, Tensor) else u.new_tensor(scale, dtype=dtype)
    return released_mixcse.released_loss(
        u.to(dtype), v.to(dtype), shares(z2), shares(z1), value, reduction, options
    )


def _unit(x: Tensor) -> Tensor:
    dtype = torch.promote_types(x.dtype, torch.float32)
    return F.normalize(x.to(dtype), dim=1).to(x.dtype)


def _mixed(x: Tensor, mix: float, partners: Tensor) -> Tensor:
    return _unit(mix * x + (1 - mix) * x[partners])


def _rows(n: int, device: torch.device) -> Tensor:
    return torch.arange(n, device=device)


def _random_order(n: int, device: torch.device, generator: torch.Generator | None) -> Tensor:
    """All rows in a random order, where each has the next one for a partner: nobody their own."""
    return torch.randperm(n, generator=generator, device=_device(generator, device)).to(device)


def _device(generator: torch.Generator | None, device: torch.device) -> torch.device:
    return device if generator is None else generator.device


def _reduced(rows: Tensor, reduction: str) -> Tensor:
    check_option("reduction", reduction, REDUCTIONS)
    return rows.mean() if reduction == "mean" else rows.sum() if reduction == "sum" else rows
