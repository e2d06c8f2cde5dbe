"""Builds the model that a run's settings describe, and loads trained models from a run's directory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from numpy.typing import NDArray

from fastqt.errors import InputError
from fastqt.nn import (
    BagOfWords,
    Encoder,
    Gloss,
    GRUEncoder,
    LSTMEncoder,
    MixCSE,
    QuickThoughts,
    SimCSE,
    Transformer,
)
from fastqt.nn.init import Init
from fastqt.runs.checkpoint import CONFIG, MODEL, VOCABULARY, load_model, stored_shape, write_text
from fastqt.runs.config import TrainConfig
from fastqt.text import Encoded, Lexicon, Vocabulary, pad
from fastqt.text.vocabulary import Unknown

if TYPE_CHECKING:
    from fastqt.integrations.huggingface import CheckpointVocabulary

HUGGINGFACE = "huggingface"  # subdirectory of a run: the configuration and the tokenizer of its checkpoint
BATCH_SIZE = 512  # sentences that are encoded together

Model = QuickThoughts | SimCSE | Gloss


def build_model(
    config: TrainConfig, vocab_size: int, *, sentences: int = 0, pretrained: bool = True
) -> Model:
    """A freshly initialised model of the kind that the settings name.

    Args:
        config: the settings of the run.
        vocab_size: number of token ids.
        sentences: number of latent vectors of a GLOSS model, one for each training sentence.
        pretrained: load the weights of the Hugging Face checkpoint, if the settings name one.

    Returns:
        The model, on the CPU.
    """
    if config.model.startswith("gloss"):
        return Gloss(
            vocab_size,
            config.word_dim,
            sentences=sentences,
            decoder=config.model.removeprefix("gloss-"),
            max_length=config.max_length,
            radius=config.radius,
        )
    encoder = build_encoder(config, vocab_size, pretrained=pretrained)
    if config.model == "quickthoughts":
        return QuickThoughts(encoder, build_encoder(config, vocab_size, pretrained=pretrained))
    if config.model == "simcse":
        return SimCSE(encoder, dropout=config.dropout, scale=config.scale)
    return MixCSE(encoder, dropout=config.dropout, scale=config.scale, mix=config.mix, form=config.form)


def build_encoder(config: TrainConfig, vocab_size: int, *, pretrained: bool = True) -> Encoder:
    """A freshly initialised sentence encoder, or the encoder of a Hugging Face checkpoint.

    Args:
        config: the settings of the run.
        vocab_size: number of token ids.
        pretrained: load the weights of the Hugging Face checkpoint, if the settings name one.

    Returns:
        The encoder, on the CPU.
    """
    if config.checkpoint is not None:
        from fastqt.integrations.huggingface import HuggingFaceEncoder, Pooling, untrained

        source = (config.checkpoint,) if pretrained else untrained(config.checkpoint)
        return HuggingFaceEncoder(
            *source, pooling=cast("Pooling", config.pooling), max_length=config.max_length
        )
    init = cast("Init", config.init)
    if config.encoder == "bow":
        return BagOfWords(vocab_size, config.word_dim, sparse=True, init=init)
    if config.encoder == "transformer":
        return Transformer(
            vocab_size,
            config.word_dim,
            layers=config.layers,
            heads=config.heads,
            feedforward=config.feedforward,
            dropout=config.dropout,
            max_length=config.max_length,
            sparse=True,
        )
    sizes = (vocab_size, config.word_dim, config.hidden_size)
    bidirectional = config.encoder.startswith("bi")
    if config.encoder.endswith("lstm"):
        return LSTMEncoder(*sizes, bidirectional=bidirectional, init=init, sparse=True)
    reset_after = config.cell == "reset-after"
    return GRUEncoder(*sizes, bidirectional=bidirectional, reset_after=reset_after, init=init, sparse=True)


def load_lexicon(config: TrainConfig, directory: Path) -> Lexicon:
    """Reads the vocabulary of a run, or the tokenizer if its encoder is a Hugging Face checkpoint.

    Args:
        config: the settings of the run.
        directory: its directory.

    Raises:
        InputError: the file is missing or damaged.
    """
    if config.encoder == "huggingface":
        from fastqt.integrations.huggingface import CheckpointVocabulary

        return CheckpointVocabulary.load(directory / HUGGINGFACE, max_length=config.max_length)
    return Vocabulary.load(directory / VOCABULARY, unknown=cast("Unknown", config.unknown))


def save_lexicon(lexicon: Lexicon, directory: Path) -> None:
    """Writes a vocabulary or a tokenizer to a run's directory, for `load_lexicon` to read."""
    if isinstance(lexicon, Vocabulary):
        write_text(directory / VOCABULARY, lexicon.to_json())
    else:
        cast("CheckpointVocabulary", lexicon).save(directory / HUGGINGFACE)


def choose_device(name: str) -> torch.device:
    """The device for the setting "auto", "cpu" or "cuda"; "auto" prefers a GPU.

    Raises:
        InputError: "cuda" is wanted and torch sees no CUDA device.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise InputError("device: wanted cuda, but torch sees no CUDA device here")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


@dataclass
class SentenceEncoder:
    """A model with its vocabulary, which turns text into vectors.

    Attributes:
        model: the model, in evaluation mode.
        vocabulary: turns sentences into token ids.
        device: the device of the model.
    """

    model: Model
    vocabulary: Lexicon
    device: torch.device

    @classmethod
    def load(cls, directory: str | Path, device: str = "auto", *, trained: bool = True) -> SentenceEncoder:
        """Loads a model that `fastqt train` wrote.

        Args:
            directory: the directory of the run.
            device: "auto", "cpu" or "cuda".
            trained: read the weights. Otherwise the model is freshly initialised.

        Returns:
            The encoder, on the device.

        Raises:
            InputError: a file is missing or damaged, is from another version, or does not fit the others.
        """
        directory = Path(directory)
        if not directory.is_dir():
            raise InputError(f"no trained model: {directory} is not a directory")
        config = TrainConfig.load(directory / CONFIG)
        vocabulary = load_lexicon(config, directory)
        # The checkpoint's directory may be gone. Only its configuration is needed, and the run has a copy.
        if config.checkpoint is not None:
            config = replace(config, checkpoint=str(directory / HUGGINGFACE))
        is_gloss = config.model.startswith("gloss")
        sentences = stored_shape(directory / MODEL, "latents")[0] if is_gloss and trained else 0
        model = build_model(config, len(vocabulary), sentences=sentences, pretrained=False)
        if trained:
            load_model(directory / MODEL, model)
        chosen = choose_device(device)
        return cls(model.to(chosen).eval(), vocabulary, chosen)

    @torch.inference_mode()
    def encode(self, sentences: list[str], *, normalize: bool = True) -> NDArray[np.float32]:
        """Encodes sentences in batches of similar length.

        Args:
            sentences: the texts; none of them may be blank.
            normalize: scale each vector to norm 1; for QuickThoughts, each of the two encoders' halves.

        Returns:
            Vectors (len(sentences), model.embedding_dim) float32, in the order of the sentences.
        """
        ids, lengths = self.vocabulary.encode(sentences)
        starts = np.cumsum(lengths) - lengths
        order = np.argsort(lengths, kind="stable")
        vectors: list[NDArray[np.float32]] = []
        for begin in range(0, len(order), BATCH_SIZE):
            rows = order[begin : begin + BATCH_SIZE]
            words = [ids[starts[row] : starts[row] + lengths[row]] for row in rows]
            tokens, sizes = pad(Encoded(np.concatenate(words), lengths[rows]))
            encoded = self.model.encode(tokens.to(self.device), sizes.to(self.device), normalize=normalize)
            vectors.append(encoded.float().cpu().numpy())
        result = np.empty((len(order), vectors[0].shape[1]), dtype=np.float32)
        result[order] = np.concatenate(vectors)
        return result
