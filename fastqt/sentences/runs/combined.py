"""Builds the combined model: several QuickThoughts models that are trained apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fastqt.nn import CombinedQuickThoughts


def combined(encoders: Sequence[str], build: Callable[[str], Any]) -> CombinedQuickThoughts:
    """A model of each encoder, which `build` makes from the encoder's name.

    All of them are drawn from the same state of torch's random numbers. Each has therefore the weights with
    which it would begin alone, with the same seed.
    """
    state = torch.get_rng_state()
    models = []
    for encoder in encoders:
        torch.set_rng_state(state)
        models.append(build(encoder))
    return CombinedQuickThoughts(*models)
