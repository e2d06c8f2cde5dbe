"""Thresholds of similarities: above its row's, a candidate is taken for a false negative and leaves the loss.

They follow from the similarities of queries with their targets, which are computed apart: O(N D) per target a
row. Engines compare the scores that they have anyway with the thresholds, so that no product is taken twice.

Two sums of the same terms in other orders differ. So that an exact copy of a target is not above the target,
a threshold is higher by what rounding may add to the similarity of such a copy.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from fastqt.devices import accumulation_dtype
from fastqt.engines import ops
from fastqt.functional.call import Call
from fastqt.norms import LEAST_NORM
from fastqt.problem import loss_dtype
from fastqt.targets import NoTargets, TargetRows
from fastqt.torch_modes import input_dtype, is_traced, is_transformed, without_autocast

# Bytes of the embeddings of targets that are scored at a time. On a CPU they stay in the cache; elsewhere
# launches should be few.
BLOCK_BYTES = {"cpu": 2**19}
BLOCK_BYTES_ELSEWHERE = 2**26

# Beside those of a sum: of what it is multiplied by, of that product, and of the threshold.
MORE_ROUNDINGS = 8

MOST_KNOWN = 8  # targets in a cache, whose cells are kept; after so many all are forgotten
_known: dict[int, tuple[TargetRows, int, _Cells]] = {}


def with_thresholds(call: Call) -> Call:
    """The call with the thresholds of its rows, (N,) in the dtype of losses, in place of its margin.

    ValueError for a margin where any candidate may be a target.
    """
    if call.margin is None:
        return call if call.thresholds is None else _with(call, call.thresholds.detach())

    M = call.candidates.shape[0]
    targets = targets_of_margin(call, M)
    whole = is_traced(call.queries) or is_transformed()
    if not whole and _has_operator(call):
        cells = _cells_on_cpu(targets, M)
        of_cells = _similarities_of_cells(call, cells.row, cells.column)
        if cells.are_one_a_row:
            return _with_lowest(call, *of_cells)
        return _with_margin(call, targets, cells.row, of_cells)

    row, column = _cells(targets, M)
    room = BLOCK_BYTES.get(call.queries.device.type, BLOCK_BYTES_ELSEWHERE)
    step = room // (call.queries.shape[1] * call.queries.element_size())
    step = max(len(row) if whole else step, 1)
    similarities = [
        _similarities(call, call.queries.index_select(0, i), call.candidates.index_select(0, j))
        for i, j in zip(row.split(step), column.split(step), strict=True)
    ]
    return _with_margin(call, targets, row, _Similarities(*map(torch.cat, zip(*similarities, strict=True))))


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
            "exclude: want no Margin with smoothed targets or a matrix of them, where any candidate may be "
            "one; give indices or a sparse matrix"
        )
    return targets


def threshold_of(
    similarity: Tensor,  # of the row's target
    lengths: Tensor,  # the product of the norms of the two rows
    width: int,
    margin: float,
    strategy: str,
    *,
    of_cosines: bool = False,
) -> Tensor:
    """What candidates of a row are compared with.

    A sum of n products is off by n roundings of the product of the norms at most, in whichever order it is
    added up. In a cosine the squares of both norms are such sums, too, and count half.
    """
    dtype = torch.promote_types(similarity.dtype, torch.float32)
    roundings = (2 if of_cosines else 1) * (width + MORE_ROUNDINGS)
    slack = roundings * (0.505 * torch.finfo(dtype).eps * lengths + torch.finfo(dtype).tiny)
    return similarity + (margin if strategy == "absolute" else similarity.abs() * margin) + slack


def widened(thresholds: Tensor, scored_in: torch.dtype, *, rounds_rows: bool) -> Tensor:
    """Thresholds of scores that are rounded to 16 bits, or are those of rows at norm 1 that are."""
    rounding = torch.finfo(scored_in).eps / 2
    return thresholds + rounding * (2.02 if rounds_rows else 1.01 * thresholds.abs())


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


class _Similarities(NamedTuple):
    """Of rows with rows, in the dtype of losses."""

    products: Tensor  # (entries,), cosines where rows are normalised
    lengths: Tensor  # (entries,) the products of the norms that the rows then have, at most


def _similarities(call: Call, queries: Tensor, candidates: Tensor) -> _Similarities:
    """The similarities of rows with rows, as a matrix product reads them."""
    read_as, dtype = input_dtype(call.queries), accumulation_dtype(call.queries.device)
    with torch.no_grad(), without_autocast(call.queries):
        a, b = (x.detach().to(read_as).to(loss_dtype(x)) for x in (queries, candidates))
        products = (a * b).sum(1, dtype=dtype)
        norms = [torch.linalg.vector_norm(x, dim=1).to(dtype) for x in (a, b)]
        if call.normalize:
            for norm in norms:
                products = products / norm.clamp(min=LEAST_NORM)
        lengths = torch.ones_like(products) if call.normalize else norms[0] * norms[1]
        return _Similarities(products.to(a.dtype), lengths.to(a.dtype))


def _has_operator(call: Call) -> bool:
    """Whether the C++ extension has an operator for the similarities of these embeddings."""
    return (
        call.queries.device.type == "cpu"
        and ops.native_error is None
        and input_dtype(call.queries) in (torch.float32, torch.float64, torch.bfloat16)
    )


def _similarities_of_cells(call: Call, row: Tensor, column: Tensor) -> _Similarities:
    """The same as `_similarities` of the rows with these indices, which are not copied."""
    read_as = input_dtype(call.queries)
    rows = [x.detach().to(read_as) for x in (call.queries, call.candidates)]
    queries, candidates = (x if x.stride(1) == 1 else x.contiguous() for x in rows)
    products: Tensor = torch.ops.fastqt.row_similarities.default(
        queries, candidates, row, column, call.normalize, LEAST_NORM
    )
    if call.normalize:
        return _Similarities(products, torch.ones_like(products))
    a, b = (torch.linalg.vector_norm(x, dim=1, dtype=products.dtype) for x in (queries, candidates))
    return _Similarities(products, a[row] * b[column])


def _with_margin(call: Call, targets: TargetRows, row: Tensor, of_entries: _Similarities) -> Call:
    """The call with thresholds from the least similar target of each row; infinity where there is none."""
    no_target = targets.compressed()[2] == 0

    def of_rows(entries: Tensor, none: float, reduction: str) -> Tensor:
        rows = torch.full(call.queries.shape[:1], none, dtype=entries.dtype, device=row.device)
        return rows.scatter_reduce(0, row, entries.masked_fill(no_target, none), reduction)

    products, lengths = of_entries
    return _with_lowest(call, of_rows(products, torch.inf, "amin"), of_rows(lengths, 0.0, "amax"))


def _with_lowest(call: Call, lowest: Tensor, lengths: Tensor) -> Call:
    """The call with thresholds from the lowest similarity of each row with its targets."""
    assert call.margin is not None
    margin, strategy = call.margin.margin, call.margin.strategy
    width = call.queries.shape[1]
    thresholds = threshold_of(lowest, lengths, width, margin, strategy, of_cosines=call.normalize)
    if strategy == "relative":  # Infinity times a margin of 0 is NaN.
        thresholds = thresholds.masked_fill(lowest == torch.inf, torch.inf)
    return _with(call, thresholds)


def _with(call: Call, thresholds: Tensor) -> Call:
    if call.margin is not None and call.thresholds is not None:
        thresholds = torch.fmin(thresholds, call.thresholds.detach())
    thresholds = thresholds.to(loss_dtype(call.queries)).contiguous()
    return replace(call, thresholds=thresholds, margin=None)
