"""GLOSS, which predicts the words of each sentence from a latent vector of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from fastqt.sentences.kinds.kind import Build, Kind
from fastqt.sentences.options.option import option, part
from fastqt.sentences.options.training import TrainOptions

if TYPE_CHECKING:
    from torch import nn


@part
class GlossOptions(TrainOptions):
    """The options of GLOSS."""

    title: ClassVar[str] = "loss of gloss"

    radius: float = option(2.0, "radius of the ball that holds the latent vectors", at_least=1e-6)
    latents: Literal["rows", "all"] = option(
        "rows", "latent vectors that a step moves: those of the batch, or all of them by momentum"
    )


@part
class GlossPosOptions(GlossOptions):
    """The options of GLOSS with a decoder that knows the positions of words."""

    title: ClassVar[str] = "loss of gloss-pos"

    position_loss: Literal["sum", "mean"] = option(
        "sum", "loss of a sentence: the sum over its words, or their mean"
    )


@dataclass(frozen=True)
class GlossKind(Kind[Any]):
    """A latent vector of each sentence of the corpus, and a decoder."""

    def build(self, config: Any, build: Build) -> nn.Module:
        from fastqt.nn import Gloss

        return Gloss(
            build.vocab_size,
            config.word_dim,
            sentences=build.sentences,
            decoder="pos" if self.options is GlossPosOptions else "bow",
            max_length=config.max_length,
            radius=config.radius,
            position_loss=config.position_loss,
        )

    def smallest_batch(self, config: GlossOptions) -> int:
        return 1


# Source: Singh, Fan and Auli (2019), who do not give the batch size.
DEFAULTS = {"batch_size": 512, "learning_rate": 3e-4, "clip": 25.0, "epochs": 210}
KINDS = tuple(
    GlossKind(name, options, "objectives.GlossObjective", DEFAULTS, encoders=("bow",), encodes=False)
    for name, options in (("gloss-bow", GlossOptions), ("gloss-pos", GlossPosOptions))
)
