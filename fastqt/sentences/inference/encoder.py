"""Loads trained models from a run's directory, and turns sentences into vectors with them."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from fastqt.errors import InputError
from fastqt.nn import Gloss
from fastqt.nn.gloss_inference import Inference
from fastqt.nn.tokens import list_of_texts
from fastqt.sentences.errors import warn
from fastqt.sentences.json_text import Digest
from fastqt.sentences.options.commands import InferenceOptions, Side
from fastqt.sentences.runs.checkpoint import (
    CONFIG,
    MODEL,
    check_weights,
    load_weights,
    standing,
    stored_shape,
)
from fastqt.sentences.runs.config import TrainConfig
from fastqt.sentences.runs.files import joined_digest
from fastqt.sentences.runs.lexicon import HUGGINGFACE, damage_in_words, load_lexicon
from fastqt.sentences.runs.model import (
    Model,
    build_model,
    choose_device,
    outline,
    prompts_of,
)
from fastqt.sentences.runs.tensor_files import open_tensors
from fastqt.sentences.text import Encoded, Lexicon, Prompts, pad

BATCH_SIZE = 512  # sentences that are encoded together


class TextEncoder(Protocol):
    """What searches and evaluations need of an encoder: a `SentenceEncoder`, or another library's."""

    @property
    def width(self) -> int:
        """The width D of the vectors."""

    @property
    def identity(self) -> str | None:
        """What identifies the encoder: a digest of all that its vectors depend on; None without digests."""

    @property
    def prompts(self) -> Prompts:
        """What the model's texts begin with."""

    def encode(
        self, sentences: Sequence[str], *, normalize: bool = True, side: Side = "query"
    ) -> NDArray[np.float32]:
        """The vectors of n sentences, (n, D)."""

    def encode_as_they_are(self, sentences: Sequence[str], *, normalize: bool) -> NDArray[np.float32]:
        """The same of sentences that have their prompts already."""


@dataclass
class SentenceEncoder:
    """A model with its vocabulary and its settings, which turns text into vectors.

    The model is in evaluation mode on `device`. `config` is the settings that it was trained with. `digests`
    are those of all that the vectors depend on: the settings, the vocabulary, and the weights if they were
    read; none if nobody asked for them. `inferred` is how a GLOSS model infers, if it is not its default.
    """

    model: Model
    vocabulary: Lexicon
    device: torch.device
    config: TrainConfig
    digests: tuple[str, ...] = ()
    inferred: str = ""

    @classmethod
    def load(
        cls,
        directory: str | Path,
        device: str = "auto",
        *,
        trained: bool = True,
        with_identity: bool = False,
        like: SentenceEncoder | None = None,
    ) -> SentenceEncoder:
        """Loads a model that `fastqt train` wrote to a directory, to the device "auto", "cpu" or "cuda".

        Without `trained` the weights are not read: the model is freshly initialised. `with_identity` is for
        who asks for the encoder's `identity`. `like` has the settings and the vocabulary of the directory, if
        they were read before.
        """
        directory = Path(directory)
        if not directory.is_dir():
            raise InputError(f"no trained model: {directory} is not a directory")
        digests: tuple[str, ...]
        if like is None:
            of_config = hashlib.sha256()
            config = TrainConfig.load(directory / CONFIG, of_config)
            vocabulary, of_vocabulary = load_lexicon(config, directory)
            digests = of_config.hexdigest(), of_vocabulary
        else:
            config, vocabulary, digests = like.config, like.vocabulary, like.digests[:2]
        # The checkpoint's directory may be gone. Only its configuration is needed, and the run has a copy.
        build = config
        if config.checkpoint is not None:
            build = replace(config, checkpoint=str(directory / HUGGINGFACE))
        of_weights = hashlib.sha256() if with_identity else None
        with damage_in_words(directory) if config.checkpoint is not None else contextlib.nullcontext():
            if trained:
                model = _trained_model(build, vocabulary, directory, of_weights)
                if at := standing(directory, config):
                    warn(f"{directory}: this training has not ended: it stands at {at}")
            else:
                model = build_model(build, len(vocabulary), pretrained=False)

        chosen = choose_device(device)
        if of_weights is None:
            digests = ()
        elif trained:
            digests = (*digests, of_weights.hexdigest())
        return cls(model.to(chosen).eval(), vocabulary, chosen, config, digests)

    @property
    def identity(self) -> str | None:
        """What identifies the encoder: a digest of all that its vectors depend on; None without digests."""
        if not self.digests:
            return None
        identity = joined_digest(*self.digests)
        return joined_digest(identity, self.inferred) if self.inferred else identity

    @property
    def prompts(self) -> Prompts:
        """What the model's texts begin with."""
        return prompts_of(self.config)

    @property
    def width(self) -> int:
        """The width D of the vectors."""
        return self.model.embedding_dim

    def encode_as_they_are(self, sentences: Sequence[str], *, normalize: bool) -> NDArray[np.float32]:
        """The vectors of texts that have their prompts already, (n, D), as of `encode`."""
        config = replace(self.config, query_prompt="", document_prompt="")
        return replace(self, config=config).encode(sentences, normalize=normalize)

    @torch.inference_mode()
    def encode(
        self, sentences: str | Sequence[str], *, normalize: bool = True, side: Side = "query"
    ) -> NDArray[np.float32]:
        """Encodes n sentences: (n, model.embedding_dim) float32, in their order; a blank one has zeros.

        One text in place of a list has one vector, (model.embedding_dim,).

        `normalize` scales each vector to norm 1; for QuickThoughts, each of the two encoders' halves. The
        prompt of `side` stands in front of each sentence; texts that are compared with their like are
        queries. Several threads may encode at the same time.
        """
        if isinstance(sentences, str):
            one: NDArray[np.float32] = self.encode([sentences], normalize=normalize, side=side)[0]
            return one
        sentences = list_of_texts("sentences", sentences)
        prompt = self.prompts.query if side == "query" else self.prompts.document
        ids, lengths = self.vocabulary.encode([prompt + text for text in sentences] if prompt else sentences)
        starts = np.cumsum(lengths) - lengths
        order = np.argsort(lengths, kind="stable")

        result = np.empty((len(order), self.model.embedding_dim), dtype=np.float32)
        for begin in range(0, len(order), BATCH_SIZE):
            rows = order[begin : begin + BATCH_SIZE]
            words = [ids[starts[row] : starts[row] + lengths[row]] for row in rows]
            tokens, sizes = pad(Encoded(np.concatenate(words), lengths[rows]))
            encoded = self.model.encode(tokens.to(self.device), sizes.to(self.device), normalize=normalize)
            result[rows] = encoded.float().cpu().numpy()

        finite = np.isfinite(result).all(axis=1)
        if not finite.all():
            raise InputError(
                f"the model's vector of {sentences[int(finite.argmin())]!r:.100} is not finite: want a model "
                "whose training did not diverge"
            )
        result[[not text.strip() for text in sentences]] = 0
        return result


def load(directory: str | Path, device: str = "auto") -> SentenceEncoder:
    """Loads a model that `fastqt train` wrote to a directory, to turn sentences into vectors.

    Args:
        directory: the `--out` of the training.
        device: "auto", which prefers a GPU, "cpu" or "cuda".

    Returns:
        An encoder. Its `encode` turns a list of n sentences into an array (n, D) of float32, and one sentence
        into its vector (D,); its `model` is the `torch.nn.Module`, in evaluation mode.

    Raises:
        InputError: the directory holds no trained model, or its files are damaged.

    Example:
        >>> import fastqt
        >>> encoder = fastqt.load("run", device="cpu")
        >>> vectors = encoder.encode(["a cat sat on the mat", "the dog ran away"])
        >>> vectors.shape == (2, encoder.width)
        True
    """
    return SentenceEncoder.load(directory, device)


def _trained_model(config: TrainConfig, vocabulary: Lexicon, directory: Path, digest: Digest | None) -> Model:
    """The model with its stored weights, whose file is read once.

    Settings that do not fit these weights are refused before any memory is taken for them.
    """
    path = directory / MODEL
    with open_tensors(path, digest) as file:
        sentences = 0 if config.kind.encodes else stored_shape(file, path, "latents")[0]
        _check_layers(vocabulary, directory, len(file.keys()))
        check_weights(file, path, outline(config, len(vocabulary), sentences=sentences).state_dict())
        model = build_model(config, len(vocabulary), sentences=sentences, pretrained=False)
        load_weights(file, path, model.state_dict())
    return model


def _check_layers(lexicon: Lexicon, directory: Path, tensors: int) -> None:
    """Refuses a Hugging Face configuration with more layers than the stored weights have tensors."""
    layers = getattr(getattr(lexicon, "config", None), "num_hidden_layers", 0)
    if layers > tensors:
        raise InputError(
            f"{directory / HUGGINGFACE}: num_hidden_layers: want at most {tensors}, the number of stored "
            f"tensors, got {layers}"
        )


def chosen_inference(options: InferenceOptions) -> Inference | None:
    """The options of a command as an `Inference`; None if none is given."""
    numbers = {"steps": options.inference_steps, "learning_rate": options.inference_learning_rate}
    changes: dict[str, Any] = {name: value for name, value in numbers.items() if value is not None}
    if options.inference is None and not changes:
        return None
    try:
        return replace(Inference(safeguard=options.inference != "specified"), **changes)
    except ValueError as error:
        raise InputError(f"inference_{error}") from None


def set_inference(encoder: SentenceEncoder, how: Inference | None) -> SentenceEncoder:
    """Has an encoder find latent vectors as `how` says, and its identity tell so; None changes nothing."""
    if how is None:
        return encoder
    if not isinstance(encoder.model, Gloss):
        raise InputError(
            "inference: want it with a model trained with --model gloss-bow or gloss-pos alone, got a "
            f"{type(encoder.model).__name__}"
        )
    encoder.model.inference = how
    if how != Inference():
        encoder.inferred = str(how)
    return encoder
