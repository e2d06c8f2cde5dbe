"""Pairs: queries, their positives and any hard negatives, with the losses of ranking and of a teacher."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from fastqt.errors import InputError
from fastqt.options import Direction, MarginStrategy, Quantization
from fastqt.sentences.kinds.kind import Build, Kind
from fastqt.sentences.kinds.views import ScaleOptions
from fastqt.sentences.options.option import option, options_of, part
from fastqt.sentences.options.training import WIDEST

if TYPE_CHECKING:
    from torch import nn

    from fastqt.matryoshka import Matryoshka
    from fastqt.nn.losses import Loss


@part
class PairsOptions(ScaleOptions):
    """The options of pairs."""

    title: ClassVar[str] = "loss of pairs"

    query_prompt: str = option("", "text in front of each query, such as 'query: ' (default: none)")
    document_prompt: str = option("", "text in front of each document, such as 'passage: ' (default: none)")
    loss: Literal["ranking", "gist", "distillation"] = option(
        "ranking",
        "each query's positive among all documents of the batch (ranking), without those that the teacher "
        "finds nearer than the positive (gist), or the teacher's scores (distillation)",
    )
    directions: tuple[Direction, ...] | None = option(
        None,
        "scores among which the positive is: some of query_to_doc, query_to_query, doc_to_query and "
        "doc_to_doc (default: query_to_doc; gist all but doc_to_query)",
    )
    matryoshka_dims: tuple[int, ...] | None = option(
        None,
        "widths to which vectors may be cut: the loss is the sum over all of them",
        at_least=1,
        below=WIDEST + 1,
        also="--matryoshka",
    )
    matryoshka_weights: tuple[float, ...] | None = option(
        None, "weight of the loss of each of them (default: 1)", at_least=1e-6, below=1e38
    )
    hard_negatives: Literal["shared", "alone"] = option(
        "shared",
        "hard negatives are candidates of all queries of the batch (shared), or of their own query alone",
    )
    tau_plus: float = option(
        0.0,
        "share of the negatives that are expected to be positives, in the loss of ranking",
        at_least=0,
        below=1,
    )
    quantize: tuple[Quantization, ...] | None = option(
        None,
        "how vectors may be quantised, int8 or binary or both: the loss is the sum of that of the vectors as "
        "they are and of those",
    )
    false_negative_margin: float | None = option(
        None,
        "a document whose cosine is so much above that of the positive leaves the loss of ranking; 0.1 in "
        "Qwen3-Embedding",
        at_least=-1e6,
        below=1e6,
    )
    guide_margin: float = option(
        0.0,
        "how far below the teacher's cosine of the positive a document's has to be, to stay in the loss gist",
        at_least=-1e6,
        below=1e6,
    )
    margin_strategy: MarginStrategy = option(
        "absolute",
        "a margin is a difference of cosines (absolute), or a share of the positive's cosine (relative)",
    )
    teacher: tuple[str, ...] | None = option(
        None,
        "vectors of another model for one column of the rows, .npy; given once for each column, that of the "
        "queries first",
        file="X.npy",
        repeats=True,
        resume="move",
    )
    teacher_weight: float | None = option(
        None,
        "weight of the loss of distillation beside that of --loss (default with a teacher: ranking 1, gist "
        "0)",
        at_least=0,
        below=1e38,
    )
    teacher_scale: float = option(20.0, "1 / temperature of the teacher's scores", at_least=1e-6, below=1e38)

    @property
    def distillation_weight(self) -> float:
        """The weight of the loss of distillation beside that of ranking or gist."""
        if self.teacher is None or self.loss == "distillation":
            return 0.0
        if self.teacher_weight is None:
            return 1.0 if self.loss == "ranking" else 0.0
        return self.teacher_weight

    def matryoshka(self) -> Matryoshka | None:
        """The widths to which vectors may be cut, and their weights."""
        from fastqt.matryoshka import Matryoshka

        dims = self.matryoshka_dims
        return None if dims is None else Matryoshka(dims, self.matryoshka_weights)


# The options that some losses of pairs do not have.
OF_TEACHER = {"teacher", "teacher_weight", "teacher_scale"}
OF_RANKING = {"directions", "matryoshka_dims"}
OF_RANKING |= {"matryoshka_weights", "false_negative_margin", "margin_strategy"} | OF_TEACHER
OF_RANKING |= {"hard_negatives", "tau_plus"}
OF_LOSS = {
    "ranking": OF_RANKING,
    "gist": {"directions", "guide_margin", "margin_strategy"} | OF_TEACHER,
    "distillation": {"teacher", "teacher_scale"},
}


@dataclass(frozen=True)
class PairsKind(Kind[PairsOptions]):
    """One encoder for queries and documents, without dropout of its own, and the loss that ranks them."""

    def reads_rows(self, config: PairsOptions) -> bool:
        return True

    def build(self, config: PairsOptions, build: Build) -> nn.Module:
        """The model; InputError for Matryoshka dimensions that the encoder's vectors do not have."""
        from fastqt.matryoshka import prefixes_of
        from fastqt.sentences.kinds.one_encoder import OneEncoder

        encoder = build.encoder(config.encoder)
        try:
            prefixes_of(config.matryoshka(), encoder.embedding_dim)
            return OneEncoder(encoder, _loss(config))
        except (TypeError, ValueError) as error:
            raise InputError(_of_settings(str(error))) from error

    def check(self, config: PairsOptions) -> None:
        config.check_scale()
        self._check_loss(config)
        for name in ("query_prompt", "document_prompt"):
            try:
                getattr(config, name).encode()
            except UnicodeEncodeError:
                raise InputError(f"{name}: want UTF-8, got {getattr(config, name)!r:.100}") from None
        _check_directions(config)
        if config.matryoshka_weights is not None and config.matryoshka_dims is None:
            raise InputError(f"matryoshka_weights: want matryoshka_dims too, got {config.matryoshka_weights}")
        _check_margin(config)
        _check_teacher(config)

    def _check_loss(self, config: PairsOptions) -> None:
        foreign = set().union(*OF_LOSS.values()) - OF_LOSS[config.loss]
        for name in sorted(foreign):
            default, value = options_of(self.options)[name].default, getattr(config, name)
            if value != default:
                where = f"loss {config.loss} of {self.name}"
                raise InputError(f"{name}: want {default!r} with {where}, got {value!r:.100}")

    def check_columns(self, config: PairsOptions, columns: int) -> None:
        if config.hard_negatives == "alone" and columns < 3:
            raise InputError(
                f"hard_negatives: want 'shared' without hard negatives, got 'alone' with {columns} columns"
            )
        if config.teacher is not None and len(config.teacher) != columns:
            raise InputError(
                f"teacher: want a file for each of the {columns} columns of the corpus, "
                f"got {len(config.teacher)}"
            )


def _check_directions(config: PairsOptions) -> None:
    directions = config.directions or ("query_to_doc",)
    if "query_to_doc" not in directions:
        raise InputError(f"directions: want query_to_doc among them, got {', '.join(directions)}")
    if config.loss == "gist" and "doc_to_query" in directions:
        raise InputError("directions: want no doc_to_query with loss gist, got it among them")


def _check_margin(config: PairsOptions) -> None:
    has_margin = config.false_negative_margin is not None or config.guide_margin != 0
    if config.margin_strategy != "absolute" and not has_margin:
        margin = "guide_margin" if config.loss == "gist" else "false_negative_margin"
        raise InputError(f"margin_strategy: want it with a {margin} alone, got {config.margin_strategy!r}")


def _check_teacher(config: PairsOptions) -> None:
    if config.teacher is None:
        if config.loss != "ranking":
            raise InputError(f"teacher: want .npy files with loss {config.loss}, got None")
        if config.teacher_weight is not None:
            raise InputError(f"teacher_weight: want it with a teacher alone, got {config.teacher_weight:g}")
    elif config.loss == "ranking" and not config.distillation_weight:
        raise InputError(f"teacher_weight: want more than 0 with loss ranking, got {config.teacher_weight:g}")

    is_scaled = config.loss == "distillation" or config.distillation_weight > 0
    if not is_scaled and config.teacher_scale != PairsOptions.teacher_scale:
        raise InputError(
            f"teacher_scale: want it with a teacher whose scores are learnt, got {config.teacher_scale:g}"
        )


def _of_settings(message: str) -> str:
    """What a loss says of its argument, with the name of the setting."""
    argument, colon, what = message.partition(":")
    settings = {"matryoshka": "matryoshka_dims", "dims": "matryoshka_dims", "weights": "matryoshka_weights"}
    return settings.get(argument, argument) + colon + what


def _loss(config: PairsOptions) -> Loss:
    from fastqt.exclusions import Margin
    from fastqt.nn import DistillationLoss, GISTEmbedLoss, MultipleNegativesRankingLoss

    shared = config.scale_options()
    if config.loss == "distillation":
        return DistillationLoss(teacher_scale=config.teacher_scale, **shared)

    if config.loss == "gist":
        directions = config.directions or ("query_to_query", "doc_to_doc")
        return GISTEmbedLoss(
            margin=config.guide_margin,
            margin_strategy=config.margin_strategy,
            contrast_anchors="query_to_query" in directions,
            contrast_positives="doc_to_doc" in directions,
            **shared,
        )

    of_ranking: dict[str, Any] = {
        "directions": config.directions or ("query_to_doc",),
        "matryoshka": config.matryoshka(),
        "tau_plus": config.tau_plus,
    }
    if config.false_negative_margin is not None:
        of_ranking["exclude"] = Margin(config.false_negative_margin, config.margin_strategy)
    return MultipleNegativesRankingLoss(**of_ranking, **shared)


# What sentence-transformers trained its first static embeddings with, but that it cuts no text.
OF_STATIC = {
    "word_dim": 1024,
    "init": "torch",
    "max_length": 512,
    "batch_size": 2048,
    "learning_rate": 0.2,
}
# Documents are longer than sentences. The learning rate is usual where a checkpoint becomes a retriever.
PAIRS = PairsKind(
    "pairs",
    PairsOptions,
    "pairs.PairsObjective",
    defaults={"batch_size": 64, "max_length": 128, "valid_every": 125},
    of_encoder={"huggingface": {"learning_rate": 2e-5}, "static": OF_STATIC},
    chunks=True,
)
KINDS = (PAIRS,)
