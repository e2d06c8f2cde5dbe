"""QuickThoughts: two encoders, trained to tell the neighbours of a sentence from the rest of the batch."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastqt.nn.encoders import Encoder


class QuickThoughts(nn.Module):
    """Two encoders f and g that share no parameters.

    Args:
        query_encoder: f, which encodes the sentence.
        candidate_encoder: g, which encodes its context; its `embedding_dim` D must equal that of f.

    Raises:
        ValueError: encoders of different widths.

    Source: Logeswaran and Lee, "An efficient framework for learning sentence representations"
    (arXiv:1803.02893).
    """

    def __init__(self, query_encoder: Encoder, candidate_encoder: Encoder) -> None:
        if query_encoder.embedding_dim != candidate_encoder.embedding_dim:
            raise ValueError(
                f"candidate_encoder: want query_encoder's embedding_dim, {query_encoder.embedding_dim}, "
                f"got {candidate_encoder.embedding_dim}"
            )
        super().__init__()
        self.query_encoder = query_encoder
        self.candidate_encoder = candidate_encoder

    @property
    def embedding_dim(self) -> int:
        """2D, the width of the vectors that `encode` returns."""
        return self.query_encoder.embedding_dim + self.candidate_encoder.embedding_dim

    def forward(self, tokens: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Encodes sentences with both encoders, for `fastqt.contrastive_loss`.

        Args:
            tokens: (B, L) int64, token ids.
            lengths: (B,) int64 in 0..L.

        Returns:
            The queries f(s) and the candidates g(s), (B, D) each.

        Raises:
            ValueError, IndexError: as in `Encoder.forward`.
        """
        return self.query_encoder(tokens, lengths), self.candidate_encoder(tokens, lengths)

    @torch.no_grad()
    def encode(self, tokens: Tensor, lengths: Tensor, *, normalize: bool = True) -> Tensor:
        """The sentence vectors for downstream use: [f(s) ; g(s)].

        Args:
            tokens: (B, L) int64, token ids.
            lengths: (B,) int64 in 0..L.
            normalize: scale each half to norm 1, as in the paper's code. A half of zeros stays zero.

        Returns:
            (B, 2D), without gradient.

        Raises:
            ValueError, IndexError: as in `Encoder.forward`.
        """
        halves = self(tokens, lengths)
        return torch.cat([F.normalize(half, dim=1) if normalize else half for half in halves], dim=1)
