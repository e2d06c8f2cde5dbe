"""SimCSE and MixCSE: one encoder, trained to tell a sentence's second view from all other sentences."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastqt.nn.encoders import Encoder
from fastqt.nn.loss import Loss, MixCSELoss, SimCSELoss


class SimCSE(nn.Module):
    """An encoder whose dropout makes two views of a sentence (Gao et al., arXiv:2104.08821).

    Args:
        encoder: of sentences; its own dropout, if it has any, differs between the views too.
        dropout: the probability with which a coordinate of a sentence's vector is left out of a view.
        **options: those of `fastqt.simcse_loss`.

    Raises:
        ValueError: a dropout outside [0, 1).
        TypeError: an option that the loss has not.

    Attributes:
        loss: the loss of two views, a module.
    """

    loss: Loss

    def __init__(self, encoder: Encoder, *, dropout: float = 0.1, **options: Any) -> None:
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout: expected a probability in [0, 1), got {dropout}")
        super().__init__()
        self.encoder = encoder
        self.dropout = nn.Dropout(dropout)
        self.loss = self._loss(**options)

    def _loss(self, **options: Any) -> Loss:
        return SimCSELoss(**options)

    @property
    def embedding_dim(self) -> int:
        """The width of `encode`'s vectors."""
        return self.encoder.embedding_dim

    def forward(self, tokens: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Two views of each sentence, for `self.loss`; equal ones in evaluation mode.

        Args:
            tokens: (B, L) int64, token ids.
            lengths: (B,) int64.

        Returns:
            z1 and z2, (B, D) each.
        """
        both: Tensor = self.dropout(self.encoder(torch.cat([tokens, tokens]), torch.cat([lengths, lengths])))
        z1, z2 = both.chunk(2)
        return z1, z2

    @torch.no_grad()
    def encode(self, tokens: Tensor, lengths: Tensor, *, normalize: bool = True) -> Tensor:
        """The representation of sentences for use elsewhere; without dropout in evaluation mode alone.

        Args:
            tokens: (B, L) int64, token ids.
            lengths: (B,) int64.
            normalize: scale to unit length; zeros stay zeros.

        Returns:
            (B, D), without gradient.
        """
        vectors = self.encoder(tokens, lengths)
        return F.normalize(vectors, dim=1) if normalize else vectors


class MixCSE(SimCSE):
    """SimCSE with a hard negative mixed of a sentence's own positive and another's (Zhang et al., AAAI 2022).

    Args:
        encoder, dropout: as of `SimCSE`.
        **options: those of `fastqt.mixcse_loss`.

    Raises:
        ValueError, TypeError: as `SimCSE`.
    """

    def _loss(self, **options: Any) -> Loss:
        return MixCSELoss(**options)
