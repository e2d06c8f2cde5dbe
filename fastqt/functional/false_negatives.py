"""Thresholds of similarities: above its row's, a candidate is taken for a false negative and leaves the loss.

They follow from the similarities of queries with their targets, which are computed apart: O(N D) per target a
row. Engines compare the scores that they have anyway with the thresholds, so that no product is taken twice.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from fastqt.autograd.transformed import is_transformed
from fastqt.engines import ops
from fastqt.functional.call import Call
from fastqt.norms import LEAST_NORM
from fastqt.problem import loss_dtype
from fastqt.targets import NoTargets, TargetRows
from fastqt.torch_modes import input_dtype, is_traced, without_autocast

# Bytes of the embeddings of targets that are scored at a time. On a CPU they stay in the cache; elsewhere
# launches should be few.
BLOCK_BYTES = {"cpu": 2**19}
BLOCK_BYTES_ELSEWHERE = 2**26

MOST_KNOWN = 8  # targets in a cache, whose cells are kept; after so many all are forgotten
_known: dict[int, tuple[TargetRows, int, _Cells]] = {}


def with_thresholds(call: Call) -> Call:
    """The call with the thresholds of its rows, (N,) in the dtype of losses, in place of its margin.

    ValueError for a margin where any candidate may be a target.
    """
    if call.thresholds is not None:
        return _with(call, call.thresholds.detach())
    if call.false_negative_margin is None:
        return call

    M = call.candidates.shape[0]
    targets = targets_of_margin(call, M)
    whole = is_traced(call.queries) or is_transformed()
    if not whole and _has_operator(call):
        cells = _cells_on_cpu(targets, M)
        of_cells = _similarities_of_cells(call, cells.row, cells.column)
        if cells.are_one_a_row:
            return _with_lowest(call, of_cells)
        return _with_margin(call, targets, cells.row, of_cells)

    row, column = _cells(targets, M)
    room = BLOCK_BYTES.get(call.queries.device.type, BLOCK_BYTES_ELSEWHERE)
    step = room // (call.queries.shape[1] * call.queries.element_size())
    step = max(len(row) if whole else step, 1)
    similarities = [
        _similarities(call, call.queries.index_select(0, i), call.candidates.index_select(0, j))
        for i, j in zip(row.split(step), column.split(step), strict=True)
    ]
    return _with_margin(call, targets, row, torch.cat(similarities))


def with_thresholds_from(call: Call, targets: TargetRows, rows: Tensor) -> Call:
    """The same of a rank from `targets_of_margin` and the embeddings of its targets (entries, D)."""
    row, _ = _cells(targets, 1)
    return _with_margin(call, targets, row, _similarities(call, call.queries.index_select(0, row), rows))


def targets_of_margin(call: Call, M: int) -> TargetRows:
    """The targets of a call with a margin and M candidates in all; a rank may have no queries.

    ValueError where any candidate may be one.
    """
    N, device = call.queries.shape[0], call.queries.device
    if not N:
        return NoTargets().rows(N, M, device)
    call.targets.check(N, M, call.diagonal)
    targets = call.targets.rows(N, M, device)
    if targets.dense is not None or targets.background is not None:
        raise ValueError(
            "false_negative_margin: want None with smoothed targets or a matrix of them, where any candidate "
            "may be one; give indices or a sparse matrix"
        )
    return targets


def threshold_of(similarity: Tensor, margin: float, strategy: str) -> Tensor:
    """What candidates of a row are compared with, from the similarity of the row's target."""
    return similarity + (margin if strategy == "absolute" else similarity.abs() * margin)


def _cells(targets: TargetRows, M: int) -> tuple[Tensor, Tensor]:
    """The row and the column of each entry; an engine reports a column that there is not."""
    starts, columns, _ = targets.compressed()
    return torch.repeat_interleave(starts.diff(), output_size=len(columns)), columns.clamp(0, M - 1)


class _Cells(NamedTuple):
    """The cells of targets on a CPU."""

    row: Tensor  # of each entry, as the next one
    column: Tensor
    are_one_a_row: bool  # and have a weight


def _cells_on_cpu(targets: TargetRows, M: int) -> _Cells:
    """The cells of some targets over M candidates; those of targets in a cache are found once."""
    known = _known.get(id(targets))
    if known is not None and known[0] is targets and known[1] == M:
        return known[2]

    starts, columns, weights = targets.compressed()
    row, column = _cells(targets, M)
    rows = len(starts) - 1
    one = len(columns) == rows and bool((starts.diff() == 1).all()) and bool((weights != 0).all())
    cells = _Cells(row.contiguous(), column.contiguous(), one)
    if targets.cached:
        if len(_known) >= MOST_KNOWN:
            _known.clear()
        _known[id(targets)] = targets, M, cells
    return cells


def _similarities(call: Call, queries: Tensor, candidates: Tensor) -> Tensor:
    """The similarities of rows with rows, as a matrix product reads them, in the dtype of losses."""
    read_as = input_dtype(call.queries)
    with torch.no_grad(), without_autocast(call.queries):
        a, b = (x.detach().to(read_as).to(loss_dtype(x)) for x in (queries, candidates))
        products = (a * b).sum(1)
        if call.normalize:
            for x in (a, b):
                products = products / torch.linalg.vector_norm(x, dim=1).clamp(min=LEAST_NORM)
        return products


def _has_operator(call: Call) -> bool:
    """Whether the C++ extension has an operator for the similarities of these embeddings."""
    return (
        call.queries.device.type == "cpu"
        and ops.native_error is None
        and input_dtype(call.queries) in (torch.float32, torch.float64, torch.bfloat16)
    )


def _similarities_of_cells(call: Call, row: Tensor, column: Tensor) -> Tensor:
    """The same as `_similarities` of the rows with these indices, which are not copied."""
    read_as = input_dtype(call.queries)
    rows = [x.detach().to(read_as) for x in (call.queries, call.candidates)]
    queries, candidates = (x if x.stride(1) == 1 else x.contiguous() for x in rows)
    of_cells: Tensor = torch.ops.fastqt.row_similarities.default(
        queries, candidates, row, column, call.normalize, LEAST_NORM
    )
    return of_cells


def _with_margin(call: Call, targets: TargetRows, row: Tensor, similarities: Tensor) -> Call:
    """The call with thresholds from the least similar target of each row; infinity where there is none."""
    of_targets = similarities.masked_fill(targets.compressed()[2] == 0, torch.inf)
    lowest = torch.full(call.queries.shape[:1], torch.inf, dtype=of_targets.dtype, device=row.device)
    return _with_lowest(call, lowest.scatter_reduce(0, row, of_targets, "amin"))


def _with_lowest(call: Call, lowest: Tensor) -> Call:
    """The call with thresholds from the lowest similarity of each row with its targets."""
    margin, strategy = call.false_negative_margin, call.false_negative_margin_strategy
    assert margin is not None
    thresholds = threshold_of(lowest, margin, strategy)
    if strategy == "relative":  # Infinity times a margin of 0 is NaN.
        thresholds = thresholds.masked_fill(lowest == torch.inf, torch.inf)
    return _with(call, thresholds)


def _with(call: Call, thresholds: Tensor) -> Call:
    thresholds = thresholds.to(loss_dtype(call.queries)).contiguous()
    return replace(call, thresholds=thresholds, false_negative_margin=None)
