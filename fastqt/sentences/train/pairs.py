"""The training objective of pairs: rank each query's positive above the other documents of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from fastqt.errors import InputError
from fastqt.losses import distillation_loss, gist_embed_loss, multiple_negatives_ranking_loss
from fastqt.nn import GISTEmbedLoss, MultipleNegativesRankingLoss
from fastqt.options import Quantization
from fastqt.quantization import quantization_ranges, quantized
from fastqt.sentences.metrics import ranking_figures, view_figures
from fastqt.sentences.text import Batch, Sample
from fastqt.sentences.text.rows import ROWS_TOGETHER
from fastqt.sentences.text.vectors import map_rows
from fastqt.sentences.train.objectives import Measured, group_options
from fastqt.sentences.train.ranks import Share
from fastqt.sentences.train.views import OneEncoderObjective


class PairsObjective(OneEncoderObjective):
    """Rows of a query, its positive and any hard negatives, with a loss of ranking, a teacher, or both.

    Held-out rows have no teacher: their loss is that of ranking.
    """

    def _read_corpus(self) -> None:
        super()._read_corpus()
        files, rows = self.config.teacher or (), len(self.sentences)
        self.teacher = [_vectors_of_rows(path, rows) for path in files]
        for path, vectors in zip(files, self.teacher, strict=True):
            if vectors.shape[1] != self.teacher[0].shape[1]:
                widths = self.teacher[0].shape[1], vectors.shape[1]
                raise InputError(f"teacher: want vectors of width {widths[0]}, got {widths[1]} in {path}")

    def loss_of(
        self, embeddings: Sequence[Tensor], batch: Batch | Sample, share: Share | None
    ) -> tuple[Tensor, Measured]:
        """As of `Objective.loss_of`; the tensors are each column of this rank's rows, (B, D)."""
        queries, *documents = embeddings[0].chunk(self.width)
        teacher = self._of_teacher(batch, queries) if self.model.training else []
        group = group_options(share)
        loss = self._loss(queries, documents, teacher, group)
        for precision in self.config.quantize or ():
            loss = loss + self._loss(*_quantized(queries, documents, precision, group), teacher, group)
        return loss, (queries, *documents)

    def _loss(
        self, queries: Tensor, documents: list[Tensor], teacher: list[Tensor], group: dict[str, Any]
    ) -> Tensor:
        module, weight = self.model.loss, self.config.distillation_weight
        options = module.function_options() | group
        if isinstance(module, MultipleNegativesRankingLoss):
            positives, *negatives = documents
            alone = None
            if self.config.hard_negatives == "alone" and negatives:
                alone, documents = torch.stack(negatives, 1), [positives]
            loss = multiple_negatives_ranking_loss(queries, documents, row_negatives=alone, **options)
        elif not teacher:
            loss = multiple_negatives_ranking_loss(queries, documents, scale=module.scale, **group)
        elif isinstance(module, GISTEmbedLoss):
            loss = gist_embed_loss(
                queries,
                documents[0],
                documents[1:],
                guide_anchors=teacher[0],
                guide_positives=teacher[1],
                guide_negatives=teacher[2:],
                **options,
            )
        else:
            return _distilled(queries, documents, teacher, **options)

        if not (teacher and weight):
            return loss
        scales = {"scale": module.scale, "teacher_scale": self.config.teacher_scale}
        return loss + weight * _distilled(queries, documents, teacher, **scales, **group)

    def _of_teacher(self, batch: Batch | Sample, queries: Tensor) -> list[Tensor]:
        """The teacher's vectors (B, D') of each column of a batch of the corpus."""
        assert isinstance(batch, Sample)  # for mypy: held-out rows do not come here
        dtype, rows = torch.promote_types(queries.dtype, torch.float32), batch.rows.numpy()
        columns = (vectors[rows].astype(np.float64) for vectors in self.teacher)
        return [torch.from_numpy(column).to(self.device, dtype) for column in columns]

    def measure(self, measured: Measured) -> dict[str, float]:
        queries, positives, *negatives = measured
        nobody = torch.full((len(queries),), -1, device=queries.device)  # nothing is mixed
        figures = view_figures(queries, positives, mix=0.0, partners=nobody, negatives=negatives)
        return ranking_figures(queries, [positives, *negatives]) | figures


def _quantized(
    queries: Tensor, documents: Sequence[Tensor], precision: Quantization, group: dict[str, Any]
) -> tuple[Tensor, list[Tensor]]:
    """Embeddings as they are where an index of norm 1 is quantised, by the ranges of all documents."""
    queries, *documents = (F.normalize(x, dim=1) for x in (queries, *documents))
    ranges = quantization_ranges(torch.cat(documents), **group) if precision == "int8" else None
    query, *others = (quantized(x, precision, ranges) for x in (queries, *documents))
    return query, others


def _distilled(
    queries: Tensor, documents: Sequence[Tensor], teacher: Sequence[Tensor], **options: Any
) -> Tensor:
    """The loss of distillation of queries against all documents; the teacher's vectors are not of 16 bits."""
    dtype, (first, *others) = teacher[0].dtype, teacher
    candidates = torch.cat([*documents]).to(dtype)
    return distillation_loss(queries.to(dtype), candidates, first, torch.cat(others), **options)


def _vectors_of_rows(path: str, rows: int) -> NDArray[Any]:
    """Maps an .npy file that has a vector for each row of the corpus."""
    vectors = map_rows(path)
    if len(vectors) != rows:
        raise InputError(
            f"teacher: want a vector for each of the {rows:,} rows of the corpus, got {len(vectors):,} in "
            f"{path}"
        )

    for begin in range(0, rows, ROWS_TOGETHER):
        finite = np.isfinite(vectors[begin : begin + ROWS_TOGETHER]).all(axis=1)
        if not finite.all():
            row = begin + int(finite.argmin()) + 1
            raise InputError(f"teacher: want finite numbers, got NaN or infinity in row {row:,} of {path}")
    return vectors
