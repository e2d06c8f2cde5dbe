"""Skip-thoughts: a model that generates the neighbours of a sentence; the baseline of QuickThoughts."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from fastqt.functional import contrastive_loss
from fastqt.nn.encoders import GRUEncoder, check_batch, pack_tokens
from fastqt.nn.gru import GRU
from fastqt.nn.init import embedding_table, init_gru


class SkipThoughts(nn.Module):
    """A GRU that encodes a sentence, and two GRUs that decode the previous and the next sentence from it.

    This is the form whose parameters Logeswaran and Lee count: encoder and decoders share one table of word
    vectors, the sentence vector is the initial state of each decoder, and each decoder has its own output
    weights, without a bias.

    Args:
        vocab_size: V, the number of token ids.
        word_dim: W, the width of a word vector.
        hidden_size: H, the width of a sentence vector.
        reset_after: the form of the cell, see `fastqt.nn.GRU`.
        sparse: give the embedding table a sparse gradient, for optimisers that accept one.

    Source: Kiros et al., "Skip-thought vectors" (arXiv:1506.06726); the number of parameters: Logeswaran and
    Lee (arXiv:1803.02893).
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
        """The sentence vectors (B, H); arguments and errors as in `Encoder.forward`."""
        return self.encoder(tokens, lengths)

    def loss(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """The mean cross-entropy of a neighbour's word, given the sentence and the words before that word.

        The logits, a matrix of words by vocabulary, are never stored as a whole.

        Args:
            tokens: (B, L) int64, token ids of consecutive sentences.
            lengths: (B,) int64 in 0..L.

        Returns:
            A scalar.

        Raises:
            ValueError: a wrong shape or dtype, a length outside 0..L, or no word in any neighbour.
            IndexError: a token id outside the vocabulary.
        """
        check_batch(tokens, lengths)
        words = int(lengths[:-1].sum() + lengths[1:].sum())
        if words == 0:
            raise ValueError("lengths: want at least two sentences, with words, got no word to predict")
        vectors, table = self(tokens, lengths), self.encoder.embedding
        before = self.previous.loss(vectors[1:], table, tokens[:-1], lengths[:-1])
        after = self.next.loss(vectors[:-1], table, tokens[1:], lengths[1:])
        return (before + after) / words


class Decoder(nn.Module):
    """Predicts a sentence word by word: a GRU over the previous words, which starts from a given state."""

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
        """The cross-entropy, summed over all words of all sentences."""
        targets, batch_sizes, order = pack_tokens(tokens, lengths)
        if len(targets) == 0:
            return states.new_zeros(())
        nonempty = int(batch_sizes[0])
        previous, _, _ = pack_tokens(tokens.roll(1, dims=1), lengths)
        # The first step has no previous word and reads zeros.
        words = table(previous[nonempty:])
        words = torch.cat([words.new_zeros(nonempty, table.embedding_dim), words])
        initial = states.index_select(0, order[:nonempty]).unsqueeze(0)
        output, _ = self.recurrent(PackedSequence(words, batch_sizes), initial)
        return contrastive_loss(output.data, self.output, targets, diagonal="keep", reduction="sum")
