"""Builds the model that a run's settings describe, and says which one a run's directory holds."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import torch
from torch import nn

from fastqt.errors import InputError
from fastqt.nn import CombinedQuickThoughts, Encoder, Gloss, QuickThoughts, SimCSE, SkipThoughts
from fastqt.nn.combine import share_frozen_tables
from fastqt.sentences.kinds.kind import Build
from fastqt.sentences.runs.config import TrainConfig
from fastqt.sentences.runs.encoders import load_form
from fastqt.sentences.text import Prompts
from fastqt.sentences.text.reader import check_bytes

Model = QuickThoughts | CombinedQuickThoughts | SimCSE | Gloss | SkipThoughts


def build_model(
    config: TrainConfig, vocab_size: int, *, sentences: int = 0, pretrained: bool = True
) -> Model:
    """A freshly initialised model of the kind that the settings name, on the CPU.

    The vocabulary has so many token ids, and a GLOSS model a latent vector for each of so many training
    sentences. `pretrained` loads the weights of the Hugging Face checkpoint, if the settings name one.
    """
    if config.checkpoint is None or not pretrained:
        check_size(outline(config, vocab_size, sentences=sentences))
    return _build_model(config, vocab_size, sentences=sentences, pretrained=pretrained)


def outline(config: TrainConfig, vocab_size: int, *, sentences: int = 0) -> Model:
    """The model of `build_model` on the device "meta", where tensors have shapes and no memory."""
    with torch.device("meta"):
        return _build_model(config, vocab_size, sentences=sentences, pretrained=False)


def check_size(model: Model) -> None:
    """Refuses a model, also on the device "meta", that takes more than half of this machine's memory."""
    weights = model.state_dict()
    name, largest = max(weights.items(), key=lambda named: named[1].nbytes)
    check_bytes(
        sum(tensor.nbytes for tensor in weights.values()),
        f"size of the model, of which {name} {tuple(largest.shape)} is the largest part",
    )


def _build_model(config: TrainConfig, vocab_size: int, *, sentences: int, pretrained: bool) -> Model:
    def encoder(name: str) -> Encoder:
        settings = config if name == config.encoder else replace(config, encoder=name)
        return build_encoder(settings, vocab_size, pretrained=pretrained)

    model = config.kind.build(config, Build(vocab_size, encoder, sentences, pretrained))
    return _settle_tables(cast("Model", model), config)


def build_encoder(config: TrainConfig, vocab_size: int, *, pretrained: bool = True) -> Encoder:
    """The sentence encoder of `build_model`, which says what the arguments are."""
    encoder: Encoder = load_form(config.encoder_kind).build(config, vocab_size, pretrained=pretrained)
    return encoder


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


def _settle_tables(model: Model, config: TrainConfig) -> Model:
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


def prompts_of(config: TrainConfig) -> Prompts:
    """What the texts of a run's model begin with."""
    return Prompts(config.query_prompt, config.document_prompt)


def choose_device(name: str) -> torch.device:
    """The device for the setting "auto", "cpu" or "cuda"; "auto" prefers a GPU."""
    if name == "cuda" and not torch.cuda.is_available():
        raise InputError("device: want cuda, but torch sees no CUDA device here")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)
