"""The library's MatryoshkaLoss around losses of fastqt: all prefixes in the products of one loss."""

from __future__ import annotations

import inspect
import random
from collections.abc import Iterable
from typing import Any

from sentence_transformers.sentence_transformer.losses import matryoshka
from torch import Tensor, nn

from fastqt.integrations.sentence_transformers.columns import SentenceTransformerLoss
from fastqt.integrations.sentence_transformers.ranking import (
    CachedMultipleNegativesRankingLoss,
    MultipleNegativesRankingLoss,
)
from fastqt.integrations.sentence_transformers.replacement import Replacement
from fastqt.matryoshka import Matryoshka

# The class as it is when this module is imported, which is before `patch` changes the library's module.
_Matryoshka = matryoshka.MatryoshkaLoss


class MatryoshkaLoss(Replacement, _Matryoshka):
    """The library's MatryoshkaLoss, with its arguments, values and gradients.

    Around this package's losses of multiple negatives ranking, and around a `SentenceTransformerLoss` whose
    function takes `matryoshka`, all prefixes of the embeddings are computed together. Other losses are
    computed once for each of them, as the library does. As there, every prefix is scored at norm 1.

    Raises:
        ValueError: as the library's.

    Example:
        >>> from sentence_transformers import SentenceTransformer
        >>> from fastqt.integrations.sentence_transformers import (
        ...     MatryoshkaLoss, MultipleNegativesRankingLoss
        ... )
        >>> model = SentenceTransformer("bert", device="cpu", local_files_only=True)
        >>> columns = [model.preprocess(texts) for texts in (["the cat", "a mat"], ["cats", "mats"])]
        >>> width = model.get_embedding_dimension()
        >>> loss = MatryoshkaLoss(model, MultipleNegativesRankingLoss(model), [width, width // 2])
        >>> loss(columns, None).shape
        torch.Size([])
    """

    def __init__(self, model: Any, loss: nn.Module, *args: Any, **kwargs: Any) -> None:
        undecorated = dict(vars(loss))
        super().__init__(model, loss, *args, **kwargs)
        if takes_prefixes(loss):
            # Their own would compute a loss that caches gradients once for each prefix.
            vars(loss).pop("calculate_loss", None)
            if "calculate_loss" in undecorated:
                vars(loss)["calculate_loss"] = undecorated["calculate_loss"]

    def forward(self, sentence_features: Iterable[dict[str, Tensor]], labels: Tensor) -> Tensor:
        """The weighted sum of the losses of the prefixes, of which `n_dims_per_step` are drawn."""
        inner: Any = self.loss
        if not takes_prefixes(inner):
            return super().forward(sentence_features, labels)
        try:
            inner.prefixes = self._drawn()
            loss: Tensor = inner(sentence_features, labels)
        finally:
            inner.prefixes = None
        return loss

    def _drawn(self) -> Matryoshka:
        """The prefixes of a step, drawn as the library draws them."""
        indices: Any = range(len(self.matryoshka_dims))
        if 0 < self.n_dims_per_step < len(indices):
            indices = random.sample(indices, self.n_dims_per_step)
        weights: dict[int, float] = {}  # They may name a number of columns twice.
        for i in sorted(indices, key=lambda i: self.matryoshka_dims[i]):
            dim = self.matryoshka_dims[i]
            weights[dim] = weights.get(dim, 0.0) + float(self.matryoshka_weights[i])
        return Matryoshka(tuple(weights), tuple(weights.values()))


def takes_prefixes(loss: Any) -> bool:
    """Whether a module computes the loss of several prefixes at once, by its attribute `prefixes`."""
    if isinstance(loss, SentenceTransformerLoss):
        return "matryoshka" in inspect.signature(loss.loss).parameters
    return isinstance(loss, MultipleNegativesRankingLoss | CachedMultipleNegativesRankingLoss)
