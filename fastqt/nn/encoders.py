"""Sentence encoders: from token ids to one vector per sentence.

Padding is recognised by the sentence's length and never by its id, so it may hold any values.
"""

from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence

from fastqt.checks import check_option, check_tensor
from fastqt.nn.gru import GRU
from fastqt.nn.init import Init, PaperGRU, PaperLSTM, embedding_table, reset_children
from fastqt.nn.sparse_gradients import Mode, pooled

LSTM = nn.LSTM


class Encoder(nn.Module):
    """The interface of all sentence encoders.

    Attributes:
        embedding_dim: E, the width of a sentence vector.

    Example:
        >>> import torch, fastqt
        >>> encoder = fastqt.nn.BagOfWords(100, 16)
        >>> tokens, lengths = torch.tensor([[5, 7, 2], [3, 0, 0]]), torch.tensor([3, 1])
        >>> isinstance(encoder, fastqt.nn.Encoder), encoder.embedding_dim, encoder(tokens, lengths).shape
        (True, 16, torch.Size([2, 16]))
    """

    embedding_dim: int

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """Encodes a batch of sentences.

        Args:
            tokens: (B, L) int64, token ids. Ids beyond a sentence's length are never read.
            lengths: (B,) int64 in 0..L.

        Returns:
            (B, E); an empty sentence is encoded as zeros.

        Raises:
            TypeError: not a tensor.
            ValueError: a wrong shape or dtype, or a length outside 0..L.
            IndexError: a token id outside the vocabulary.
        """
        raise NotImplementedError

    def reset_parameters(self) -> None:
        """Gives parameters and buffers their initial values, as after `to_empty` of a module made on "meta".

        RuntimeError for word vectors that were given and not kept: those of an encoder that was made on
        another device.
        """
        reset_children(self)

    def __call__(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        result: Tensor = super().__call__(tokens, lengths)
        return result


class BagOfWords(Encoder):
    """The sum, or the mean, of a sentence's word vectors.

    Args:
        vocab_size: V, the number of token ids.
        dim: the width of word and sentence vectors.
        mode: "sum", or "mean" as in static embeddings.
        vectors: (V, dim) initial word vectors.
        freeze: do not train the word vectors.
        sparse: give the embedding table a sparse gradient, for optimisers that accept one.
        init: "paper" for U[-0.1, 0.1], "torch" for N(0, 1).

    Raises:
        ValueError: vectors of another shape, or an unknown mode or init.

    Example:
        >>> import torch, fastqt
        >>> encoder = fastqt.nn.BagOfWords(100, 16)
        >>> tokens, lengths = torch.tensor([[5, 7, 2], [3, 0, 0]]), torch.tensor([3, 1])
        >>> encoder(tokens, lengths).shape
        torch.Size([2, 16])
        >>> bool((encoder(tokens, lengths)[1] == encoder.embedding.weight[3]).all())  # of one word
        True
    """

    def __init__(
        self,
        vocab_size: int,
        dim: int = 300,
        *,
        mode: Mode = "sum",
        vectors: Tensor | None = None,
        freeze: bool = False,
        sparse: bool = False,
        init: Init = "paper",
    ) -> None:
        super().__init__()
        check_option("mode", mode, get_args(Mode))
        self.mode: Mode = mode
        self.embedding_dim = dim
        self.embedding = embedding_table(
            vocab_size, dim, vectors=vectors, freeze=freeze, sparse=sparse, init=init
        )

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        check_batch(tokens, lengths)
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        valid = tokens[positions < lengths.unsqueeze(1)]
        offsets = lengths.cumsum(0) - lengths
        return pooled(self.embedding, valid, offsets, self.mode)


class RecurrentEncoder(Encoder):
    """Base of the recurrent encoders: the final states of all directions, concatenated.

    A direction's final state is the one after its last word, not after padding.
    """

    recurrent: nn.Module

    def __init__(self, embedding: nn.Embedding, embedding_dim: int) -> None:
        super().__init__()
        self.embedding = embedding
        self.embedding_dim = embedding_dim

    def final_states(self, words: PackedSequence) -> Tensor:
        """The final state of each direction, (D, B, H), for word vectors packed longest first."""
        raise NotImplementedError

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        check_batch(tokens, lengths)
        packed, batch_sizes, order = pack_tokens(tokens, lengths)
        if len(batch_sizes) == 0:
            return of_no_words(self, self.embedding.weight, len(tokens))
        states = self.final_states(PackedSequence(self.embedding(packed), batch_sizes))
        sentences = states.transpose(0, 1).reshape(-1, self.embedding_dim)
        # Empty sentences were sorted to the end and are in no batch of the packed sequence.
        sentences = F.pad(sentences, (0, 0, 0, len(tokens) - len(sentences)))
        return sentences.index_select(0, order.argsort())


class GRUEncoder(RecurrentEncoder):
    """The final state of a GRU: the uni-GRU and bi-GRU of QuickThoughts.

    Args:
        vocab_size: V, the number of token ids.
        word_dim: W, the width of a word vector.
        hidden_size: H, the width of a sentence vector. With `bidirectional`, each direction has H / 2 units.
        bidirectional: concatenate the final states of both directions. The backward direction ends at the
            first token.
        reset_after: the form of the cell, see `fastqt.nn.GRU`.
        bias: see `fastqt.nn.GRU`. "single" gives the number of parameters that the paper reports.
        vectors, freeze, sparse: as in `BagOfWords`, with vectors (V, W).
        init: "paper" draws word vectors from U[-0.1, 0.1] and the gates' weights Glorot-uniformly, and sets
            the biases to 1 (r, z) and 0 (n); "torch" keeps the defaults of torch's layers.

    Raises:
        ValueError: an odd hidden_size with `bidirectional`, vectors of another shape, or an unknown init.

    Example:
        >>> import torch, fastqt
        >>> encoder = fastqt.nn.GRUEncoder(100, 16, 32, bidirectional=True)
        >>> tokens, lengths = torch.tensor([[5, 7, 2], [3, 0, 0]]), torch.tensor([3, 1])
        >>> encoder(tokens, lengths).shape
        torch.Size([2, 32])

    Source: Logeswaran and Lee, "An efficient framework for learning sentence representations"
    (arXiv:1803.02893).
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
        self.recurrent = (PaperGRU if init == "paper" else GRU)(
            word_dim,
            direction_width(hidden_size, bidirectional),
            bias=bias,
            bidirectional=bidirectional,
            reset_after=reset_after,
        )

    def final_states(self, words: PackedSequence) -> Tensor:
        return self.recurrent.final_states(words)


class LSTMEncoder(RecurrentEncoder):
    """The final hidden state of an LSTM.

    Args:
        vocab_size, word_dim, hidden_size, bidirectional, vectors, freeze, sparse: as in `GRUEncoder`.
        init: "paper" is as in `GRUEncoder`, with biases 1 (forget gate) and 0 (other gates); "torch" keeps
            torch's defaults.

    Raises:
        ValueError: an odd hidden_size with `bidirectional`, vectors of another shape, or an unknown init.

    Example:
        >>> import torch, fastqt
        >>> encoder = fastqt.nn.LSTMEncoder(100, 16, 32)
        >>> tokens, lengths = torch.tensor([[5, 7, 2], [3, 0, 0]]), torch.tensor([3, 1])
        >>> encoder(tokens, lengths).shape
        torch.Size([2, 32])
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
        layer = PaperLSTM if init == "paper" else LSTM
        self.recurrent = layer(word_dim, width, bidirectional=bidirectional)

    def final_states(self, words: PackedSequence) -> Tensor:
        _, (h_n, _) = self.recurrent(words)
        states: Tensor = h_n
        return states


def of_no_words(encoder: Encoder, like: Tensor, rows: int) -> Tensor:
    """The vectors of sentences without words: zeros, with gradients of 0 to all parameters, as for DDP."""
    tables = [module for module in encoder.modules() if isinstance(module, nn.Embedding)]
    theirs = {id(table.weight) for table in tables}
    no_ids = torch.zeros(0, dtype=torch.int64, device=like.device)
    # A sparse table gets a sparse gradient.
    nothing = [table(no_ids) for table in tables]
    nothing += [x.flatten()[:0] for x in encoder.parameters() if id(x) not in theirs]
    return sum((x.sum().to(like) for x in nothing), like.new_zeros(rows, encoder.embedding_dim))


def check_batch(tokens: Tensor, lengths: Tensor) -> None:
    """Raises ValueError or TypeError unless tokens are (B, L) int64 and lengths (B,) int64 in 0..L."""
    check_tensor("tokens", tokens)
    check_tensor("lengths", lengths)
    if tokens.dim() != 2 or tokens.dtype != torch.int64:
        raise ValueError(f"tokens: want (B, L) int64, got {tuple(tokens.shape)} {tokens.dtype}")
    if lengths.shape != tokens.shape[:1] or lengths.dtype != torch.int64:
        raise ValueError(f"lengths: want ({len(tokens)},) int64, got {tuple(lengths.shape)} {lengths.dtype}")
    if len(lengths) and not 0 <= int(lengths.min()) <= int(lengths.max()) <= tokens.shape[1]:
        raise ValueError(
            f"lengths: want values in 0..{tokens.shape[1]}, the width of tokens, "
            f"got {int(lengths.min())}..{int(lengths.max())}"
        )


def pack_tokens(tokens: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Packs token ids (B, L) as in torch's PackedSequence, without the padding; lengths (B,) are in 0..L.

    Returns:
        ids: (N,) int64, all first tokens, then all second tokens, and so on.
        batch_sizes: (T,) int64 on the CPU, how many sentences have a token t.
        order: (B,) int64, the sentences from the longest to the shortest. Empty sentences come last, and no
            batch contains them.
    """
    lengths, order = lengths.sort(descending=True, stable=True)
    steps = torch.arange(int(lengths[0]) if len(lengths) else 0, device=tokens.device)
    has_token = steps.unsqueeze(1) < lengths
    time_major = tokens.index_select(0, order)[:, : len(steps)].t()
    return time_major[has_token], has_token.sum(1).cpu(), order


def direction_width(hidden_size: int, bidirectional: bool) -> int:
    """The number of units of each direction, so that all directions together have `hidden_size`."""
    if bidirectional and hidden_size % 2:
        raise ValueError(f"hidden_size: want an even number, half for each direction, got {hidden_size}")
    return hidden_size // 2 if bidirectional else hidden_size
