"""Functions that want few cells of scores, of pairs or the best of each row, or nothing but their shape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fastqt.promises import closed
from fastqt.promises.ends import like, loss_of_targets
from fastqt.promises.promise import RULES, Promise, known
from fastqt.promises.scores import Exponentials, LogProbabilities, Scores

T = Tensor
rule = RULES.rule
ROWS_AT_ONCE = 2**20  # cells of a walk over rows without a gradient


@rule(T.gather, torch.gather)
def gathered(s: Any, dim: Any, index: Any, **named: Any) -> Any:
    is_index = type(index) is Tensor and index.dtype == torch.int64 and index.dim() == 2
    if named or dim not in (1, -1) or not is_index or len(index) != s.shape[0]:
        return NotImplemented
    if index.shape[1] == 1 and known(s, LogProbabilities) is not None:
        picked = _picked(s, index[:, 0])
        return picked if picked is NotImplemented else picked[:, None]
    p = None if known(s, Scores) is None else known(s, Scores).alone
    if p is None or index.shape[1] * index.shape[0] * 4 > s.numel() or not _in_range(index, s.shape[1]):
        return NotImplemented
    rows = torch.arange(len(index), device=index.device)[:, None].expand_as(index)
    cells = p.cells(rows, index)
    return NotImplemented if cells is None else like(cells, s, False)


@rule(T.__getitem__)
def indexed(s: Any, where: Any) -> Any:
    """Cells of a list of rows and one of columns."""
    if not isinstance(where, tuple) or len(where) != 2:
        return NotImplemented
    N, M = s.shape if len(s.shape) == 2 else (0, 0)
    lists = [torch.as_tensor(x, device=s.device) if isinstance(x, list | range) else x for x in where]
    if not N or not all(type(x) is Tensor and x.dtype == torch.int64 and x.dim() == 1 for x in lists):
        return NotImplemented
    rows, columns = lists
    if len(rows) != len(columns) or not (_in_range(rows, N) and _in_range(columns, M)):
        return NotImplemented
    if known(s, LogProbabilities) is not None:
        everyone = len(rows) == N and bool((rows == torch.arange(N, device=rows.device)).all())
        return _picked(s, columns) if everyone else NotImplemented
    if (exponentials := known(s, Exponentials)) is not None:
        return _exponentials_of_cells(s, exponentials, rows, columns)
    p = None if known(s, Scores) is None else known(s, Scores).alone
    cells = None if p is None else p.cells(rows, columns)
    return NotImplemented if cells is None else like(cells, s, False)


def _exponentials_of_cells(s: Promise, exponentials: Exponentials, rows: Tensor, columns: Tensor) -> Any:
    p = exponentials.scores.alone
    cells = None if p is None else p.cells(rows, columns)
    return NotImplemented if cells is None else like(cells.exp(), s, False)


def _in_range(index: Tensor, length: int) -> bool:
    return not index.numel() or bool((index >= 0).all() and (index < length).all())


def _picked(s: Promise, target: Tensor) -> Any:
    """The log-probability of a column of each row."""
    if not _in_range(target, s.shape[1]):
        return NotImplemented
    losses = loss_of_targets(known(s, LogProbabilities).scores, target, -100, "none")
    return losses if losses is NotImplemented else like(-losses, s, False)


@rule(T.diag, torch.diag)
def diagonal(s: Any, *options: Any) -> Any:
    is_square = len(s.shape) == 2 and s.shape[0] == s.shape[1]
    if not options and is_square and (exponentials := known(s, Exponentials)) is not None:
        rows = torch.arange(len(s), device=s.device)
        return _exponentials_of_cells(s, exponentials, rows, rows)
    if options or not is_square or known(s, LogProbabilities) is None:
        return closed.copied_diagonal(s, *options)
    return _picked(s, torch.arange(len(s), device=s.device))


@rule(T.argmax, torch.argmax)
def argmax(s: Any, dim: Any = None, keepdim: bool = False) -> Any:
    """The best column of each row, some rows at a time."""
    scores = known(s, Scores)
    p = None if scores is None else scores.alone
    if p is None or dim not in (1, -1) or not p.is_plain:
        return NotImplemented
    best = []
    height = max(ROWS_AT_ONCE // max(len(p.candidates), 1), 1)
    with torch.no_grad():
        for rows in p.queries.split(height):
            best.append((rows @ p.candidates.T * p.scale + p.bias).argmax(1, keepdim=keepdim))
    return torch.cat(best)


@rule(T.max, torch.max)
def maxima(s: Any, dim: Any = None, keepdim: bool = False) -> Any:
    """The largest cell of each row, whose gradient goes to it, and its column."""
    best = argmax(s, dim) if isinstance(dim, int) and dim in (1, -1) else NotImplemented
    if best is NotImplemented:
        return best
    rows = torch.arange(len(best), device=best.device)
    values = like(known(s, Scores).alone.cells(rows, best), s, False)
    pair = (values[:, None], best[:, None]) if keepdim else (values, best)
    return torch.return_types.max(pair)


def _numbers_beside(function: Callable[..., Tensor]) -> None:
    """Tensors of a shape, dtype and device want no cells."""

    @rule(function)
    def made(s: Any, *sizes: Any, **named: Any) -> Tensor:
        empty = torch.empty(0, dtype=s.dtype, device=s.device)
        if function in (torch.zeros_like, torch.ones_like):
            new = empty.new_zeros if function is torch.zeros_like else empty.new_ones
            return new(s.shape, **named) if not sizes and named.keys() <= {"dtype"} else NotImplemented
        return function(empty, *sizes, **named)


for _function in (torch.zeros_like, torch.ones_like, T.new_zeros, T.new_ones, T.new_full):
    _numbers_beside(_function)
