"""The library's two GISTEmbed losses, computed without their matrices of similarities.

The classes are subclasses of the library's: what they take, how they embed, retokenize and gather, what they
write to a model card and what they cite is theirs. Similarities and cross-entropy are replaced, as long as
nobody has replaced these in the library's own class.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
from sentence_transformers.sentence_transformer import losses as library
from torch import Tensor, nn

from fastqt.integrations.sentence_transformers.replacement import Replacement
from fastqt.losses.gist_embed import Texts, loss_of_own_rows
from fastqt.torch_modes import autocast_dtype

# What the library's modules gather with, which tests of it replace there.
plain: Any = import_module("sentence_transformers.sentence_transformer.losses.gist_embed")
cached: Any = import_module("sentence_transformers.sentence_transformer.losses.cached_gist_embed")


class GISTEmbedLoss(Replacement, library.GISTEmbedLoss):
    """The library's GISTEmbedLoss: same arguments, value and gradients, in the memory of the embeddings.

    With `gather_across_devices` a process's loss is that of its own anchors, as theirs is, with the positives
    and negatives of all processes and its own anchors as candidates. Arguments and errors are the library's.

    Example:
        >>> from sentence_transformers import SentenceTransformer
        >>> from fastqt.integrations.sentence_transformers import GISTEmbedLoss
        >>> model = SentenceTransformer("bert", device="cpu", local_files_only=True)
        >>> columns = [model.preprocess(texts) for texts in (["the cat", "a mat"], ["cats", "mats"])]
        >>> GISTEmbedLoss(model, guide=model)(columns, None).shape
        torch.Size([])
    """

    def forward(self, sentence_features: Iterable[dict[str, Tensor]], labels: Tensor) -> Tensor:
        """The loss, a scalar, of the tokenised texts of two or three columns; labels are ignored."""
        if not _is_as_made(self):
            replaced: Tensor = super().forward(sentence_features, labels)
            return replaced
        with self._recorded() as pairs:
            super().forward(sentence_features, labels)
        (anchors, positives), (guide_anchors, guide_positives), *others = pairs
        # Anchors among anchors, positives among positives, and last anchors among negatives: each of the
        # model, then of the guide.
        others = others[2 * (bool(self.contrast_anchors) + bool(self.contrast_positives)) :]
        columns = tuple(columns for _, columns in others)
        first = plain.get_rank() * len(anchors) if self.gather_across_devices else 0
        return _loss(
            self,
            Texts(anchors, positives, columns[0::2]),
            Texts(guide_anchors, guide_positives, columns[1::2]),
            first,
        )

    def sim_matrix(self, embed1: Tensor, embed2: Tensor) -> Tensor:
        """The cosines of rows with rows; while `forward` runs, a matrix of their shape that has no memory."""
        pairs: list[tuple[Tensor, Tensor]] | None = self.__dict__.get("_pairs")
        if pairs is None:
            cosines: Tensor = super().sim_matrix(embed1, embed2)
            return cosines
        pairs.append((embed1, embed2))
        return torch.empty(len(embed1), len(embed2), device="meta")

    @contextmanager
    def _recorded(self) -> Iterator[list[tuple[Tensor, Tensor]]]:
        """What similarities are asked of, while the library's forward runs without making them."""
        pairs: list[tuple[Tensor, Tensor]] = []
        # In front of the class's methods and of the submodules, which a module keeps elsewhere.
        stand_ins = {"_pairs": pairs, "cross_entropy_loss": lambda scores, labels: None}
        self.__dict__.update(stand_ins)
        try:
            yield pairs
        finally:
            for name in stand_ins:
                del self.__dict__[name]


class CachedGISTEmbedLoss(Replacement, library.CachedGISTEmbedLoss):
    """The library's CachedGISTEmbedLoss: same arguments, value and gradients.

    The loss takes all embeddings at once, in the memory that they have; mini-batches bound what the encoder
    needs. As in the library, there may be several columns of negatives. Arguments and errors are its own.

    Example:
        >>> from sentence_transformers import SentenceTransformer
        >>> from fastqt.integrations.sentence_transformers import CachedGISTEmbedLoss
        >>> model = SentenceTransformer("bert", device="cpu", local_files_only=True)
        >>> columns = [model.preprocess(texts) for texts in (["the cat", "a mat"], ["cats", "mats"])]
        >>> CachedGISTEmbedLoss(model, guide=model)(columns, None).shape
        torch.Size([])
    """

    def calculate_loss(
        self,
        reps: list[list[Tensor]],
        reps_guided: list[list[Tensor]],
        *,
        with_backward: bool = False,
    ) -> Tensor:
        """The loss, a scalar, of the embeddings of each column's mini-batches, and of the guide's of them.

        `with_backward` takes the gradients of `reps`, and returns a loss without a graph. ValueError for
        other columns in one than in the other.
        """
        if not _is_as_made(self):
            replaced: Tensor = super().calculate_loss(reps, reps_guided, with_backward=with_backward)
            return replaced
        if len(reps) != len(reps_guided):
            raise ValueError("reps and reps_guided must have the same length")
        first = cached.get_rank() * sum(map(len, reps[0])) if self.gather_across_devices else 0
        loss = _loss(self, self._texts(reps), self._texts(reps_guided), first)
        if not with_backward:
            return loss
        loss.backward()
        return loss.detach()

    def _texts(self, reps: list[list[Tensor]]) -> Texts:
        """The embeddings of all columns; those of candidates from all processes, if they are gathered."""
        anchors, *candidates = map(torch.cat, reps)
        if self.gather_across_devices:
            candidates = [cached.all_gather_with_grad(x) for x in candidates]
        return Texts(anchors, candidates[0], tuple(candidates[1:]))


def _is_as_made(loss: Any) -> bool:
    """Whether similarity and cross-entropy are those that the library makes; others need its matrices."""
    similarity, cross_entropy = loss.similarity_fct, loss.cross_entropy_loss
    return (
        type(similarity) is nn.CosineSimilarity
        and similarity.dim == -1
        and type(cross_entropy) is nn.CrossEntropyLoss
        and (cross_entropy.weight, cross_entropy.label_smoothing) == (None, 0.0)
        and cross_entropy.reduction == "mean"
    )


def _loss(loss: Any, texts: Texts, guides: Texts, first: int) -> Tensor:
    """The loss of a process's own anchors, whose positives are those from row `first` on."""
    if autocast_dtype(texts.anchors) is not None:  # Cosines and cross-entropies are not rounded to it.
        texts = Texts(
            texts.anchors.float(), texts.positives.float(), tuple(x.float() for x in texts.negatives)
        )

    if first:
        texts = texts._replace(positives=texts.positives.roll(-first, 0))
        guides = guides._replace(positives=guides.positives.roll(-first, 0))

    with torch.autocast(texts.anchors.device.type, enabled=False):
        names = ("margin", "margin_strategy", "contrast_anchors", "contrast_positives")
        options = {name: getattr(loss, name) for name in names}
        options |= {"scale": 1 / loss.temperature, "memory": "fast", "backend": None}
        return loss_of_own_rows(texts, guides, options, "mean")
