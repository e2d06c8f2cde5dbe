"""Where the figures of a training go besides metrics.jsonl: to TensorBoard, or to Weights & Biases."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path

from fastqt.errors import InputError
from fastqt.integrations._libraries import load_library
from fastqt.sentences.errors import warn
from fastqt.sentences.runs.config import TrainConfig

Log = Callable[[Mapping[str, float]], None]  # takes a line of metrics.jsonl


def check_logger(config: TrainConfig) -> None:
    """Refuses a logger whose library is not installed, before any work."""
    if config.log is not None:
        try:
            load_library(config.log)
        except ImportError as error:
            raise InputError(f"log: {error}") from error


@contextlib.contextmanager
def logger(config: TrainConfig, directory: Path) -> Iterator[Log]:
    """A context with what takes the figures of each report of a run in this directory.

    TensorBoard's files are in its folder `tensorboard`. W&B is given the settings too; its environment
    variables say which project and which run it is.
    """
    if config.log == "tensorboard":
        from torch.utils.tensorboard import SummaryWriter

        with contextlib.closing(SummaryWriter(str(directory / "tensorboard"))) as writer:

            def add(figures: dict[str, float], step: int) -> None:
                for name, value in figures.items():
                    writer.add_scalar(name, value, step)

            yield _cautious(add)
    elif config.log == "wandb":
        run = load_library("wandb").init(dir=str(directory), name=directory.name, config=asdict(config))
        try:
            yield _cautious(lambda figures, step: run.log(figures, step=step))
        finally:
            run.finish()
    else:
        yield lambda line: None


def _cautious(log: Callable[[dict[str, float], int], object]) -> Log:
    """Gives the figures of a line to a library; a full disk does not end the training."""

    def take(line: Mapping[str, float]) -> None:
        figures = dict(line)
        step = int(figures.pop("step"))
        try:
            log(figures, step)
        except OSError as error:
            warn(f"log: {error.strerror or error}; the training goes on")

    return take
