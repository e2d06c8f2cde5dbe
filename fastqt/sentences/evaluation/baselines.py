"""Baselines for trained encoders: averages of word vectors, and models with random weights."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import sparse
from sklearn.utils.extmath import randomized_svd

from fastqt.errors import InputError
from fastqt.nn.tokens import list_of_texts
from fastqt.options import Device
from fastqt.sentences.inference.encoder import SentenceEncoder
from fastqt.sentences.text.vectors import WordRows, read_counts, read_vectors

# A word, which may contain ' or - between letters; a number; or any other single character.
TOKEN = re.compile(r"[^\W\d_]+(?:['-][^\W\d_]+)*|\d+|[^\w\s]|_")


def tokens(text: str) -> list[str]:
    """The words, numbers and punctuation marks of a sentence, in lower case."""
    return TOKEN.findall(text.lower().replace("’", "'"))


class WordVectors:
    """Encodes a sentence as the mean of its word vectors.

    Unknown words are skipped. A sentence without a known word has the vector 0.

    Args:
        words: the words, in lower case.
        vectors: (len(words), d) their vectors.
        weights: (len(words),) factors of the vectors. The divisor of the mean stays the number of known
            words. Without weights, all factors are 1.

    Raises:
        ValueError: the shape of `vectors` does not fit.

    Example:
        >>> import numpy as np
        >>> from fastqt.sentences.evaluation import WordVectors
        >>> encode = WordVectors(["good", "film"], np.eye(2))
        >>> encode(["A good film", "Unknown words"]).tolist()
        [[0.5, 0.5], [0.0, 0.0]]
    """

    def __init__(
        self,
        words: Sequence[str],
        vectors: NDArray[np.floating],
        weights: NDArray[np.floating] | None = None,
    ) -> None:
        if vectors.ndim != 2 or len(vectors) != len(words):
            raise ValueError(f"vectors: want ({len(words)}, d) for {len(words)} words, got {vectors.shape}")
        self.rows = WordRows(words)
        self.vectors = np.asarray(vectors, dtype=np.float32)
        if weights is not None:
            self.vectors = self.vectors * np.asarray(weights, dtype=np.float32)[:, None]

    @classmethod
    def load(cls, path: str | Path) -> WordVectors:
        """Reads word vectors from a file, as `fastqt.sentences.text.vectors.read_vectors` does."""
        words, vectors = read_vectors(path)
        return cls(words, vectors)

    def __call__(self, texts: str | Sequence[str]) -> NDArray[np.float32]:
        """Encodes n sentences; returns (n, d) float32, or (d,) of one text in place of a list."""
        if isinstance(texts, str):
            one: NDArray[np.float32] = self([texts])[0]
            return one
        texts = list_of_texts("texts", texts)
        find = self.rows.find
        rows = [[row for token in tokens(text) if (row := find(token)) >= 0] for text in texts]
        sizes = np.array([len(row) for row in rows], dtype=np.int64)
        columns = np.fromiter((word for row in rows for word in row), dtype=np.int64, count=sizes.sum())
        shares = np.repeat(1 / np.maximum(sizes, 1), sizes).astype(np.float32)
        starts = np.concatenate([[0], np.cumsum(sizes)])
        matrix = sparse.csr_matrix((shares, columns, starts), shape=(len(texts), len(self.vectors)))
        return np.asarray(matrix @ self.vectors)


class SIF(WordVectors):
    """Encodes a sentence as the mean of its word vectors, weighted by a / (a + p(word)).

    The weights are the smooth inverse frequencies of the words. The second step of the method,
    `remove_component`, depends on a set of sentences: `encode` applies it to the given sentences, and
    `fastqt.sentences.evaluation.evaluate` applies it to the sentences of each task. A plain call returns the
    weighted means only.

    Args:
        words: the words, in lower case.
        vectors: (len(words), d) their vectors.
        counts: (len(words),) how often each word occurs in a corpus; a word with count 0 has weight 1.
        total: number of words in that corpus; the sum of `counts` if not given.
        a: the smoothing constant.

    Example:
        >>> import numpy as np
        >>> from fastqt.sentences.evaluation import SIF
        >>> encode = SIF(["the", "film"], np.eye(2), np.array([99, 1]), a=0.01)
        >>> np.round(encode(["the film"]).astype(float), 3).tolist()  # halves of 0.01 and 0.5
        [[0.005, 0.25]]

    Source: Arora, Liang and Ma (2017).
    """

    def __init__(
        self,
        words: Sequence[str],
        vectors: NDArray[np.floating],
        counts: NDArray[np.integer],
        *,
        total: int | None = None,
        a: float = 1e-3,
    ) -> None:
        share = np.asarray(counts, dtype=np.float64) / (counts.sum() if total is None else total)
        super().__init__(words, vectors, a / (a + share))
        self.per_task = remove_component

    @classmethod
    def load(cls, path: str | Path, counts: str | Path | None = None, *, a: float = 1e-3) -> SIF:
        """Reads word vectors, as `WordVectors.load`, and word counts.

        The counts are in a text file with a line "word count" for each word. For `a` see the class.
        """
        if counts is None:
            raise InputError("counts: want a file of word counts, got none")
        words, vectors = read_vectors(path)
        count_of = read_counts(counts)
        word_counts = np.array([count_of.get(word, 0) for word in words])
        return cls(words, vectors, word_counts, total=sum(count_of.values()), a=a)

    def encode(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Encodes n sentences and removes their first component; returns (n, d) float32."""
        texts = list_of_texts("texts", texts)
        return remove_component(self(texts))


def remove_component(vectors: NDArray[np.floating]) -> NDArray[np.float32]:
    """Subtracts from each row its projection on the first right singular vector of the matrix.

    Args:
        vectors: (n, d); they are not centred.

    Returns:
        (n, d) float32.

    Example:
        >>> import numpy as np
        >>> from fastqt.sentences.evaluation import remove_component
        >>> left = remove_component(np.array([[3.0, 1.0], [3.0, -1.0]]))  # both rows have the first axis
        >>> np.abs(left).round(3).tolist()
        [[0.0, 1.0], [0.0, 1.0]]
    """
    vectors = np.asarray(vectors, dtype=np.float32)
    if not len(vectors):
        return vectors
    _, _, (first,) = randomized_svd(vectors, n_components=1, n_iter=7, random_state=0)
    return vectors - np.outer(vectors @ first, first).astype(np.float32)


def random_encoder(directory: str | Path, *, seed: int = 0, device: Device = "auto") -> SentenceEncoder:
    """A model with the settings and the vocabulary of a run, but with random weights.

    Args:
        directory: a directory that `fastqt train` wrote; its weights are not read.
        seed: seed of the weights.
        device: "auto", "cpu" or "cuda".

    Raises:
        InputError: the directory holds no run.

    Example:
        >>> from fastqt.sentences.evaluation import random_encoder
        >>> fresh = random_encoder("run", seed=1)  # a directory that `fastqt train` wrote
        >>> fresh.encode(["She closed the door."]).shape
        (1, 16)
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return SentenceEncoder.load(directory, device, trained=False, with_identity=True)
