"""The library's losses of all triplets of a batch, without the matrix of its distances."""

from __future__ import annotations

from typing import Any

from sentence_transformers.sentence_transformer.losses import (
    batch_all_triplet,
    batch_hard_soft_margin_triplet,
    batch_hard_triplet,
    batch_semi_hard_triplet,
)
from torch import Tensor

from fastqt.integrations.sentence_transformers.replacement import Replacement
from fastqt.losses.triplets import Rule, all_active, hardest, semi_hard, triplet_loss
from fastqt.torch_modes import is_traced, is_transformed

# The classes as they are when this module is imported, which is before `patch` changes the library's modules.
_BatchAll = batch_all_triplet.BatchAllTripletLoss
_BatchHard = batch_hard_triplet.BatchHardTripletLoss
_BatchHardSoftMargin = batch_hard_soft_margin_triplet.BatchHardSoftMarginTripletLoss
_BatchSemiHard = batch_semi_hard_triplet.BatchSemiHardTripletLoss
_DISTANCES = batch_hard_triplet.BatchHardTripletLossDistanceFunction


class _Triplets(Replacement):
    """The library computes what has another `distance_metric` than its own two, is traced, or has no rows."""

    distance_metric: Any

    def _loss(self, labels: Tensor, embeddings: Tensor, rule: Rule, margin: float | None) -> Tensor | None:
        euclidean = self.distance_metric == _DISTANCES.euclidean_distance
        if not euclidean and self.distance_metric != _DISTANCES.cosine_distance:
            return None
        if is_traced(embeddings, labels) or is_transformed():
            return None
        if not len(embeddings) or labels.numel() != len(embeddings):
            return None
        return triplet_loss(embeddings, labels.flatten(), rule, margin=margin, euclidean=euclidean)


class BatchHardTripletLoss(_Triplets, _BatchHard):
    """The library's BatchHardTripletLoss, with its arguments, values and gradients.

    Example:
        >>> import torch
        >>> from sentence_transformers import SentenceTransformer
        >>> from fastqt.integrations.sentence_transformers import BatchHardTripletLoss
        >>> model = SentenceTransformer("bert", device="cpu", local_files_only=True)
        >>> column = model.preprocess(["the cat", "cats", "a mat", "mats"])
        >>> BatchHardTripletLoss(model)([column], torch.tensor([0, 0, 1, 1])).shape
        torch.Size([])
    """

    def batch_hard_triplet_loss(self, labels: Tensor, embeddings: Tensor) -> Tensor:
        """The loss, a scalar, of embeddings (B, D) and B labels of any shape."""
        loss = self._loss(labels, embeddings, hardest, self.triplet_margin)
        return super().batch_hard_triplet_loss(labels, embeddings) if loss is None else loss


class BatchHardSoftMarginTripletLoss(_BatchHardSoftMargin, BatchHardTripletLoss):
    """The library's BatchHardSoftMarginTripletLoss, with its arguments, values and gradients.

    Example:
        >>> import torch
        >>> from sentence_transformers import SentenceTransformer
        >>> from fastqt.integrations.sentence_transformers import BatchHardSoftMarginTripletLoss
        >>> model = SentenceTransformer("bert", device="cpu", local_files_only=True)
        >>> column = model.preprocess(["the cat", "cats", "a mat", "mats"])
        >>> BatchHardSoftMarginTripletLoss(model)([column], torch.tensor([0, 0, 1, 1])).shape
        torch.Size([])
    """

    def batch_hard_triplet_soft_margin_loss(self, labels: Tensor, embeddings: Tensor) -> Tensor:
        """The loss, a scalar, of embeddings (B, D) and B labels of any shape."""
        loss = self._loss(labels, embeddings, hardest, None)
        return super().batch_hard_triplet_soft_margin_loss(labels, embeddings) if loss is None else loss


class BatchSemiHardTripletLoss(_Triplets, _BatchSemiHard):
    """The library's BatchSemiHardTripletLoss, with its arguments, values and gradients.

    Example:
        >>> import torch
        >>> from sentence_transformers import SentenceTransformer
        >>> from fastqt.integrations.sentence_transformers import BatchSemiHardTripletLoss
        >>> model = SentenceTransformer("bert", device="cpu", local_files_only=True)
        >>> column = model.preprocess(["the cat", "cats", "a mat", "mats"])
        >>> BatchSemiHardTripletLoss(model)([column], torch.tensor([0, 0, 1, 1])).shape
        torch.Size([])
    """

    def batch_semi_hard_triplet_loss(self, labels: Tensor, embeddings: Tensor) -> Tensor:
        """The loss, a scalar, of embeddings (B, D) and B labels of any shape."""
        loss = self._loss(labels, embeddings, semi_hard, self.margin)
        return super().batch_semi_hard_triplet_loss(labels, embeddings) if loss is None else loss


class BatchAllTripletLoss(_Triplets, _BatchAll):
    """The library's BatchAllTripletLoss, with its arguments, values and gradients.

    Example:
        >>> import torch
        >>> from sentence_transformers import SentenceTransformer
        >>> from fastqt.integrations.sentence_transformers import BatchAllTripletLoss
        >>> model = SentenceTransformer("bert", device="cpu", local_files_only=True)
        >>> column = model.preprocess(["the cat", "cats", "a mat", "mats"])
        >>> BatchAllTripletLoss(model)([column], torch.tensor([0, 0, 1, 1])).shape
        torch.Size([])
    """

    def batch_all_triplet_loss(self, labels: Tensor, embeddings: Tensor) -> Tensor:
        """The loss, a scalar, of embeddings (B, D) and B labels of any shape."""
        loss = self._loss(labels, embeddings, all_active, self.triplet_margin)
        return super().batch_all_triplet_loss(labels, embeddings) if loss is None else loss
