"""QuickThoughts: two encoders, trained to tell the neighbours of a sentence from the rest of the batch."""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastqt.nn.encoders import Encoder
from fastqt.nn.init import reset_children


class QuickThoughts(nn.Module):
    """Two encoders f and g that share no parameters.

    Args:
        query_encoder: f, which encodes the sentence.
        candidate_encoder: g, which encodes its context; its `embedding_dim` D must equal that of f.

    Raises:
        ValueError: encoders of different widths.

    Example:
        >>> import torch, fastqt
        >>> model = fastqt.nn.QuickThoughts(*(fastqt.nn.BagOfWords(100, 16) for _ in range(2)))
        >>> tokens, lengths = torch.tensor([[5, 7, 2], [3, 0, 0]]), torch.tensor([3, 1])
        >>> queries, candidates = model(tokens, lengths)
        >>> fastqt.contrastive_loss(queries, candidates).shape, model.encode(tokens, lengths).shape
        (torch.Size([]), torch.Size([2, 32]))

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

    reset_parameters = reset_children

    @property
    def embedding_dim(self) -> int:
        """2D, the width of the vectors that `encode` returns."""
        return self.query_encoder.embedding_dim + self.candidate_encoder.embedding_dim

    def forward(self, tokens: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """The queries f(s) and the candidates g(s), (B, D) each, for `fastqt.contrastive_loss`.

        Arguments and errors are those of `Encoder.forward`.
        """
        return self.query_encoder(tokens, lengths), self.candidate_encoder(tokens, lengths)

    @torch.no_grad()
    def encode(self, tokens: Tensor, lengths: Tensor, *, normalize: bool = True) -> Tensor:
        """The sentence vectors for downstream use: [f(s) ; g(s)], (B, 2D), without gradient.

        `normalize` scales each half to norm 1, as in the paper's code. A half of zeros stays zero. The
        sentences, and the errors, are as in `Encoder.forward`.
        """
        halves = self(tokens, lengths)
        return torch.cat([F.normalize(half, dim=1) if normalize else half for half in halves], dim=1)


class CombinedQuickThoughts(nn.Module):
    """Models that are trained apart and joined at test time: the combined model of QuickThoughts.

    Each model has a loss of its own. No gradient of it depends on another model.

    Args:
        *models: at least one, of one vocabulary; the paper joins a uni-GRU model and a bi-GRU model.

    Raises:
        ValueError: no model.

    Example:
        >>> import torch
        >>> from fastqt.nn import BagOfWords, CombinedQuickThoughts, QuickThoughts
        >>> models = [QuickThoughts(BagOfWords(100, 16), BagOfWords(100, 16)) for _ in range(2)]
        >>> tokens, lengths = torch.tensor([[5, 7, 2], [3, 0, 0]]), torch.tensor([3, 1])
        >>> CombinedQuickThoughts(*models).encode(tokens, lengths).shape
        torch.Size([2, 64])

    Source: Logeswaran and Lee, "An efficient framework for learning sentence representations"
    (arXiv:1803.02893), combine-QT.
    """

    def __init__(self, *models: QuickThoughts) -> None:
        if not models:
            raise ValueError("models: want at least one model, got none")
        super().__init__()
        self.models = nn.ModuleList(models)

    reset_parameters = reset_children

    @property
    def parts(self) -> Sequence[QuickThoughts]:
        """The models, as what they are."""
        return cast("Sequence[QuickThoughts]", self.models)

    @property
    def embedding_dim(self) -> int:
        """The width of the vectors that `encode` returns, the sum of those of the models."""
        return sum(model.embedding_dim for model in self.parts)

    def forward(self, tokens: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """The queries and the candidates: those of the models beside each other, in their order.

        A product of both is the sum of the models' scores. Arguments and errors are those of
        `Encoder.forward`.
        """
        queries, candidates = zip(*(model(tokens, lengths) for model in self.models), strict=True)
        return torch.cat(queries, dim=1), torch.cat(candidates, dim=1)

    def split(self, vectors: Tensor) -> tuple[Tensor, ...]:
        """Takes queries or candidates of `forward` apart: those of each model."""
        return torch.split(vectors, [model.query_encoder.embedding_dim for model in self.parts], dim=1)

    @torch.no_grad()
    def encode(self, tokens: Tensor, lengths: Tensor, *, normalize: bool = True) -> Tensor:
        """The sentence vectors for downstream use, (B, embedding_dim): [f1(s) ; g1(s) ; f2(s) ; g2(s) ; …].

        They are those of the models' `encode`, which says what the arguments are. The whole is not
        normalised.
        """
        return torch.cat([model.encode(tokens, lengths, normalize=normalize) for model in self.parts], dim=1)
