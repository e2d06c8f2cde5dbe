"""The objective of the combined model: several QuickThoughts models, trained apart on the same batches."""

from __future__ import annotations

import torch
from torch import Tensor

from fastqt.sentences.metrics import context_accuracy
from fastqt.sentences.runs.model_settings import COMBINED
from fastqt.sentences.text import Batch
from fastqt.sentences.train.objectives import ContextObjective, Measured
from fastqt.sentences.train.ranks import Share


class CombinedObjective(ContextObjective):
    """Several QuickThoughts models on the same batches, each trained as if it were alone.

    The loss is the sum of the models' losses, and the gradients of each model are clipped apart.
    """

    def clip_groups(self) -> list[list[Tensor]]:
        if self.config.clip_by == "global":
            return [list(model.parameters()) for model in self.model.parts]
        return super().clip_groups()

    def loss(self, batch: Batch, share: Share | None = None) -> tuple[Tensor, Measured]:
        both = self.model(batch.tokens.to(self.device), batch.lengths.to(self.device))
        losses = [
            self.context_loss(queries, candidates, batch, share)
            for queries, candidates in zip(*map(self.model.split, both), strict=True)
        ]
        return torch.stack(losses).sum(), both

    def measure(self, measured: Measured) -> dict[str, float]:
        """The accuracies of the sum of the models' scores, and of each model under its encoder's name."""
        figures = super().measure(measured)
        for name, queries, candidates in zip(COMBINED, *map(self.model.split, measured), strict=True):
            forward, backward = context_accuracy(queries, candidates)
            figures |= {f"{name}_forward_accuracy": forward, f"{name}_backward_accuracy": backward}
        return figures
