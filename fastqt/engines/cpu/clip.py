"""CLIP's loss on a CPU: one walk for the logsumexp of rows and columns, one for the gradients of both.

The walks are C++, in csrc/cpu/clip.cpp: 6 N² D operations where the memory keeps all scores from the first
walk to the second, and up to 8 where it keeps less. Of a rectangle of the scores, `sums` is the first walk
and `gradients_from` the second: 8 N M D, or 6 of the first rows, whose scores are kept in between.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastqt.engines.cpu import contrastive
from fastqt.engines.reference import clip as reference_clip
from fastqt.problem import (
    ClipProblem,
    ClipSide,
    ClipSums,
    Gradients,
    Inputs,
    Needs,
    Rows,
    finite_scale,
    loss_dtype,
    room_of,
)
from fastqt.steps import even_step


def gradients_in_forward(p: ClipProblem) -> bool:
    """Whether a scalar loss takes its gradients in the forward pass."""
    return True


def forward(p: ClipProblem) -> Rows:
    """The loss of each pair; saved are its score and the logsumexps of the others, (3, N) float64."""
    found = p.queries.new_empty(4, len(p.queries), dtype=torch.float64)
    _walk(p, found[:3], found[3], None, Needs(), known=False)
    return Rows(found[3], (found[:3],))


def forward_with_gradients(p: ClipProblem, row_weight: float, needs: Needs) -> tuple[Tensor, Gradients]:
    """row_weight * sum_i loss_i, and its gradients."""
    found = p.queries.new_empty(5, p.queries.shape[0], dtype=torch.float64)
    loss, weights = found[3], found[4].fill_(row_weight)
    gradients = _walk(p, found[:3], loss, weights, needs, known=False)
    return torch.dot(weights, loss).to(loss_dtype(p.queries)), gradients


def backward(p: ClipProblem, saved: tuple[Tensor, ...], row_weights: Tensor, needs: Needs) -> Gradients:
    """The gradients of sum_i row_weights_i loss_i, from what `forward` found."""
    (sums,) = saved
    return _walk(p, sums, torch.empty_like(sums[0]), row_weights, needs, known=True)


def sums(p: ClipProblem) -> ClipSums:
    """The score of each pair of a rectangle, and the logsumexps of all other cells."""
    if not p.has_cells:
        return reference_clip.sums(p)
    (N, _), M = p.queries.shape, p.candidates.shape[0]
    pairs = N if p.pairs is None else p.pairs
    K = len(p.multiples)
    positive, *others = (
        p.queries.new_empty(size, dtype=torch.float64) for size in ((pairs,), (K, N), (K, M))
    )
    _, _, _, _, tile_rows, _ = rectangle = _rectangle(p)
    p.kept = contrastive.kept_scores(p, M, tile_rows) if p.keeps else None
    torch.ops.fastqt.clip_sums_.default(*rectangle, positive, *others, p.kept, p.multiples)
    return ClipSums(positive, *(x.squeeze(0) for x in others))


def gradients_from(
    p: ClipProblem, rows: ClipSide, columns: ClipSide, pairs: Tensor, needs: Needs
) -> Gradients:
    """The gradients of a rectangle, of which dL/dS is `pairs` at the pairs and the sides' elsewhere."""
    if not p.has_cells:
        return reference_clip.gradients_from(p, rows, columns, pairs, needs)
    gradients = _empty_gradients(p, needs)
    torch.ops.fastqt.clip_gradients_.default(
        *_rectangle(p),
        *(x.view(len(p.multiples), -1) for x in (*rows, *columns)),
        pairs,
        p.kept,
        p.multiples,
        gradients.queries,
        gradients.candidates,
        gradients.scale,
    )
    return gradients


def _rectangle(p: ClipProblem) -> tuple[Tensor, Tensor, float, bool, int, int]:
    """The arguments that the operators of a rectangle have in common."""
    rows, columns, _ = _tiles(p)
    return p.queries, p.candidates, finite_scale(p.scale), p.normalize, rows, columns


def _walk(
    p: ClipProblem,
    sums: Tensor,  # (3, N) float64: csrc/cpu/clip_tile.h's PairSums, found unless known
    loss: Tensor,  # (N,) float64, found
    weights: Tensor | None,  # (N,) float64
    needs: Needs,
    *,
    known: bool,
) -> Gradients:
    gradients = _empty_gradients(p, needs)
    torch.ops.fastqt.clip_walk_.default(
        p.queries,
        p.candidates,
        finite_scale(p.scale),
        p.normalize,
        *_tiles(p),
        known,
        sums,
        loss,
        weights,
        gradients.queries,
        gradients.candidates,
        gradients.scale,
    )
    return gradients


def _empty_gradients(p: ClipProblem, needs: Needs) -> Gradients:
    return Inputs(
        queries=p.queries.new_empty(p.queries.shape) if needs.queries else None,
        candidates=p.candidates.new_empty(p.candidates.shape) if needs.candidates else None,
        scale=p.queries.new_empty((), dtype=torch.float64) if needs.scale else None,
    )


def _tiles(p: ClipProblem) -> tuple[int, int, int]:
    """Rows and columns of the scores that are computed at once, and how many such tiles are held."""
    N, M, size = len(p.queries), len(p.candidates), p.queries.element_size()
    room = room_of(p.memory, contrastive.CHUNK_BYTES, contrastive.LOW_BYTES)
    if N * M * size <= min(room, contrastive.CHUNK_BYTES):
        return N, M, 1
    rows, columns = even_step(N, contrastive.TILE_ROWS), even_step(M, contrastive.TILE_COLUMNS)
    return rows, columns, max(1, room // (rows * columns * size))
