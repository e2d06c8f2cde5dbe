"""What the settings of the optimiser may be together. Like the settings, it imports no torch."""

from __future__ import annotations

from fastqt.errors import InputError
from fastqt.sentences.runs.train_settings import TrainSettings

# The figures of metrics.jsonl that tell which model is the best.
DEV_MEASURE, LOSS_MEASURE = "dev_spearman", "validation_loss"


def check_optimiser(config: TrainSettings) -> None:
    """Checks the settings of the optimiser by themselves; which weights decay, only the model can tell."""
    if config.warmup >= 1 and config.warmup != int(config.warmup):
        raise InputError(
            f"warmup: want a whole number of steps, or a share of the training below 1, got {config.warmup:g}"
        )
    if config.early_stop is not None and config.valid is None and config.dev is None:
        raise InputError(
            f"early_stop: want it with dev or valid, whose figures tell when to stop, got {config.early_stop}"
        )
    if config.chunk is None:
        return
    if config.model not in ("quickthoughts", "simcse", "mixcse", "pairs"):
        raise InputError(
            f"chunk: want none with model {config.model}, whose loss is a mean over sentences or words; a "
            f"smaller batch_size takes less memory; got {config.chunk}"
        )
    if config.masked_words:
        raise InputError(
            f"chunk: want none with masked_words, whose loss has the states of all words, got {config.chunk}"
        )


def has_schedule(config: TrainSettings) -> bool:
    """Whether the learning rate differs between steps."""
    return config.schedule != "constant" or config.warmup > 0


def measure_of_best(config: TrainSettings) -> str | None:
    """The figure of a validation that tells which model is kept; None where it is the last one.

    Development pairs decide wherever there are some. Without them, a training that may stop early keeps the
    model with the lowest loss on its held-out text.
    """
    if config.dev is not None:
        return DEV_MEASURE
    return LOSS_MEASURE if config.early_stop is not None else None


def check_same_end(config: TrainSettings, stored: TrainSettings) -> None:
    """Checks that a training with a schedule is resumed towards the end that it was started with."""
    if stored.schedule == "constant" and not 0 < stored.warmup < 1:
        return  # the rate of a step does not depend on how many there are
    for name in ("epochs", "steps"):
        was, now = getattr(stored, name), getattr(config, name)
        if was != now:
            raise InputError(
                f"cannot resume: {name} is {now!r}, but the run was started with {was!r}, and its learning "
                f"rate follows a schedule over the whole training (schedule {stored.schedule}, warmup "
                f"{stored.warmup:g})"
            )
