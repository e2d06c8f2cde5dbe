"""SimCSE and MixCSE, which learn from two views of each sentence, or from the texts of a row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias, TypeVar, cast

from fastqt.errors import InputError
from fastqt.options import MaskedCell, MixBlocks, MixForm, MixPartner
from fastqt.sentences.kinds.kind import Build, Kind
from fastqt.sentences.options.encoders import ENCODERS
from fastqt.sentences.options.option import option, part
from fastqt.sentences.options.training import TrainOptions

if TYPE_CHECKING:
    from torch import nn

    from fastqt.nn import Encoder, MaskedWordHead
    from fastqt.nn.masked_words import TokenEncoder

# Files of rows, of which each is an anchor, its positive and any hard negatives.
ROWS = tuple(f".{kind}{packed}" for kind in ("tsv", "csv", "jsonl") for packed in ("", ".gz", ".xz"))
LARGEST_SCALE = 100.0  # that of CLIP

BatchSampler: TypeAlias = Literal["random", "no-duplicates"]


@part
class ScaleOptions(TrainOptions):
    """The scale of cosines."""

    title: ClassVar[str] = "scale and batches of simcse, mixcse and pairs"

    batch_sampler: BatchSampler = option(
        "random",
        "rows in random order, or in one in which no batch has a text twice (no-duplicates), as the second "
        "would be a wrong negative",
    )

    scale: float = option(20.0, "1 / temperature", at_least=1e-6, below=1e38)
    learn_scale: bool = option(False, "learn the scale, from --scale on, by its logarithm, as CLIP does")
    max_scale: float | None = option(
        None, "the most that a learnt scale may become (default: 100)", at_least=1e-6, below=1e38
    )

    @property
    def largest_scale(self) -> float:
        """The most that a learnt scale may become."""
        return LARGEST_SCALE if self.max_scale is None else self.max_scale

    def scale_options(self) -> dict[str, Any]:
        """The options of a loss that follow."""
        limit = self.largest_scale if self.learn_scale else None
        return {"scale": self.scale, "learn_scale": self.learn_scale, "max_scale": limit}

    def check_scale(self) -> None:
        """Checks the limit of a learnt scale."""
        if self.max_scale is not None and not self.learn_scale:
            raise InputError(f"max_scale: want it with learn_scale alone, got {self.max_scale:g}")
        if self.learn_scale and self.largest_scale < self.scale:
            raise InputError(f"max_scale: want at least the scale {self.scale:g}, got {self.largest_scale:g}")


@part
class ViewsOptions(ScaleOptions):
    """The options of SimCSE, which MixCSE has too."""

    title: ClassVar[str] = "loss of simcse and mixcse"

    hard_negative_weight: float = option(
        0.0,
        "added to the scores of a sentence with its own hard negatives: those of simcse in a .tsv, or the "
        "mixtures of mixcse --form released",
    )
    masked_words: float = option(
        0.0,
        "weight of the prediction of masked words, with transformer or huggingface; the source has 0.1",
        at_least=0,
        below=1e38,
    )


@part
class MixOptions(ViewsOptions):
    """The options of MixCSE."""

    title: ClassVar[str] = "loss of mixcse"

    mix: float = option(0.2, "share of a sentence's own positive in its mixed negative", at_least=0, below=1)
    form: MixForm = option("slides", "one mixed negative per row, or the 3 N columns of the authors' code")
    partner: MixPartner = option(
        "next", "sentence with which a negative is mixed: the next one, or one by a random cycle"
    )
    stop_gradient: Literal["yes", "no"] = option("yes", "whether gradients stop at the mixed negatives")
    blocks: MixBlocks = option(
        "both", "mixed columns of --form released: mixtures of both views, or of the candidates alone"
    )
    masked_cell: MaskedCell = option(
        "zero",
        "cells of --form released whose mixture has the sentence as the partner: score 0, or left out",
    )


V = TypeVar("V", bound=ViewsOptions)


@dataclass(frozen=True)
class ViewsKind(Kind[V]):
    """One encoder, whose dropout makes the views, or that encodes the texts of a row."""

    def reads_rows(self, config: V) -> bool:
        return config.corpus[0].endswith(ROWS)

    def build(self, config: V, build: Build) -> nn.Module:
        encoder = build.encoder(config.encoder)
        head = _head(config, encoder, build.pretrained) if config.masked_words else None
        return self.around(config, encoder, head)

    def around(self, config: V, encoder: Encoder, head: MaskedWordHead | None) -> nn.Module:
        """The model around an encoder, with what predicts masked words if anything does."""
        from fastqt.nn import SimCSE

        shared, weight = config.scale_options(), config.hard_negative_weight
        return SimCSE(encoder, head=head, dropout=config.dropout, hard_negative_weight=weight, **shared)

    def check(self, config: V) -> None:
        config.check_scale()
        self._check_files(config)
        if config.masked_words and not config.encoder_kind.has_states:
            those = " or ".join(kind.name for kind in ENCODERS.values() if kind.has_states)
            raise InputError(
                f"masked_words: want encoder {those}, which have a state for each word, got {config.encoder}"
            )
        if config.masked_words and config.chunk is not None:
            raise InputError(
                "chunk: want none with masked_words, whose loss has the states of all words, "
                f"got {config.chunk}"
            )
        self.check_loss(config)

    def check_loss(self, config: V) -> None:
        """Checks the options of the loss."""
        if config.hard_negative_weight and not self.reads_rows(config):
            raise InputError(
                f"hard_negative_weight: want 0.0 with model {self.name} and sentences, "
                f"got {config.hard_negative_weight}"
            )

    def _check_files(self, config: V) -> None:
        """Checks that all files have rows or none has."""
        wanted = ".tsv, .csv or .jsonl, perhaps with .gz or .xz"
        others = [name for name in config.corpus if not name.endswith(ROWS)]
        if 0 < len(others) < len(config.corpus):
            raise InputError(
                f"corpus: want all files or none to end in {wanted}, got {others[0]!r} among others"
            )
        rows = self.reads_rows(config)
        if config.valid is not None and config.valid.endswith(ROWS) != rows:
            kind = f"rows as the corpus has, a file that ends in {wanted}" if rows else "sentences"
            raise InputError(f"valid: want {kind}, got {config.valid!r}")

    def check_columns(self, config: V, columns: int) -> None:
        if columns == 2 and config.hard_negative_weight:
            raise InputError(
                "hard_negative_weight: want 0.0 for rows without hard negatives, "
                f"got {config.hard_negative_weight}"
            )


@dataclass(frozen=True)
class MixKind(ViewsKind[MixOptions]):
    """The same with a hard negative of each sentence, mixed from two positives."""

    def around(self, config: MixOptions, encoder: Encoder, head: MaskedWordHead | None) -> nn.Module:
        from fastqt.nn import MixCSE

        return MixCSE(
            encoder,
            head=head,
            dropout=config.dropout,
            mix=config.mix,
            form=config.form,
            partner=config.partner,
            blocks=config.blocks,
            masked_cell=config.masked_cell,
            hard_negative_weight=config.hard_negative_weight,
            stop_gradient=config.stop_gradient == "yes",
            **config.scale_options(),
        )

    def check_loss(self, config: MixOptions) -> None:
        if config.form == "released":
            return
        for name, default in (("blocks", "both"), ("masked_cell", "zero"), ("hard_negative_weight", 0.0)):
            if (value := getattr(config, name)) != default:
                raise InputError(f"{name}: want {default!r} with form slides of mixcse, got {value!r}")

    def check_columns(self, config: MixOptions, columns: int) -> None:
        if columns > 2:
            raise InputError(
                "corpus: want rows of an anchor and a positive for mixcse, which mixes its own hard "
                f"negatives, got {columns} columns"
            )


def _head(config: ViewsOptions, encoder: Encoder, pretrained: bool) -> MaskedWordHead:
    """What predicts masked words: the checkpoint's own head where it has one, otherwise a fresh one."""
    from fastqt.nn import MaskedWordHead

    words, width = cast("TokenEncoder", encoder).word_table.shape
    if width != encoder.embedding_dim:
        raise InputError(
            f"masked_words: want a checkpoint whose word vectors are as wide as its states, "
            f"{encoder.embedding_dim}, got {width}"
        )
    head = MaskedWordHead(words, width)
    if config.checkpoint is not None and pretrained:
        from fastqt.integrations.huggingface.masked_words import load_masked_word_head

        load_masked_word_head(head, config.checkpoint)
    return head


# Source: the authors' code. The learning rate differs: it suits encoders that are trained from scratch.
DEFAULTS = {"batch_size": 64, "max_length": 32, "valid_every": 125}
OF_ENCODER = {"huggingface": {"learning_rate": 3e-5}}
KINDS = (
    ViewsKind("simcse", ViewsOptions, "views.ViewsObjective", DEFAULTS, OF_ENCODER, chunks=True),
    MixKind("mixcse", MixOptions, "views.ViewsObjective", DEFAULTS, OF_ENCODER, chunks=True),
)
