"""What fastqt is compared with: plain PyTorch models and training, and the loss's matrix products."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence

from fastqt.machine.cases import window_matrix

__all__ = ["PlainQuickThoughts", "PlainTrainer", "eager_contrastive_loss", "loss_products", "window_matrix"]


def eager_contrastive_loss(
    queries: Tensor,  # (N, D)
    candidates: Tensor,  # (N, D)
    targets: Tensor,  # (N, N)
) -> Tensor:
    """The loss that `contrastive_loss` computes, in plain PyTorch with the whole score matrix."""
    scores = (queries @ candidates.T).fill_diagonal_(0)
    return F.kl_div(F.log_softmax(scores, dim=1), targets, reduction="batchmean")


class PlainEncoder(nn.Module):
    """An `nn.EmbeddingBag`, or an `nn.GRU` over packed sequences if there is a hidden size."""

    def __init__(self, vocab_size: int, word_dim: int, hidden_size: int | None) -> None:
        super().__init__()
        self.gru = None if hidden_size is None else nn.GRU(word_dim, hidden_size, batch_first=True)
        table = nn.EmbeddingBag if self.gru is None else nn.Embedding
        options = {"mode": "sum"} if self.gru is None else {}
        self.embedding = table(vocab_size, word_dim, **options)
        nn.init.uniform_(self.embedding.weight, -0.1, 0.1)

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        if self.gru is None:
            valid = torch.arange(tokens.shape[1]) < lengths[:, None]
            return self.embedding(tokens[valid], lengths.cumsum(0) - lengths)
        words = pack_padded_sequence(self.embedding(tokens), lengths, batch_first=True, enforce_sorted=False)
        return self.gru(words)[1][0]


class PlainQuickThoughts(nn.Module):
    """Two plain encoders, for queries and for candidates; `hidden_size` None means bags of words."""

    def __init__(self, vocab_size: int, word_dim: int = 300, hidden_size: int | None = None) -> None:
        super().__init__()
        self.query_encoder = PlainEncoder(vocab_size, word_dim, hidden_size)
        self.candidate_encoder = PlainEncoder(vocab_size, word_dim, hidden_size)

    def forward(self, tokens: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        return self.query_encoder(tokens, lengths), self.candidate_encoder(tokens, lengths)


class PlainTrainer:
    """The usual loop: the eager loss on dense targets made once, torch's clipping, torch's default Adam."""

    def __init__(self, model: nn.Module, batch_size: int, context_size: int) -> None:
        self.model = model
        self.optimizer = torch.optim.Adam(model.parameters(), lr=5e-4)
        self.targets = window_matrix(batch_size, context_size)

    def step(self, tokens: Tensor, lengths: Tensor) -> None:
        self.optimizer.zero_grad()
        eager_contrastive_loss(*self.model(tokens, lengths), self.targets).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 5.0)
        self.optimizer.step()


def loss_products(queries: Tensor, candidates: Tensor) -> Callable[[Tensor, Tensor], None]:
    """The three matrix products of a score matrix and its two gradients, written to preallocated memory.

    The returned function takes detached queries and candidates of these shapes.
    """
    dF, dG = torch.empty_like(queries, requires_grad=False), torch.empty_like(candidates, requires_grad=False)
    S = dF.new_empty(len(queries), len(candidates))

    def run(F: Tensor, G: Tensor) -> None:
        torch.mm(F, G.T, out=S)
        torch.mm(S, G, out=dF)
        torch.mm(S.T, F, out=dG)

    return run
