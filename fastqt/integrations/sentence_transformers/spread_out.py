"""The library's GlobalOrthogonalRegularizationLoss without its matrix of similarities."""

from __future__ import annotations

from typing import Any

from sentence_transformers.sentence_transformer.losses import global_orthogonal_regularization
from torch import Tensor

from fastqt.integrations.sentence_transformers.replacement import Replacement
from fastqt.integrations.sentence_transformers.similarity import scores_cosines
from fastqt.losses import spread_out_loss

# The class as it is when this module is imported, which is before `patch` changes the library's modules.
_Regularization = global_orthogonal_regularization.GlobalOrthogonalRegularizationLoss


class GlobalOrthogonalRegularizationLoss(Replacement, _Regularization):
    """The library's GlobalOrthogonalRegularizationLoss, with its arguments, values and gradients.

    Raises:
        ValueError: as the library's, or a `similarity_fct` that is neither `cos_sim` nor `dot_score`.

    Example:
        >>> from sentence_transformers import SentenceTransformer
        >>> from fastqt.integrations.sentence_transformers import GlobalOrthogonalRegularizationLoss
        >>> model = SentenceTransformer("bert", device="cpu", local_files_only=True)
        >>> columns = [model.preprocess(texts) for texts in (["the cat", "a mat"], ["cats", "mats"])]
        >>> sorted(GlobalOrthogonalRegularizationLoss(model)(columns))
        ['gor_mean', 'gor_second_moment']
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        scores_cosines(self.similarity_fct)

    def compute_gor(self, embeddings: Tensor) -> tuple[Tensor, Tensor]:
        """The mean term and the term of squares, 0-d each without their weights, of a column (B, D).

        A term whose weight is None or 0, which the library does not return either, is not computed: it is 0.
        """
        normalize = scores_cosines(self.similarity_fct)
        mean = second_moment = embeddings.new_zeros(())
        if self.mean_weight:
            mean = spread_out_loss(embeddings, second_moment_weight=0.0, normalize=normalize)
        if self.second_moment_weight:
            second_moment = spread_out_loss(embeddings, mean_weight=0.0, normalize=normalize)
        return mean, second_moment
