"""fastqt's losses in the trainer of the `sentence_transformers` library (the extra `st`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn

from fastqt.losses import simcse_loss


class SentenceTransformerLoss(nn.Module):
    """A loss of a model's embeddings of a data set's columns, for `SentenceTransformerTrainer(loss=...)`.

    With the defaults it is that library's MultipleNegativesRankingLoss of (anchor, positive) or (anchor,
    positive, negative), without the matrix of scores.

    Args:
        model: a SentenceTransformer, or whatever maps features to a dict with "sentence_embedding" (B, D).
        loss: takes one (B, D) a column, such as `fastqt.simcse_loss`, `fastqt.mixcse_loss`,
            `fastqt.clip_loss` or `fastqt.contrastive_loss`.
        **options: the loss's own.
    """

    def __init__(self, model: nn.Module, loss: Callable[..., Tensor] = simcse_loss, **options: Any) -> None:
        super().__init__()
        self.model = model
        self.loss = loss
        self.options = options

    def forward(self, sentence_features: Iterable[dict[str, Tensor]], labels: Tensor | None = None) -> Tensor:
        """A scalar, of a batch's columns; there are no labels in it."""
        embeddings = [self.model(features)["sentence_embedding"] for features in sentence_features]
        return self.loss(*embeddings, **self.options)

    def get_config_dict(self) -> dict[str, Any]:
        """What the library writes into a model's card."""
        return {"loss": getattr(self.loss, "__name__", repr(self.loss)), **self.options}
