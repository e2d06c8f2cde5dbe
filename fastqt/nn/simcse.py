"""SimCSE and MixCSE: one encoder, trained to tell the second view of a sentence from other sentences."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastqt.checks import check_dropout
from fastqt.nn.encoders import Encoder
from fastqt.nn.loss import Loss
from fastqt.nn.losses import MixCSELoss, SimCSELoss


class SimCSE(nn.Module):
    """An encoder whose dropout makes two views of each sentence, or that encodes pairs and triplets.

    Args:
        encoder: a sentence encoder. If it has dropout of its own, that differs between the views too.
        dropout: the probability with which a coordinate of a sentence vector is set to zero in a view.
        **options: the options of `fastqt.simcse_loss`.

    Raises:
        ValueError: a dropout outside [0, 1).
        TypeError: an option that the loss does not have.

    Attributes:
        loss: the module that computes the loss of two views.

    Source: Gao et al., "SimCSE: Simple contrastive learning of sentence embeddings" (arXiv:2104.08821).
    """

    loss: Loss

    def __init__(self, encoder: Encoder, *, dropout: float = 0.1, **options: Any) -> None:
        check_dropout(dropout)
        super().__init__()
        self.encoder = encoder
        self.dropout = nn.Dropout(dropout)
        self.loss = self._make_loss(**options)

    def _make_loss(self, **options: Any) -> Loss:
        return SimCSELoss(**options)

    @property
    def embedding_dim(self) -> int:
        """D, the width of the vectors that `encode` returns."""
        return self.encoder.embedding_dim

    def forward(self, tokens: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Two views of each sentence, for `self.loss`. They are equal in evaluation mode.

        Args:
            tokens: (B, L) int64, token ids.
            lengths: (B,) int64 in 0..L.

        Returns:
            The views z1 and z2, (B, D) each.

        Raises:
            ValueError, IndexError: as in `Encoder.forward`.
        """
        z1, z2 = self.view(torch.cat([tokens, tokens]), torch.cat([lengths, lengths])).chunk(2)
        return z1, z2

    def view(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """One view of each sentence, for pairs and triplets of different sentences.

        Args:
            tokens: (B, L) int64, token ids.
            lengths: (B,) int64 in 0..L.

        Returns:
            (B, D).

        Raises:
            ValueError, IndexError: as in `Encoder.forward`.
        """
        result: Tensor = self.dropout(self.encoder(tokens, lengths))
        return result

    @torch.no_grad()
    def encode(self, tokens: Tensor, lengths: Tensor, *, normalize: bool = True) -> Tensor:
        """The sentence vectors for downstream use.

        Call `eval()` first: in training mode the encoder's own dropout is active.

        Args:
            tokens: (B, L) int64, token ids.
            lengths: (B,) int64 in 0..L.
            normalize: scale each vector to norm 1. A vector of zeros stays zero.

        Returns:
            (B, D), without gradient.

        Raises:
            ValueError, IndexError: as in `Encoder.forward`.
        """
        vectors = self.encoder(tokens, lengths)
        return F.normalize(vectors, dim=1) if normalize else vectors


class MixCSE(SimCSE):
    """SimCSE with a hard negative per sentence, mixed from its own positive and that of another sentence.

    Args:
        encoder, dropout: as in `SimCSE`.
        **options: the options of `fastqt.mixcse_loss`.

    Raises:
        ValueError, TypeError: as in `SimCSE`.

    Source: Zhang et al., "Unsupervised Sentence Representation via Contrastive Learning with Mixing
    Negatives" (AAAI 2022).
    """

    def _make_loss(self, **options: Any) -> Loss:
        return MixCSELoss(**options)
