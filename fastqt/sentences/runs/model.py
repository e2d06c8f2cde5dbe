"""Builds the model that a run's settings describe, and loads trained models from a run's directory."""

from __future__ import annotations

import contextlib
import hashlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from numpy.typing import NDArray

from fastqt.errors import InputError
from fastqt.nn import (
    BagOfWords,
    CombinedQuickThoughts,
    Encoder,
    Gloss,
    GRUEncoder,
    LSTMEncoder,
    QuickThoughts,
    SimCSE,
    SkipThoughts,
    Transformer,
)
from fastqt.nn.init import Init
from fastqt.sentences.runs.checkpoint import (
    CONFIG,
    MODEL,
    check_model,
    load_model,
    stored_shape,
)
from fastqt.sentences.runs.combined import combined
from fastqt.sentences.runs.config import TrainConfig
from fastqt.sentences.runs.digests import digest
from fastqt.sentences.runs.lexicon import HUGGINGFACE, damage_in_words, lexicon_digest, load_lexicon
from fastqt.sentences.runs.skip_thoughts import build_skip_thoughts
from fastqt.sentences.runs.tensor_files import open_tensors
from fastqt.sentences.runs.views_model import build_views_model
from fastqt.sentences.runs.word_tables import CHANNELS, multi_channel, settle_tables
from fastqt.sentences.text import Encoded, Lexicon, pad
from fastqt.sentences.text.limits import check_bytes

if TYPE_CHECKING:
    pass

BATCH_SIZE = 512  # sentences that are encoded together

Model = QuickThoughts | CombinedQuickThoughts | SimCSE | Gloss | SkipThoughts


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

    Raises:
        InputError: this machine's memory does not hold the model.
    """
    if config.encoder != HUGGINGFACE or not pretrained:
        check_size(outline(config, vocab_size, sentences=sentences))
    return _build_model(config, vocab_size, sentences=sentences, pretrained=pretrained)


def outline(config: TrainConfig, vocab_size: int, *, sentences: int = 0) -> Model:
    """The model of `build_model` on the device "meta", where tensors have shapes and no memory."""
    with torch.device("meta"):
        return _build_model(config, vocab_size, sentences=sentences, pretrained=False)


def check_size(model: Model) -> None:
    """Checks that this machine could hold a model.

    Args:
        model: it may be on the device "meta".

    Raises:
        InputError: the model takes more than half of the machine's memory.
    """
    weights = model.state_dict()
    name, largest = max(weights.items(), key=lambda named: named[1].nbytes)
    check_bytes(
        sum(tensor.nbytes for tensor in weights.values()),
        f"size of the model, of which {name} {tuple(largest.shape)} is the largest part",
    )


def _build_model(config: TrainConfig, vocab_size: int, *, sentences: int, pretrained: bool) -> Model:
    return settle_tables(_new_model(config, vocab_size, sentences=sentences, pretrained=pretrained), config)


def _new_model(config: TrainConfig, vocab_size: int, *, sentences: int = 0, pretrained: bool = True) -> Model:
    if config.model.startswith("gloss"):
        return Gloss(
            vocab_size,
            config.word_dim,
            sentences=sentences,
            decoder="pos" if config.model == "gloss-pos" else "bow",
            max_length=config.max_length,
            radius=config.radius,
            position_loss="mean" if config.position_loss == "mean" else "sum",
        )
    if config.model == "skip-thoughts":
        return build_skip_thoughts(config, vocab_size)
    if config.encoder == "combine":
        return combined(lambda encoder: _new_model(replace(config, encoder=encoder), vocab_size))
    encoder = build_encoder(config, vocab_size, pretrained=pretrained)
    if config.model == "quickthoughts":
        return QuickThoughts(encoder, build_encoder(config, vocab_size, pretrained=pretrained))
    return build_views_model(config, encoder, pretrained=pretrained)


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
    if config.encoder.startswith(CHANNELS):
        return multi_channel(config, vocab_size)
    init = cast("Init", config.init)
    if config.encoder == "bow":
        return BagOfWords(vocab_size, config.word_dim, sparse=True, init=init)
    if config.encoder == "transformer":
        predicts_words = config.masked_words > 0
        return Transformer(
            vocab_size + predicts_words,  # the last one is the mask token's, which no vocabulary has
            config.word_dim,
            layers=config.layers,
            heads=config.heads,
            feedforward=config.feedforward,
            dropout=config.dropout,
            max_length=config.max_length,
            sparse=not predicts_words,  # a softmax over all words gives all of them a gradient
        )
    sizes = (vocab_size, config.word_dim, config.hidden_size)
    bidirectional = config.encoder.startswith("bi")
    if config.encoder.endswith("lstm"):
        return LSTMEncoder(*sizes, bidirectional=bidirectional, init=init, sparse=True)
    reset_after = config.cell == "reset-after"
    return GRUEncoder(*sizes, bidirectional=bidirectional, reset_after=reset_after, init=init, sparse=True)


def _check_layers(lexicon: Lexicon, directory: Path) -> None:
    """Refuses a Hugging Face configuration with more layers than the stored weights have tensors."""
    layers = getattr(getattr(lexicon, "config", None), "num_hidden_layers", 0)
    if not layers:
        return
    with open_tensors(directory / MODEL) as file:
        tensors = len(file.keys())
    if layers > tensors:
        raise InputError(
            f"{directory / HUGGINGFACE}: num_hidden_layers: want at most {tensors}, the number of stored "
            f"tensors, got {layers}"
        )


def model_digest(directory: str | Path) -> str:
    """The SHA-256 of everything in a run's directory that the vectors of its sentences depend on.

    Raises:
        InputError: a file is missing or damaged.
    """
    directory = Path(directory)
    config = TrainConfig.load(directory / CONFIG)
    try:
        parts = (
            digest(directory / CONFIG),
            lexicon_digest(config, directory),
            digest(directory / MODEL),
        )
    except OSError as error:
        raise InputError(f"cannot read {error.filename}: {error.strerror or error}") from error
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()


def choose_device(name: str) -> torch.device:
    """The device for the setting "auto", "cpu" or "cuda"; "auto" prefers a GPU.

    Raises:
        InputError: "cuda" is wanted and torch sees no CUDA device.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise InputError("device: want cuda, but torch sees no CUDA device here")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def _fitting_model(config: TrainConfig, vocabulary: Lexicon, directory: Path, trained: bool) -> Model:
    """A freshly initialised model of the shapes of the stored weights, if they are to be loaded.

    Settings that do not fit these weights are refused before any memory is taken for them.
    """
    if not trained:
        return build_model(config, len(vocabulary), pretrained=False)
    is_gloss = config.model.startswith("gloss")
    sentences = stored_shape(directory / MODEL, "latents")[0] if is_gloss else 0
    _check_layers(vocabulary, directory)
    check_model(directory / MODEL, outline(config, len(vocabulary), sentences=sentences).state_dict())
    return build_model(config, len(vocabulary), sentences=sentences, pretrained=False)


@dataclass
class SentenceEncoder:
    """A model with its vocabulary, which turns text into vectors.

    Attributes:
        model: the model, in evaluation mode.
        vocabulary: turns sentences into token ids.
        device: the device of the model.
        digest: `model_digest` of the directory that it was loaded from, None if that was not asked for.
    """

    model: Model
    vocabulary: Lexicon
    device: torch.device
    digest: str | None = None

    @classmethod
    def load(
        cls, directory: str | Path, device: str = "auto", *, trained: bool = True, with_digest: bool = False
    ) -> SentenceEncoder:
        """Loads a model that `fastqt train` wrote.

        Args:
            directory: the directory of the run.
            device: "auto", "cpu" or "cuda".
            trained: read the weights. Otherwise the model is freshly initialised.
            with_digest: compute the encoder's `digest`.

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
        with damage_in_words(directory) if config.encoder == HUGGINGFACE else contextlib.nullcontext():
            model = _fitting_model(config, vocabulary, directory, trained)
        if trained:
            load_model(directory / MODEL, model)
        chosen = choose_device(device)
        known = model_digest(directory) if with_digest else None
        return cls(model.to(chosen).eval(), vocabulary, chosen, known)

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
