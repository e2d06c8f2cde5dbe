"""Which options of every training go together; a model kind checks its own."""

from __future__ import annotations

from fastqt.errors import InputError
from fastqt.sentences.options.training import TrainOptions


def check_combination(config: TrainOptions) -> None:
    """Checks that the options go with each other and with the encoder."""
    _check_vectors(config)
    _check_encoder(config)
    _check_vocabulary(config)
    _check_optimiser(config)


def _check_vectors(config: TrainOptions) -> None:
    """Refuses pre-trained word vectors that are needed and missing, or given where nothing can use them."""
    kind = config.encoder_kind
    if config.trained_dim is not None and not kind.channel:
        raise InputError(f"trained_dim: want it with an mc- encoder alone, got {config.trained_dim}")

    if config.vectors is None:
        for what, needs_vectors in (
            (f"encoder {config.encoder}", "vectors" in kind.needs),
            ("freeze_vectors", config.freeze_vectors),
            ("vectors_scale", config.vectors_scale != 1),
        ):
            if needs_vectors:
                raise InputError(f"vectors: want a file of word vectors with {what}, got None")
        return

    for where, has_no_words in (
        (f"encoder {config.encoder}", "checkpoint" in kind.needs),
        ("a vocabulary of a file", config.vocabulary is not None),
    ):
        if has_no_words:
            raise InputError(f"vectors: want none with {where}, got {config.vectors!r}")

    if config.freeze_vectors and (kind.is_table or kind.channel):
        reason = "has a frozen and a trained table" if kind.channel else "has no other weights"
        raise InputError(f"freeze_vectors: want none with encoder {config.encoder}, which {reason}")


def _check_encoder(config: TrainOptions) -> None:
    kind = config.encoder_kind
    if ("checkpoint" in kind.needs) != (config.checkpoint is not None):
        raise InputError(f"checkpoint: want with encoder huggingface alone, got {config.checkpoint!r}")
    if kind.has_heads and config.word_dim is not None and config.word_dim % config.heads:
        raise InputError(f"heads: want a divisor of word_dim {config.word_dim}, got {config.heads}")
    if kind.bidirectional and config.hidden_size % 2:
        raise InputError(f"hidden_size: want an even number for {config.encoder}, got {config.hidden_size}")


def _check_vocabulary(config: TrainOptions) -> None:
    if config.vocabulary is not None and "checkpoint" in config.encoder_kind.needs:
        raise InputError(f"vocabulary: want none with encoder {config.encoder}, got {config.vocabulary!r}")


def _check_optimiser(config: TrainOptions) -> None:
    """Checks the options of the optimiser by themselves; which weights decay, only the model can tell."""
    if config.warmup >= 1 and config.warmup != int(config.warmup):
        raise InputError(
            f"warmup: want a whole number of steps, or a share of the training below 1, got {config.warmup:g}"
        )
    if config.early_stop is not None and config.valid is None and config.dev is None:
        raise InputError(
            f"early_stop: want it with dev or valid, whose figures tell when to stop, got {config.early_stop}"
        )
