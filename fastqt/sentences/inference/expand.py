"""Vocabulary expansion: adds the words of pre-trained word vectors to a trained model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer

from fastqt.errors import InputError
from fastqt.sentences.inference.encoder import SentenceEncoder
from fastqt.sentences.runs.checkpoint import CONFIG, MODEL, VOCABULARY, save_model, write_text
from fastqt.sentences.runs.files import own_directory
from fastqt.sentences.runs.lexicon import RUN_FILES
from fastqt.sentences.runs.model import build_model
from fastqt.sentences.text import Vocabulary
from fastqt.sentences.text.vectors import WordRows
from fastqt.sentences.text.vocabulary import UNKNOWN

# The tables of a skip-thoughts model with a row for each word, beside the encoder's word vectors.
OUTPUTS = ("previous.output", "next.output")


def check_holds_no_model(out: Path) -> None:
    """Checks that a directory to write a model to holds none, and no file of a run's name."""
    if names := [name for name in RUN_FILES if (out / name).exists()]:
        raise InputError(
            f"{out} already holds a model, or a file of its name, {names[0]}: choose another one"
        )


def add_words(
    directory: str | Path, words: Sequence[str], vectors: NDArray[np.floating], out: str | Path
) -> int:
    """Writes a copy of a trained model whose encoders know further words; returns how many were added.

    An affine map from the pre-trained vectors to the model's word vectors is fitted to the model's words that
    have a pre-trained vector: that of the word itself, or else that of its lower-case form. Each embedding
    table has its own map (see `expand_table`), and so has each output table of
    skip-thoughts. The words of the model keep their vectors. A word that the model's tokenizer would split is
    left out, because no text would ever contain it.

    The words are distinct and case-sensitive, as in the model's vocabulary, with pre-trained vectors (words,
    W); more than W words of the vocabulary must have one. `out` is created if it does not exist, and must not
    hold a model.

    Source: Kiros et al. (2015), section 2.2.
    """
    if len(set(words)) != len(words):
        raise InputError(f"words: want distinct ones, got {len(words) - len(set(words))} more than once")
    with own_directory(Path(out)):
        return _add_words(Path(directory), words, vectors, Path(out))


def _add_words(directory: Path, words: Sequence[str], vectors: NDArray[np.floating], out: Path) -> int:
    """As `add_words`, in a directory that is there and is written by no other process."""
    check_holds_no_model(out)
    encoder = SentenceEncoder.load(directory, "cpu")
    config, vocabulary = encoder.config, encoder.vocabulary
    if not isinstance(vocabulary, Vocabulary) or config.vocabulary is not None or not config.kind.encodes:
        kind = config.model if config.vocabulary is None else f"{config.model} with the vocabulary of a file"
        raise InputError(f"{directory}: want a model with word vectors of its own, got {kind}")

    if config.masked_words:
        raise InputError(f"{directory}: want a model that was trained without masked words")

    ids = vocabulary.tokenizer.get_vocab()
    split = vocabulary.tokenizer.pre_tokenizer.pre_tokenize_str
    find = WordRows(words).find
    row_numbers = sorted((row, find(word)) for word, row in ids.items() if word != UNKNOWN)
    known = [(number, row) for row, number in row_numbers if number >= 0]
    if len(known) <= (W := vectors.shape[1]):
        raise InputError(
            f"words: want more of the model's than the vectors' {W} dimensions, got {len(known)}"
        )
    new = [
        number
        for number, word in enumerate(words)
        if word != UNKNOWN and word not in ids and [piece for piece, _ in split(word)] == [word]
    ]
    numbers = [number for number, _ in known] + new
    rows = np.array([row for _, row in known] + [-1] * len(new), dtype=np.int64)

    weights = encoder.model.state_dict()
    for name, table in weights.items():
        if name.endswith("embedding.weight") or name in OUTPUTS:
            weights[name] = torch.from_numpy(expand_table(table.numpy(), vectors[numbers], rows))
    vocabulary = expand_vocabulary(vocabulary, [words[number] for number in new])
    with torch.device("meta"):
        model = build_model(config, len(vocabulary))
    model.load_state_dict(weights, assign=True)

    try:
        write_text(out / CONFIG, config.to_json())
        write_text(out / VOCABULARY, vocabulary.to_json())
        save_model(out / MODEL, model)
    except BaseException:
        for name in (CONFIG, VOCABULARY, MODEL):  # a part of a model would be in the way of another try
            (out / name).unlink(missing_ok=True)
        raise
    return len(new)


class AffineMap(NamedTuple):
    """The function x @ matrix + intercept of rows x."""

    matrix: NDArray[np.float64]  # (W, D)
    intercept: NDArray[np.float64]  # (D,)

    def __call__(self, x: NDArray[np.floating]) -> NDArray[np.float64]:
        return np.asarray(x, dtype=np.float64) @ self.matrix + self.intercept


def fit_affine(sources: NDArray[np.floating], targets: NDArray[np.floating]) -> AffineMap:
    """Fits an affine map from (n, W) to (n, D), n > W, by least squares, in float64."""
    x, y = sources.astype(np.float64), targets.astype(np.float64)
    x_mean, y_mean = x.mean(0), y.mean(0)
    matrix = np.linalg.lstsq(x - x_mean, y - y_mean, rcond=None)[0]
    return AffineMap(matrix, y_mean - x_mean @ matrix)


def expand_table(
    table: NDArray[np.floating],  # (V, D) trained vectors
    vectors: NDArray[np.floating],  # (P, W) pre-trained vectors
    rows: NDArray[np.integer],  # (P,), the row of `table` that belongs to the same word, or -1 for a new word
) -> NDArray[np.floating]:
    """Appends a row to a trained table for each new word that has a pre-trained vector.

    The map from pre-trained to trained vectors is fitted, as by `fit_affine`, on the words that have both.
    The trained rows do not change. The rows of the n new words, (V + n, D) in the dtype of the table, are in
    their order.

    Source: Kiros et al., "Skip-thought vectors" (arXiv:1506.06726), section 2.2.
    """
    shared = rows >= 0
    mapped = fit_affine(vectors[shared], table[rows[shared]])(vectors[~shared])
    return np.concatenate([table, mapped.astype(table.dtype)])


def expand_vocabulary(vocabulary: Vocabulary, words: Sequence[str]) -> Vocabulary:
    """A copy of the vocabulary with `words`, none of which it contains, appended in their order."""
    state = json.loads(vocabulary.tokenizer.to_str())
    ids = state["model"]["vocab"]
    ids.update({word: number for number, word in enumerate(words, start=len(ids))})
    return Vocabulary(
        Tokenizer.from_str(json.dumps(state)), unknown=vocabulary.unknown, max_length=vocabulary.max_length
    )
