"""The settings of a training, which are also command-line options, each with its default and its range."""

from __future__ import annotations

from dataclasses import dataclass, fields

from fastqt.errors import InputError
from fastqt.sentences.runs.defaults import WORD_DIM, default_encoder, defaults_of
from fastqt.sentences.runs.settings import check_setting, option

MODELS = ("quickthoughts", "skip-thoughts", "simcse", "mixcse", "gloss-bow", "gloss-pos")
# The name of an encoder of two channels, one of them on frozen word vectors, begins with "mc-".
ENCODERS = (
    "bow",
    "gru",
    "bigru",
    "lstm",
    "bilstm",
    "transformer",
    "huggingface",
    "mc-bow",
    "mc-gru",
    "mc-bigru",
    "combine",  # two models, one of each encoder in COMBINED
)
COMBINED = ("gru", "bigru")
WIDEST = 1 << 24  # of any width, so that no product of two widths overflows
MOST_LAYERS = 1 << 8


@dataclass(frozen=True)
class TrainSettings:
    """The settings of a training, each within its range; `TrainConfig` checks that they go together.

    The defaults are those of each model's source. Only the learning rate of SimCSE and MixCSE differs: it
    suits encoders that are trained from scratch.

    Source: Logeswaran and Lee (2018) for QuickThoughts; Singh, Fan and Auli (2019) for GLOSS; the authors'
    code for SimCSE and MixCSE.
    """

    corpus: tuple[str, ...]
    column: str | None = option(
        None,
        "column of the text in .parquet and .arrow files and folders of the datasets library (default: text, "
        "sentence, or the only one of text)",
    )
    document_column: str | None = option(None, "column of them that has another value in another document")
    valid: str | None = option(None, "held-out text to validate on")
    dev: str | None = option(
        None, "sentence pairs with gold scores, such as STS-B's dev.tsv: keep the model that ranks them best"
    )
    model: str = option("quickthoughts", "what to train", choices=MODELS)
    encoder: str = option(None, "sentence encoder (default: bow; skip-thoughts gru)", choices=ENCODERS)
    checkpoint: str | None = option(
        None, "directory with the model and the tokenizer, for --encoder huggingface"
    )
    pooling: str = option(
        "cls",
        "how a huggingface encoder pools its token states",
        choices=("cls", "cls_before_pooler", "mean"),
    )
    vectors: str | None = option(
        None,
        "pre-trained word vectors to start from: .npz, text, the JSON of wink's embeddings, or a folder with "
        "an .npy and the .parquet of its words; a word takes its own vector, or else that of its lower-case "
        "form, and words without one are drawn",
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
    word_dim: int = option(
        None,
        "width of the word vectors, and of the sentence vectors of bow, transformer and gloss "
        "(default: that of --vectors, or 300)",
        at_least=1,
        below=WIDEST + 1,
    )
    trained_dim: int | None = option(
        None,
        "width of the word vectors that mc- encoders train beside those of --vectors (default: the same)",
        at_least=1,
        below=WIDEST + 1,
    )
    hidden_size: int = option(
        1000, "width of the sentence vectors of gru and lstm", at_least=1, below=WIDEST + 1
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
    cell: str = option(
        "reset-after",
        "gru cell: that of torch, or that of the paper",
        choices=("reset-after", "reset-before"),
    )
    init: str = option(
        "paper", "initialisation: that of the paper, or that of torch", choices=("paper", "torch")
    )
    batch_size: int = option(
        None,
        "sentences per batch; under torchrun each process takes as many, and a step has all of them "
        "(default: 400; bow 1500; skip-thoughts 128; simcse and mixcse 64; gloss 512)",
        at_least=2,
    )
    context_size: int = option(None, "neighbours to predict on each side (default: 1; bow 3)", at_least=1)
    scale: float = option(20.0, "1 / temperature of simcse and mixcse", at_least=1e-6, below=1e38)
    mix: float = option(
        0.2, "share of a sentence's own positive in its mixed negative, for mixcse", at_least=0, below=1
    )
    form: str = option(
        "slides",
        "loss of mixcse: one mixed negative per row, or the 3 N columns of the authors' code",
        choices=("slides", "released"),
    )
    partner: str = option(
        "next",
        "sentence with which mixcse mixes a negative: the next one, or one by a random cycle",
        choices=("next", "random"),
    )
    stop_gradient: str = option(
        "yes", "whether gradients stop at the mixed negatives of mixcse", choices=("yes", "no")
    )
    blocks: str = option(
        "both",
        "mixed columns of mixcse --form released: mixtures of both views, or of the candidates alone",
        choices=("both", "candidates"),
    )
    masked_cell: str = option(
        "zero",
        "cells of mixcse --form released whose mixture has the sentence as the partner: score 0, or left out",
        choices=("zero", "exclude"),
    )
    hard_negative_weight: float = option(
        0.0,
        "added to the scores of a sentence with its own hard negatives: those of simcse in a .tsv, or the "
        "mixtures of mixcse --form released",
    )
    masked_words: float = option(
        0.0,
        "weight of the prediction of masked words in simcse and mixcse, with transformer or huggingface; the "
        "source has 0.1",
        at_least=0,
        below=1e38,
    )
    radius: float = option(2.0, "radius of the ball that holds the latent vectors of gloss", at_least=1e-6)
    latents: str = option(
        "rows",
        "latent vectors that a step of gloss moves: those of the batch, or all of them by momentum",
        choices=("rows", "all"),
    )
    position_loss: str = option(
        "sum",
        "loss of a sentence of gloss-pos: the sum over its words, or their mean",
        choices=("sum", "mean"),
    )
    documents: str = option(
        "cut", "context windows end at document boundaries, or cross them", choices=("cut", "cross")
    )
    vocabulary: str | None = option(
        None, "file of the tokenizers library (tokenizer.json) whose tokens take the place of words"
    )
    special_tokens: str = option(
        "none", "special tokens of --vocabulary, such as [CLS], that a sentence gets", choices=("none", "add")
    )
    vocab_size: int = option(
        None,
        "number of words in the vocabulary, including <unk> (default: 50,000; skip-thoughts 20,000)",
        at_least=2,
        below=(1 << 31),
    )
    unknown: str = option(
        "keep", "words outside the vocabulary become <unk>, or are dropped", choices=("keep", "drop")
    )
    max_length: int = option(
        None,
        "longer sentences are cut to this many words (default: 50; skip-thoughts 30; simcse and mixcse 32)",
        at_least=1,
        below=WIDEST + 1,
    )
    learning_rate: float = option(
        None,
        "constant learning rate of Adam (default: 5e-4; gloss 3e-4; simcse and mixcse with huggingface 3e-5)",
        at_least=0,
    )
    clip: float = option(
        None,
        "largest norm of the gradient; 0 for no limit (default: 5; skip-thoughts 10; gloss 25)",
        at_least=0,
    )
    clip_by: str = option(
        "global", "norm over all weights, or of each variable separately", choices=("global", "variable")
    )
    epochs: int = option(None, "passes over the corpus (default: 1; gloss 210)", at_least=1)
    steps: int | None = option(None, "stop after this many batches", at_least=1)
    seed: int = option(0, "seed of the random numbers", at_least=0, below=1 << 63)
    report_every: int = option(50, "steps between reports", at_least=1)
    valid_every: int = option(
        None, "steps between validations (default: 500; simcse and mixcse 125)", at_least=1
    )
    valid_batches: int = option(10, "batches of the held-out text to validate on", at_least=1)
    checkpoint_every: int = option(500, "steps between checkpoints", at_least=1)
    keep_checkpoint: bool = option(
        False,
        "keep the checkpoint after the last step too, which takes three times the space of the model; then "
        "--resume can go on with more --epochs or --steps",
    )
    device: str = option("auto", "where to compute", choices=("auto", "cpu", "cuda"))
    timeout: int = option(
        600,
        "under torchrun, seconds after which a process that does not answer ends the training",
        at_least=1,
        below=1 << 20,
    )

    def __post_init__(self) -> None:
        for setting in fields(self):
            check_setting(setting, getattr(self, setting.name))
        if not self.corpus:
            raise InputError("corpus: want at least one file, got none")

        if self.encoder is None:
            object.__setattr__(self, "encoder", default_encoder(self.model))
        for name, value in defaults_of(self.model, self.encoder).items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        if self.vectors is None and self.word_dim is None:
            object.__setattr__(self, "word_dim", WORD_DIM)
