"""Sentence encoders: from token ids to one vector a sentence.

Positions beyond a sentence's length may hold anything: they are left out by length, never by id.
"""

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence

from fastqt.nn.gru import GRU
from fastqt.nn.init import Init, embedding_table, init_gru, init_lstm
from fastqt.nn.sparse_gradients import bag_sum

LSTM = nn.LSTM


class Encoder(nn.Module):
    """The interface of all sentence encoders.

    Attributes:
        embedding_dim: the width of a sentence's vector.
    """

    embedding_dim: int

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """Encode a batch.

        Args:
            tokens: (B, L) int64, token ids; what lies beyond a sentence's length is never read.
            lengths: (B,) int64, each 0..L. An empty sentence has the vector of zeros.

        Returns:
            (B, embedding_dim).

        Raises:
            ValueError: a shape, a dtype or a length that does not fit.
            IndexError: a token id outside the vocabulary.
        """
        raise NotImplementedError

    def __call__(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        result: Tensor = super().__call__(tokens, lengths)
        return result


class BagOfWords(Encoder):
    """The sum of a sentence's word vectors.

    Args:
        vocab_size: V, the number of token ids.
        dim: the width of a word's and a sentence's vector.
        sparse: give the table a sparse gradient, for optimisers that take one.
        init: "paper" for U[-0.1, 0.1], "torch" for N(0, 1).
    """

    def __init__(
        self, vocab_size: int, dim: int = 300, *, sparse: bool = False, init: Init = "paper"
    ) -> None:
        super().__init__()
        self.embedding_dim = dim
        self.embedding = embedding_table(vocab_size, dim, sparse=sparse, init=init)

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        check_batch(tokens, lengths)
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        valid = tokens[positions < lengths.unsqueeze(1)]
        offsets = lengths.cumsum(0) - lengths
        if self.embedding.sparse:
            return bag_sum(self.embedding.weight, valid, offsets)
        return F.embedding_bag(valid, self.embedding.weight, offsets, mode="sum")


class RecurrentEncoder(Encoder):
    """What the recurrent encoders share: the last true state of each direction, side by side."""

    recurrent: nn.Module

    def __init__(self, embedding: nn.Embedding, embedding_dim: int) -> None:
        super().__init__()
        self.embedding = embedding
        self.embedding_dim = embedding_dim

    def final_states(self, words: PackedSequence) -> Tensor:
        """(D, B, H): the last state of each direction."""
        raise NotImplementedError

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        check_batch(tokens, lengths)
        packed, batch_sizes, order = pack_tokens(tokens, lengths)
        if len(batch_sizes) == 0:
            return self.embedding.weight.new_zeros(len(tokens), self.embedding_dim)
        states = self.final_states(PackedSequence(self.embedding(packed), batch_sizes))
        sentences = states.transpose(0, 1).reshape(-1, self.embedding_dim)
        # Empty sentences were sorted to the end and took no step.
        sentences = F.pad(sentences, (0, 0, 0, len(tokens) - len(sentences)))
        return sentences.index_select(0, order.argsort())


class GRUEncoder(RecurrentEncoder):
    """A GRU's last state: the uni-GRU and bi-GRU of QuickThoughts (arXiv:1803.02893).

    Args:
        vocab_size: V, the number of token ids.
        word_dim: W, the width of a word's vector.
        hidden_size: H, the width of a sentence's vector; with `bidirectional` each direction has half of it.
        bidirectional: the concatenation of both directions' last states; the backward one's is that at the
            first token.
        reset_after: the form of the cell, see `fastqt.nn.GRU`.
        bias: see `fastqt.nn.GRU`; one bias a gate gives the paper's number of parameters.
        vectors: (V, W) initial word vectors.
        freeze: keep the word vectors as they are.
        sparse: give the table a sparse gradient, for optimisers that take one.
        init: "paper": words U[-0.1, 0.1], gates' weights Glorot-uniform, biases 1 (r, z) and 0 (n); "torch":
            the defaults of torch's layers.

    Raises:
        ValueError: an odd hidden_size with `bidirectional`, or vectors of another shape.
    """

    recurrent: GRU

    def __init__(
        self,
        vocab_size: int,
        word_dim: int = 300,
        hidden_size: int = 1000,
        *,
        bidirectional: bool = False,
        reset_after: bool = True,
        bias: bool | Literal["single"] = "single",
        vectors: Tensor | None = None,
        freeze: bool = False,
        sparse: bool = False,
        init: Init = "paper",
    ) -> None:
        table = embedding_table(
            vocab_size, word_dim, vectors=vectors, freeze=freeze, sparse=sparse, init=init
        )
        super().__init__(table, hidden_size)
        self.recurrent = GRU(
            word_dim,
            direction_width(hidden_size, bidirectional),
            bias=bias,
            bidirectional=bidirectional,
            reset_after=reset_after,
        )
        if init == "paper":
            init_gru(self.recurrent)

    def final_states(self, words: PackedSequence) -> Tensor:
        return self.recurrent.final_states(words)


class LSTMEncoder(RecurrentEncoder):
    """An LSTM's last hidden state.

    Args:
        vocab_size, word_dim, hidden_size, bidirectional, vectors, freeze, sparse: as in `GRUEncoder`.
        init: "paper": as in `GRUEncoder`, with biases 1 (forget gate) and 0 (others); "torch": its defaults.

    Raises:
        ValueError: an odd hidden_size with `bidirectional`, or vectors of another shape.
    """

    recurrent: nn.LSTM

    def __init__(
        self,
        vocab_size: int,
        word_dim: int = 300,
        hidden_size: int = 1000,
        *,
        bidirectional: bool = False,
        vectors: Tensor | None = None,
        freeze: bool = False,
        sparse: bool = False,
        init: Init = "paper",
    ) -> None:
        table = embedding_table(
            vocab_size, word_dim, vectors=vectors, freeze=freeze, sparse=sparse, init=init
        )
        super().__init__(table, hidden_size)
        width = direction_width(hidden_size, bidirectional)
        self.recurrent = LSTM(word_dim, width, bidirectional=bidirectional)
        if init == "paper":
            init_lstm(self.recurrent)

    def final_states(self, words: PackedSequence) -> Tensor:
        _, (h_n, _) = self.recurrent(words)
        states: Tensor = h_n
        return states


class Combine(Encoder):
    """Encoders side by side: the concatenation of their vectors, in order.

    The paper's combined model trains its parts apart and puts them together at test time.

    Raises:
        ValueError: no encoder.
    """

    def __init__(self, *encoders: Encoder) -> None:
        if not encoders:
            raise ValueError("encoders: expected at least one encoder, got none")
        super().__init__()
        self.encoders = nn.ModuleList(encoders)
        self.embedding_dim = sum(encoder.embedding_dim for encoder in encoders)

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        return torch.cat([encoder(tokens, lengths) for encoder in self.encoders], dim=1)


class MultiChannel(Combine):
    """Two bi-GRUs side by side: over frozen pre-trained word vectors, and over trained ones (MC-QT).

    Args:
        vectors: (V, W) the pre-trained word vectors.
        word_dim: the width of the trained word vectors; that of `vectors` if not given.
        hidden_size: the width of each bi-GRU's vector, half for each direction; a sentence's has twice that.
        reset_after, bias, sparse, init: as in `GRUEncoder`.

    Raises:
        ValueError: vectors that are no matrix, or an odd hidden_size.
    """

    def __init__(
        self,
        vectors: Tensor,
        *,
        word_dim: int | None = None,
        hidden_size: int = 1000,
        reset_after: bool = True,
        bias: bool | Literal["single"] = "single",
        sparse: bool = False,
        init: Init = "paper",
    ) -> None:
        if vectors.dim() != 2:
            raise ValueError(f"vectors: expected shape (V, W), got {tuple(vectors.shape)}")
        V, W = vectors.shape

        def channel(width: int, vectors: Tensor | None) -> GRUEncoder:
            return GRUEncoder(
                V,
                width,
                hidden_size,
                bidirectional=True,
                reset_after=reset_after,
                bias=bias,
                vectors=vectors,
                freeze=vectors is not None,
                sparse=sparse,
                init=init,
            )

        super().__init__(channel(W, vectors), channel(word_dim or W, None))


def check_batch(tokens: Tensor, lengths: Tensor) -> None:
    if tokens.dim() != 2 or tokens.dtype != torch.int64:
        raise ValueError(f"tokens: expected (B, L) int64, got {tuple(tokens.shape)} {tokens.dtype}")
    if lengths.shape != tokens.shape[:1] or lengths.dtype != torch.int64:
        raise ValueError(
            f"lengths: expected ({len(tokens)},) int64, got {tuple(lengths.shape)} {lengths.dtype}"
        )
    if len(lengths) and not 0 <= int(lengths.min()) <= int(lengths.max()) <= tokens.shape[1]:
        raise ValueError(
            f"lengths: expected values in 0..{tokens.shape[1]}, the width of tokens, "
            f"got {int(lengths.min())}..{int(lengths.max())}"
        )


def pack_tokens(tokens: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What a PackedSequence of token ids holds: ids (N,), batch sizes (T,) on the CPU, sorted order (B,).

    Empty sentences come last in the order and appear in no batch.
    """
    lengths, order = lengths.sort(descending=True, stable=True)
    steps = torch.arange(int(lengths[0]) if len(lengths) else 0, device=tokens.device)
    active = steps.unsqueeze(1) < lengths
    time_major = tokens.index_select(0, order)[:, : len(steps)].t()
    return time_major[active], active.sum(1).cpu(), order


def direction_width(hidden_size: int, bidirectional: bool) -> int:
    if bidirectional and hidden_size % 2:
        raise ValueError(f"hidden_size: expected an even number, half for each direction, got {hidden_size}")
    return hidden_size // 2 if bidirectional else hidden_size
