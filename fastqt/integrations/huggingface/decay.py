"""Weight decay of a Trainer, which is not to draw a learnt scale towards 1."""

from __future__ import annotations

from typing import Any, TypeVar

from torch import nn

from fastqt.nn.losses.base import ScaledLoss

Trainer = TypeVar("Trainer", bound=Any)


def without_scale_decay(trainer: Trainer) -> Trainer:
    """A Trainer that leaves the learnt scales of fastqt's loss modules out of its weight decay.

    A Trainer decides by names: biases and norms do not decay, and what is called `log_scale` does.

    Args:
        trainer: a `transformers.Trainer`, or one of sentence-transformers, which has not trained yet.

    Returns:
        The same Trainer.

    Raises:
        TypeError: no Trainer.
        ValueError: a Trainer that has its optimiser already.

    Example:
        >>> import fastqt
        >>> from transformers import Trainer, TrainingArguments
        >>> from fastqt.integrations.huggingface import ContrastiveModel, without_scale_decay
        >>> model = ContrastiveModel("bert", fastqt.nn.SimCSELoss(learn_scale=True))
        >>> arguments = TrainingArguments("run", weight_decay=0.1)
        >>> trainer = without_scale_decay(Trainer(model, arguments))
        >>> "loss.log_scale" in trainer.get_decay_parameter_names(model)
        False
    """
    if not callable(getattr(trainer, "get_decay_parameter_names", None)):
        raise TypeError(f"trainer: want a Trainer of transformers, got {type(trainer).__name__}")
    if getattr(trainer, "optimizer", None) is not None:
        raise ValueError("trainer: want one that has no optimizer yet, got one that has")
    names_of = trainer.get_decay_parameter_names

    def names(model: nn.Module) -> list[str]:
        scales = {
            f"{name}.log_scale".removeprefix(".")
            for name, module in model.named_modules()
            if isinstance(module, ScaledLoss)
        }
        return [name for name in names_of(model) if name not in scales]

    trainer.get_decay_parameter_names = names
    return trainer
