"""QuickThoughts: two encoders, trained to tell a sentence's neighbours from the rest of the batch."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastqt.nn.encoders import Encoder


class QuickThoughts(nn.Module):
    """Two encoders f and g with parameters of their own (Logeswaran and Lee, arXiv:1803.02893).

    Args:
        query_encoder: f, for the sentence.
        candidate_encoder: g, for its context; of the same `embedding_dim`.

    Raises:
        ValueError: encoders of different widths.
    """

    def __init__(self, query_encoder: Encoder, candidate_encoder: Encoder) -> None:
        if query_encoder.embedding_dim != candidate_encoder.embedding_dim:
            raise ValueError(
                f"candidate_encoder: expected query_encoder's embedding_dim, {query_encoder.embedding_dim}, "
                f"got {candidate_encoder.embedding_dim}"
            )
        super().__init__()
        self.query_encoder = query_encoder
        self.candidate_encoder = candidate_encoder

    @property
    def embedding_dim(self) -> int:
        """The width of `encode`'s vectors: the two encoders' together."""
        return self.query_encoder.embedding_dim + self.candidate_encoder.embedding_dim

    def forward(self, tokens: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Both encoders' vectors, for `fastqt.contrastive_loss`.

        Args:
            tokens: (B, L) int64, token ids.
            lengths: (B,) int64.

        Returns:
            queries f(s) and candidates g(s), (B, D) each.
        """
        return self.query_encoder(tokens, lengths), self.candidate_encoder(tokens, lengths)

    @torch.no_grad()
    def encode(self, tokens: Tensor, lengths: Tensor, *, normalize: bool = True) -> Tensor:
        """The representation of sentences for use elsewhere: [f(s) ; g(s)].

        Args:
            tokens: (B, L) int64, token ids.
            lengths: (B,) int64.
            normalize: scale each half to unit length, as in the paper's code; zeros stay zeros.

        Returns:
            (B, 2D), without gradient.
        """
        halves = self(tokens, lengths)
        return torch.cat([F.normalize(half, dim=1) if normalize else half for half in halves], dim=1)
