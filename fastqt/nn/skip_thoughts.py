"""Skip-thoughts: the model that writes a sentence's neighbours, with which QuickThoughts is compared."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from fastqt.functional import contrastive_loss
from fastqt.nn.encoders import GRUEncoder, check_batch, pack_tokens
from fastqt.nn.gru import GRU
from fastqt.nn.init import embedding_table, init_gru


class SkipThoughts(nn.Module):
    """A GRU that reads a sentence and two that write the sentences before and after it from its vector.

    In the form whose parameters Logeswaran and Lee count: one table of word vectors for all three, a
    sentence's vector as a decoder's first state, and output weights of each decoder's own, without bias.

    Args:
        vocab_size: V, the number of token ids.
        word_dim: W, the width of a word's vector.
        hidden_size: H, the width of a sentence's vector.
        reset_after: the form of the cell, see `fastqt.nn.GRU`.
        sparse: give the table a sparse gradient, for optimisers that take one.

    Source: Kiros et al., "Skip-thought vectors" (arXiv:1506.06726).
    """

    def __init__(
        self,
        vocab_size: int,
        word_dim: int = 300,
        hidden_size: int = 1000,
        *,
        reset_after: bool = True,
        sparse: bool = False,
    ) -> None:
        super().__init__()
        sizes = vocab_size, word_dim, hidden_size
        self.encoder = GRUEncoder(*sizes, reset_after=reset_after, sparse=sparse)
        self.previous = Decoder(*sizes, reset_after=reset_after)
        self.next = Decoder(*sizes, reset_after=reset_after)

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """The vectors of sentences, (B, H)."""
        return self.encoder(tokens, lengths)

    def loss(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """The mean cross-entropy of a neighbour's word, given the sentence and the words before it.

        No matrix of words by vocabulary is formed.

        Args:
            tokens: (B, L) int64, token ids of consecutive sentences.
            lengths: (B,) int64, each 0..L.

        Returns:
            A scalar.

        Raises:
            ValueError: a shape, a dtype or a length that does not fit, or no sentence with a neighbour that
                has words.
        """
        check_batch(tokens, lengths)
        words = int(lengths[:-1].sum() + lengths[1:].sum())
        if words == 0:
            raise ValueError("lengths: expected at least two sentences, with words, got no word to predict")
        vectors, table = self(tokens, lengths), self.encoder.embedding
        before = self.previous.loss(vectors[1:], table, tokens[:-1], lengths[:-1])
        after = self.next.loss(vectors[:-1], table, tokens[1:], lengths[1:])
        return (before + after) / words


class Decoder(nn.Module):
    """Writes a sentence word by word: a GRU over the words so far, which begins with a given state."""

    def __init__(self, vocab_size: int, word_dim: int, hidden_size: int, *, reset_after: bool) -> None:
        super().__init__()
        self.recurrent = GRU(word_dim, hidden_size, bias="single", reset_after=reset_after)
        init_gru(self.recurrent)
        self.output = nn.Parameter(embedding_table(vocab_size, hidden_size).weight)

    def loss(
        self,
        states: Tensor,  # (B, H)
        table: nn.Embedding,  # (V, W)
        tokens: Tensor,  # (B, L)
        lengths: Tensor,  # (B,)
    ) -> Tensor:
        """The cross-entropy of all words, summed."""
        targets, batch_sizes, order = pack_tokens(tokens, lengths)
        if len(targets) == 0:
            return states.new_zeros(())
        begun = int(batch_sizes[0])
        read, _, _ = pack_tokens(tokens.roll(1, dims=1), lengths)
        # At the first step there is no word before: zeros.
        words = table(read[begun:])
        words = torch.cat([words.new_zeros(begun, table.embedding_dim), words])
        first = states.index_select(0, order[:begun]).unsqueeze(0)
        output, _ = self.recurrent(PackedSequence(words, batch_sizes), first)
        return contrastive_loss(output.data, self.output, targets, diagonal="keep", reduction="sum")
