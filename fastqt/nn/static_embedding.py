"""Static embeddings: a table of token vectors, and the mean of those of each text."""

from __future__ import annotations

from typing import get_args

import torch
from torch import Tensor, nn

from fastqt.checks import check_option, check_tensor
from fastqt.ids import as_ids
from fastqt.nn.init import Init, embedding_table, reset_children
from fastqt.nn.sparse_gradients import Mode, pooled


class StaticEmbedding(nn.Module):
    """The mean, or the sum, of a text's token vectors, from token ids without padding.

    It takes what `torch.nn.EmbeddingBag` takes, and has the parameter `embedding.weight` of the
    StaticEmbedding of sentence-transformers. `BagOfWords` takes padded sentences.

    Args:
        vocab_size: V, the number of token ids.
        dim: D, the width of token and text vectors.
        mode: "mean" or "sum".
        vectors: (V, D) initial token vectors.
        freeze: do not train the token vectors.
        sparse: give the table a sparse gradient with the rows of the batch, each once, for optimisers that
            accept one. On a CPU the extension computes then both directions, in one order of sums for any
            number of threads.
        init: "torch" for N(0, 1), "paper" for U[-0.1, 0.1].

    Raises:
        ValueError: vectors of another shape, or an unknown mode or init.

    Example:
        >>> import torch, fastqt
        >>> embedding = fastqt.nn.StaticEmbedding(100, 16)
        >>> ids, offsets = torch.tensor([5, 7, 2, 3]), torch.tensor([0, 3])
        >>> embedding(ids, offsets).shape
        torch.Size([2, 16])
        >>> bool((embedding(ids, offsets)[1] == embedding.embedding.weight[3]).all())  # of one token
        True
    """

    def __init__(
        self,
        vocab_size: int,
        dim: int,
        *,
        mode: Mode = "mean",
        vectors: Tensor | None = None,
        freeze: bool = False,
        sparse: bool = False,
        init: Init = "torch",
    ) -> None:
        super().__init__()
        check_option("mode", mode, get_args(Mode))
        self.mode: Mode = mode
        self.embedding_dim = dim
        self.embedding = embedding_table(
            vocab_size, dim, vectors=vectors, freeze=freeze, sparse=sparse, init=init
        )

    reset_parameters = reset_children

    def forward(self, ids: Tensor, offsets: Tensor | None = None) -> Tensor:
        """The vectors of texts, (B, D); that of a text without tokens is 0.

        Args:
            ids: (T,) integers, the token ids of all texts, one text after the other; or (B, L), the ids of B
                texts of one length, without offsets.
            offsets: (B,) integers, the position in ids where each text begins, ascending from 0.

        Raises:
            TypeError: not a tensor, or not of integers.
            ValueError: a wrong shape, or ids (T,) without offsets.
            RuntimeError: an id outside the vocabulary, or offsets that do not ascend from 0 to at most T.
        """
        check_tensor("ids", ids)
        if ids.dim() == 2 and offsets is None:
            texts, length = ids.shape
            offsets = length * torch.arange(texts, device=ids.device)
            ids = ids.reshape(-1)
        if offsets is None:
            raise ValueError("offsets: want where each text begins, for ids of all texts in one; got None")
        return pooled(self.embedding, as_ids("ids", ids), as_ids("offsets", offsets), self.mode)

    def __call__(self, ids: Tensor, offsets: Tensor | None = None) -> Tensor:
        result: Tensor = super().__call__(ids, offsets)
        return result
