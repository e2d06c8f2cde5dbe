"""SimCSE and MixCSE: one encoder, trained to tell the second view of a sentence from other sentences."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import Unpack

from fastqt.checks import check_dropout
from fastqt.nn.encoders import Encoder
from fastqt.nn.init import reset_children
from fastqt.nn.losses import Loss, MixCSELoss, SimCSELoss
from fastqt.nn.losses.base import NamedOptions, takes_options_of
from fastqt.nn.masked_words import MaskedWordHead, Masking, TokenEncoder, masked_word_loss

if TYPE_CHECKING:  # The stub that type checkers read has these types, and no module.
    from fastqt.nn.losses import MixCSEOptions, SimCSEOptions


class SimCSE(NamedOptions):
    """An encoder whose dropout makes two views of each sentence, or that encodes pairs and triplets.

    Args:
        encoder: a sentence encoder. If it has dropout of its own, that differs between the views too.
        dropout: the probability with which a coordinate of a sentence vector is set to zero in a view.
        head: predicts masked words from the encoder's token states, for SimCSE's further term.
        scale, learn_scale, max_scale, hard_negative_weight, tau_plus, exclude, matryoshka, reduction,
            memory, backend, group: the options of the loss, as of `fastqt.nn.SimCSELoss`; the scale is
            1 / temperature.

    Raises:
        ValueError: a dropout outside [0, 1), or an option that the loss refuses.
        TypeError: an option of another type, or a head with an encoder without states of tokens.

    Attributes:
        loss: the module that computes the loss of two views.

    Example:
        >>> import torch, fastqt
        >>> model = fastqt.nn.SimCSE(fastqt.nn.BagOfWords(100, 16), dropout=0.1, scale=1 / 0.05)
        >>> tokens, lengths = torch.tensor([[5, 7, 2], [3, 0, 0]]), torch.tensor([3, 1])
        >>> model.loss(*model(tokens, lengths)).shape
        torch.Size([])
        >>> model.eval().encode(tokens, lengths).shape
        torch.Size([2, 16])

    Source: Gao et al., "SimCSE: Simple contrastive learning of sentence embeddings" (arXiv:2104.08821).
    """

    loss: Loss

    @takes_options_of(SimCSELoss)
    def __init__(
        self,
        encoder: Encoder,
        *,
        dropout: float = 0.1,
        head: MaskedWordHead | None = None,
        **options: Unpack[SimCSEOptions],
    ) -> None:
        self._set_up(encoder, dropout, head, SimCSELoss(**options))

    def _set_up(self, encoder: Encoder, dropout: float, head: MaskedWordHead | None, loss: Loss) -> None:
        check_dropout(dropout)
        if head is not None and not isinstance(encoder, TokenEncoder):
            raise TypeError(f"head: want None with a {type(encoder).__name__}, which has no states of tokens")
        nn.Module.__init__(self)
        self.encoder = encoder
        self.head = head
        self.dropout = nn.Dropout(dropout)
        self.loss = loss

    reset_parameters = reset_children

    @property
    def embedding_dim(self) -> int:
        """D, the width of the vectors that `encode` returns."""
        return self.encoder.embedding_dim

    def forward(self, tokens: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Two views z1 and z2 of each sentence, (B, D) each, for `self.loss`.

        They are equal in evaluation mode. Arguments and errors are those of `Encoder.forward`.
        """
        z1, z2 = self.view(torch.cat([tokens, tokens]), torch.cat([lengths, lengths])).chunk(2)
        return z1, z2

    def view(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """One view (B, D) of each sentence, for pairs and triplets of different sentences.

        Arguments and errors are those of `Encoder.forward`.
        """
        result: Tensor = self.dropout(self.encoder(tokens, lengths))
        return result

    def masked_word_loss(self, tokens: Tensor, lengths: Tensor, masking: Masking) -> Tensor:
        """The cross-entropy of masked words, summed over all that were chosen, a scalar.

        The sentences, as they were, and the errors are as in `Encoder.forward`; `masking` is what
        `fastqt.nn.mask_words` returned for them. ValueError where the model has no head.
        """
        if self.head is None:
            raise ValueError("head: want one that predicts masked words, got None")
        return masked_word_loss(cast("TokenEncoder", self.encoder), self.head, tokens, lengths, masking)

    @torch.no_grad()
    def encode(self, tokens: Tensor, lengths: Tensor, *, normalize: bool = True) -> Tensor:
        """The sentence vectors for downstream use, (B, D), without gradient.

        Call `eval()` first: in training mode the encoder's own dropout is active. `normalize` scales each
        vector to norm 1; a vector of zeros stays zero. The sentences, and the errors, are as in
        `Encoder.forward`.
        """
        vectors = self.encoder(tokens, lengths)
        return F.normalize(vectors, dim=1) if normalize else vectors


class MixCSE(SimCSE):
    """SimCSE with a hard negative per sentence, mixed from its own positive and that of another sentence.

    Args:
        encoder, dropout, head: as in `SimCSE`.
        mix, scale, learn_scale, max_scale, form, partner, blocks, masked_cell, hard_negative_weight,
            stop_gradient, reduction, memory, backend, group: the options of the loss, as of
            `fastqt.nn.MixCSELoss`; the scale is 1 / temperature.

    Raises:
        ValueError, TypeError: as in `SimCSE`.

    Example:
        >>> import torch, fastqt
        >>> model = fastqt.nn.MixCSE(fastqt.nn.BagOfWords(100, 16), mix=0.2)
        >>> tokens, lengths = torch.tensor([[5, 7, 2], [3, 0, 0]]), torch.tensor([3, 1])
        >>> model.loss(*model(tokens, lengths)).shape
        torch.Size([])

    Source: Zhang et al., "Unsupervised Sentence Representation via Contrastive Learning with Mixing
    Negatives" (AAAI 2022).
    """

    @takes_options_of(MixCSELoss)
    def __init__(
        self,
        encoder: Encoder,
        *,
        dropout: float = 0.1,
        head: MaskedWordHead | None = None,
        **options: Unpack[MixCSEOptions],
    ) -> None:
        self._set_up(encoder, dropout, head, MixCSELoss(**options))
