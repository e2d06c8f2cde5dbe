"""MixCSE: SimCSE with mixtures of views as further, hard negatives."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from fastqt import autograd, engines
from fastqt.arguments import Rows, Scale, Share
from fastqt.checks import shown
from fastqt.distributed.group import GroupLike
from fastqt.exclusions import ExcludeLike, Exclusions, Same
from fastqt.functional import contrastive_loss, log_sum_exp
from fastqt.functional.lowering import mixtures_may_be_short
from fastqt.loss import Arguments, loss
from fastqt.losses.common import joined_loss, random_order, row_numbers, scores
from fastqt.negatives import Mixed
from fastqt.norms import LEAST_NORM
from fastqt.options import Backend, MaskedCell, Memory, MixBlocks, MixForm, MixPartner, Reduction
from fastqt.problem import ThreeBlockProblem, loss_dtype, reduce, unit_rows
from fastqt.targets import Diagonal
from fastqt.torch_modes import input_dtype, is_traced


def _fit(
    form: MixForm,
    blocks: MixBlocks,
    masked_cell: MaskedCell,
    hard_negative_weight: float,
    exclude: Exclusions | None,
) -> None:
    of_released = {"blocks": "both", "masked_cell": "zero", "hard_negative_weight": 0.0}
    values = {"blocks": blocks, "masked_cell": masked_cell, "hard_negative_weight": hard_negative_weight}
    for name, default in of_released.items() if form == "slides" else ():
        if values[name] != default:
            raise ValueError(f"{name}: want {default!r} with form='slides', got {shown(values[name])}")
    if form == "released" and exclude is not None:
        raise ValueError(
            "exclude: want None with form='released', whose cells are those of the authors' code"
        )


@loss("MixCSELoss", check=_fit)
def mixcse_loss(
    call: Arguments,
    z1: Rows,
    z2: Rows,
    *,
    mix: Share = 0.2,
    scale: Scale = 20.0,
    form: MixForm = "slides",
    partner: MixPartner = "next",
    generator: torch.Generator | None = None,
    blocks: MixBlocks = "both",
    masked_cell: MaskedCell = "zero",
    hard_negative_weight: float = 0.0,
    stop_gradient: bool = True,
    exclude: ExcludeLike | None = None,
    reduction: Reduction = "mean",
    memory: Memory = "fast",
    backend: Backend | None = None,
    group: GroupLike | None = None,
) -> Tensor:
    """SimCSE's loss with mixtures of views as further, hard negatives; cosines throughout.

    form="slides": each sentence i has one negative of its own, normalise(mix * h_i + (1 - mix) * h_j) of
    second views h at norm 1, its positive and that of its partner j.

    form="released", as the authors' code has it: with m_i = mix * z2_i + (1 - mix) * z2_j and a_i the same
    of z1, the scores of row i are [cos(z1_i, z2) | cos(z1_i, m) | cos(a_i, z2)], 3 N columns, where cells
    whose mixture holds the sentence as the partner are masked.

    Args:
        z1, z2: (N, D) two views of N >= 2 sentences.
        mix: the share of a sentence's own view, 0 <= mix <= 1.
        scale: 1 / temperature.
        form: "slides" or "released".
        partner: "next" row (the first one for the last), or "random": one cycle through all rows.
        generator: draws the random cycle; torch's default generator if None. A generator breaks the graph of
            torch.compile.
        blocks: "both" of the mixed blocks of the released form, or "candidates": only m.
        masked_cell: score 0 ("zero") or none ("exclude") for masked cells of the released form.
        hard_negative_weight: added to the scores of a sentence with its own mixtures in the released form.
        stop_gradient: no gradient flows through mixtures.
        exclude: as of `contrastive_loss`, with form="slides".
        reduction: "mean" over all rows, "sum", or "none".
        memory, backend, group: as of `contrastive_loss`. In a group the next row may be another
            rank's, the random cycle is drawn on its first rank, and the released form takes gathered views.

    Returns:
        A scalar, or (N,) for reduction="none".

    Raises:
        ValueError, TypeError: naming the argument, what is wanted and what came.

    Example:
        >>> import torch, fastqt
        >>> z1, z2 = torch.randn(2, 8, 16)
        >>> fastqt.mixcse_loss(z1, z2, mix=0.2, form="released", reduction="none").shape
        torch.Size([8])
        >>> mixed = fastqt.mixcse_loss(z1, z2)
        >>> bool(mixed > fastqt.simcse_loss(z1, z2))  # one more negative a row
        True

    Source: Zhang et al., "Unsupervised sentence representation via contrastive learning with mixing
    negatives" (AAAI 2022).
    """
    batch = call.batch
    n, N, first = len(z1), batch.total(), batch.first()
    if N < 2:
        raise ValueError(f"z2: want two views of at least 2 sentences, got {N}")
    order = None
    if partner == "random":
        order = batch.of_first_rank(random_order(N, z1.device, generator))

    if form == "slides":
        partners = _partners(order, N, z1.device)[first : first + n]
        negatives: Mixed | Tensor = Mixed(mix, partners)
        normalize = True
        if not stop_gradient:
            if not batch.is_of_process or (z2.is_cpu and mixtures_may_be_short(z2, mix)):
                # The mixtures are at the norm they are to have, and nothing else is left to be normalised.
                z1, z2 = (unit_rows(z.to(loss_dtype(z)) if z.is_cpu else z) for z in (z1, z2))
                normalize = False
            own = unit_rows(z2) if normalize else z2
            negatives = unit_rows(mix * own + (1 - mix) * batch.gather(own)[partners])
        return call.to(
            contrastive_loss,
            {"rows": "rows", "candidates": "rows"},
            queries=z1,
            candidates=z2,
            targets=Diagonal(),
            diagonal="keep",
            normalize=normalize,
            row_negatives=negatives,
        )

    if batch.is_of_process and not is_traced(z1, z2):
        alone = _in_three_blocks(call, z1, z2, order)
        if alone is not None:
            return alone

    # This rank's sentences are the first of all for it.
    partners = (_partners(order, N, z1.device).roll(-first) - first) % N
    second = batch.gather_own_first(z2)
    mixtures = None
    if blocks == "both":
        whole = z1.detach() if stop_gradient else z1
        others = batch.gather_own_first(whole)[partners[:n]]
        mixtures = unit_rows(mix * whole + (1 - mix) * others)

    def losses(part: str) -> Tensor:
        return reduce(_composed(call, unit_rows(z1), mixtures, second, partners), part)

    return batch.loss(reduction, (z1, second, mixtures, scale), losses)


def drawn_partners(N: int, device: torch.device, generator: torch.Generator | None) -> Tensor:
    """The partners (N,) that `mixcse_loss` draws for partner="random" from a generator in the same state."""
    return _partners(random_order(N, device, generator), N, device)


def _in_three_blocks(
    call: Arguments,
    z1: Tensor,
    z2: Tensor,
    order: Tensor | None,  # (N,): each row's partner is the next one in it; None for the order as it is
) -> Tensor | None:
    """The released form as one problem; None where the engine has no computation for it."""
    values = call.values
    if order is not None:
        z1, z2 = z1[order], z2[order]
    p = _three_blocks(call, z1, z2)
    engine = engines.choose(values["backend"], p, p.queries.dtype)
    if not engine.computes(p):
        return None
    dtype = engine.dtype_for(p, p.queries.dtype)
    p.queries, p.candidates = p.queries.to(dtype), p.candidates.to(dtype)
    reduction = values["reduction"]
    loss = autograd.loss_of(p, reduction, engine, call.function)

    if order is not None and reduction == "none":
        loss = torch.empty_like(loss).index_copy(0, order, loss)
    return loss


def _three_blocks(call: Arguments, z1: Tensor, z2: Tensor) -> ThreeBlockProblem:
    """The problem of two views of sentences whose partners are the next ones.

    With rows u and v of norm 1, a mixture m_j of v_j and v_j+1 is own_j v_j + next_j v_j+1, and a_i the same
    of u. So the scores of the mixed blocks are sums of two neighbouring cosines, and their gradients fold
    back onto those: one matrix product gives the scores of all three blocks.
    """
    values, mix, scale = call.values, call.values["mix"], call.values["scale"]
    u, v = (unit_rows(z).to(input_dtype(z)) for z in (z1, z2))
    dtype = torch.promote_types(u.dtype, torch.float32)

    def shares(z: Tensor) -> tuple[Tensor, Tensor]:
        z = z.detach().to(dtype) if values["stop_gradient"] else z.to(dtype)
        # What u and v were divided by, so that a share times one of their rows is a part of the mixture.
        norms = torch.linalg.vector_norm(z, dim=1).clamp(min=LEAST_NORM)
        mixture = torch.linalg.vector_norm(mix * z + (1 - mix) * z.roll(-1, 0), dim=1).clamp(min=LEAST_NORM)
        return mix * norms / mixture, (1 - mix) * norms.roll(-1) / mixture

    if not isinstance(scale, Tensor):
        scale = torch.full((), scale, dtype=dtype, device=u.device)
    return ThreeBlockProblem(
        u,
        v,
        *shares(z2),
        *shares(z1),
        scale,
        third_block=values["blocks"] == "both",
        masks_excluded=values["masked_cell"] == "exclude",
        own_mixture_weight=values["hard_negative_weight"],
        stop_gradient=values["stop_gradient"],
        memory=values["memory"],
    )


def _composed(
    call: Arguments,
    z1: Tensor,  # (n, D), of norm 1
    a: Tensor | None,  # (n, D), of norm 1: their mixtures, for the third block
    z2: Tensor,  # (N, D), of which the first n belong to z1
    partners: Tensor,  # (N,)
) -> Tensor:
    """The released form's losses of the first n of N sentences, from the logsumexp of each block."""
    mix, scale, weight = (call.values[name] for name in ("mix", "scale", "hard_negative_weight"))
    n, m = len(z1), unit_rows(mix * z2 + (1 - mix) * z2[partners])
    if call.values["stop_gradient"]:
        a, m = None if a is None else a.detach(), m.detach()
    z2 = unit_rows(z2)

    # The columns are put into an order in which the masked cells, m_j with partner i and z2_j of a_i's
    # partner j, lie on the diagonal. A sentence's own mixture is then in another column.
    rows = row_numbers(len(z2), z2.device)
    before = torch.empty_like(partners).scatter_(0, partners, rows)
    sums = partial(call.here, log_sum_exp)
    others = [sums(queries=z1, candidates=z2, diagonal="exclude")]

    def add_block(queries: Tensor, candidates: Tensor, own: Tensor) -> None:
        same = Exclusions((Same(own, rows),))
        cell = call.values["masked_cell"]
        others.append(sums(queries=queries, candidates=candidates, diagonal=cell, exclude=same))
        others.append(scores(queries, candidates[own], scale) + weight)

    add_block(z1, m[before], partners[:n])
    if a is not None:
        add_block(a, z2[partners], before[:n])
    return joined_loss(scores(z1, z2[:n], scale), others)


def _partners(order: Tensor | None, N: int, device: torch.device) -> Tensor:
    """The partner of each row: the one after it in the order, and after the last the first."""
    if order is None:
        order = row_numbers(N, device)
    return torch.empty_like(order).scatter_(0, order, order.roll(-1))
