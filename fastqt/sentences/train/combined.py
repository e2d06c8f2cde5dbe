"""The objective of the combined model: several QuickThoughts models, trained apart on the same batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fastqt.sentences.metrics import context_accuracy
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

    def encoders(self) -> list[Callable[..., Tensor]]:
        return [each for model in self.model.parts for each in (model.query_encoder, model.candidate_encoder)]

    def loss_of(
        self, embeddings: Sequence[Tensor], batch: Batch, share: Share | None
    ) -> tuple[Tensor, Measured]:
        queries, candidates = embeddings[::2], embeddings[1::2]
        losses = [self.context_loss(*each, batch, share) for each in zip(queries, candidates, strict=True)]
        return torch.stack(losses).sum(), (torch.cat([*queries], dim=1), torch.cat([*candidates], dim=1))

    def measure(self, measured: Measured) -> dict[str, float]:
        """The accuracies of the sum of the models' scores, and of each model under its encoder's name."""
        figures, names = super().measure(measured), self.config.encoder_kind.parts
        for name, queries, candidates in zip(names, *map(self.model.split, measured), strict=True):
            forward, backward = context_accuracy(queries, candidates)
            figures |= {f"{name}_forward_accuracy": forward, f"{name}_backward_accuracy": backward}
        return figures
