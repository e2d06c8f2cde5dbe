"""QuickThoughts and skip-thoughts, which learn from the sentences around each sentence of a text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from fastqt.errors import InputError
from fastqt.sentences.kinds.kind import Build, Kind
from fastqt.sentences.options.encoders import ENCODERS
from fastqt.sentences.options.option import option, part
from fastqt.sentences.options.training import TrainOptions

if TYPE_CHECKING:
    from torch import nn


@part
class ContextOptions(TrainOptions):
    """The options of both."""

    title: ClassVar[str] = "loss of quickthoughts and skip-thoughts"

    documents: Literal["cut", "cross"] = option(
        "cut", "context windows end at document boundaries, or cross them"
    )


@part
class QuickThoughtsOptions(ContextOptions):
    """The options of QuickThoughts."""

    title: ClassVar[str] = "loss of quickthoughts"

    context_size: int = option(1, "neighbours to predict on each side", at_least=1, varies=True)


@dataclass(frozen=True)
class QuickThoughtsKind(Kind[QuickThoughtsOptions]):
    """Two encoders: one for a sentence, and one for the candidates among which its neighbours are."""

    def build(self, config: QuickThoughtsOptions, build: Build) -> nn.Module:
        """The model; of an encoder of parts, a model of each part.

        All of these are drawn from the same state of torch's random numbers. Each has therefore the weights
        with which it would begin alone, with the same seed.
        """
        import torch

        from fastqt.nn import CombinedQuickThoughts, QuickThoughts

        def pair(encoder: str) -> QuickThoughts:
            return QuickThoughts(build.encoder(encoder), build.encoder(encoder))

        if not config.encoder_kind.parts:
            return pair(config.encoder)

        state = torch.get_rng_state()
        models = []
        for encoder in config.encoder_kind.parts:
            torch.set_rng_state(state)
            models.append(pair(encoder))
        return CombinedQuickThoughts(*models)

    def objective_of(self, config: QuickThoughtsOptions) -> str:
        return "context.CombinedObjective" if config.encoder_kind.parts else self.objective

    def check(self, config: QuickThoughtsOptions) -> None:
        if config.context_size >= config.batch_size:
            raise InputError(
                f"context_size: want less than batch_size {config.batch_size}, got {config.context_size}"
            )

    def smallest_batch(self, config: QuickThoughtsOptions) -> int:
        return config.context_size + 1


@dataclass(frozen=True)
class SkipThoughtsKind(Kind[ContextOptions]):
    """An encoder, and a decoder for each neighbour of a sentence."""

    def build(self, config: ContextOptions, build: Build) -> nn.Module:
        from fastqt.nn import SkipThoughts

        return SkipThoughts(
            build.vocab_size,
            config.word_dim,
            config.hidden_size,
            bidirectional=config.encoder_kind.bidirectional,
            reset_after=config.cell == "reset-after",
            sparse=True,
        )

    def check(self, config: ContextOptions) -> None:
        if config.init != "paper":
            raise InputError(f"init: want paper with model {self.name}, got {config.init}")


# Source: Logeswaran and Lee (2018).
OF_BOW = {"batch_size": 1500, "context_size": 3}
QUICKTHOUGHTS = QuickThoughtsKind(
    "quickthoughts",
    QuickThoughtsOptions,
    "context.ContextObjective",
    of_encoder={"bow": OF_BOW, "mc-bow": OF_BOW},
    encoders=tuple(ENCODERS),
    chunks=True,
)
# The batch size and the clipping are of Kiros et al. (2015), the length is of their code; the vocabulary is
# also that with which Logeswaran and Lee compare the two models.
SKIP_THOUGHTS = SkipThoughtsKind(
    "skip-thoughts",
    ContextOptions,
    "context.SkipThoughtsObjective",
    defaults={"encoder": "gru", "batch_size": 128, "max_length": 30, "clip": 10.0, "vocab_size": 20_000},
    encoders=("gru", "bigru"),
)
KINDS = QUICKTHOUGHTS, SKIP_THOUGHTS
