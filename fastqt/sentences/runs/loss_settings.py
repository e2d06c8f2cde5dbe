"""What a training minimises: the losses of the models, with their options."""

from __future__ import annotations

from dataclasses import dataclass

from fastqt.sentences.runs.settings import option


@dataclass(frozen=True)
class LossSettings:
    """The loss of a training."""

    context_size: int = option(None, "neighbours to predict on each side (default: 1; bow 3)", at_least=1)
    scale: float = option(20.0, "1 / temperature of simcse, mixcse and pairs", at_least=1e-6, below=1e38)
    learn_scale: bool = option(
        False, "learn the scale of simcse, mixcse and pairs, from --scale on, by its logarithm, as CLIP does"
    )
    max_scale: float | None = option(
        None, "the most that a learnt scale may become (default: 100)", at_least=1e-6, below=1e38
    )
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
