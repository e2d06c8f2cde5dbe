"""The library's losses of multiple negatives ranking, computed without a matrix of scores.

Each is a subclass of the library's own of the same name, which keeps its signature, checks, settings,
citation, merged forward pass and gradient cache. Only the loss of embeddings is computed by fastqt.
"""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import torch
from sentence_transformers.sentence_transformer.losses import (
    cached_multiple_negatives_ranking,
    cached_multiple_negatives_symmetric_ranking,
    multiple_negatives_ranking,
    multiple_negatives_symmetric_ranking,
)
from torch import Tensor
from typing_extensions import deprecated

from fastqt.integrations._gathering import group_of
from fastqt.integrations.sentence_transformers.replacement import Replacement
from fastqt.integrations.sentence_transformers.similarity import scores_cosines
from fastqt.losses import multiple_negatives_ranking_loss
from fastqt.matryoshka import Matryoshka

# The classes as they are when this module is imported, which is before `patch` changes the library's modules.
_Ranking = multiple_negatives_ranking.MultipleNegativesRankingLoss
_CachedRanking = cached_multiple_negatives_ranking.CachedMultipleNegativesRankingLoss
_SymmetricRanking = multiple_negatives_symmetric_ranking.MultipleNegativesSymmetricRankingLoss
_CachedSymmetricRanking = (
    cached_multiple_negatives_symmetric_ranking.CachedMultipleNegativesSymmetricRankingLoss
)


class MultipleNegativesRankingLoss(Replacement, _Ranking):
    """The library's MultipleNegativesRankingLoss, with its arguments, values and gradients.

    Raises:
        ValueError: as the library's, or a `similarity_fct` that is neither `cos_sim` nor `dot_score`.

    Example:
        >>> from sentence_transformers import SentenceTransformer
        >>> from fastqt.integrations.sentence_transformers import MultipleNegativesRankingLoss
        >>> model = SentenceTransformer("bert", device="cpu", local_files_only=True)
        >>> columns = [model.preprocess(texts) for texts in (["the cat", "a mat"], ["cats", "mats"])]
        >>> MultipleNegativesRankingLoss(model)(columns, None).shape
        torch.Size([])
    """

    prefixes: Matryoshka | None = None  # which a MatryoshkaLoss around it sets for a step

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        scores_cosines(self.similarity_fct)

    def compute_loss_from_embeddings(self, embeddings: list[Tensor], labels: Tensor) -> Tensor:
        """The loss, a scalar, of queries, positives, and any number of hard negatives, (B, D) each.

        With `gather_across_devices` it is the mean over all devices' queries, where the library has that of
        the own ones; the gradients that DistributedDataParallel averages are the same. Labels are ignored.
        """
        if len(embeddings) < 2:
            raise ValueError(f"Expected at least 2 embeddings, got {len(embeddings)}")
        return ranking_loss(self, embeddings, self.prefixes)


class CachedMultipleNegativesRankingLoss(Replacement, _CachedRanking):
    """The library's CachedMultipleNegativesRankingLoss, whose loss is not computed in mini-batches.

    Raises:
        ValueError: as the library's, or a `similarity_fct` that is neither `cos_sim` nor `dot_score`.

    Example:
        >>> from sentence_transformers import SentenceTransformer
        >>> from fastqt.integrations.sentence_transformers import CachedMultipleNegativesRankingLoss
        >>> model = SentenceTransformer("bert", device="cpu", local_files_only=True)
        >>> columns = [model.preprocess(texts) for texts in (["the cat", "a mat"], ["cats", "mats"])]
        >>> CachedMultipleNegativesRankingLoss(model)(columns, None).shape
        torch.Size([])
    """

    prefixes: Matryoshka | None = None  # as of the loss that is not cached

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not isinstance(self.loss, MultipleNegativesRankingLoss):
            options = inspect.signature(_Ranking.__init__).parameters.keys() - {"self"}
            self.loss = MultipleNegativesRankingLoss(**{name: getattr(self, name) for name in options})

    def calculate_loss(
        self, reps: list[list[Tensor]], labels: Tensor | None = None, *, with_backward: bool = False
    ) -> Tensor:
        """The loss of the embeddings of each column's mini-batches; labels are ignored.

        `with_backward` also takes the gradients, and returns the loss without its graph.
        """
        loss = ranking_loss(self.loss, [torch.cat(column) for column in reps], self.prefixes)
        if with_backward:
            loss.backward()
            loss = loss.detach()
        return loss


with warnings.catch_warnings():  # The library warns when a class is derived from one that it has deprecated.
    warnings.simplefilter("ignore", DeprecationWarning)

    @deprecated(vars(_SymmetricRanking)["__deprecated__"])
    class MultipleNegativesSymmetricRankingLoss(_SymmetricRanking, MultipleNegativesRankingLoss):
        """The library's MultipleNegativesSymmetricRankingLoss, which it has deprecated.

        Example:
            >>> from sentence_transformers import SentenceTransformer
            >>> from fastqt.integrations.sentence_transformers import MultipleNegativesSymmetricRankingLoss
            >>> model = SentenceTransformer("bert", device="cpu", local_files_only=True)
            >>> columns = [model.preprocess(texts) for texts in (["the cat", "a mat"], ["cats", "mats"])]
            >>> MultipleNegativesSymmetricRankingLoss(model)(columns, None).shape
            torch.Size([])
        """

    @deprecated(vars(_CachedSymmetricRanking)["__deprecated__"])
    class CachedMultipleNegativesSymmetricRankingLoss(
        _CachedSymmetricRanking, CachedMultipleNegativesRankingLoss
    ):
        """The library's CachedMultipleNegativesSymmetricRankingLoss, which it has deprecated.

        Example:
            >>> from sentence_transformers import SentenceTransformer
            >>> from fastqt.integrations import sentence_transformers as ours
            >>> model = SentenceTransformer("bert", device="cpu", local_files_only=True)
            >>> columns = [model.preprocess(texts) for texts in (["the cat", "a mat"], ["cats", "mats"])]
            >>> ours.CachedMultipleNegativesSymmetricRankingLoss(model)(columns, None).shape
            torch.Size([])
        """


def ranking_loss(loss: Any, embeddings: list[Tensor], prefixes: Matryoshka | None) -> Tensor:
    """The loss of columns, or of their prefixes at norm 1, with the settings of a module of the library."""
    return multiple_negatives_ranking_loss(
        embeddings[0],
        embeddings[1:],
        scale=loss.scale,
        normalize=prefixes is not None or scores_cosines(loss.similarity_fct),
        directions=loss.directions,
        partition_mode=loss.partition_mode,
        hardness_mode=loss.hardness_mode,
        hardness_strength=0.0 if loss.hardness_mode is None else loss.hardness_strength,  # as the library
        matryoshka=prefixes,
        group=group_of(loss),
    )
