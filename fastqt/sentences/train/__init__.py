"""Training of all models: one loop, which can be stopped and resumed at any step."""

from fastqt.sentences.train.loop import Outcome
from fastqt.sentences.train.start import train

__all__ = ["Outcome", "train"]
