"""The options of what a trained model is used for, and of its evaluation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from fastqt.errors import InputError
from fastqt.sentences.options.option import Options, option

PAPER_GRID = tuple(2.0**power for power in range(9))  # Logeswaran and Lee (2018)
SENTEVAL_GRID = tuple(2.0**power for power in range(-2, 4))
GRIDS = {"paper": PAPER_GRID, "senteval": SENTEVAL_GRID}
SPARE = 10  # candidates for each negative, where some may be refused

SSTTraining: TypeAlias = Literal["phrases", "sentences"]
Side: TypeAlias = Literal["query", "document"]
"""What a text is, for a model that was trained with prompts."""


@dataclass(frozen=True)
class InferenceOptions(Options):
    """How a GLOSS model finds vectors; without any value, as it is made."""

    inference: Literal["safeguarded", "specified"] | None = option(
        None,
        "how a gloss model finds vectors: steps that overshoot are undone, or all are taken, as in the paper "
        "(default: safeguarded)",
    )
    inference_steps: int | None = option(
        None, "steps of gloss's inference (default: 250)", at_least=0, below=1 << 31
    )
    inference_learning_rate: float | None = option(
        None, "step size of gloss's inference (default: 1)", above=0
    )


@dataclass(frozen=True)
class EmbedOptions(Options):
    """Which vectors are written."""

    raw: bool = option(False, "do not scale vectors, or the two halves of QuickThoughts vectors, to norm 1")
    side: Side = option("query", "which prompt of a run of pairs the lines get")


@dataclass(frozen=True)
class ExportOptions(Options):
    """What is written for other libraries."""

    format: Literal["sentence-transformers", "onnx"] = option(help="what to write")
    raw: bool = option(False, "do not scale vectors, or their halves, to norm 1")
    overwrite: bool = option(False, "replace DIR if it holds nothing but an earlier export")


@dataclass(frozen=True)
class IndexOptions(Options):
    """What kind of index is made."""

    kind: Literal["auto", "flat", "ivf"] = option(
        "auto",
        "compare with all vectors (flat), or with those of near lists (ivf) (default: flat below 50,000 "
        "sentences, and ivf)",
    )
    lists: int | None = option(
        None, "lists of ivf (default: four times the root of the sentences)", at_least=1, below=1 << 31
    )
    # A search reads as few lists as this needs.
    min_recall: float = option(
        0.95, "share of the 10 nearest neighbours that a search finds", above=0, at_most=1
    )
    seed: int = option(0, "seed of samples of sentences", at_least=0, below=1 << 31)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lists is not None and self.kind != "ivf":
            raise InputError(f"lists: want them for kind ivf alone, got {self.lists} for {self.kind}")


@dataclass(frozen=True)
class MineOptions(Options):
    """Which candidates become negatives, as of `mine_hard_negatives` of sentence-transformers."""

    negatives: int = option(3, "negatives of each query", at_least=1, below=1 << 31)
    range_min: int = option(0, "so many of the nearest candidates are passed over", at_least=0, below=1 << 31)
    # None is range_min + negatives + the most positives that a query has, or with 10 times the negatives
    # where a highest score or a margin may refuse some.
    range_max: int | None = option(
        None,
        "so many of the nearest candidates are looked at (default: as many as the other options need)",
        at_least=1,
        below=1 << 31,
    )
    max_score: float | None = option(None, "the highest cosine of a negative with its query")
    min_score: float | None = option(None, "the lowest cosine of a negative with its query")
    absolute_margin: float | None = option(
        None, "a negative's cosine is at least so much below that of the positive"
    )
    relative_margin: float | None = option(
        None, "it is below that of the positive by at least this share of it, as 0.05"
    )
    sampling: Literal["top", "random"] = option("top", "take the nearest of the candidates, or random ones")
    seed: int = option(0, "seed of random negatives", at_least=0, below=1 << 32)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.range_max is not None and self.range_max < self.range_min + self.negatives:
            raise InputError(
                f"range_max: want at least range_min + negatives = {self.range_min + self.negatives}, "
                f"got {self.range_max}"
            )
        if self.min_score is not None and self.max_score is not None and self.min_score > self.max_score:
            raise InputError(
                f"min_score: want at most max_score, which is {self.max_score}, got {self.min_score}"
            )

    def depth(self, positives: int) -> int:
        """`range_max`, or what stands for it where a query has at most so many positives."""
        if self.range_max is not None:
            return self.range_max
        limits = (self.max_score, self.absolute_margin, self.relative_margin)
        spare = 1 if all(limit is None for limit in limits) else SPARE
        return self.range_min + spare * self.negatives + positives


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
