"""What a training trains: the model and its sentence encoder."""

from __future__ import annotations

from dataclasses import dataclass

from fastqt.sentences.runs.encoders import ENCODERS, EncoderKind
from fastqt.sentences.runs.settings import option

MODELS = ("quickthoughts", "skip-thoughts", "simcse", "mixcse", "pairs", "gloss-bow", "gloss-pos")
WIDEST = 1 << 24  # of any width, so that no product of two widths overflows
MOST_LAYERS = 1 << 8


@dataclass(frozen=True)
class ModelSettings:
    """The model of a training and its sentence encoder."""

    model: str = option("quickthoughts", "what to train", choices=MODELS)
    encoder: str = option(None, "sentence encoder (default: bow; skip-thoughts gru)", choices=tuple(ENCODERS))
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
    cell: str = option(
        "reset-after",
        "gru cell: that of torch, or that of the paper",
        choices=("reset-after", "reset-before"),
    )
    init: str = option(
        "paper", "initialisation: that of the paper, or that of torch", choices=("paper", "torch")
    )

    @property
    def encoder_kind(self) -> EncoderKind:
        """The record of the encoder."""
        return ENCODERS[self.encoder]
