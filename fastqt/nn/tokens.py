"""Sentences as token ids: concatenated, as a vocabulary gives them, and padded, as encoders take them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fastqt.checks import shown
from fastqt.errors import InputError


class Encoded(NamedTuple):
    """Sentences as token ids."""

    ids: NDArray[np.int64]  # the ids of all sentences, concatenated
    lengths: NDArray[np.int64]  # the number of ids of each sentence


def list_of_texts(name: str, texts: Iterable[str]) -> list[str]:
    """Several texts as a list, after it was checked that none has half a character, which no tokenizer takes.

    One text in their place, which would be taken for its characters, is a TypeError.
    """
    if isinstance(texts, str) or not isinstance(texts, Iterable):
        raise TypeError(f"{name}: want a list of texts, got {shown(texts)}")
    texts = list(texts)
    for text in texts:
        if not isinstance(text, str):
            raise TypeError(f"{name}: want texts, got {shown(text)}")
        try:
            text.encode()
        except UnicodeEncodeError:
            raise InputError(f"{name}: want text in UTF-8, got {text!r:.100}") from None
    return texts


def pad(encoded: Encoded) -> tuple[Tensor, Tensor]:
    """Pads sentences with 0 to the length L of the longest: tokens (B, L) and lengths (B,), int64."""
    lengths = encoded.lengths
    tokens = np.zeros((len(lengths), int(lengths.max(initial=0))), dtype=np.int64)
    tokens[np.arange(tokens.shape[1]) < lengths[:, None]] = encoded.ids
    return torch.from_numpy(tokens), torch.from_numpy(lengths)
