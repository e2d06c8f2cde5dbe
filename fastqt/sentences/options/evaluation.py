"""The options of evaluations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from fastqt.sentences.options.option import Options, option

PAPER_GRID = tuple(2.0**power for power in range(9))  # Logeswaran and Lee (2018)
SENTEVAL_GRID = tuple(2.0**power for power in range(-2, 4))
GRIDS = {"paper": PAPER_GRID, "senteval": SENTEVAL_GRID}

SSTTraining: TypeAlias = Literal["phrases", "sentences"]


@dataclass(frozen=True)
class ProtocolOptions(Options):
    """Choices that the literature makes in more than one way."""

    seed: int = option(0, "seed of folds and random weights", at_least=0, below=1 << 32)
    sst: SSTTraining = option(
        "phrases", "training set of SST2: all labelled phrases, or whole sentences only"
    )
    tokenised: bool = option(False, "read the STS texts lower-cased and tokenised, as in SentEval")
    t: float = option(2.0, "the factor in the exponent of the uniformity", above=0)


@dataclass(frozen=True)
class EvaluationOptions(ProtocolOptions):
    """All choices of an evaluation."""

    grid: tuple[float, ...] = option(PAPER_GRID, "values of C", above=0)


@dataclass(frozen=True)
class MapOptions(Options):
    """How the maps of images and captions are learnt; see `fastqt.sentences.evaluation.fit_maps`."""

    dim: int = option(1000, "width of the common space", at_least=1, below=1 << 24)
    margin: float = option(
        0.2, "how much higher the cosine of a pair should be than that of its contrasts", at_least=0
    )
    contrasts: int = option(
        50, "sampled captions, and images, that a pair is compared with", at_least=1, below=1 << 31
    )
    epochs: int = option(50, "at most so many passes", at_least=1, below=1 << 31)
    patience: int = option(
        5,
        "stop after so many passes without better figures on the captions of --dev",
        at_least=1,
        below=1 << 31,
    )
    seed: int = option(0, "seed of the parts, the maps and the contrasts", at_least=0, below=1 << 32)
