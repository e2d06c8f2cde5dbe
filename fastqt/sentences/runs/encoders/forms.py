"""How the encoders of a class are made of a run's settings, compiled and exported."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any, Generic, TypeVar

from torch import Tensor, nn

from fastqt.nn import Encoder
from fastqt.sentences.options.encoders import ENCODERS, EncoderKind
from fastqt.sentences.runs.config import TrainConfig

E = TypeVar("E", bound=Encoder)


class EncoderForm(Generic[E]):
    """Of these methods every form has `build`, and either `vectors` or `graph`."""

    def build(self, config: TrainConfig, vocab_size: int, *, pretrained: bool) -> E:
        """A freshly initialised encoder, on the CPU; for the arguments see `build_model`."""
        raise NotImplementedError

    def compiled(self, encoder: E) -> Iterator[nn.Module]:
        """The modules of an encoder that torch compiles."""
        yield from ()

    def graph(self, encoder: E) -> nn.Module:
        """The module of `vectors`, which an export to ONNX traces."""
        return Graph(self, encoder)

    def vectors(self, encoder: E, tokens: Tensor, valid: Tensor) -> Tensor:
        """The encoder's vectors (B, E), by operations that ONNX has.

        Tokens (B, L) are 0 as padding, and `valid` (B, L) says where words are.
        """
        raise NotImplementedError


class Graph(nn.Module):
    def __init__(self, form: EncoderForm[E], encoder: E) -> None:
        super().__init__()
        self.form, self.encoder = form, encoder

    def forward(self, tokens: Tensor, valid: Tensor) -> Tensor:
        return self.form.vectors(self.encoder, tokens, valid)


def load_form(kind: EncoderKind) -> EncoderForm[Any]:
    """Imports the form of an encoder, and torch with it."""
    module, name = kind.form.split(".")
    form: EncoderForm[Any] = getattr(import_module(f"{__package__}.{module}"), name)()
    return form


def form_of(encoder: Encoder) -> EncoderForm[Any]:
    """The form of an encoder's class."""
    name = type(encoder).__name__
    return load_form(next(kind for kind in ENCODERS.values() if kind.encoder == name))
