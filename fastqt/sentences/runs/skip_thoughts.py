"""Skip-thoughts as the settings of a run describe it."""

from __future__ import annotations

from fastqt.nn import SkipThoughts
from fastqt.sentences.runs.config import TrainConfig

# The tables of a skip-thoughts model with a row for each word, beside the encoder's word vectors.
OUTPUTS = ("previous.output", "next.output")


def build_skip_thoughts(config: TrainConfig, vocab_size: int) -> SkipThoughts:
    """A freshly initialised skip-thoughts model, on the CPU, whose encoder is a GRU."""
    return SkipThoughts(
        vocab_size,
        config.word_dim,
        config.hidden_size,
        bidirectional=config.encoder_kind.bidirectional,
        reset_after=config.cell == "reset-after",
        sparse=True,
    )
