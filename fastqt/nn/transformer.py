"""A small Transformer as a sentence encoder, whose matrix products see the words alone and no padding."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastqt.nn.encoders import Encoder, check_batch
from fastqt.nn.init import embedding_table

Pooling = Literal["mean", "first"]


class Transformer(Encoder):
    """A Transformer trained from scratch; the default sizes are those of the QuickThoughts re-implementation.

    sqrt(dim) · (word + learnt position), dropout, `layers` of multi-head attention and a ReLU feed-forward
    network, each in the pre-norm form x + dropout(f(norm(x))), a last norm, and the mean over the words.

    Args:
        vocab_size: V, the number of token ids.
        dim: the width of a word's and a sentence's vector.
        layers: how many.
        heads: of attention; they share `dim` evenly.
        feedforward: the width within the feed-forward network.
        dropout: the share of zeros in embeddings, attention weights and the results of sub-layers.
        max_length: the longest sentence there is a position for.
        pooling: "mean" of the words, or "first": a learnt token in front of them, whose vector is taken.
        sparse: give the table a sparse gradient, for optimisers that take one.

    Raises:
        ValueError: an option out of its range; in `forward`, a sentence longer than max_length too.

    Source: Vaswani et al., "Attention is all you need" (arXiv:1706.03762); pre-norm: Xiong et al.
        (arXiv:2002.04745).
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
            if size < 1:
                raise ValueError(f"{name}: expected at least 1, got {size}")
        if heads < 1 or dim % heads:
            raise ValueError(f"heads: expected a divisor of dim={dim}, got {heads}")
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout: expected a share in [0, 1), got {dropout}")
        if pooling not in ("mean", "first"):
            raise ValueError(f"pooling: expected 'mean' or 'first', got {pooling!r}")
        super().__init__()
        self.embedding_dim = dim
        self.max_length = max_length
        self.embedding = embedding_table(vocab_size, dim, sparse=sparse)
        self.positions = embedding_table(max_length, dim)
        self.summary = nn.Parameter(torch.empty(1, dim).uniform_(-0.1, 0.1)) if pooling == "first" else None
        self.layers = nn.ModuleList(TransformerLayer(dim, heads, feedforward, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        check_batch(tokens, lengths)
        longest = int(lengths.max()) if len(lengths) else 0
        if longest > self.max_length:
            raise ValueError(
                f"lengths: expected at most max_length={self.max_length} words a sentence, got {longest}"
            )
        if longest == 0:
            return self.embedding.weight.new_zeros(len(tokens), self.embedding_dim)
        valid = torch.arange(longest, device=tokens.device) < lengths.unsqueeze(1)
        sentence, position = valid.nonzero(as_tuple=True)
        words = self.embedding(tokens[sentence, position]) + self.positions(position)
        if self.summary is not None:
            # In front of all words rather than each sentence's: only attention knows of an order.
            words = torch.cat([self.summary.expand(len(tokens), -1), words])
            position = torch.cat([position.new_zeros(len(tokens)), position + 1])
            sentence = torch.cat([torch.arange(len(tokens), device=tokens.device), sentence])
            valid = F.pad(valid, (1, 0), value=True)
        places = Places(valid, sentence * valid.shape[1] + position)
        words = self.dropout(math.sqrt(self.embedding_dim) * words)
        for layer in self.layers:
            words = layer(words, places)
        if self.summary is None:
            return places.pad(self.norm(words)).sum(1) / lengths.clamp(min=1).unsqueeze(1)
        summaries = self.norm(words[: len(tokens)])
        return torch.where(lengths.unsqueeze(1) > 0, summaries, 0)


@dataclass(frozen=True)
class Places:
    """Where the words of a batch lie in their padded sentences."""

    valid: Tensor  # (B, L) bool
    slots: Tensor  # (N,) int64, the place of each word in (B·L)

    def pad(self, words: Tensor) -> Tensor:
        """(N, D) to (B, L, D), zeros where there is no word."""
        B, L = self.valid.shape
        return words.new_zeros(B * L, words.shape[1]).index_copy(0, self.slots, words).view(B, L, -1)

    def words(self, padded: Tensor) -> Tensor:
        """(B, L, D) to (N, D)."""
        return padded.flatten(0, 1).index_select(0, self.slots)


class TransformerLayer(nn.Module):
    """Self-attention within each sentence, then a network for each word, both as x + dropout(f(norm(x)))."""

    def __init__(self, dim: int, heads: int, feedforward: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(dim)
        self.query_key_value = nn.Linear(dim, 3 * dim)
        self.output = nn.Linear(dim, dim)
        self.feedforward_norm = nn.LayerNorm(dim)
        self.expand = nn.Linear(dim, feedforward)
        self.contract = nn.Linear(feedforward, dim)
        self.dropout = nn.Dropout(dropout)
        for kernel in (*self.query_key_value.weight.chunk(3), self.output.weight):
            nn.init.xavier_uniform_(kernel)
        for linear in (self.expand, self.contract):
            nn.init.xavier_uniform_(linear.weight)
        for linear in (self.query_key_value, self.output, self.expand, self.contract):
            nn.init.zeros_(linear.bias)

    def forward(self, words: Tensor, places: Places) -> Tensor:
        words = words + self.dropout(self._attention(self.attention_norm(words), places))
        hidden = self.dropout(F.relu(self.expand(self.feedforward_norm(words))))
        result: Tensor = words + self.dropout(self.contract(hidden))
        return result

    def _attention(self, words: Tensor, places: Places) -> Tensor:
        padded = places.pad(self.query_key_value(words))
        queries, keys, values = padded.unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        # A sentence without a word attends to a zero, which nobody reads, rather than to nothing: no NaN.
        attended = places.valid | ~places.valid.any(1, keepdim=True)
        heads = F.scaled_dot_product_attention(
            queries,
            keys,
            values,
            attn_mask=attended[:, None, None],
            dropout_p=self.dropout.p if self.training else 0.0,
        )
        result: Tensor = self.output(places.words(heads.transpose(1, 2).flatten(2)))
        return result
