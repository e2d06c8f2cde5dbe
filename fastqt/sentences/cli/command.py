"""What a command is: a record of its arguments, which follow from declared options and know how to run."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from fastqt.errors import InputError
from fastqt.options import Device
from fastqt.sentences.cli.declared import add_options
from fastqt.sentences.options.commands import InferenceOptions
from fastqt.sentences.options.option import Options, option, options_of

if TYPE_CHECKING:
    from fastqt.sentences.inference.encoder import SentenceEncoder, TextEncoder

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Command(Options):
    """A command, whose docstring --help shows."""

    title: ClassVar[str]  # what `fastqt --help` says of it

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        """Adds the arguments of the command line from which the record is made."""
        add_options(parser, cls)

    @classmethod
    def of(cls, arguments: dict[str, Any]) -> Command:
        """The record of the arguments of a command line."""
        return cls(**arguments)

    def run(self) -> int:
        """Does what the command is for; returns the exit status."""
        raise NotImplementedError

    def part(self, record: type[T]) -> T:
        """Those of its options that another record has."""
        return record(**{name: getattr(self, name) for name in options_of(record)})


@dataclass(frozen=True, kw_only=True)
class OfModel(Command):
    """A command that has a trained model."""

    model: str = option(help="a directory that train wrote", file="MODEL", positional=True)
    device: Device = option("auto", "where to compute")


@dataclass(frozen=True, kw_only=True)
class Encoding(OfModel, InferenceOptions):
    """A command that encodes sentences, and infers them as it is told where the model is GLOSS."""

    def load(self, *, with_identity: bool = False) -> SentenceEncoder:
        """The trained model."""
        from fastqt.sentences.inference.encoder import SentenceEncoder, chosen_inference, set_inference

        how = chosen_inference(self)
        encoder = SentenceEncoder.load(self.model, self.device, with_identity=with_identity)
        return set_inference(encoder, how)


@dataclass(frozen=True, kw_only=True)
class AnyEncoding(Encoding):
    """A command that encodes sentences by a model of fastqt or of another library."""

    model: str = option(
        help="a directory that train wrote, or a folder of sentence-transformers",
        file="MODEL",
        positional=True,
    )

    def load_any(self, *, with_identity: bool = False) -> TextEncoder:
        """The trained model, or that of sentence-transformers in a folder."""
        from fastqt.sentences.inference.encoder import chosen_inference
        from fastqt.sentences.inference.library_encoder import LibraryEncoder, is_library_folder

        if not is_library_folder(self.model):
            return self.load(with_identity=with_identity)
        if chosen_inference(self) is not None:
            raise InputError(f"inference: want a trained gloss model, got {self.model}")
        return LibraryEncoder(self.model, self.device, with_identity=with_identity)
