"""Training of all models: one loop that may be stopped and resumed at any step."""

from fastqt.train.loop import Outcome, train

__all__ = ["Outcome", "train"]
