"""What a model kind is: one entry, which says everything of it but how a step of its training computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from fastqt.errors import InputError
from fastqt.sentences.options.encoders import ENCODERS
from fastqt.sentences.options.option import default_of, has_option
from fastqt.sentences.options.training import TrainOptions

if TYPE_CHECKING:
    from torch import nn

    from fastqt.nn import Encoder

C = TypeVar("C", bound=TrainOptions)
OF_ONE_PART = tuple(kind.name for kind in ENCODERS.values() if not kind.parts)


@dataclass(frozen=True)
class Build:
    """What a model is built from, beside its settings."""

    vocab_size: int  # token ids of its vocabulary
    encoder: Callable[[str], Encoder]  # makes a new encoder, of the name that it is given
    sentences: int  # of the corpus, of which some kinds have a vector each
    pretrained: bool  # whether the weights of a Hugging Face checkpoint are loaded


@dataclass(frozen=True)
class Kind(Generic[C]):
    """A model kind. A subclass says how it is built, and what else differs from what is here.

    Each method is given the settings of a training of this kind.
    """

    name: str  # as --model has it
    options: type[C]  # the options of its trainings: it has no others
    objective: str  # the module in fastqt/sentences/train and the class in it, an `Objective`
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of options that vary
    of_encoder: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # likewise, by the encoder
    encoders: tuple[str, ...] = OF_ONE_PART  # those that it may have
    encodes: bool = True  # whether it has an encoder; otherwise it finds vectors by optimisation
    chunks: bool = False  # whether its encoders may run over a part of a batch at a time

    def build(self, config: C, build: Build) -> nn.Module:
        """A freshly initialised model, on the CPU."""
        raise NotImplementedError

    def objective_of(self, config: C) -> str:
        """The objective, where it depends on the settings."""
        return self.objective

    def check(self, config: C) -> None:
        """Refuses settings that do not go together; what the kind has no option for is refused before."""

    def reads_rows(self, config: C) -> bool:
        """Whether the corpus has rows of texts with tabs between them, and not sentences."""
        return False

    def check_columns(self, config: C, columns: int) -> None:
        """Refuses rows of so many columns if the loss cannot use them."""

    def smallest_batch(self, config: C) -> int:
        """The least number of sentences of which a process makes a batch."""
        return 2

    def default(self, name: str, encoder: str = "") -> Any:
        """The default of an option, with an encoder."""
        declared = default_of(self.options, name)
        return {name: declared, **self.defaults, **self.of_encoder.get(encoder, {})}[name]

    def has(self, name: str) -> bool:
        """Whether its trainings have an option."""
        return has_option(self.options, name)

    def check_common(self, config: C) -> None:
        """Refuses options of every training that this kind cannot have."""
        if config.encoder not in self.encoders:
            names = ", ".join(self.encoders)
            raise InputError(f"encoder: want one of {names} with model {self.name}, got {config.encoder!r}")
        for name in () if self.encodes else ("vectors", "vocabulary", "init_from"):
            if (value := getattr(config, name)) is not None:
                raise InputError(f"{name}: want none with model {self.name}, got {value!r}")
        if config.chunk is not None and not self.chunks:
            raise InputError(
                f"chunk: want none with model {self.name}, whose loss is a mean over sentences or words; a "
                f"smaller batch_size takes less memory; got {config.chunk}"
            )
