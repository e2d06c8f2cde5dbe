"""Starts a training from pre-trained word vectors: their width, and how much of the corpus they cover."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from fastqt.errors import InputError
from fastqt.sentences.json_text import to_json
from fastqt.sentences.runs.config import TrainConfig
from fastqt.sentences.runs.files import digest
from fastqt.sentences.runs.model import tables_of_vectors
from fastqt.sentences.text import Lexicon, Vocabulary
from fastqt.sentences.text.vectors import vectors_of, width_of


def width_of_words(config: TrainConfig, stored: TrainConfig | None) -> int:
    """The width of word vectors: that of the settings, of the run to resume, or of the pre-trained file."""
    if config.vectors is None:
        return config.word_dim
    if stored is not None:
        return stored.word_dim
    width = width_of(config.vectors)
    if config.word_dim not in (None, width):
        raise InputError(f"word_dim: want {width}, the width of {config.vectors}, got {config.word_dim}")
    replace(config, word_dim=width)  # which checks what else depends on it
    return width


def start_from_vectors(
    model: nn.Module, vocabulary: Lexicon, config: TrainConfig, say: Callable[[str], None]
) -> str:
    """Gives the words of a new model their pre-trained vectors. Other words keep those that were drawn.

    Returns JSON for the run's directory: what was read, and which shares of the vocabulary's words and of the
    corpus's tokens have a vector. The corpus's tokens are known if the vocabulary was built from them. A file
    that has none for any word is refused.
    """
    path = cast("str", config.vectors)
    words = _words(cast("Vocabulary", vocabulary))
    pretrained = vectors_of(path, words[1:])  # without the unknown word
    if pretrained.vectors.shape[1] != config.word_dim:
        width = pretrained.vectors.shape[1]
        raise InputError(f"word_dim: want {width}, the width of {path}, got {config.word_dim}")

    known = pretrained.places + 1
    if not len(known):
        raise InputError(f"vectors: want words of the vocabulary, got none of {len(words) - 1} in {path}")

    vectors = torch.from_numpy(pretrained.vectors) * config.vectors_scale
    with torch.no_grad():
        for table in tables_of_vectors(model, config):
            table.weight[torch.from_numpy(known)] = vectors.to(table.weight)

    share = len(known) / (len(words) - 1)
    text = f"{path}: vectors of {len(known):,} of {len(words) - 1:,} words ({share:.1%})"
    coverage: dict[str, Any] = {"words": len(words) - 1, "words_with_a_vector": len(known)}
    counts = cast("Vocabulary", vocabulary).counts
    if counts is not None:
        tokens, covered = int(counts.sum()), int(counts[known].sum())
        coverage |= {"tokens": tokens, "tokens_with_a_vector": covered}
        text += f", which are {covered / max(tokens, 1):.1%} of the corpus's tokens"

    say(text)
    coverage |= {"width": config.word_dim, "scale": config.vectors_scale}
    return to_json({"vectors": path, "sha256": digest(Path(path)), **coverage}, indent=2) + "\n"


def _words(vocabulary: Vocabulary) -> list[str]:
    """The words in the order of their ids."""
    ids = vocabulary.tokenizer.get_vocab()
    return sorted(ids, key=ids.__getitem__)
