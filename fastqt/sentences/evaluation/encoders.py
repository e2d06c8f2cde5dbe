"""The encoders that a command line names: trained models, random ones, and means of word vectors."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import sparse
from sklearn.utils.extmath import randomized_svd

from fastqt.errors import InputError
from fastqt.nn.gloss_inference import Inference
from fastqt.nn.tokens import list_of_texts
from fastqt.options import Device
from fastqt.sentences.evaluation.judged import JudgedSet
from fastqt.sentences.evaluation.tasks import Task
from fastqt.sentences.evaluation.vectors import Encode, Vectors
from fastqt.sentences.inference.encoder import SentenceEncoder, TextEncoder, set_inference
from fastqt.sentences.inference.library_encoder import LibraryEncoder, is_library_folder
from fastqt.sentences.options.commands import EvaluationOptions
from fastqt.sentences.runs.files import digest, joined_digest
from fastqt.sentences.text.reader import check_rereadable
from fastqt.sentences.text.vectors import WordRows, read_counts, read_vectors

# A word, which may contain ' or - between letters; a number; or any other single character.
TOKEN = re.compile(r"[^\W\d_]+(?:['-][^\W\d_]+)*|\d+|[^\w\s]|_")


def tokens(text: str) -> list[str]:
    """The words, numbers and punctuation marks of a sentence, in lower case."""
    return TOKEN.findall(text.lower().replace("’", "'"))


class WordVectors:
    """Encodes a sentence as the mean of its word vectors: of words in lower case and their vectors, (n, d).

    Unknown words are skipped. A sentence without a known word has the vector 0.
    """

    def __init__(self, words: Sequence[str], vectors: NDArray[np.floating]) -> None:
        self.rows = WordRows(words)
        self.vectors = np.asarray(vectors, dtype=np.float32)

    @classmethod
    def load(cls, path: str | Path) -> WordVectors:
        """Reads word vectors from a file, as `fastqt.sentences.text.vectors.read_vectors` does."""
        return cls(*read_vectors(path))

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
    """The mean of word vectors weighted by a / (a + p(word)), with the frequencies p of a file of counts.

    `per_task`, the second step of the method, depends on a set of sentences: `evaluate` applies it to those
    of each task.

    Source: Arora, Liang and Ma (2017).
    """

    @classmethod
    def of_files(cls, path: str, counts: str, a: float = 1e-3) -> SIF:
        """Reads word vectors, and how often each word occurs; a word that does not has weight 1."""
        words, vectors = read_vectors(path)
        count_of = read_counts(counts)
        shares = np.array([count_of.get(word, 0) for word in words]) / sum(count_of.values())
        return cls(words, vectors * (a / (a + shares)).astype(np.float32)[:, None])

    @staticmethod
    def per_task(vectors: NDArray[np.float32]) -> NDArray[np.float32]:
        """Subtracts from each row of (n, d) its projection on the first right singular vector."""
        _, _, (first,) = randomized_svd(vectors, n_components=1, n_iter=7, random_state=0)
        return vectors - np.outer(vectors @ first, first).astype(np.float32)


def random_encoder(
    directory: str | Path, *, seed: int = 0, device: Device = "auto", like: SentenceEncoder | None = None
) -> SentenceEncoder:
    """A model with the settings and the vocabulary of a run, but with random weights of a seed.

    `like` is as of `SentenceEncoder.load`.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return SentenceEncoder.load(directory, device, trained=False, with_identity=True, like=like)


class NamedEncoder(NamedTuple):
    """An encoder, and what identifies it: a digest of everything that its vectors depend on."""

    encode: Encode
    identity: str
    of_run: SentenceEncoder | None = None  # the model, if it is one that `fastqt train` wrote


def load_encoder(
    name: str,
    *,
    device: Device = "auto",
    raw: bool = False,
    seed: int = 0,
    inference: Inference | None = None,
    like: SentenceEncoder | None = None,
) -> NamedEncoder:
    """Loads an encoder by its name.

    Args:
        name: a directory that `fastqt train` or sentence-transformers wrote, `random:DIR` (the former model
            with random weights), `word-vectors:FILE` or `sif:FILE,COUNTS`.
        device: "auto", "cpu" or "cuda", for a trained model.
        raw: do not scale the vectors of a model, or their halves, to norm 1.
        seed: seed of the random weights.
        inference: how a GLOSS model finds latent vectors; None for its default.
        like: a model of the same directory, whose settings and vocabulary are not read again.

    Returns:
        The encoder, a function from a list of n sentences to (n, d), and its identity.

    Example:
        >>> from fastqt.sentences.evaluation import load_encoder
        >>> encode = load_encoder("run").encode  # a directory that `fastqt train` wrote
        >>> encode(["She closed the door."]).shape
        (1, 16)
        >>> load_encoder("word-vectors:vectors.txt").encode(["She closed the door."]).shape
        (1, 2)
    """
    kind, colon, rest = name.partition(":")
    if colon and kind in ("word-vectors", "sif"):
        for option, is_given in (("raw", raw), ("inference", inference is not None)):
            if is_given:
                raise InputError(f"{option}: want a trained model, got {name}")
        files = [rest] if kind == "word-vectors" else rest.split(",")
        if len(files) != 1 + (kind == "sif"):
            raise InputError(f"model: want sif:FILE,COUNTS, got {name}")
        check_rereadable("model", files)  # for the digest they are read again
        words = WordVectors.load(rest) if kind == "word-vectors" else SIF.of_files(files[0], files[1])
        return NamedEncoder(words, joined_digest(kind, *(digest(Path(file)) for file in files)))

    if is_library_folder(name):
        if inference is not None:
            raise InputError(f"inference: want a trained gloss model, got {name}")
        library = LibraryEncoder(name, device, with_identity=True)
        return NamedEncoder(
            _encode_of(library, normalize=not raw), joined_digest(f"library {raw}", library.identity or "")
        )

    if not 0 <= seed < 2**32:
        raise InputError(f"seed: want 0 to {2**32 - 1}, got {seed}")
    is_random = bool(colon) and kind == "random"
    encoder = (
        random_encoder(rest, seed=seed, device=device, like=like)
        if is_random
        else SentenceEncoder.load(name, device, with_identity=True)
    )
    set_inference(encoder, inference)
    description = f"{f'random {seed}' if is_random else 'model'} {raw}"
    identity = joined_digest(description, encoder.identity or "")
    return NamedEncoder(_encode_of(encoder, normalize=not raw), identity, encoder)


def _encode_of(encoder: TextEncoder, *, normalize: bool) -> Encode:
    if any(encoder.prompts):
        return PromptedEncode(encoder, normalize=normalize)
    return partial(encoder.encode, normalize=normalize)


class PromptedEncode:
    """The function `encode` of a model with prompts: texts are encoded as queries.

    A retrieval set has documents too, so that the vector of a text depends on more than its words. `evaluate`
    therefore puts the prompts into the texts of tasks, and encodes these texts as they are, by `plain`.
    """

    def __init__(self, encoder: TextEncoder, *, normalize: bool) -> None:
        self.encoder, self.normalize = encoder, normalize

    def __call__(self, texts: list[str]) -> NDArray[np.float32]:
        return self.encoder.encode(texts, normalize=self.normalize)

    def plain(self, texts: list[str]) -> NDArray[np.float32]:
        """The vectors of texts that have their prompts already."""
        return self.encoder.encode_as_they_are(texts, normalize=self.normalize)

    def prompted(self, task: Task) -> Task:
        """A task whose texts begin with the prompts."""
        query, document = self.encoder.prompts
        if isinstance(task, JudgedSet):
            return replace(
                task,
                queries={name: query + text for name, text in task.queries.items()},
                documents={name: document + text for name, text in task.documents.items()},
            )
        return PromptedTask(task, query)


@dataclass(frozen=True)
class PromptedTask:
    """A task whose texts have a prompt in front where they are encoded, and nowhere else."""

    task: Task
    prompt: str

    def texts(self) -> Iterable[str]:
        return (self.prompt + text for text in self.task.texts())

    def check(self, options: EvaluationOptions) -> None:
        self.task.check(options)

    def evaluate(self, vectors: Vectors, options: EvaluationOptions) -> dict[str, Any]:
        return self.task.evaluate(_PromptedVectors(vectors, self.prompt), options)


class _PromptedVectors(Vectors):
    """The vectors of sentences by the sentences without their prompt."""

    def __init__(self, vectors: Vectors, prompt: str) -> None:
        super().__init__(vectors.texts, vectors.matrix)
        self.prompt = prompt

    def __call__(self, texts: Sequence[str]) -> NDArray[np.float32]:
        return super().__call__([self.prompt + text for text in texts])
