"""The record of one training, which all of its parts share."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Literal

import torch

from fastqt.sentences.runs.config import TrainConfig
from fastqt.sentences.runs.model import choose_device
from fastqt.sentences.runs.progress import Progress
from fastqt.sentences.text import Lexicon
from fastqt.sentences.train.ranks import Ranks


@dataclass
class Training:
    """What a training begins with, or goes on with."""

    config: TrainConfig
    corpus: list[str]  # paths of the text files and tables
    vocabulary: Lexicon
    directory: Path  # where the model, the metrics and the checkpoints are written
    progress: Progress  # where to go on; it is changed in place
    ranks: Ranks = field(default_factory=Ranks)  # by default this process trains alone
    begins: Literal["anew", "at a checkpoint", "at the end"] = "anew"

    @cached_property
    def device(self) -> torch.device:
        """The device to compute on."""
        return choose_device(self.config.device)
