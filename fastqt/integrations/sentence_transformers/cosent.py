"""The library's two losses of ranked pairs, CoSENT and AnglE.

Version 6.2 of the library sorts the scores too; those before version 6 stored all their differences. Here the
loss also keeps its digits where all pairs are in the right order.
"""

from __future__ import annotations

from sentence_transformers.sentence_transformer.losses import angle, cosent
from torch import Tensor

from fastqt.integrations.sentence_transformers.replacement import Replacement
from fastqt.losses import lsep_loss

# The classes as they are when this module is imported, which is before `patch` changes the library's modules.
_CoSENT = cosent.CoSENTLoss
_AnglE = angle.AnglELoss


class CoSENTLoss(Replacement, _CoSENT):
    """The library's CoSENTLoss, with its arguments, values and gradients.

    Example:
        >>> import torch
        >>> from sentence_transformers import SentenceTransformer
        >>> from fastqt.integrations.sentence_transformers import CoSENTLoss
        >>> model = SentenceTransformer("bert", device="cpu", local_files_only=True)
        >>> columns = [model.preprocess(texts) for texts in (["the cat", "a mat"], ["cats", "mats"])]
        >>> CoSENTLoss(model)(columns, torch.tensor([0.9, 0.1])).shape
        torch.Size([])
    """

    def compute_loss_from_embeddings(self, embeddings: list[Tensor], labels: Tensor) -> Tensor:
        """The loss, a scalar, of two columns (B, D) and the labels of their pairs, B numbers of any shape."""
        scores: Tensor = self.similarity_fct(embeddings[0], embeddings[1])
        if not len(scores):
            of_no_pair: Tensor = super().compute_loss_from_embeddings(embeddings, labels)
            return of_no_pair
        return lsep_loss(scores, labels.flatten(), scale=self.scale)


class AnglELoss(_AnglE, CoSENTLoss):
    """The library's AnglELoss, with its arguments, values and gradients.

    Example:
        >>> import torch
        >>> from sentence_transformers import SentenceTransformer
        >>> from fastqt.integrations.sentence_transformers import AnglELoss
        >>> model = SentenceTransformer("bert", device="cpu", local_files_only=True)
        >>> columns = [model.preprocess(texts) for texts in (["the cat", "a mat"], ["cats", "mats"])]
        >>> AnglELoss(model)(columns, torch.tensor([0.9, 0.1])).shape
        torch.Size([])
    """
