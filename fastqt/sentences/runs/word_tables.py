"""The word tables of a model: those that start from pre-trained vectors, are frozen, or are shared."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar, cast

from torch import nn

from fastqt.nn import Combine, Encoder, QuickThoughts
from fastqt.nn.combine import Channel, channels, share_frozen_tables
from fastqt.nn.init import Init

if TYPE_CHECKING:
    from fastqt.sentences.runs.config import TrainConfig

CHANNELS = "mc-"  # how the names of encoders of two channels begin

M = TypeVar("M", bound=nn.Module)


def multi_channel(config: TrainConfig, vocab_size: int) -> Encoder:
    """A freshly initialised encoder of two channels.

    The frozen table is drawn too: it keeps what was drawn for words without a pre-trained vector.
    """
    both = channels(
        cast("Channel", config.encoder.removeprefix(CHANNELS)),
        vocab_size,
        config.word_dim,
        vectors=None,
        word_dim=config.trained_dim or config.word_dim,
        hidden_size=config.hidden_size,
        reset_after=config.cell == "reset-after",
        init=cast("Init", config.init),
        sparse=True,
    )
    return Combine(*both)


def word_tables(model: nn.Module) -> list[nn.Embedding]:
    """The tables of word vectors in a model, each once."""
    return [
        module
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding) and name.rpartition(".")[2] == "embedding"
    ]


def tables_of_vectors(model: nn.Module, config: TrainConfig) -> list[nn.Embedding]:
    """The word tables that start from the vectors of a file: all, or of two channels the frozen one."""
    tables = word_tables(model)
    if config.encoder.startswith(CHANNELS):
        return [table for table in tables if not table.weight.requires_grad]
    return tables


def settle_tables(model: M, config: TrainConfig) -> M:
    """Freezes the word tables of a new model if the settings say so, in place, and returns the model.

    Both encoders of QuickThoughts share frozen ones.
    """
    if config.freeze_vectors:
        for table in word_tables(model):
            table.weight.requires_grad_(False)
    for module in model.modules():
        if isinstance(module, QuickThoughts):
            share_frozen_tables(module.query_encoder, module.candidate_encoder)
    return model
