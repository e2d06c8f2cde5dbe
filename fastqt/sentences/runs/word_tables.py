"""The word tables of a model: those that start from pre-trained vectors, are frozen, or are shared."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from torch import nn

from fastqt.nn import QuickThoughts
from fastqt.nn.combine import share_frozen_tables

if TYPE_CHECKING:
    from fastqt.sentences.runs.config import TrainConfig

M = TypeVar("M", bound=nn.Module)


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
    if config.encoder_kind.channel:
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
