"""GLOSS's losses: which words a latent vector names."""

from __future__ import annotations

from typing import Literal, TypeAlias, cast, get_args

import torch
from torch import Tensor

from fastqt import autograd, engines
from fastqt.arguments import Rows, Shared
from fastqt.checks import check_bias, check_embeddings, check_tensor, require
from fastqt.distributed.group import GroupLike
from fastqt.functional import contrastive_loss, sigmoid_loss
from fastqt.ids import as_ids
from fastqt.loss import Arguments, loss
from fastqt.losses.common import row_numbers
from fastqt.losses.gloss_factored import (
    FACTORED,
    PositionalProblem,
    PositionScores,
    ScoresTooFarApartError,
    score_positions,
)
from fastqt.options import Backend, Memory, Reduction
from fastqt.problem import loss_dtype, reduce
from fastqt.targets import IGNORE_INDEX, Bags
from fastqt.torch_modes import input_dtype, is_traced, without_autocast

FUNCTION = "fastqt.gloss_pos_loss"
PositionLoss: TypeAlias = Literal["sum", "mean"]
"""How the losses of a sentence's positions become the sentence's."""
POSITION_LOSSES: tuple[str, ...] = get_args(PositionLoss)


@loss("GlossBagOfWordsLoss")
def gloss_bow_loss(
    call: Arguments,
    latents: Rows,
    weight: Shared,
    bias: Shared,
    token_ids: Tensor,
    offsets: Tensor,
    *,
    reduction: Reduction = "mean",
    memory: Memory = "fast",
    backend: Backend | None = None,
    group: GroupLike | None = None,
) -> Tensor:
    """Binary cross-entropy, summed over the vocabulary, of which words a sentence's latent vector names.

    Args:
        latents: (B, D) floating point.
        weight: (V, D), bias: (V,): the decoder, of logits latents @ weight.T + bias.
        token_ids: (T,) integers in [0, V), all sentences' words one after the other; one that is named
            twice counts once.
        offsets: (B,) integers, where each sentence's words begin, as of `torch.nn.EmbeddingBag`.
        reduction: "mean" over the B sentences, "sum", or "none".
        memory, backend: as of `contrastive_loss`.
        group: the processes whose sentences make up the batch, as of `contrastive_loss`; the decoder is the
            same at each, and its gradient is this rank's part of the whole.

    Returns:
        A scalar, or (B,) for reduction="none"; float64 for float64 inputs, float32 otherwise.

    Raises:
        ValueError, TypeError: naming the argument, what is wanted and what came.

    Example:
        >>> import torch, fastqt
        >>> weight, bias = torch.zeros(10, 8), torch.zeros(10)
        >>> words, offsets = torch.tensor([1, 2, 3, 4]), torch.tensor([0, 3])  # of three words and of one
        >>> loss = fastqt.gloss_bow_loss(torch.randn(2, 8), weight, bias, words, offsets)
        >>> round(loss.item(), 4)  # 10 log 2 a sentence
        6.9315

    Source: GLOSS, generative latent optimisation of sentence representations: the bag-of-words decoder.
    """

    def losses(part: str) -> Tensor:
        check_embeddings(latents=latents, weight=weight)
        targets = Bags("token_ids", token_ids, offsets)
        reduction = cast(Reduction, part)
        return sigmoid_loss(
            latents, weight, targets, bias=bias, reduction=reduction, memory=memory, backend=backend
        )

    return call.batch.loss(reduction, (latents, weight, bias), losses)


@loss("GlossPositionalLoss")
def gloss_pos_loss(
    call: Arguments,
    latents: Rows,
    positions: Shared,
    weight: Shared,
    bias: Shared,
    token_ids: Tensor,
    lengths: Tensor,
    *,
    position_loss: PositionLoss = "sum",
    reduction: Reduction = "mean",
    memory: Memory = "fast",
    backend: Backend | None = None,
    group: GroupLike | None = None,
) -> Tensor:
    """Cross-entropy of the word at each position given the sentence's latent vector.

    In float32 and float64 it takes two matrix products of (B, V) and (L, V) scores each way, whatever the
    number of words, unless a backend is asked for.

    Args:
        latents: (B, D) floating point.
        positions: (L, D), a vector for each position, added to the latent one.
        weight: (V, D), bias: (V,): the decoder, of logits (latent + position) @ weight.T + bias.
        token_ids: (B, L) integers in [0, V), padded on the right with anything.
        lengths: (B,) integers in [0, L].
        position_loss: "sum" over a sentence's positions, or their "mean". A sentence without words costs 0.
        reduction, memory, backend, group: as of `gloss_bow_loss`.

    Returns:
        A scalar, or (B,) for reduction="none"; float64 for float64 inputs, float32 otherwise.

    Raises:
        ValueError, TypeError: naming the argument, what is wanted and what came.

    Example:
        >>> import torch, fastqt
        >>> latents, positions = torch.randn(2, 8), torch.randn(3, 8)
        >>> weight, bias = torch.zeros(10, 8), torch.zeros(10)
        >>> words, lengths = torch.tensor([[1, 2, 3], [4, 0, 0]]), torch.tensor([3, 1])
        >>> loss = fastqt.gloss_pos_loss(latents, positions, weight, bias, words, lengths, reduction="sum")
        >>> round(loss.item(), 4)  # log 10 for each of four words
        9.2103

    Source: GLOSS, generative latent optimisation of sentence representations: the positional decoder.
    """

    def losses(part: str) -> Tensor:
        return _positional_loss(call, cast(Reduction, part))

    return call.batch.loss(reduction, (latents, positions, weight, bias), losses)


def _positional_loss(call: Arguments, reduction: Reduction) -> Tensor:
    """`gloss_pos_loss` of this process's sentences."""
    values = call.values
    latents, positions, weight, bias = (values[name] for name in ("latents", "positions", "weight", "bias"))
    token_ids, lengths, backend = values["token_ids"], values["lengths"], values["backend"]
    mean = values["position_loss"] == "mean"  # over a sentence's positions, in place of their sum
    check_embeddings(latents=latents, positions=positions, weight=weight)
    B, L, device = len(latents), len(positions), latents.device
    check_tensor("token_ids", token_ids)
    if tuple(token_ids.shape) != (B, L):
        raise ValueError(f"token_ids: want shape (B, L) = ({B}, {L}), got {tuple(token_ids.shape)}")

    lengths = as_ids("lengths", lengths).to(device)
    wanted = "lengths: want one in 0..{L} for each of B={B} sentences"
    if lengths.numel() != B:
        raise ValueError(f"{wanted.format(L=L, B=B)}, got {lengths.numel()} lengths")
    require(((lengths >= 0) & (lengths <= L)).all(), wanted, lengths, L=L, B=B)

    within = row_numbers(L, device) < lengths[:, None]
    token_ids = as_ids("token_ids", token_ids.reshape(-1)).to(device).view(B, L)
    used, V = token_ids.where(within, 0), len(weight)
    require(((used >= 0) & (used < V)).all(), "token_ids: want integers in 0..{last}", used, last=V - 1)
    check_bias(bias, V, device, latents.dtype)

    if engines.requested(backend) is None:
        loss = factored_pos_loss(latents, positions, weight, bias, token_ids, within, reduction, mean=mean)
        if loss is not None:
            return loss

    if is_traced(latents):  # A graph has room for a word at each place; without one it is a row of no target.
        sentence = row_numbers(B, device).repeat_interleave(L)
        position = row_numbers(L, device).repeat(B)
        targets = token_ids.where(within, IGNORE_INDEX).flatten()
    else:
        sentence, position = within.nonzero(as_tuple=True)
        targets = token_ids[sentence, position]
    if not len(sentence):  # The batch has no word at all.
        return reduce(latents.sum(1, dtype=loss_dtype(latents)) * 0, reduction)

    # The gradients of rows that are read several times are added up in the dtype of losses.
    of_latents, of_positions = (x.to(loss_dtype(x)) for x in (latents, positions))
    rows = of_latents[sentence] + of_positions[position]
    loss = contrastive_loss(
        rows.to(latents.dtype),
        weight,
        targets,
        diagonal="keep",
        bias=bias,
        reduction="none" if reduction == "none" or mean else "sum",
        memory=values["memory"],
        backend=backend,
    )
    if mean:
        loss = loss / lengths.clamp(min=1).to(loss.dtype)[sentence]
    if reduction == "none":
        return loss.new_zeros(B).index_add(0, sentence, loss)
    return loss.sum() / B if reduction == "mean" else loss.sum()


def factored_pos_loss(
    latents: Tensor,  # (B, D)
    positions: Tensor,  # (L, D)
    weight: Tensor,  # (V, D)
    bias: Tensor,  # (V,)
    token_ids: Tensor,  # (B, L) int64
    within: Tensor,  # (B, L) bool: whether the sentence has this position
    reduction: Reduction,
    position_scores: PositionScores | None = None,  # score_positions(positions, weight), if it is known
    *,
    mean: bool = False,  # over a sentence's positions, in place of their sum
) -> Tensor | None:
    """`gloss_pos_loss` by the factored algorithm; None where that cannot compute it.

    It needs float32 or float64, and the scores of sentences and positions to be near enough to each other.
    """
    if input_dtype(latents) not in (torch.float32, torch.float64) or is_traced(latents):
        return None
    with without_autocast(latents):
        p = PositionalProblem(
            latents,
            positions,
            weight,
            bias.to(latents.dtype),
            token_ids.where(within, 0),
            within,
            position_scores or score_positions(positions, weight),
            mean,
        )
        try:
            return autograd.loss_of(p, reduction, FACTORED, FUNCTION)
        except ScoresTooFarApartError:
            return None
