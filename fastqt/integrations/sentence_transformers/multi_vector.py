"""The library's ranking losses of multi-vector (ColBERT) models, without the scores of all pairs of tokens.

The default score, its mean over a query's tokens, and XTR's score are computed here, with any
`chunk_elements`. With another `similarity_fct` a loss is computed by the library, and so is one of XTR that
gathers across devices.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any, NamedTuple

from sentence_transformers.base.losses.merged_forward import embed_columns_padded
from sentence_transformers.multi_vector_encoder.losses import (
    cached_multiple_negatives_ranking,
    multiple_negatives_ranking,
)
from sentence_transformers.multi_vector_encoder.scoring import (
    XTRScores,
    colbert_scores,
    mean_colbert_scores,
    xtr_scores,
)
from sentence_transformers.util import cat_padded_token_embeddings
from torch import Tensor

from fastqt.integrations._gathering import group_of
from fastqt.integrations.sentence_transformers.replacement import Replacement
from fastqt.losses import maxsim_loss
from fastqt.losses.xtr import xtr_loss

# The classes as they are when this module is imported, which is before `patch` changes the library's modules.
_Ranking = multiple_negatives_ranking.MultiVectorMultipleNegativesRankingLoss
_CachedRanking = cached_multiple_negatives_ranking.CachedMultiVectorMultipleNegativesRankingLoss

# The functions of scores that are computed here, and the option of each.
OPTIONS: dict[Any, str] = {
    colbert_scores: "length_normalize",
    mean_colbert_scores: "length_normalize",
    xtr_scores: "top_k",
}


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
        scores = scores_of(self)
        if scores is None:
            of_library: Tensor = super().forward(columns, labels)
            return of_library

        output = self.model(columns[0], task=columns[0].get("task", "query"))
        queries, query_mask = output["token_embeddings"], output["attention_mask"].bool()
        documents, masks = embed_columns_padded(
            self.model, columns[1:], self.mini_batch_size, task_default="document"
        )
        return token_loss(self, scores, queries, query_mask, *cat_padded_token_embeddings(documents, masks))


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
        scores = scores_of(self)
        if scores is None:
            of_library: Tensor = super().calculate_loss(reps, masks_chunks, with_backward=with_backward)
            return of_library

        (queries, query_mask), *columns = (
            cat_padded_token_embeddings(*column) for column in zip(reps, masks_chunks, strict=True)
        )
        documents, masks = ([column[side] for column in columns] for side in (0, 1))
        loss = token_loss(self, scores, queries, query_mask, *cat_padded_token_embeddings(documents, masks))
        if with_backward:
            loss.backward()
            loss = loss.detach()
        return loss


class Scores(NamedTuple):
    """What a `similarity_fct` computes."""

    divides: bool = False  # MaxSim's score, by the number of the query's tokens
    top_k: int | None = None  # of XTR's score


def scores_of(loss: Any) -> Scores | None:
    """The scores of a loss of the library; None if the library has to compute them."""
    function: Any = loss.similarity_fct
    options: dict[str, Any] = {}
    while isinstance(function, partial) and not function.args:
        options = {**function.keywords, **options}
        function = function.func
    if type(function) is XTRScores:
        function, options = xtr_scores, {**function.get_config_dict(), **options}
    is_known = getattr(function, "__hash__", None) and function in OPTIONS
    if not is_known or not options.keys() <= {"chunk_elements", OPTIONS[function]}:
        return None

    if function is not xtr_scores:
        return Scores(bool(options.get("length_normalize", function is mean_colbert_scores)))
    top_k = options.get("top_k", 256)
    if loss.gather_across_devices or type(top_k) is not int or top_k < 1:
        return None
    return Scores(top_k=top_k)


def token_loss(
    loss: Any,
    scores: Scores,
    queries: Tensor,  # (B, Tq, D)
    query_mask: Tensor,  # (B, Tq)
    documents: Tensor,  # (C B, Td, D), of which the first B are the queries' own
    document_mask: Tensor,  # (C B, Td)
) -> Tensor:
    """The loss of embedded columns with the settings of a module of the library."""
    if scores.divides:
        queries = queries / query_mask.sum(1).clamp(min=1)[:, None, None]
    if documents.dtype is not queries.dtype:
        documents = documents.to(queries.dtype)
    if scores.top_k is not None:
        masks = query_mask.bool(), document_mask.bool()
        return xtr_loss(queries, documents, *masks, scale=loss.scale, top_k=scores.top_k)
    return maxsim_loss(
        queries,
        documents,
        query_mask=query_mask,
        document_mask=document_mask,
        scale=loss.scale,
        normalize=False,
        group=group_of(loss),
    )
