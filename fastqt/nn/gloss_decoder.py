"""GLOSS's decoder of sentences: what it should predict, and its loss for given latent vectors."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastqt.checks import INTEGERS, check_tensor
from fastqt.ids import as_ids
from fastqt.losses import gloss_bow_loss, gloss_pos_loss
from fastqt.losses.gloss import PositionLoss


class Decoder(NamedTuple):
    """The parameters and options that a sentence's loss depends on."""

    weight: Tensor  # (V, d)
    bias: Tensor  # (V,)
    positions: Tensor | None  # (L, d); None for bags of words
    unknown_id: int | None  # the id that a bag of words does not predict
    position_loss: PositionLoss

    def frozen(self, dtype: torch.dtype) -> Decoder:
        """The same without gradients, in a dtype."""
        positions = None if self.positions is None else self.positions.detach().to(dtype)
        weight, bias = self.weight.detach().to(dtype), self.bias.detach().to(dtype)
        return self._replace(weight=weight, bias=bias, positions=positions)

    def targets(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """Which of the tokens (B, L) to predict, (B, L) bool."""
        inside = within(lengths, tokens.shape[1])
        if self.positions is not None or self.unknown_id is None:
            return inside
        return inside & (tokens != self.unknown_id)

    def loss(self, latents: Tensor, tokens: Tensor, lengths: Tensor, **options: Any) -> Tensor:
        """The loss of checked sentences: `fastqt.gloss_bow_loss` or `fastqt.gloss_pos_loss`."""
        if self.positions is None:
            return self._bow_loss(latents, tokens, lengths, **options)
        positions = self.positions[: tokens.shape[1]]
        options["position_loss"] = self.position_loss
        return gloss_pos_loss(latents, positions, self.weight, self.bias, tokens, lengths, **options)

    def check(self, tokens: Tensor, lengths: Tensor) -> None:
        """Checks shapes, dtypes and ranges of the sentences that the user gave."""
        check_tensor("tokens", tokens)
        as_ids("lengths", lengths)
        V, most = len(self.weight), math.inf if self.positions is None else len(self.positions)
        if tokens.dim() != 2 or tokens.shape[1] > most:
            raise ValueError(f"tokens: want shape (B, L), L at most {most}, got {tuple(tokens.shape)}")
        if tokens.dtype not in INTEGERS:
            raise TypeError(f"tokens: want an integer dtype, got {tokens.dtype}")
        B, L = tokens.shape
        if lengths.shape != (B,) or bool(((lengths < 0) | (lengths > L)).any()):
            raise ValueError(f"lengths: want one in 0..{L} for each of B={B} sentences")
        used = tokens[within(lengths, L)]
        if bool(((used < 0) | (used >= V)).any()):
            raise ValueError(f"tokens: want integers in 0..{V - 1}, got {int(used.min())}..{int(used.max())}")

    def _bow_loss(self, latents: Tensor, tokens: Tensor, lengths: Tensor, **options: Any) -> Tensor:
        is_target = self.targets(tokens, lengths)
        counts = is_target.sum(1)
        ids, offsets = tokens[is_target], counts.cumsum(0) - counts
        return gloss_bow_loss(latents, self.weight, self.bias, ids, offsets, **options)


def within(lengths: Tensor, L: int) -> Tensor:
    """Whether position l lies inside sentence b, (B, L) bool."""
    return torch.arange(L, device=lengths.device) < lengths[:, None]


def projected(latents: Tensor, radius: Tensor) -> Tensor:
    """Latent vectors (B, d) on the ball: those outside are scaled to its surface."""
    norms = torch.linalg.vector_norm(latents, dim=1, keepdim=True)
    factors: Tensor = radius / norms.clamp(min=radius)
    return latents * factors.to(latents.dtype)
