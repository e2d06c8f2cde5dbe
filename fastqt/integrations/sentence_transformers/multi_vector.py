"""The library's ranking losses of multi-vector (ColBERT) models, without the scores of all pairs of tokens.

Only the default score and its mean over a query's tokens are computed here, with any `chunk_elements`; with
another `similarity_fct`, such as XTR's, a loss is computed by the library.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

from sentence_transformers.base.losses.merged_forward import embed_columns_padded
from sentence_transformers.multi_vector_encoder.losses import (
    cached_multiple_negatives_ranking,
    multiple_negatives_ranking,
)
from sentence_transformers.multi_vector_encoder.scoring import colbert_scores, mean_colbert_scores
from sentence_transformers.util import cat_padded_token_embeddings
from torch import Tensor

from fastqt.integrations._gathering import group_of
from fastqt.integrations.sentence_transformers.replacement import Replacement
from fastqt.losses import maxsim_loss

# The classes as they are when this module is imported, which is before `patch` changes the library's modules.
_Ranking = multiple_negatives_ranking.MultiVectorMultipleNegativesRankingLoss
_CachedRanking = cached_multiple_negatives_ranking.CachedMultiVectorMultipleNegativesRankingLoss

# Whether scores are divided by the number of a query's tokens, by the function.
DIVIDES: dict[Any, bool] = {colbert_scores: False, mean_colbert_scores: True}


class MultiVectorMultipleNegativesRankingLoss(Replacement, _Ranking):
    """The library's MultiVectorMultipleNegativesRankingLoss, with its arguments, values and gradients.

    With `gather_across_devices` its value is the mean over all devices' queries, where the library has that
    of the own ones; the gradients that DistributedDataParallel averages are the same.

    Example:
        >>> from sentence_transformers import MultiVectorEncoder
        >>> from fastqt.integrations.sentence_transformers import MultiVectorMultipleNegativesRankingLoss
        >>> model = MultiVectorEncoder("bert", device="cpu", local_files_only=True)
        >>> columns = [model.preprocess(texts) for texts in (["the cat", "a mat"], ["cats", "mats"])]
        >>> MultiVectorMultipleNegativesRankingLoss(model)(columns).shape
        torch.Size([])
    """

    def forward(self, sentence_features: Iterable[dict[str, Tensor]], labels: Tensor | None = None) -> Tensor:
        """The loss, a scalar, of the columns of queries, documents, and any number of hard negatives."""
        columns = [dict(features) for features in sentence_features]
        divides = divides_scores(self.similarity_fct)
        if divides is None:
            of_library: Tensor = super().forward(columns, labels)
            return of_library

        output = self.model(columns[0], task=columns[0].get("task", "query"))
        queries, query_mask = output["token_embeddings"], output["attention_mask"].bool()
        documents, masks = embed_columns_padded(
            self.model, columns[1:], self.mini_batch_size, task_default="document"
        )
        return token_loss(self, divides, queries, query_mask, *cat_padded_token_embeddings(documents, masks))


class CachedMultiVectorMultipleNegativesRankingLoss(Replacement, _CachedRanking):
    """The library's CachedMultiVectorMultipleNegativesRankingLoss, whose scores need no mini-batches.

    Example:
        >>> from sentence_transformers import MultiVectorEncoder
        >>> from fastqt.integrations import sentence_transformers as ours
        >>> model = MultiVectorEncoder("bert", device="cpu", local_files_only=True)
        >>> columns = [model.preprocess(texts) for texts in (["the cat", "a mat"], ["cats", "mats"])]
        >>> ours.CachedMultiVectorMultipleNegativesRankingLoss(model)(columns).requires_grad
        True
    """

    def calculate_loss(
        self, reps: list[list[Tensor]], masks_chunks: list[list[Tensor]], *, with_backward: bool = False
    ) -> Tensor:
        """The loss of the tokens of each column's mini-batches.

        `with_backward` also takes the gradients, and returns the loss without its graph.
        """
        divides = divides_scores(self.similarity_fct)
        if divides is None:
            of_library: Tensor = super().calculate_loss(reps, masks_chunks, with_backward=with_backward)
            return of_library

        (queries, query_mask), *columns = (
            cat_padded_token_embeddings(*column) for column in zip(reps, masks_chunks, strict=True)
        )
        documents, masks = ([column[side] for column in columns] for side in (0, 1))
        loss = token_loss(self, divides, queries, query_mask, *cat_padded_token_embeddings(documents, masks))
        if with_backward:
            loss.backward()
            loss = loss.detach()
        return loss


def divides_scores(function: Any) -> bool | None:
    """Whether a `similarity_fct` divides by the number of tokens; None if it is not one of MaxSim."""
    options: dict[str, Any] = {}
    while isinstance(function, partial) and not function.args:
        options = {**function.keywords, **options}
        function = function.func
    if not options.keys() <= {"chunk_elements", "length_normalize"}:
        return None
    divides = DIVIDES.get(function) if getattr(function, "__hash__", None) else None
    return None if divides is None else bool(options.get("length_normalize", divides))


def token_loss(
    loss: Any,
    divides: bool,
    queries: Tensor,  # (B, Tq, D)
    query_mask: Tensor,  # (B, Tq)
    documents: Tensor,  # (C B, Td, D), of which the first B are the queries' own
    document_mask: Tensor,  # (C B, Td)
) -> Tensor:
    """The loss of embedded columns with the settings of a module of the library."""
    if divides:
        queries = queries / query_mask.sum(1).clamp(min=1)[:, None, None]
    if documents.dtype is not queries.dtype:
        documents = documents.to(queries.dtype)
    return maxsim_loss(
        queries,
        documents,
        query_mask=query_mask,
        document_mask=document_mask,
        scale=loss.scale,
        normalize=False,
        group=group_of(loss),
    )
