"""The encoders whose vectors, beside each other, are the sentence vectors of a model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastqt.errors import InputError
from fastqt.nn import CombinedQuickThoughts, Encoder, QuickThoughts


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
