"""A loss from whose rows cells leave that no engine finds itself, computed some rows at a time.

These are cells that a guide finds similar, and those that several ids or ids of negatives exclude. The mask
of a few rows is made, and an engine computes these rows as it does those of any problem with a mask. Neither
a guide's scores nor the mask of all rows are ever in memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastqt.devices import accumulation_dtype
from fastqt.engines import Computation
from fastqt.engines.guide_rows import guide_rows
from fastqt.engines.reference import contrastive as reference
from fastqt.exclusions import Guide, OfIds
from fastqt.problem import (
    LEAST_MEMORY,
    Gradients,
    Inputs,
    Needs,
    Problem,
    Rows,
    check_scale_of_thresholds,
    finite_scale,
    loss_dtype,
    reduce,
    room_of,
)
from fastqt.steps import even_step
from fastqt.targets import TargetRows

# Bytes of which the guide takes a quarter, by the kind of the device: about as many as the engines take.
ROOM = {"cpu": (48 * 2**20, 16 * 2**20), "cuda": (512 * 2**20, 40 * 2**20)}
MIN_ROWS = 64
MIN_COLUMNS = 64
SAVED = "logsumexp", "mass"  # what engines save of a problem's rows, unless they keep scores too


@dataclass(kw_only=True)
class FilteredProblem(Problem):
    """A `Problem` with filters; engines are given problems without, of some of the rows, with a mask."""

    guide_queries: Tensor | None  # (N, E)
    guide_candidates: Tensor | None  # (M, E)
    guide_negatives: Tensor | None  # (K, E)
    guide_thresholds: Tensor | None  # (N,) float32
    guide_normalize: bool
    ids: tuple[OfIds, ...]
    in_plain_torch: bool = False  # the guide's scores too

    def unfiltered(self) -> Problem:
        """The same without the filters."""
        return Problem(**{field.name: getattr(self, field.name) for field in fields(Problem)})


def filtered_problem(p: Problem, guide: Guide | None, ids: tuple[OfIds, ...]) -> FilteredProblem:
    """A checked problem with checked filters."""
    return FilteredProblem(
        **{field.name: getattr(p, field.name) for field in fields(Problem)},
        guide_queries=None if guide is None else guide.queries,
        guide_candidates=None if guide is None else guide.candidates,
        guide_negatives=None if guide is None else guide.negatives,
        guide_thresholds=None if guide is None else guide.row_thresholds(),
        guide_normalize=guide is not None and guide.normalize,
        # Copies, since the backward pass compares them again.
        ids=tuple(x.with_ids(torch.clone) for x in ids),
    )


def reference_loss(p: FilteredProblem, reduction: str) -> Tensor:
    """The reduced loss in plain PyTorch, with the whole mask."""
    finite_scale(p.scale)
    check_scale_of_thresholds(p)
    reference.check_targets(p)
    p = replace(p, in_plain_torch=True)
    rows = [reference.row_losses(chunk) for _, chunk in _chunks(p, len(p.queries))]
    return reduce(torch.cat(rows), reduction)


class Filtered:
    """What computes a `FilteredProblem`; see `fastqt.engines` for the functions.

    Args:
        engine: what computes the chunks, each of them a `Problem` whose candidates are also the negatives.
    """

    def __init__(self, engine: Computation) -> None:
        self.engine = engine

    def gradients_in_forward(self, p: FilteredProblem) -> bool:
        """Whether a scalar loss takes its gradients in the forward pass."""
        return self.engine.gradients_in_forward(p)

    def forward(self, p: FilteredProblem) -> Rows:
        """The loss of each row."""
        with _NamingRows(p):
            found = [self.engine.forward(chunk) for _, chunk in _chunks(p, _height(p))]
        saved = zip(*(rows.saved for rows in found), strict=True)
        return Rows(torch.cat([rows.loss for rows in found]), tuple(torch.cat(parts) for parts in saved))

    def forward_for_backward(self, p: FilteredProblem) -> Rows:
        """The same. Where all rows are one chunk, of which the engine keeps scores, so is the mask."""
        keeping = getattr(self.engine, "forward_for_backward", None)
        if keeping is None or _height(p) < len(p.queries) or len(p.candidates) < len(p.queries):
            return self.forward(p)
        with _NamingRows(p):
            ((_, chunk),) = _chunks(p, len(p.queries))
            rows: Rows = keeping(chunk)
        if len(rows.saved) == len(SAVED) or chunk.mask is None:
            return rows
        return Rows(rows.loss, (*rows.saved, chunk.mask))

    def forward_with_gradients(
        self, p: FilteredProblem, row_weight: float, needs: Needs
    ) -> tuple[Tensor, Gradients]:
        """row_weight * sum_i loss_i, and its gradients."""
        total, sums = p.queries.new_zeros((), dtype=accumulation_dtype(p.queries.device)), _Sums(p, needs)
        with _NamingRows(p):
            for first, chunk in _chunks(p, _height(p)):
                part, found = self.engine.forward_with_gradients(chunk, row_weight, sums.needs)
                total += part
                sums.add(first, chunk, Inputs(*found))
        return total.to(loss_dtype(p.queries)), sums.gradients()

    def backward(
        self, p: FilteredProblem, saved: tuple[Tensor, ...], row_weights: Tensor, needs: Needs
    ) -> Gradients:
        """The gradients of sum_i row_weights_i loss_i, from what `forward` found."""
        sums = _Sums(p, needs)
        if len(saved) > len(SAVED):
            chunk = _whole(p, saved[-1])
            sums.add(0, chunk, Inputs(*self.engine.backward(chunk, saved[:-1], row_weights, sums.needs)))
            return sums.gradients()

        for first, chunk in _chunks(p, _height(p)):
            rows = slice(first, first + len(chunk.queries))
            known = tuple(x[rows] for x in saved)
            found = self.engine.backward(chunk, known, row_weights[rows], sums.needs)
            sums.add(first, chunk, Inputs(*found))
        return sums.gradients()


class _NamingRows:
    """A context in which the error for a target names its row of the whole problem.

    A wrong scale comes first, as it does in problems without a guide.
    """

    def __init__(self, p: FilteredProblem) -> None:
        self.p = p

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is ValueError:
            check_scale_of_thresholds(self.p)
            reference.check_targets(self.p)


class _Sums:
    """The gradients of a problem from those of its chunks.

    Those of candidates and negatives are one tensor, as chunks have them. The first chunk's is kept, and the
    others are added to it, in float32 at least.
    """

    def __init__(self, p: FilteredProblem, needs: Needs) -> None:
        self.p, self.wanted = p, needs
        self.needs = needs._replace(candidates=needs.candidates or needs.negatives, negatives=False)
        self.sums: Gradients = Inputs()

    def add(self, first: int, chunk: Problem, part: Gradients) -> None:
        shift = first if chunk.diagonal == "zero" else 0
        sums = {}
        for name, whole, gradient in zip(Inputs._fields, self.sums, part, strict=True):
            if name in Problem.by_query:
                sums[name] = self._rows(whole, first, gradient)
            else:
                sums[name] = _added(whole, gradient, shift if name in Problem.by_candidate else 0)
        self.sums = Inputs(**sums)

    def gradients(self) -> Gradients:
        p, columns, bias = self.p, self.sums.candidates, self.sums.bias
        M = len(p.candidates)
        columns = None if columns is None else columns.to(p.candidates.dtype)
        return self.sums._replace(
            candidates=columns[:M] if columns is not None and self.wanted.candidates else None,
            negatives=columns[M:] if columns is not None and self.wanted.negatives else None,
            bias=None if bias is None else bias[:M],
        )

    def _rows(self, whole: Tensor | None, first: int, part: Tensor | None) -> Tensor | None:
        """The gradients of all rows with those of some of them."""
        N = len(self.p.queries)
        if part is None or len(part) == N:
            return part
        if whole is None:
            whole = part.new_empty(N, *part.shape[1:])
        whole[first : first + len(part)] = part
        return whole


def _added(whole: Tensor | None, part: Tensor | None, shift: int) -> Tensor | None:
    """A sum with another part, of whose rows the first one is row `shift` of the sum."""
    if part is None:
        return None
    if whole is None:
        return part.to(loss_dtype(part))
    if not shift:
        whole += part
        return whole
    rest = len(whole) - shift
    whole[shift:] += part[:rest]
    whole[:shift] += part[rest:]
    return whole


def _chunks(p: FilteredProblem, height: int) -> Iterator[tuple[int, Problem]]:
    """The first row of each chunk, and the problem of its rows, which has at most `height`.

    Where the diagonal is zero, a chunk's own candidates are moved before all others, so that its cells (i, i)
    are those of the whole problem.
    """
    (N, _), M = p.queries.shape, len(p.candidates)
    columns = _columns(p)
    edges = [0]
    for end in dict.fromkeys((min(M, N), N)):
        start = edges[-1]
        step = even_step(end - start, height)
        edges += [*range(start + step, end, step), end]
    entries = _entry_edges(p.targets, edges)
    most = max(last - first for first, last in pairwise(edges))
    # One cell more than there are, to which writes for cells of no interest go.
    cells = torch.empty(most * len(columns.candidates) + 1, dtype=torch.bool, device=p.queries.device)
    for k, (first, last) in enumerate(pairwise(edges)):
        yield first, _chunk(p, columns, slice(first, last), slice(entries[k], entries[k + 1]), cells)


class _Columns(NamedTuple):
    """The candidates with the negatives behind them."""

    candidates: Tensor  # (M + K, D)
    bias: Tensor | None  # (M + K,)


def _columns(p: FilteredProblem) -> _Columns:
    if p.negatives is None:
        return _Columns(p.candidates, p.bias)
    bias = None if p.bias is None else F.pad(p.bias, (0, len(p.negatives)))
    return _Columns(torch.cat([p.candidates, p.negatives]), bias)


def _chunk(
    p: FilteredProblem,
    columns: _Columns,
    rows: slice,
    entries: slice,
    cells: Tensor | None = None,
    mask: Tensor | None = None,
) -> Problem:
    """The problem of some rows; its mask is written into `cells`, unless it is known."""
    M = len(p.candidates)
    width = len(columns.candidates)
    targets = _targets(p.targets, rows, entries, M, width)
    if mask is None:
        assert cells is not None
        mask = _mask(p, rows, targets, cells, width)
    candidates, bias = columns
    shift = rows.start if p.diagonal == "zero" and rows.start < M else 0
    if shift:
        candidates, mask = candidates.roll(-shift, 0), mask.roll(-shift, 1)
        bias = None if bias is None else bias.roll(-shift)
        targets = _rolled(targets, shift, width)
    chunk = p.unfiltered()
    for name in Problem.by_query:
        x = getattr(p, name)
        setattr(chunk, name, None if x is None else x[rows])
    chunk.candidates, chunk.bias, chunk.negatives = candidates, bias, None
    chunk.targets = targets
    chunk.diagonal = "zero" if p.diagonal == "zero" and rows.start < M else "keep"

    # The mask has the groups too.
    chunk.mask, chunk.query_groups, chunk.candidate_groups = mask, None, None
    if not isinstance(p.memory, str):
        chunk.memory = max(LEAST_MEMORY, p.memory - _share(p))
    return chunk


def _mask(p: FilteredProblem, rows: slice, targets: TargetRows, cells: Tensor, width: int) -> Tensor:
    """Which cells of some rows leave the loss, by the filters, by groups, by a mask or as the diagonal."""
    M, height = len(p.candidates), rows.stop - rows.start
    mask = cells[: height * width].view(height, width)

    if p.guide_queries is None:
        mask.zero_()
    else:
        _write_above(mask, p, rows)
    if p.query_groups is not None and p.candidate_groups is not None:
        mask[:, :M] |= p.query_groups[rows, None] == p.candidate_groups
    _exclude_ids(mask, p, rows)
    _keep_targets(mask, targets, cells)
    if p.mask is not None:
        mask[:, :M] |= p.mask[rows]
    if p.diagonal == "exclude" and rows.start < M:
        mask[:, rows.start : M].fill_diagonal_(True)
    return mask


def _write_above(mask: Tensor, p: FilteredProblem, rows: slice) -> None:
    """Writes which cells of some rows the guide finds similar."""
    assert p.guide_queries is not None
    assert p.guide_candidates is not None
    assert p.guide_thresholds is not None
    guide = guide_rows(
        p.guide_queries[rows],
        p.guide_thresholds[rows],
        normalize=p.guide_normalize,
        in_plain_torch=p.in_plain_torch,
    )
    room, height = _share(p) // 2, rows.stop - rows.start
    step = max(MIN_COLUMNS, room // (guide.cell_bytes * height + 16 * p.guide_queries.shape[1]))
    first = 0
    for block in (p.guide_candidates, p.guide_negatives):
        for part in () if block is None else block.split(step):
            guide.write_above(mask[:, first : first + len(part)], part)
            first += len(part)


def _exclude_ids(mask: Tensor, p: FilteredProblem, rows: slice) -> None:
    """Excludes the cells of some rows that ids take out."""
    M = len(p.candidates)
    for x in p.ids:
        mask[:, :M] |= x.excludes(x.query_ids[rows], x.columns)
        if x.negative_ids is not None:
            mask[:, M:] |= x.excludes(x.query_ids[rows], x.negative_ids)


def _keep_targets(mask: Tensor, targets: TargetRows, cells: Tensor) -> None:
    """Lets no target leave; `mask` is the first part of `cells`."""
    if targets.dense is not None:
        mask &= targets.dense == 0
        return
    starts, columns, weights = targets.compressed()
    if not len(columns):
        return
    width = mask.shape[1]
    row = torch.repeat_interleave(starts.diff(), output_size=len(columns))
    is_target = (weights != 0) & (columns >= 0) & (columns < width)
    cells.index_fill_(0, (row * width + columns).where(is_target, len(cells) - 1), False)


def _targets(t: TargetRows, rows: slice, entries: slice, M: int, width: int) -> TargetRows:
    """The targets of some rows, over M candidates and, up to `width`, negatives."""
    if t.dense is not None:
        dense = t.dense[rows]
        return TargetRows(dense=F.pad(dense, (0, width - M)))
    starts, columns, weights = t.compressed()
    starts, columns = starts[rows.start : rows.stop + 1], columns[entries]
    if width > M:
        columns = columns.where(
            columns < M, width
        )  # A negative is no target: engines refuse what is outside.
    return TargetRows(starts - entries.start if entries.start else starts, columns, weights[entries])


def _rolled(t: TargetRows, shift: int, width: int) -> TargetRows:
    """Targets for candidates of which the first `shift` have been moved behind all others."""
    if t.dense is not None:
        return TargetRows(dense=t.dense.roll(-shift, 1))
    starts, columns, weights = t.compressed()
    inside = (columns >= 0) & (columns < width)
    return TargetRows(starts, ((columns - shift) % width).where(inside, columns), weights)


def _whole(p: FilteredProblem, mask: Tensor) -> Problem:
    """The problem of all rows, whose mask is known."""
    rows, entries = slice(0, len(p.queries)), slice(0, _entry_edges(p.targets, [0, len(p.queries)])[-1])
    return _chunk(p, _columns(p), rows, entries, mask=mask)


def _entry_edges(t: TargetRows, rows: list[int]) -> list[int]:
    """Where the entries of some rows begin, without waiting for a device where that can be known."""
    if t.dense is not None:
        return [0] * len(rows)
    starts, columns, _ = t.compressed()
    if not len(columns) or len(rows) == 2:
        return [0] * (len(rows) - 1) + [len(columns)]
    if t.offsets is not None:
        return [min(row * len(t.offsets), len(columns)) for row in rows]
    found: list[int] = starts[torch.tensor(rows, device=starts.device)].tolist()
    return found


def _share(p: FilteredProblem) -> int:
    """The bytes that the guide may take: for the mask of a chunk and for scores, each a half."""
    return room_of(p.memory, *ROOM["cpu" if p.queries.is_cpu else "cuda"]) // 4


def _height(p: FilteredProblem) -> int:
    """How many rows a chunk has at most."""
    width = len(p.candidates) + (0 if p.negatives is None else len(p.negatives))
    return max(MIN_ROWS, _share(p) // 2 // width)
