"""How the encoders of a class are made of a run's settings, compiled and exported."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Generic, TypeVar

from torch import Tensor, nn

from fastqt.errors import InputError
from fastqt.nn import Encoder
from fastqt.sentences.runs.config import TrainConfig
from fastqt.sentences.runs.encoders import ENCODERS

E = TypeVar("E", bound=Encoder)


class EncoderForm(Generic[E]):
    """Has to say how an encoder is built. One that has no `graph` here is not exported to ONNX.

    One that has no `description` is not exported to safetensors files.
    """

    def build(self, config: TrainConfig, vocab_size: int, *, pretrained: bool) -> E:
        """A freshly initialised encoder, on the CPU; for the arguments see `build_model`."""
        raise NotImplementedError

    def compiled(self, encoder: E) -> Iterator[nn.Module]:
        """The modules of an encoder that torch compiles."""
        yield from ()

    def graph(self, encoder: E) -> nn.Module:
        """A module of tokens (B, L), whose padding is 0, and of where words are, with the encoder's vectors.

        It has only operations that ONNX has operators for.
        """
        raise InputError(f"format: want one that a {type(encoder).__name__} can be exported to, got onnx")

    def description(self, encoder: E) -> dict[str, Any]:
        """What the encoder computes, in the words of encoder.json."""
        raise InputError(
            f"format: want one that a {type(encoder).__name__} can be exported to, got safetensors"
        )

    def weights(self, encoder: E, folder: Path) -> dict[str, Tensor]:
        """The encoder's weights under torch.nn's names, unless they are written to a directory of their own.

        Frozen word vectors that two encoders share are in the file once for each of them.
        """
        table: Any = encoder.embedding
        return {**encoder.state_dict(), "embedding.weight": table.weight.detach().clone()}

    def parts(self, name: str, encoder: E) -> Iterator[tuple[str, Encoder]]:
        """The encoders whose vectors stand beside each other in an encoder's, by their names in its model."""
        yield name, encoder


def form_of(encoder: Encoder) -> EncoderForm[Any]:
    """The form of an encoder's class."""
    name = type(encoder).__name__
    kind = next((kind for kind in ENCODERS.values() if kind.encoder == name), None)
    return EncoderForm() if kind is None else kind.load_form()
