"""The encoders whose vectors, beside each other, are those of a model, and the token ids that they take."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastqt.errors import InputError
from fastqt.nn import CombinedQuickThoughts, Encoder, QuickThoughts
from fastqt.sentences.text import Encoded, Lexicon, pad


def halves_of(model: nn.Module) -> dict[str, Encoder]:
    """The encoders of a model, in the order of their vectors, by their names among the model's modules.

    QuickThoughts has two of them, whose vectors are normalised separately; other models have one. GLOSS is
    refused: it has no encoder.
    """
    if isinstance(model, QuickThoughts):
        return {
            "query_encoder": model.query_encoder,
            "candidate_encoder": model.candidate_encoder,
        }
    if isinstance(model, CombinedQuickThoughts):
        return {
            f"models.{number}.{name}": encoder
            for number, part in enumerate(model.parts)
            for name, encoder in halves_of(part).items()
        }
    encoder = getattr(model, "encoder", None)
    if not isinstance(encoder, Encoder):
        raise InputError(
            f"model: want one with an encoder to export, got a {type(model).__name__}, which finds the "
            "vectors of sentences by optimisation"
        )
    return {"encoder": encoder}


def vectors_of(halves: Sequence[Encoder], tokens: Tensor, lengths: Tensor, *, normalize: bool) -> Tensor:
    """The sentence vectors (B, E) of a model with these encoders, with gradients, unlike its `encode`.

    `normalize` scales each half of a vector to norm 1; tokens and lengths are as in `Encoder.forward`.
    """
    vectors = [encoder(tokens, lengths) for encoder in halves]
    return torch.cat([F.normalize(half, dim=1) if normalize else half for half in vectors], dim=1)


def tokens_of(lexicon: Lexicon, texts: Sequence[str], prompt: str = "") -> tuple[Tensor, Tensor]:
    """Token ids (B, L), padded, of at least one text, and their lengths (B,), int64.

    The prompt is put in front of each text. The length of a blank text is 0, so that its vector is zero. A
    vocabulary alone would give it a token.
    """
    stripped = [text.strip() for text in texts]
    has_words = np.array([bool(text) for text in stripped])
    ids, lengths = np.zeros(0, dtype=np.int64), np.zeros(len(texts), dtype=np.int64)
    if has_words.any():
        ids, lengths[has_words] = lexicon.encode([prompt + text for text in stripped if text])
    return pad(Encoded(ids, lengths))
