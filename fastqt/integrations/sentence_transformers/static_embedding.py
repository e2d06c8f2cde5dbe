"""The library's StaticEmbedding, with a table of fastqt whose gradient may be sparse."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from sentence_transformers.sentence_transformer.modules.static_embedding import (
    StaticEmbedding as _StaticEmbedding,
)
from torch import Tensor, nn
from typing_extensions import Self

from fastqt.integrations.sentence_transformers.replacement import Replacement
from fastqt.nn.init import WordTable
from fastqt.nn.sparse_gradients import pooled, pooled_columns

Features = dict[str, Any]


class StaticEmbedding(Replacement, _StaticEmbedding):
    """The library's StaticEmbedding, with its arguments, vectors, gradients and files.

    The library loads what it saves without fastqt. `accelerate_static` puts it into a trainer, with an
    optimiser for its sparse gradients. In a training loop of your own, `fastqt.optim` has the optimiser and
    the clipping.

    Args:
        tokenizer, embedding_weights, embedding_dim, base_model: as the library's.
        sparse: give the table a sparse gradient with the rows of the batch, each once, for optimisers that
            accept one, as of `fastqt.nn.StaticEmbedding`.

    Raises:
        ValueError: as the library's.

    Example:
        >>> from sentence_transformers import SentenceTransformer
        >>> from tokenizers import Tokenizer
        >>> from fastqt.integrations.sentence_transformers import StaticEmbedding
        >>> tokenizer = Tokenizer.from_file("bert/tokenizer.json")
        >>> module = StaticEmbedding(tokenizer, embedding_dim=16, sparse=True)
        >>> SentenceTransformer(modules=[module], device="cpu").encode(["the cat", "a mat"]).shape
        (2, 16)
    """

    _columns: Columns | None = None  # of a step, while its loss is computed

    def __init__(self, *args: Any, sparse: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._take_table(sparse)

    @classmethod
    def of(cls, module: _StaticEmbedding, *, sparse: bool) -> Self:
        """One in the place of the library's module, with its parameter, its tokenizer and its hooks."""
        taken = cls.__new__(cls)
        taken.__dict__ = {**module.__dict__, "_modules": {**module._modules}}
        taken._take_table(sparse)
        return taken

    def _take_table(self, sparse: bool) -> None:
        weight = self.embedding.weight
        table = WordTable(len(weight), weight.shape[1], sparse=sparse, _weight=weight.detach())
        table.weight = weight
        self.embedding: Any = table  # in the place of an EmbeddingBag

    @classmethod
    def load(cls, *args: Any, **kwargs: Any) -> Self:
        """Loads a folder, as the library does; the gradient of its table is dense."""
        return cls.of(super().load(*args, **kwargs), sparse=False)

    def preprocess(self, inputs: Sequence[Any], prompt: str | None = None, **kwargs: Any) -> Features:
        """The token ids of all texts in one, and where each text begins."""
        ids, lengths = encoded(self.tokenizer, inputs, prompt)
        return features(ids, lengths)

    def forward(self, features: Features, **kwargs: Any) -> Features:
        """Adds the texts' vectors, (B, D), as `sentence_embedding`."""
        ids, offsets = features["input_ids"], features["offsets"]
        vectors = None if self._columns is None else self._columns.take(ids, self.embedding)
        if vectors is None:
            vectors = pooled(self.embedding, ids, offsets, "mean")
        features["sentence_embedding"] = vectors
        return features

    @contextlib.contextmanager
    def together(self, columns: Sequence[Features]) -> Iterator[None]:
        """A context in which the forward passes of these columns have one gradient together.

        The vectors are those of passes one by one, and the gradient for the table has each row once.
        """
        self._columns = Columns(columns)
        try:
            yield
        finally:
            self._columns = None


class Columns:
    """The columns of a step, whose vectors are computed together when one of them is embedded.

    A column's vectors are given out once, and in the state that they were computed in: a loss that embeds it
    again, or has changed the table since, gets None and computes them anew.
    """

    def __init__(self, columns: Sequence[Features]) -> None:
        self._bags = [(each["input_ids"], each["offsets"]) for each in columns]
        self._vectors: list[Tensor | None] = []
        self._state: object = None

    def take(self, ids: Tensor, table: nn.Embedding) -> Tensor | None:
        """The vectors (B, D) of the column with these ids, the same tensor; None if they are not here."""
        place = next((i for i, (of_column, _) in enumerate(self._bags) if of_column is ids), None)
        if place is None:
            return None
        if not self._vectors:
            self._vectors = [*pooled_columns(table, self._bags, "mean")]
            self._state = _state_of(table)
        if self._state != _state_of(table):
            return None
        vectors, self._vectors[place] = self._vectors[place], None
        return vectors


def _state_of(table: nn.Embedding) -> object:
    """What vectors depend on, and whether they have a gradient."""
    return id(table), table.weight._version, table.weight.requires_grad, torch.is_grad_enabled()


def encoded(tokenizer: Any, texts: Iterable[str], prompt: str | None = None) -> tuple[np.ndarray, np.ndarray]:
    """The token ids of all texts in one (T,), int32, and the number of ids of each text (B,), int64."""
    texts = [prompt + text for text in texts] if prompt else list(texts)
    # The fast one leaves out where each token lies in its text, which nobody reads here.
    encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    lengths = np.fromiter(map(len, encodings), np.int64, len(encodings))
    ids = chain.from_iterable(encoding.ids for encoding in encodings)
    return np.fromiter(ids, np.int32, int(lengths.sum())), lengths


def features(ids: np.ndarray, lengths: np.ndarray) -> dict[str, Tensor]:
    """What the module's forward pass is given, from token ids (T,) and the lengths of texts (B,)."""
    offsets = lengths.cumsum() - lengths
    return {"input_ids": torch.from_numpy(ids.astype(np.int64)), "offsets": torch.from_numpy(offsets)}
