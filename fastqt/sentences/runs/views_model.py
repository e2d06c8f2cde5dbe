"""Builds SimCSE and MixCSE as a run's settings describe them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from fastqt.errors import InputError
from fastqt.nn import Encoder, MaskedWordHead, MixCSE, SimCSE
from fastqt.nn.masked_words import TokenEncoder
from fastqt.sentences.runs.config import TrainConfig
from fastqt.sentences.runs.views_options import largest_scale
from fastqt.sentences.text import Lexicon

if TYPE_CHECKING:
    from fastqt.integrations.huggingface import CheckpointVocabulary


def build_views_model(config: TrainConfig, encoder: Encoder, *, pretrained: bool) -> SimCSE:
    """SimCSE or MixCSE, whichever the settings name, around an encoder.

    `pretrained` loads the head for masked words of a Hugging Face checkpoint, if it has one.
    """
    head = _head(config, encoder, pretrained) if config.masked_words else None
    shared: dict[str, Any] = {
        "head": head,
        "dropout": config.dropout,
        "scale": config.scale,
        "learn_scale": config.learn_scale,
        "max_scale": largest_scale(config) if config.learn_scale else None,
        "hard_negative_weight": config.hard_negative_weight,
    }
    if config.model == "simcse":
        return SimCSE(encoder, **shared)

    # The configuration has checked these texts.
    of_mixtures: dict[str, Any] = {
        "form": config.form,
        "partner": config.partner,
        "blocks": config.blocks,
        "masked_cell": config.masked_cell,
    }
    stop_gradient = config.stop_gradient == "yes"
    return MixCSE(encoder, mix=config.mix, stop_gradient=stop_gradient, **of_mixtures, **shared)


def _head(config: TrainConfig, encoder: Encoder, pretrained: bool) -> MaskedWordHead:
    """What predicts masked words: the checkpoint's own head where it has one, otherwise a fresh one."""
    words, width = cast("TokenEncoder", encoder).word_table.shape
    if width != encoder.embedding_dim:
        raise InputError(
            f"masked_words: want a checkpoint whose word vectors are as wide as its states, "
            f"{encoder.embedding_dim}, got {width}"
        )
    head = MaskedWordHead(words, width)
    if config.checkpoint is not None and pretrained:
        from fastqt.integrations.huggingface.masked_words import load_masked_word_head

        load_masked_word_head(head, config.checkpoint)
    return head


def mask_token(config: TrainConfig, vocabulary: Lexicon, words: int) -> int:
    """The id of the mask token, for an encoder whose word table has `words` rows.

    An encoder that is trained from scratch has one row more than its vocabulary has words, for this token
    alone. A checkpoint has one of its own, in its tokenizer and with a vector in its model.
    """
    if config.checkpoint is None:
        return len(vocabulary)
    token_id: int | None = cast("CheckpointVocabulary", vocabulary).tokenizer.mask_token_id
    if token_id is None or token_id >= words:
        raise InputError(f"masked_words: want a checkpoint with a mask token, got {config.checkpoint!r}")
    return token_id
