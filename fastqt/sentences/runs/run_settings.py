"""What a training does beside its steps: reports, validations, checkpoints, and the device."""

from __future__ import annotations

from dataclasses import dataclass

from fastqt.sentences.runs.settings import option


@dataclass(frozen=True)
class RunSettings:
    """The reports, validations and checkpoints of a training, and its device."""

    report_every: int = option(50, "steps between reports", at_least=1)
    valid_every: int = option(
        None, "steps between validations (default: 500; simcse, mixcse and pairs 125)", at_least=1
    )
    valid_batches: int = option(10, "batches of the held-out text to validate on", at_least=1)
    checkpoint_every: int = option(500, "steps between checkpoints", at_least=1)
    keep_checkpoint: bool = option(
        False,
        "keep the checkpoint after the last step too, which takes three times the space of the model; then "
        "--resume can go on with more --epochs or --steps",
    )
    device: str = option("auto", "where to compute", choices=("auto", "cpu", "cuda"))
    compile: bool = option(
        False,
        "let torch compile the encoder, transformer or huggingface, in the first steps; vectors differ by "
        "rounding alone",
    )
    timeout: int = option(
        600,
        "under torchrun, seconds after which a process that does not answer ends the training",
        at_least=1,
        below=1 << 20,
    )
