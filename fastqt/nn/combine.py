"""Encoders that are made of several: the combined and the multi-channel encoder of QuickThoughts."""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from fastqt.checks import check_option, shown
from fastqt.nn.encoders import BagOfWords, Encoder, GRUEncoder
from fastqt.nn.init import Init, check_vectors

Channel = Literal["bow", "gru", "bigru"]


class Combine(Encoder):
    """The concatenation of the vectors of several encoders, in the order given.

    The combined model of the QuickThoughts paper trains its encoders separately and concatenates their
    vectors at test time.

    Args:
        *encoders: at least one.

    Raises:
        ValueError: no encoder.

    Example:
        >>> import torch, fastqt
        >>> encoder = fastqt.nn.Combine(fastqt.nn.BagOfWords(100, 16), fastqt.nn.GRUEncoder(100, 8, 32))
        >>> tokens, lengths = torch.tensor([[5, 7, 2], [3, 0, 0]]), torch.tensor([3, 1])
        >>> encoder(tokens, lengths).shape
        torch.Size([2, 48])
    """

    def __init__(self, *encoders: Encoder) -> None:
        if not encoders:
            raise ValueError("encoders: want at least one encoder, got none")
        super().__init__()
        self.encoders = nn.ModuleList(encoders)
        self.embedding_dim = sum(encoder.embedding_dim for encoder in encoders)

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        return torch.cat([encoder(tokens, lengths) for encoder in self.encoders], dim=1)


class MultiChannel(Combine):
    """Two concatenated encoders of one kind: one on frozen pre-trained word vectors, one on trained ones.

    Args:
        vectors: (V, W) pre-trained word vectors.
        word_dim: the width of the trained word vectors; W by default.
        hidden_size: the width of the vector of each GRU; of a bi-GRU, half for each direction. A sentence
            vector has twice this width. With bags of words it has W + word_dim instead.
        kind: "bigru" as in the paper's MC-QT, "gru", or "bow" for sums of word vectors.
        reset_after, bias, sparse, init: as in `GRUEncoder`. The trained word vectors are drawn.

    Raises:
        ValueError: vectors that are not 2-D, an odd hidden_size of a bi-GRU, an unknown kind or an unknown
            init.

    Example:
        >>> import torch, fastqt
        >>> encoder = fastqt.nn.MultiChannel(torch.randn(100, 16), hidden_size=32)
        >>> tokens, lengths = torch.tensor([[5, 7, 2], [3, 0, 0]]), torch.tensor([3, 1])
        >>> encoder(tokens, lengths).shape
        torch.Size([2, 64])

    Source: Logeswaran and Lee (arXiv:1803.02893), the multi-channel model.
    """

    def __init__(
        self,
        vectors: Tensor,
        *,
        word_dim: int | None = None,
        hidden_size: int = 1000,
        kind: Channel = "bigru",
        reset_after: bool = True,
        bias: bool | Literal["single"] = "single",
        sparse: bool = False,
        init: Init = "paper",
    ) -> None:
        check_option("kind", kind, get_args(Channel))
        for name, value, default in (("reset_after", reset_after, True), ("bias", bias, "single")):
            if kind == "bow" and value != default:
                raise ValueError(f"{name}: want {default!r} with kind='bow', got {shown(value)}")

        check_vectors(vectors)
        if vectors.dim() != 2:
            raise ValueError(f"vectors: want shape (V, W), got {tuple(vectors.shape)}")
        V, W = vectors.shape
        both = channels(
            kind,
            V,
            W,
            vectors=vectors,
            word_dim=word_dim or W,
            hidden_size=hidden_size,
            reset_after=reset_after,
            bias=bias,
            sparse=sparse,
            init=init,
        )
        super().__init__(*both)


def channels(
    kind: Channel,
    V: int,
    W: int,
    *,
    vectors: Tensor | None,  # (V, W), or drawn if not given
    word_dim: int,
    hidden_size: int,
    sparse: bool,
    init: Init,
    **options: Any,
) -> tuple[Encoder, Encoder]:
    """An encoder on frozen word vectors, and one on trained ones. For the arguments see `MultiChannel`."""
    table: dict[str, Any] = {"sparse": sparse, "init": init}
    frozen = {**table, "vectors": vectors, "freeze": True}
    if kind == "bow":
        return BagOfWords(V, W, **frozen), BagOfWords(V, word_dim, **table)
    options["bidirectional"] = kind == "bigru"
    return GRUEncoder(V, W, hidden_size, **frozen, **options), GRUEncoder(
        V, word_dim, hidden_size, **table, **options
    )


def share_frozen_tables(owner: Encoder, other: Encoder) -> None:
    """Has an encoder read the frozen word vectors of another one of the same structure, instead of its own.

    The frozen tables of `other` are removed: the shared ones are parameters of `owner` alone, and stored
    once.
    """
    for ours, theirs in zip(owner.modules(), list(other.modules()), strict=True):
        table = getattr(ours, "embedding", None)
        if isinstance(table, nn.Embedding) and not table.weight.requires_grad:
            del theirs.embedding
            object.__setattr__(theirs, "embedding", table)  # as a value, which is no submodule
