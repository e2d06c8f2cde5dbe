"""Sentences as token ids: concatenated, as a vocabulary gives them, and padded, as encoders take them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class Encoded(NamedTuple):
    """Sentences as token ids."""

    ids: NDArray[np.int64]  # the ids of all sentences, concatenated
    lengths: NDArray[np.int64]  # the number of ids of each sentence


def pad(encoded: Encoded) -> tuple[Tensor, Tensor]:
    """Pads sentences with 0 to the length L of the longest: tokens (B, L) and lengths (B,), int64."""
    lengths = encoded.lengths
    tokens = np.zeros((len(lengths), int(lengths.max())), dtype=np.int64)
    tokens[np.arange(tokens.shape[1]) < lengths[:, None]] = encoded.ids
    return torch.from_numpy(tokens), torch.from_numpy(lengths)
