"""The options of every training; those of some model kinds alone are declared beside these kinds."""

from __future__ import annotations

from typing import ClassVar, Literal

from fastqt.options import Device
from fastqt.sentences.options.encoders import ENCODERS, EncoderKind
from fastqt.sentences.options.option import option, part

WIDEST = 1 << 24  # of any width, so that no product of two widths overflows
MOST_LAYERS = 1 << 8


@part
class DataOptions:
    """The text of a training, its vocabulary, and what it is validated on."""

    title: ClassVar[str] = "data"

    corpus: tuple[str, ...] = option(
        help="text files, tables or folders, in this order", file="CORPUS", resume="move"
    )
    column: str | None = option(
        None,
        "column of the text in .parquet and .arrow files and folders of the datasets library (default: text, "
        "sentence, or the only one of text)",
    )
    valid: str | None = option(None, "held-out text to validate on", file="FILE", resume="change")
    dev: str | None = option(
        None,
        "sentence pairs with gold scores, such as STS-B's dev.tsv: keep the model that ranks them best",
        file="FILE",
        resume="change",
    )
    vocabulary: str | None = option(
        None,
        "file of the tokenizers library (tokenizer.json) whose tokens take the place of words",
        file="FILE",
        also="--tokenizer",
        resume="move",
    )
    vocab_size: int = option(
        50_000, "number of words in the vocabulary, including <unk>", at_least=2, below=1 << 31, varies=True
    )
    unknown: Literal["keep", "drop"] = option(
        "keep", "words outside the vocabulary become <unk>, or are dropped"
    )
    max_length: int = option(
        50, "longer sentences are cut to this many words", at_least=1, below=WIDEST + 1, varies=True
    )


@part
class EncoderOptions:
    """The sentence encoder of a training."""

    title: ClassVar[str] = "encoder"

    encoder: str = option("bow", "sentence encoder", choices=tuple(ENCODERS), varies=True)
    checkpoint: str | None = option(
        None,
        "directory with the model and the tokenizer, for --encoder huggingface",
        file="DIR",
        resume="move",
    )
    init_from: str | None = option(
        None,
        "directory of an earlier run, whose weights and vocabulary the training begins with, at step 0 and "
        "with a new optimiser; options of the encoder that are not given are those of that run",
        file="RUN",
    )
    pooling: Literal["cls", "cls_before_pooler", "mean"] = option(
        "cls", "how a huggingface encoder pools its token states"
    )
    vectors: str | None = option(
        None,
        "pre-trained word vectors to start from, text as of GloVe, word2vec and fastText; a word takes its "
        "own vector, or else that of its lower-case form, and words without one are drawn",
        file="FILE",
        resume="move",
    )
    vectors_scale: float = option(
        1.0,
        "factor of the vectors of --vectors; published ones are longer than those that are drawn",
        at_least=1e-6,
        below=1e6,
    )
    freeze_vectors: bool = option(
        False, "do not train the table of --vectors, with the vectors that were drawn for other words"
    )
    # None until the vectors of a file have been read, whose width it is.
    word_dim: int = option(
        None,
        "width of the word vectors, and of the sentence vectors of bow, static, transformer and gloss "
        "(default: that of --vectors, or 300)",
        at_least=1,
        below=WIDEST + 1,
        varies=True,
    )
    trained_dim: int | None = option(
        None,
        "width of the word vectors that mc- encoders train beside those of --vectors (default: the same)",
        at_least=1,
        below=WIDEST + 1,
    )
    hidden_size: int = option(
        1000,
        "width of the sentence vectors of encoders that have one of their own, as gru and lstm",
        at_least=1,
        below=WIDEST + 1,
    )
    layers: int = option(6, "number of transformer layers", at_least=1, below=MOST_LAYERS + 1)
    heads: int = option(5, "attention heads of each transformer layer", at_least=1, below=WIDEST + 1)
    feedforward: int = option(1000, "inner width of each transformer layer", at_least=1, below=WIDEST + 1)
    dropout: float = option(
        0.1,
        "dropout rate of a transformer, and of the sentence vectors of simcse and mixcse",
        at_least=0,
        below=1,
    )
    cell: Literal["reset-after", "reset-before"] = option(
        "reset-after", "gru cell: that of torch, or that of the paper"
    )
    init: Literal["paper", "torch"] = option(
        "paper", "initialisation: that of the paper, or that of torch", varies=True
    )

    @property
    def encoder_kind(self) -> EncoderKind:
        """The record of the encoder."""
        return ENCODERS[self.encoder]


@part
class OptimisationOptions:
    """The batches, the steps and the optimiser of a training."""

    title: ClassVar[str] = "optimisation"

    batch_size: int = option(
        400,
        "sentences per batch; under torchrun each process takes as many, and a step has all of them",
        at_least=2,
        varies=True,
    )
    chunk: int | None = option(
        None,
        "sentences that an encoder runs at a time, so that a large batch needs the memory of so many "
        "(default: the whole batch)",
        at_least=1,
    )
    epochs: int = option(1, "passes over the corpus", at_least=1, varies=True, resume="change")
    steps: int | None = option(None, "stop after this many batches", at_least=1, resume="change")
    early_stop: int | None = option(
        None,
        "stop after this many validations without a better coefficient of --dev, or else a lower loss of "
        "--valid, and keep the best model",
        at_least=1,
        resume="change",
    )
    seed: int = option(0, "seed of the random numbers", at_least=0, below=1 << 63)
    learning_rate: float = option(
        5e-4, "learning rate, the highest one of a schedule", at_least=0, varies=True
    )
    schedule: Literal["constant", "linear", "cosine"] = option(
        "constant",
        "learning rate after the warm-up: constant, or falling to 0 linearly or as half a cosine",
    )
    warmup: float = option(
        0.0,
        "steps over which the learning rate rises, or below 1 their share of the training",
        at_least=0,
        below=1 << 62,
    )
    precision: Literal["float32", "bfloat16", "float16"] = option(
        "float32", "what products are computed in, by autocast; weights and sums stay float32"
    )
    optimizer: Literal["adam", "adamw"] = option(
        "adam", "adam, or adamw, whose weight decay is not part of the gradient"
    )
    betas: tuple[float, float] = option(
        (0.9, 0.999), "decay rates of the two moments of the optimiser", at_least=0, below=1
    )
    weight_decay: float = option(
        None,
        "weight decay of matrices alone: not of biases and norms, nor of tables of word, position and latent "
        "vectors (default: 0; adamw 0.01)",
        at_least=0,
        below=1e6,
        varies=True,
    )
    clip: float = option(5.0, "largest norm of the gradient; 0 for no limit", at_least=0, varies=True)
    clip_by: Literal["global", "variable"] = option(
        "global", "norm over all weights, or of each variable separately"
    )


@part
class RunOptions:
    """The reports, validations and checkpoints of a training, and its device."""

    title: ClassVar[str] = "run"

    report_every: int = option(50, "steps between reports", at_least=1, resume="change")
    valid_every: int = option(500, "steps between validations", at_least=1, varies=True, resume="change")
    valid_batches: int = option(
        10, "batches of the held-out text to validate on", at_least=1, resume="change"
    )
    checkpoint_every: int = option(500, "steps between checkpoints", at_least=1, resume="change")
    keep_checkpoint: bool = option(
        False,
        "keep the checkpoint after the last step too, which takes three times the space of the model; then "
        "--resume can go on with more --epochs or --steps",
        resume="change",
    )
    log: Literal["tensorboard", "wandb"] | None = option(
        None, "where the figures of each report go too, by the library of this name", resume="change"
    )
    device: Device = option("auto", "where to compute", resume="change")
    timeout: int = option(
        600,
        "under torchrun, seconds after which a process that does not answer ends the training",
        at_least=1,
        below=1 << 20,
        resume="change",
    )


# The fields of the last base come first.
@part
class TrainOptions(RunOptions, OptimisationOptions, EncoderOptions, DataOptions):
    """The options of every training."""
