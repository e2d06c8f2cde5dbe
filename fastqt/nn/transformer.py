"""A small Transformer as a sentence encoder. Padding is kept out of all matrix products but attention's."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastqt.checks import check_dropout, check_option, check_size
from fastqt.nn.encoders import Encoder, check_batch, of_no_words
from fastqt.nn.init import GlorotLinear, embedding_table, reset_children

Pooling = Literal["mean", "first"]


class Transformer(Encoder):
    """A Transformer for training from scratch; its default sizes are the QuickThoughts re-implementation's.

    The input is sqrt(dim) · (word vector + learnt position vector), with dropout. Each layer is multi-head
    attention and then a ReLU feed-forward network, each in the pre-norm form x + dropout(f(norm(x))). A
    final layer norm and a pooling over the words follow.

    Args:
        vocab_size: V, the number of token ids.
        dim: the width of word and sentence vectors.
        layers: number of layers.
        heads: number of attention heads, a divisor of `dim`.
        feedforward: the hidden width of the feed-forward network.
        dropout: the dropout probability of embeddings, attention weights and the results of sub-layers.
        max_length: the number of position vectors, which is the length of the longest sentence.
        pooling: "mean" takes the mean over the words; "first" puts a learnt token in front of the words and
            takes its vector.
        sparse: give the embedding table a sparse gradient, for optimisers that accept one.

    Raises:
        ValueError: an option out of range; in `forward`, also a sentence longer than max_length.

    Example:
        >>> import torch, fastqt
        >>> encoder = fastqt.nn.Transformer(100, 16, layers=2, heads=4, feedforward=32)
        >>> tokens, lengths = torch.tensor([[5, 7, 2], [3, 0, 0]]), torch.tensor([3, 1])
        >>> encoder(tokens, lengths).shape
        torch.Size([2, 16])

    Source: Vaswani et al., "Attention is all you need" (arXiv:1706.03762); pre-norm: Xiong et al., "On layer
    normalization in the Transformer architecture" (arXiv:2002.04745).
    """

    def __init__(
        self,
        vocab_size: int,
        dim: int = 300,
        *,
        layers: int = 6,
        heads: int = 5,
        feedforward: int = 1000,
        dropout: float = 0.1,
        max_length: int = 50,
        pooling: Pooling = "mean",
        sparse: bool = False,
    ) -> None:
        for name, size in (("layers", layers), ("feedforward", feedforward), ("max_length", max_length)):
            check_size(name, size)
        if heads < 1 or dim % heads:
            raise ValueError(f"heads: want a divisor of dim={dim}, got {heads}")
        check_dropout(dropout)
        check_option("pooling", pooling, get_args(Pooling))
        super().__init__()
        self.embedding_dim = dim
        self.max_length = max_length
        self.embedding = embedding_table(vocab_size, dim, sparse=sparse)
        self.positions = embedding_table(max_length, dim)
        self.summary = nn.Parameter(torch.empty(1, dim).uniform_(-0.1, 0.1)) if pooling == "first" else None
        self.layers = nn.ModuleList(TransformerLayer(dim, heads, feedforward, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.dropout = nn.Dropout(dropout)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if self.summary is not None:
            nn.init.uniform_(self.summary, -0.1, 0.1)

    @property
    def word_table(self) -> Tensor:
        """(V, dim), the word vectors."""
        return self.embedding.weight

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        states, layout = self._states(tokens, lengths)
        if layout is None:
            return of_no_words(self, self.embedding.weight, len(tokens))
        if self.summary is None:
            return layout.pad(self.norm(states)).sum(1) / lengths.clamp(min=1).unsqueeze(1)
        summaries = self.norm(states[: len(tokens)])
        return torch.where(lengths.unsqueeze(1) > 0, summaries, 0)

    def states(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """The final states of all n words, one sentence after the other, (n, dim).

        Arguments and errors are those of `Encoder.forward`.
        """
        states, _ = self._states(tokens, lengths)
        result: Tensor = self.norm(states if self.summary is None else states[len(tokens) :])
        return result

    def _states(self, tokens: Tensor, lengths: Tensor) -> tuple[Tensor, PaddedLayout | None]:
        """The states before the final norm, those of summary tokens first; no layout where no word is."""
        check_batch(tokens, lengths)
        longest = int(lengths.max()) if len(lengths) else 0
        if longest > self.max_length:
            raise ValueError(
                f"lengths: want at most max_length={self.max_length} words a sentence, got {longest}"
            )

        if longest == 0:
            rows = 0 if self.summary is None else len(tokens)
            return self.embedding.weight.new_zeros(rows, self.embedding_dim), None

        valid = torch.arange(longest, device=tokens.device) < lengths.unsqueeze(1)
        sentence, position = valid.nonzero(as_tuple=True)
        words = self.embedding(tokens[sentence, position]) + self.positions(position)

        if self.summary is not None:
            # All summary tokens come before all words. Their order in memory is free, because `layout` tells
            # attention where each vector belongs.
            words = torch.cat([self.summary.expand(len(tokens), -1), words])
            position = torch.cat([position.new_zeros(len(tokens)), position + 1])
            sentence = torch.cat([torch.arange(len(tokens), device=tokens.device), sentence])
            valid = F.pad(valid, (1, 0), value=True)

        layout = PaddedLayout(valid, sentence * valid.shape[1] + position)
        words = self.dropout(math.sqrt(self.embedding_dim) * words)
        for layer in self.layers:
            words = layer(words, layout)
        return words, layout


@dataclass(frozen=True)
class PaddedLayout:
    """Where each of the N words of a batch stands in the padded (B, L) sentences."""

    valid: Tensor  # (B, L) bool, whether there is a word
    indices: Tensor  # (N,) int64, the index of each word in the flattened (B·L)

    def pad(self, words: Tensor) -> Tensor:
        """Scatters (N, D) to (B, L, D), with zeros as padding."""
        B, L = self.valid.shape
        return words.new_zeros(B * L, words.shape[1]).index_copy(0, self.indices, words).view(B, L, -1)

    def unpad(self, padded: Tensor) -> Tensor:
        """Gathers (N, D) from (B, L, D)."""
        return padded.flatten(0, 1).index_select(0, self.indices)


class TransformerLayer(nn.Module):
    """Self-attention within each sentence, then a feed-forward network on each word, both with pre-norm."""

    def __init__(self, dim: int, heads: int, feedforward: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(dim)
        self.query_key_value = GlorotLinear(dim, 3 * dim, blocks=3)
        self.output = GlorotLinear(dim, dim)
        self.feedforward_norm = nn.LayerNorm(dim)
        self.expand = GlorotLinear(dim, feedforward)
        self.contract = GlorotLinear(feedforward, dim)
        self.dropout = nn.Dropout(dropout)
        self.reset_parameters()

    reset_parameters = reset_children

    def forward(self, words: Tensor, layout: PaddedLayout) -> Tensor:
        words = words + self.dropout(self._attention(self.attention_norm(words), layout))
        hidden = self.dropout(F.relu(self.expand(self.feedforward_norm(words))))
        result: Tensor = words + self.dropout(self.contract(hidden))
        return result

    def _attention(self, words: Tensor, layout: PaddedLayout) -> Tensor:
        padded = layout.pad(self.query_key_value(words))
        queries, keys, values = padded.unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        # A softmax over no key is NaN. An empty sentence therefore attends to its padding, which is zero; no
        # word reads the result.
        attended = layout.valid | ~layout.valid.any(1, keepdim=True)
        heads = F.scaled_dot_product_attention(
            queries,
            keys,
            values,
            attn_mask=attended[:, None, None],
            dropout_p=self.dropout.p if self.training else 0.0,
        )
        result: Tensor = self.output(layout.unpad(heads.transpose(1, 2).flatten(2)))
        return result
