"""GLOSS's inference: the latent vectors of unseen sentences, found by projected gradient descent.

A sentence's result has the same bits in every batch. Its initial vector depends on the seed and its own
words, and all matrix products have shapes that do not depend on the batch: sentences are taken in blocks of a
fixed number, the last one padded, and a block of the decoder "pos" holds sentences of similar length, whose
positions are padded to a multiple. Libraries for matrix products round in other ways where shapes differ, and
hundreds of steps enlarge that. docs/benchmarks.md has figures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from fastqt.checks import check_flag, check_number, check_size
from fastqt.losses.gloss import factored_pos_loss
from fastqt.losses.gloss_factored import ScoresTooFarApartError, score_positions
from fastqt.nn.gloss_decoder import Decoder, projected, within

STEP_GROWTH = 1.2  # a step size grows by this factor after each step that is accepted
# Sentences of a block. On a CPU larger blocks make the products hardly faster, and a sentence alone costs as
# much as a block. A GPU takes the larger block in about the same time.
CPU_ROWS, GPU_ROWS = 32, 512
PLACES = 16  # the number of positions of a block is a multiple of this


@dataclass(frozen=True)
class Inference:
    """How the latent vectors of unseen sentences are found.

    Args:
        steps: >= 0, number of gradient steps on the loss of each sentence, each followed by a projection.
        learning_rate: > 0, step size.
        safeguard: undo a step that overshot and halve the step size of that sentence; after each accepted
            step it grows by a fifth, up to `learning_rate`. A step overshot if the gradient at its end
            has a positive inner product with the step: the loss is convex, so its minimum along the step
            lies before the end. If no step overshoots, this option changes nothing.

    Raises:
        ValueError, TypeError: naming the argument, what is wanted and what came.

    Example:
        >>> import torch, fastqt
        >>> model = fastqt.nn.Gloss(100, 16)
        >>> model.inference = fastqt.nn.Inference(steps=10)
        >>> tokens, lengths = torch.tensor([[5, 7, 2], [3, 0, 0]]), torch.tensor([3, 1])
        >>> model.encode(tokens, lengths).shape
        torch.Size([2, 16])

    Source: Singh, Fan and Auli (2019): 250 steps with the learning rate 1, and no safeguard.
    """

    steps: int = 250
    learning_rate: float = 1.0
    safeguard: bool = True

    def __post_init__(self) -> None:
        check_size("steps", self.steps, 0)
        check_number("learning_rate", self.learning_rate)
        if self.learning_rate <= 0:
            raise ValueError(f"learning_rate: want a positive number, got {self.learning_rate}")
        check_flag("safeguard", self.safeguard)


def infer_latents(
    decoder: Decoder, radius: Tensor, tokens: Tensor, lengths: Tensor, how: Inference, seed: int
) -> Tensor:
    """The latent vectors of checked sentences, (B, d), in the dtype of the decoder's weight.

    They have no gradient. The sentences are token ids (B, L) and lengths (B,), int64, and `radius` () is that
    of the ball. The decoder stays as it is; parameters of 16 bits are converted to float32. The seed draws
    the initial vectors.
    """
    dtype = torch.promote_types(decoder.weight.dtype, torch.float32)
    # Autograd refuses tensors that the caller made in inference mode. What is computed outside of it is new.
    with torch.inference_mode(False), torch.enable_grad():
        fixed = decoder.frozen(dtype)
        start = projected(_initial_latents(fixed, tokens, lengths, seed), radius)
        latents = torch.empty_like(start)
        for rows, places in _blocks(fixed, lengths):
            sentences = _fitted(tokens[rows], places), lengths[rows]
            latents[rows] = _infer_block(fixed, radius, start[rows], *sentences, how)
    return latents.to(decoder.weight.dtype)


def _blocks(decoder: Decoder, lengths: Tensor) -> Iterator[tuple[Tensor, int]]:
    """The indices of the sentences of each block, and its number of positions."""
    if decoder.positions is None:
        groups = torch.full_like(lengths, max(int(lengths.max()), 1) if len(lengths) else 1)
    else:
        groups = lengths.clamp(min=1).add(PLACES - 1) // PLACES * PLACES
        groups = groups.clamp(max=len(decoder.positions))
    for places in groups.unique().tolist():
        for rows in (groups == places).nonzero()[:, 0].split(_block_rows(lengths.device)):
            yield rows, places


def _block_rows(device: torch.device) -> int:
    return CPU_ROWS if device.type == "cpu" else GPU_ROWS


def _fitted(tokens: Tensor, places: int) -> Tensor:
    """Tokens (n, L), cut or padded to (n, places)."""
    return F.pad(tokens, (0, places - tokens.shape[1]))


def _infer_block(
    decoder: Decoder, radius: Tensor, start: Tensor, tokens: Tensor, lengths: Tensor, how: Inference
) -> Tensor:
    """The latent vectors of one block of n sentences, (n, d)."""
    n = len(start)
    extra = _block_rows(start.device) - n
    padded = [F.pad(start, (0, 0, 0, extra)), F.pad(tokens, (0, 0, 0, extra)), F.pad(lengths, (0, extra))]
    try:
        return _descend(_loss_of_latents(decoder, *padded[1:], alone=n == 1), radius, padded[0], how)[:n]
    except ScoresTooFarApartError:
        # At some step a sentence needs the loss that forms every score, in shapes that depend on all words
        # of the block. Each sentence on its own: what becomes of one must not depend on the others.
        each = (
            _infer_block(decoder, radius, *sentence, how)
            for sentence in zip(start.split(1), tokens.split(1), lengths.split(1), strict=True)
        )
        return torch.cat(list(each))


def _loss_of_latents(
    decoder: Decoder, tokens: Tensor, lengths: Tensor, *, alone: bool
) -> Callable[[Tensor], Tensor]:
    """The summed loss of a block as a function of its latent vectors.

    It raises ScoresTooFarApartError where the factored algorithm of positions gives up, unless the block has
    a sentence `alone`.
    """
    # memory="low" uses tiles of fixed width, so that memory does not grow with the vocabulary.
    options = {"reduction": "sum", "memory": "low"}
    if decoder.positions is None:
        return lambda latents: decoder.loss(latents, tokens, lengths, **options)
    positions, inside = decoder.positions[: tokens.shape[1]], within(lengths, tokens.shape[1])
    scores, mean = score_positions(positions, decoder.weight), decoder.position_loss == "mean"

    def loss(latents: Tensor) -> Tensor:
        arguments = latents, positions, decoder.weight, decoder.bias, tokens, inside
        loss = factored_pos_loss(*arguments, "sum", scores, mean=mean)
        if loss is None and not alone:
            raise ScoresTooFarApartError
        return decoder.loss(latents, tokens, lengths, **options) if loss is None else loss

    return loss


def _descend(loss: Callable[[Tensor], Tensor], radius: Tensor, latents: Tensor, how: Inference) -> Tensor:
    """Projected gradient descent from `latents` (n, d)."""
    if not how.safeguard:
        for _ in range(how.steps):
            latents = projected(latents - how.learning_rate * _gradient(loss, latents), radius)
        return latents
    gradients = _gradient(loss, latents)
    rates = torch.full_like(latents[:, :1], how.learning_rate)
    for _ in range(how.steps):
        proposed = projected(latents - rates * gradients, radius)
        end_gradients = _gradient(loss, proposed)
        overshot = (end_gradients * (proposed - latents)).sum(1, keepdim=True) > 0
        latents = proposed.where(~overshot, latents)
        gradients = end_gradients.where(~overshot, gradients)
        rates = torch.where(overshot, rates / 2, rates * STEP_GROWTH).clamp(max=how.learning_rate)
    return latents


def _gradient(loss: Callable[[Tensor], Tensor], at: Tensor) -> Tensor:
    at = at.detach().requires_grad_()
    return torch.autograd.grad(loss(at), at)[0]


def _initial_latents(decoder: Decoder, tokens: Tensor, lengths: Tensor, seed: int) -> Tensor:
    """One draw from N(0, I) per sentence, (B, d), determined by the seed and the sentence's targets."""
    draws = np.empty((len(tokens), decoder.weight.shape[1]))
    for draw, ids, length in zip(draws, tokens.tolist(), lengths.tolist(), strict=True):
        words = ids[:length]
        if decoder.positions is None:
            words = sorted(set(words) - {decoder.unknown_id})
        generator = np.random.default_rng([seed, len(words), *words])
        draw[:] = generator.standard_normal(len(draw))
    return torch.from_numpy(draws).to(decoder.weight)
