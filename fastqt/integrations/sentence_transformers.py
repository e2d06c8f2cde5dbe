"""fastqt's losses in the trainer of the `sentence_transformers` library (the extra `st`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn

from fastqt.losses import simcse_loss
from fastqt.nn.loss import check_options


class SentenceTransformerLoss(nn.Module):
    """A fastqt loss of the embeddings of a data set's columns, for `SentenceTransformerTrainer(loss=...)`.

    With the default loss, its values and gradients equal those of the library's
    MultipleNegativesRankingLoss on the columns (anchor, positive) or (anchor, positive, negative), but the
    matrix of scores is not stored.

    Args:
        model: a SentenceTransformer, or another module that maps features to a dict with
            "sentence_embedding", (B, D).
        loss: a function of one (B, D) tensor per column, such as `fastqt.simcse_loss`, `fastqt.mixcse_loss`,
            `fastqt.clip_loss` or `fastqt.contrastive_loss`.
        **options: keyword arguments of the loss.

    Raises:
        TypeError: an option that the loss does not have, or that has a value of another type.
        ValueError: an option of a loss of fastqt, with a value which that refuses.
    """

    def __init__(self, model: nn.Module, loss: Callable[..., Tensor] = simcse_loss, **options: Any) -> None:
        super().__init__()
        check_options(loss, options)
        self.model = model
        self.loss = loss
        self.options = options

    def forward(self, sentence_features: Iterable[dict[str, Tensor]], labels: Tensor | None = None) -> Tensor:
        """The loss of a batch, a scalar for the default options.

        Args:
            sentence_features: the tokenised sentences of each column.
            labels: ignored; the trainer passes it to every loss.
        """
        embeddings = [self.model(features)["sentence_embedding"] for features in sentence_features]
        return self.loss(*embeddings, **self.options)

    def get_config_dict(self) -> dict[str, Any]:
        """The settings that the library writes to a model card."""
        return {"loss": getattr(self.loss, "__name__", repr(self.loss)), **self.options}
