"""The loss and its gradients on a CPU, tile by tile of the score matrix.

The walk itself is C++, in csrc/cpu/walk.h and contrastive.cpp. `forward_with_gradients` makes all three
matrix products on a chunk of whole rows while its scores are at hand, 6 N M D operations in all.
`forward` only reduces scores to a log-sum-exp a row, and `backward` computes them once more from
there, in tiles of a fixed size: 8 N M D, or 6 of the first rows, whose scores are kept in between. A
sigmoid's gradients take three products in any tiles.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastqt.engines import ops, own_products
from fastqt.fields import getter, places_of
from fastqt.problem import (
    DIAGONALS,
    LINKS,
    ClipProblem,
    Gradients,
    Inputs,
    Needs,
    Problem,
    Rows,
    check_scale_of_thresholds,
    finite_scale,
    room_of,
    target_error,
)
from fastqt.steps import even_step

CHUNK_BYTES = 48 * 2**20  # of whole rows of scores: the more rows, the nearer the products come to full speed
# The same of scores in bfloat16, where products are fastqt's own, and as fast with fewer rows: the scores of
# a chunk stay in the cache, and their memory in the process.
BFLOAT16_BYTES = 16 * 2**20
LOW_BYTES = 16 * 2**20  # the same with memory="low"
KEPT_BYTES = 32 * 2**20  # of scores that are kept from the forward to the backward pass
MIN_CHUNK_ROWS = 64
TILE_ROWS, TILE_COLUMNS = 1024, 4096
TILE_BYTES = 16 * 2**20  # of scores whose products have read them before they leave the cache


def gradients_in_forward(p: Problem) -> bool:
    """Whether a scalar loss takes its gradients in the forward pass.

    Where the memory does not hold enough whole rows, a softmax first reduces its scores in tiles and
    computes them once more for the gradients, which is then as well done in the backward pass.
    """
    if p.memory == "fast" or p.link == "sigmoid":
        return True
    return _chunk_rows(p) >= min(len(p.queries), MIN_CHUNK_ROWS)


def forward(p: Problem) -> Rows:
    """The loss of each row."""
    return _forward(p, None)


def forward_for_backward(p: Problem) -> Rows:
    """The same; the scores of the first rows are saved as well."""
    return _forward(p, kept_scores(p, _columns_of(p), TILE_ROWS))


def _forward(p: Problem, scores: Tensor | None) -> Rows:
    *rows, status, row, column = torch.ops.fastqt.contrastive_loss_rows.default(
        *problem_arguments(p), TILE_ROWS, TILE_COLUMNS, scores
    )
    check_targets(p, status, row, column)
    logsumexp, mass, loss = rows
    return Rows(loss, (logsumexp, mass) if scores is None else (logsumexp, mass, scores))


def forward_with_gradients(p: Problem, row_weight: float, needs: Needs) -> tuple[Tensor, Gradients]:
    """row_weight * sum_i loss_i, and its gradients."""
    total: Tensor
    total, gradients, status, row, column = torch.ops.fastqt.contrastive_loss_with_gradients.default(
        *problem_arguments(p), *_gradient_tile(p), row_weight, [*map(bool, needs)]
    )
    check_targets(p, status, row, column)
    return total, gradients_of(gradients, needs)


def backward_of_columns(
    p: Problem, logsumexp: Tensor, mass: Tensor, row_weights: Tensor, needs: Needs
) -> Gradients:
    """The part of the gradients of longer rows that some of their columns have."""
    return backward(p, (logsumexp, mass), row_weights, needs)


def backward(p: Problem, saved: tuple[Tensor, ...], row_weights: Tensor, needs: Needs) -> Gradients:
    """The gradients of sum_i row_weights_i loss_i, from what `forward` found."""
    logsumexp, mass, *scores = saved
    gradients, status, row, column = torch.ops.fastqt.contrastive_loss_backward.default(
        *problem_arguments(p),
        TILE_ROWS,
        TILE_COLUMNS,
        row_weights,
        logsumexp,
        mass,
        *(scores or (None,)),
        [*map(bool, needs)],
    )
    check_targets(p, status, row, column)
    return gradients_of(gradients, needs)


def _gradient_tile(p: Problem) -> tuple[int, int | None]:
    """Rows and columns of the tiles on which loss and gradients are found at once; None: whole rows."""
    if p.link == "sigmoid" and p.memory == "low":
        return TILE_ROWS, TILE_COLUMNS
    N = p.queries.shape[0]
    if p.link != "sigmoid":
        return even_step(N, max(min(_chunk_rows(p), _rows_in_cache(p)), MIN_CHUNK_ROWS)), None
    rows = even_step(N, TILE_ROWS)
    return rows, even_step(width_of(p), TILE_BYTES // p.queries.element_size() // rows)


def _chunk_rows(p: Problem) -> int:
    """How many whole rows of scores fit the memory of a chunk."""
    room = min(room_of(p.memory, CHUNK_BYTES, LOW_BYTES), CHUNK_BYTES)
    cells = room // p.queries.element_size()
    return cells // _columns_of(p)


def _columns_of(p: Problem) -> int:
    """How many scores a row has."""
    return width_of(p) + (p.row_negatives is not None)


def kept_scores(p: Problem | ClipProblem, columns: int, tile_rows: int) -> Tensor | None:
    """Where the scores of the first rows are kept, so that the backward pass takes two products, not three.

    There are all rows or those of whole tiles; None where the memory does not hold one tile's.
    """
    room = room_of(p.memory, CHUNK_BYTES, LOW_BYTES) - LOW_BYTES  # beside a tile
    rows = max(min(room, KEPT_BYTES), 0) // (columns * p.queries.element_size())
    if rows >= len(p.queries):
        return p.queries.new_empty(len(p.queries), columns)
    rows -= rows % tile_rows
    return p.queries.new_empty(rows, columns) if rows else None


def _rows_in_cache(p: Problem) -> int:
    """How many rows of a chunk pay, where the memory has room for more."""
    if p.queries.dtype is not torch.bfloat16 or not own_products.levels()[0]:
        return len(p.queries)
    return BFLOAT16_BYTES // p.queries.element_size() // width_of(p)


def width_of(p: Problem) -> int:
    """How many candidates and negatives there are."""
    return p.candidates.shape[0] + (0 if p.negatives is None else p.negatives.shape[0])


def problem_arguments(p: Problem) -> list[Any]:
    """The arguments that the three operators have in common, in their order."""
    check_scale_of_thresholds(p)
    arguments = [*_read(p)]
    arguments[_SCALE] = finite_scale(p.scale)
    arguments[_LINK] = LINKS.index(p.link)
    arguments[_DIAGONAL] = DIAGONALS.index(p.diagonal)
    return arguments


if ops.native_error is None:
    # The operators' arguments have the names of a problem's fields. Three of them are numbers there.
    _place_of = {place.name: place for place in places_of(Problem)}
    _read = getter([_place_of[name] for name in ops.PROBLEM_ARGUMENTS])
    _SCALE, _LINK, _DIAGONAL = map(ops.PROBLEM_ARGUMENTS.index, ("scale", "link", "diagonal"))


def check_targets(p: Problem, status: int, row: int, column: int) -> None:
    """Raises for the target that an operator has reported, if any."""
    if status:
        raise target_error(status, row, column, p)


def gradients_of(found: list[Tensor], needs: Needs) -> Gradients:
    """The gradients that an operator has returned: those that are needed, in the order of `Needs`."""
    each = iter(found)
    return Inputs(*[next(each) if need else None for need in needs])
