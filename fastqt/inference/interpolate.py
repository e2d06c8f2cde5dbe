"""Sentences between sentences: what GLOSS generates on the way from one latent vector to another."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from fastqt.errors import InputError
from fastqt.nn import Gloss
from fastqt.runs.model import SentenceEncoder
from fastqt.text import Vocabulary, pad

PARALLEL = 1e-6  # sine of an angle that has no plane of its own


def between(
    encoder: SentenceEncoder, source: str, target: str, *, steps: int = 4, slerp: bool = False
) -> list[tuple[float, str]]:
    """What a GLOSS model generates at latent vectors from one sentence's to another's, both inferred.

    Args:
        encoder: a GLOSS model.
        source, target: sentences.
        steps: how many vectors lie between the two, at equal distances.
        slerp: see `interpolate`.

    Returns:
        steps + 2 pairs: the share of `target`, 0 to 1, and words, as many as `target`'s and `source`'s
        numbers of words in that proportion; those of the positional decoder in order, others the
        likeliest first.

    Raises:
        InputError: another model, blank text, or steps < 0.

    Source: Singh, Fan and Auli (2019), table 2.
    """
    model = encoder.model
    if not isinstance(model, Gloss):
        raise InputError("interpolate: wanted a model trained with --model gloss-bow or gloss-pos")
    for name, text in (("from", source), ("to", target)):
        if not text.strip():
            raise InputError(f"{name}: wanted a sentence, got blank text")
    if steps < 0:
        raise InputError(f"steps: wanted at least 0, got {steps}")
    tokens, lengths = (x.to(encoder.device) for x in pad(encoder.vocabulary.encode([source, target])))
    shares = torch.arange(steps + 2, device=encoder.device) / (steps + 1)
    first, last = model.infer(tokens, lengths)
    latents = interpolate(first, last, shares, slerp=slerp)
    counts = model.targets(tokens, lengths).sum(1).to(shares.dtype)
    numbers = torch.lerp(counts[0], counts[1], shares).round().long()
    # GLOSS takes no checkpoint: its lexicon is a vocabulary of words.
    vocabulary = cast(Vocabulary, encoder.vocabulary)
    texts = spelt(vocabulary, model.generate(latents, numbers), numbers)
    return [(step / (steps + 1), text) for step, text in enumerate(texts)]


def interpolate(source: Tensor, target: Tensor, shares: Tensor, *, slerp: bool = False) -> Tensor:
    """Vectors on the way from one to another.

    Args:
        source, target: (d,).
        shares: (K,) in [0, 1], of `target`.
        slerp: let the direction turn at a constant rate and the norm change at one, on a sphere if both
            norms are equal. Parallel and opposite vectors, between which there is no such way or not one
            alone, and vectors of norm 0 are joined by a straight line all the same.

    Returns:
        (K, d).

    Source: Shoemake, "Animating rotation with quaternion curves" (1985), of the turning direction.
    """
    shares = shares[:, None]
    straight = (1 - shares) * source + shares * target
    norms = source.norm(), target.norm()
    if not slerp or not all(norms):
        return straight
    units = source / norms[0], target / norms[1]
    # The angle by its tangent: an arc cosine is inexact where it is small.
    angle = 2 * torch.atan2((units[0] - units[1]).norm(), (units[0] + units[1]).norm())
    if angle.sin() < PARALLEL:
        return straight
    turned: Tensor = (
        ((1 - shares) * angle).sin() * units[0] + (shares * angle).sin() * units[1]
    ) / angle.sin()
    return turned * torch.lerp(norms[0], norms[1], shares)


def spelt(vocabulary: Vocabulary, tokens: Tensor, lengths: Tensor) -> list[str]:
    """Words for the ids that `Gloss.generate` gives.

    Args:
        tokens: (B, L) int64.
        lengths: (B,) int64 in [0, L].
    """
    word = vocabulary.tokenizer.id_to_token
    rows = zip(tokens.tolist(), lengths.tolist(), strict=True)
    return [" ".join(str(word(id)) for id in ids[:length]) for ids, length in rows]
