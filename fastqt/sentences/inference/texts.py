"""Texts as token ids where some may be blank, and what stands in front of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from fastqt.sentences.text import Encoded, Lexicon, Prompts, pad


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


def in_words(prompts: Prompts) -> str:
    """A sentence that says what a user of token ids has to put in front of texts."""
    return (
        f"The training put {prompts.query!r} in front of queries and {prompts.document!r} in front of "
        "documents."
    )
