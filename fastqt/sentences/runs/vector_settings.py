"""Which settings go with pre-trained word vectors."""

from __future__ import annotations

from fastqt.errors import InputError
from fastqt.sentences.runs.train_settings import TrainSettings


def check_vectors(config: TrainSettings) -> None:
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
        (f"model {config.model}", config.model.startswith("gloss")),
        (f"encoder {config.encoder}", "checkpoint" in kind.needs),
        ("a vocabulary of a file", config.vocabulary is not None),
    ):
        if has_no_words:
            raise InputError(f"vectors: want none with {where}, got {config.vectors!r}")

    if config.freeze_vectors and (kind.is_table or kind.channel):
        reason = "has a frozen and a trained table" if kind.channel else "has no other weights"
        raise InputError(f"freeze_vectors: want none with encoder {config.encoder}, which {reason}")
