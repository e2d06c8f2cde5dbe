"""Sentences that GLOSS generates along the way from one latent vector to another."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from fastqt.errors import InputError
from fastqt.nn import Gloss
from fastqt.sentences.inference.encoder import SentenceEncoder
from fastqt.sentences.inference.search import check_sentence
from fastqt.sentences.text import Vocabulary, pad

MOST_STEPS = 1000  # the scores of all words are in memory for each of them
PARALLEL = 1e-6  # two vectors count as parallel if the sine of their angle is smaller


def sentences_between(
    encoder: SentenceEncoder, source: str, target: str, *, steps: int = 4, slerp: bool = False
) -> list[tuple[float, str]]:
    """Generates sentences at latent vectors between those of two sentences.

    The encoder is a GLOSS model, which infers the latent vectors of both. `steps` is the number of latent
    vectors between the two, at equal distances; at most 1000. Returned are steps + 2 pairs: the share of
    `target`, from 0 to 1, and the generated words. Their number is interpolated too. The positional decoder
    gives words in order, the bag of words the likeliest first. For `slerp` see `vectors_between`.

    Source: Singh, Fan and Auli (2019), table 2.
    """
    model = encoder.model
    if not isinstance(model, Gloss):
        raise InputError(
            f"model: want one trained with --model gloss-bow or gloss-pos, got a {type(model).__name__}"
        )
    check_sentence("from", source)
    check_sentence("to", target)
    if not 0 <= steps <= MOST_STEPS:
        raise InputError(f"steps: want 0 to {MOST_STEPS}, got {steps}")
    tokens, lengths = (x.to(encoder.device) for x in pad(encoder.vocabulary.encode([source, target])))
    shares = torch.arange(steps + 2, device=encoder.device) / (steps + 1)

    first, last = model.infer(tokens, lengths)
    if not (first.isfinite().all() and last.isfinite().all()):
        raise InputError("inference: want finite vectors, got NaN or infinity: lower the learning rate of it")
    latents = vectors_between(first, last, shares, slerp=slerp)
    counts = model.targets(tokens, lengths).sum(1).to(shares.dtype)
    word_counts = torch.lerp(counts[0], counts[1], shares).round().long()
    # A GLOSS model has no Hugging Face tokenizer, so its lexicon is always a Vocabulary.
    vocabulary = cast(Vocabulary, encoder.vocabulary)
    texts = _to_text(vocabulary, model.generate(latents, word_counts), word_counts)
    return [(step / (steps + 1), text) for step, text in enumerate(texts)]


def vectors_between(source: Tensor, target: Tensor, shares: Tensor, *, slerp: bool = False) -> Tensor:
    """Interpolates between two vectors (d,) at shares (K,) of the target, in [0, 1]: (K, d).

    `slerp` turns the direction at a constant rate, and changes the norm linearly. Otherwise, and for parallel
    or opposite vectors and vectors of norm 0, the way is a straight line.

    Source: Shoemake, "Animating rotation with quaternion curves" (1985), for the direction.
    """
    shares = shares[:, None]
    straight = (1 - shares) * source + shares * target
    norms = source.norm(), target.norm()
    if not slerp or not all(norms):
        return straight
    units = source / norms[0], target / norms[1]
    # The angle is computed from its tangent, because the arc cosine is inexact for small angles.
    angle = 2 * torch.atan2((units[0] - units[1]).norm(), (units[0] + units[1]).norm())
    if angle.sin() < PARALLEL:
        return straight
    turned: Tensor = (
        ((1 - shares) * angle).sin() * units[0] + (shares * angle).sin() * units[1]
    ) / angle.sin()
    return turned * torch.lerp(norms[0], norms[1], shares)


def _to_text(
    vocabulary: Vocabulary,
    tokens: Tensor,  # (B, L) int64
    lengths: Tensor,  # (B,) int64, in [0, L]
) -> list[str]:
    """The words of the token ids that `Gloss.generate` returns, joined by blanks."""
    word = vocabulary.tokenizer.id_to_token
    rows = zip(tokens.tolist(), lengths.tolist(), strict=True)
    return [" ".join(str(word(id)) for id in ids[:length]) for ids, length in rows]
