"""Vocabulary expansion: adds the words of pre-trained word vectors to a trained model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from fastqt.errors import InputError
from fastqt.runs.checkpoint import CONFIG, MODEL, VOCABULARY, save_model, write_text
from fastqt.runs.config import TrainConfig
from fastqt.runs.model import SentenceEncoder, build_model
from fastqt.text import Vocabulary
from fastqt.text.expansion import expand_table, expand_vocabulary
from fastqt.text.vocabulary import UNKNOWN


def add_words(
    directory: str | Path, words: Sequence[str], vectors: NDArray[np.floating], out: str | Path
) -> int:
    """Writes a copy of a trained model whose encoders know further words.

    An affine map from the pre-trained vectors to the model's word vectors is fitted to the words that both
    have; each embedding table has its own map (see `fastqt.text.expansion`). The words of the model keep
    their vectors. A word that the model's tokenizer would split is left out, because no text would ever
    contain it.

    Args:
        directory: a directory that `fastqt train` wrote.
        words: distinct words, case-sensitive as in the model's vocabulary.
        vectors: (len(words), W) pre-trained vectors; more than W of the words must be in the vocabulary.
        out: directory of the new model. It is created if it does not exist, and must not hold a model.

    Returns:
        The number of words that were added.

    Raises:
        InputError: the model cannot be loaded, `out` holds a model, or words and vectors do not fit each
            other or the model.

    Source: Kiros et al. (2015), section 2.2.
    """
    if vectors.ndim != 2 or len(vectors) != len(words):
        raise InputError(f"vectors: want ({len(words)}, W) for {len(words)} words, got {vectors.shape}")
    if not np.isfinite(vectors).all():
        raise InputError("vectors: want finite numbers, got NaN or infinity")
    if len(set(words)) != len(words):
        raise InputError(f"words: want distinct ones, got {len(words) - len(set(words))} more than once")
    directory, out = Path(directory), Path(out)
    if any((out / name).exists() for name in (CONFIG, VOCABULARY, MODEL)):
        raise InputError(f"{out} already holds a model: choose another directory")
    encoder = SentenceEncoder.load(directory, "cpu")
    config, vocabulary = TrainConfig.load(directory / CONFIG), encoder.vocabulary
    if not isinstance(vocabulary, Vocabulary) or config.model.startswith("gloss"):
        kind = config.model if config.vocabulary is None else f"{config.model} with the vocabulary of a file"
        raise InputError(f"{directory}: want a model with word vectors of its own, got {kind}")

    if config.masked_words:
        raise InputError(f"{directory}: want a model that was trained without masked words")

    ids = vocabulary.tokenizer.get_vocab()
    split = vocabulary.tokenizer.pre_tokenizer.pre_tokenize_str
    found = [
        number
        for number, word in enumerate(words)
        if word != UNKNOWN and (word in ids or [piece for piece, _ in split(word)] == [word])
    ]
    rows = np.array([ids.get(words[number], -1) for number in found], dtype=np.int64)
    new = [words[number] for number in found if words[number] not in ids]
    shared, W = int((rows >= 0).sum()), vectors.shape[1]
    if shared <= W:
        raise InputError(f"words: want more of the model's than the vectors' {W} dimensions, got {shared}")

    weights = encoder.model.state_dict()
    for name, table in weights.items():
        if name.endswith("embedding.weight"):
            weights[name] = torch.from_numpy(expand_table(table.numpy(), vectors[found], rows))
    vocabulary = expand_vocabulary(vocabulary, new)
    with torch.device("meta"):
        model = build_model(config, len(vocabulary))
    model.load_state_dict(weights, assign=True)

    out.mkdir(parents=True, exist_ok=True)
    try:
        write_text(out / CONFIG, config.to_json())
        write_text(out / VOCABULARY, vocabulary.to_json())
        save_model(out / MODEL, model)
    except BaseException:
        for name in (CONFIG, VOCABULARY, MODEL):  # a part of a model would be in the way of another try
            (out / name).unlink(missing_ok=True)
        raise
    return len(new)
