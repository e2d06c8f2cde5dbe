"""Which settings of a training go together. Like the settings, it imports no torch."""

from __future__ import annotations

from fastqt.errors import InputError
from fastqt.sentences.runs.encoders import ENCODERS
from fastqt.sentences.runs.optimiser_options import check_optimiser
from fastqt.sentences.runs.pairs_options import check_pairs
from fastqt.sentences.runs.train_settings import TrainSettings
from fastqt.sentences.runs.vector_settings import check_vectors
from fastqt.sentences.runs.views_options import check_views


def check_combination(config: TrainSettings) -> None:
    """Checks that settings go with each other, with the model and with the encoder."""
    check_vectors(config)
    if ("checkpoint" in config.encoder_kind.needs) != (config.checkpoint is not None):
        raise InputError(f"checkpoint: want with encoder huggingface alone, got {config.checkpoint!r}")
    _check_compile(config)
    _check_vocabulary(config)
    check_views(config)
    check_pairs(config)
    check_optimiser(config)
    if config.model == "skip-thoughts":
        _check_skip_thoughts(config)
    if config.encoder_kind.parts and config.model != "quickthoughts":
        raise InputError(f"encoder: want {config.encoder} with model quickthoughts alone, got {config.model}")
    _check_widths(config)
    if config.position_loss != "sum" and config.model != "gloss-pos":
        raise InputError(f"position_loss: want 'sum' with model {config.model}, got {config.position_loss!r}")
    if config.context_size >= config.batch_size:
        raise InputError(
            f"context_size: want less than batch_size {config.batch_size}, got {config.context_size}"
        )


def _check_compile(config: TrainSettings) -> None:
    if config.compile and not config.encoder_kind.compiles:
        those = " or ".join(kind.name for kind in ENCODERS.values() if kind.compiles)
        raise InputError(
            f"compile: want it with encoder {those}, because nothing of the others becomes "
            f"faster: their operations depend on the lengths of sentences, or are compiled already; got "
            f"{config.encoder}"
        )


def _check_widths(config: TrainSettings) -> None:
    kind = config.encoder_kind
    if kind.has_heads and config.word_dim is not None and config.word_dim % config.heads:
        raise InputError(f"heads: want a divisor of word_dim {config.word_dim}, got {config.heads}")
    if kind.bidirectional and config.hidden_size % 2:
        raise InputError(f"hidden_size: want an even number for {config.encoder}, got {config.hidden_size}")


def _check_skip_thoughts(config: TrainSettings) -> None:
    encoders = tuple(kind.name for kind in ENCODERS.values() if kind.in_skip_thoughts)
    for name, wanted in (("encoder", encoders), ("init", ("paper",)), ("context_size", (1,))):
        if (value := getattr(config, name)) not in wanted:
            these = " or ".join(map(str, wanted))
            raise InputError(f"{name}: want {these} with model skip-thoughts, got {value}")


def _check_vocabulary(config: TrainSettings) -> None:
    if config.vocabulary is not None and (
        "checkpoint" in config.encoder_kind.needs or config.model.startswith("gloss")
    ):
        where = "model gloss" if config.model.startswith("gloss") else f"encoder {config.encoder}"
        raise InputError(f"vocabulary: want none with {where}, got {config.vocabulary!r}")
    if config.special_tokens != "none" and config.vocabulary is None:
        raise InputError(f"special_tokens: want it with a vocabulary alone, got {config.special_tokens!r}")
    if config.special_tokens != "none" and config.unknown == "drop":
        raise InputError("unknown: want 'keep' where special_tokens is 'add', got 'drop'")
