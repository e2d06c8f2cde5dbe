"""How a training minimises its loss: batches, steps and the optimiser."""

from __future__ import annotations

from dataclasses import dataclass

from fastqt.sentences.runs.settings import option


@dataclass(frozen=True)
class OptimisationSettings:
    """The batches, the steps and the optimiser of a training."""

    batch_size: int = option(
        None,
        "sentences per batch; under torchrun each process takes as many, and a step has all of them "
        "(default: 400; bow 1500; skip-thoughts 128; simcse, mixcse and pairs 64; gloss 512)",
        at_least=2,
    )
    chunk: int | None = option(
        None,
        "sentences that an encoder runs at a time, so that a large batch needs the memory of so many "
        "(default: the whole batch)",
        at_least=1,
    )
    epochs: int = option(None, "passes over the corpus (default: 1; gloss 210)", at_least=1)
    steps: int | None = option(None, "stop after this many batches", at_least=1)
    early_stop: int | None = option(
        None,
        "stop after this many validations without a better coefficient of --dev, or else a lower loss of "
        "--valid, and keep the best model",
        at_least=1,
    )
    seed: int = option(0, "seed of the random numbers", at_least=0, below=1 << 63)
    learning_rate: float = option(
        None,
        "learning rate, the highest one of a schedule (default: 5e-4; gloss 3e-4; with huggingface simcse "
        "and mixcse 3e-5, pairs 2e-5)",
        at_least=0,
    )
    schedule: str = option(
        "constant",
        "learning rate after the warm-up: constant, or falling to 0 linearly or as half a cosine",
        choices=("constant", "linear", "cosine"),
    )
    warmup: float = option(
        0.0,
        "steps over which the learning rate rises, or below 1 their share of the training",
        at_least=0,
        below=1 << 62,
    )
    precision: str = option(
        "float32",
        "what products are computed in, by autocast; weights and sums stay float32",
        choices=("float32", "bfloat16", "float16"),
    )
    optimizer: str = option(
        "adam", "adam, or adamw, whose weight decay is not part of the gradient", choices=("adam", "adamw")
    )
    betas: tuple[float, float] = option(
        (0.9, 0.999), "decay rates of the two moments of the optimiser", at_least=0, below=1
    )
    average: float | None = option(
        None,
        "validate and keep a moving average of the weights, in which each step multiplies the share of those "
        "before it by X, such as 0.999",
        at_least=0,
        below=1,
    )
    weight_decay: float = option(
        None,
        "weight decay of matrices alone: not of biases and norms, nor of tables of word, position and latent "
        "vectors (default: 0; adamw 0.01)",
        at_least=0,
        below=1e6,
    )
    clip: float = option(
        None,
        "largest norm of the gradient; 0 for no limit (default: 5; skip-thoughts 10; gloss 25)",
        at_least=0,
    )
    clip_by: str = option(
        "global", "norm over all weights, or of each variable separately", choices=("global", "variable")
    )
