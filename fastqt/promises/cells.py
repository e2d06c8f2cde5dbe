"""Functions that want few cells of scores, or nothing but their shape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fastqt.promises import walk
from fastqt.promises.ends.arguments import like
from fastqt.promises.ends.cross_entropies import loss_of_targets
from fastqt.promises.promise import Promise, known
from fastqt.promises.rows import FEW, taken
from fastqt.promises.rules import RULES, View
from fastqt.promises.scores import Diagonal, LogProbabilities

T = Tensor
rule = RULES.rule


@rule(T.gather, torch.gather)
def gathered(s: Any, dim: Any, index: Any, **named: Any) -> Any:
    is_index = type(index) is Tensor and index.dtype == torch.int64 and index.dim() == 2
    if named or dim not in (1, -1) or not is_index or len(s.shape) != 2 or len(index) != s.shape[0]:
        return NotImplemented
    if index.shape[1] == 1 and known(s, LogProbabilities) is not None:
        picked = _picked(s, index[:, 0])
        if picked is not NotImplemented:
            return picked[:, None]
    state = walk.matrix(s)
    if state is None or index.numel() * FEW > s.numel() or not _in_range(index, s.shape[1]):
        return NotImplemented
    return taken(state, torch.arange(len(index), device=index.device)[:, None].expand_as(index), index)


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
    everyone = len(rows) == N and bool((rows == torch.arange(N, device=rows.device)).all())
    if everyone and known(s, LogProbabilities) is not None:
        picked = _picked(s, columns)
        if picked is not NotImplemented:
            return picked
    state = walk.matrix(s)
    if state is None or len(rows) * FEW > s.numel():
        return NotImplemented
    return taken(state, rows, columns)


def _in_range(index: Tensor, length: int) -> bool:
    return not index.numel() or bool((index >= 0).all() and (index < length).all())


def _picked(s: Promise, target: Tensor) -> Any:
    """The log-probability of a column of each row."""
    if not _in_range(target, s.shape[1]):
        return NotImplemented
    losses = loss_of_targets(known(s, LogProbabilities).scores, target, -100, "none")
    if losses is NotImplemented:
        return losses
    picked = like(-losses, s, False)
    s.box.state.take(torch.arange(len(target), device=target.device), target, picked)
    return picked


@rule(T.diag, torch.diag)
def diagonal(s: Any, diagonal: int = 0) -> Any:
    """A copy of the cells (i, i + diagonal)."""
    if not diagonal and len(s.shape) == 2 and s.shape[0] == s.shape[1] and known(s, LogProbabilities):
        picked = _picked(s, torch.arange(s.shape[0], device=s.device))
        if picked is not NotImplemented:
            return picked
    return _diagonal(s, diagonal)


@rule(T.diagonal, torch.diagonal)
def view_of_diagonal(s: Any, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Any:
    if (dim1 % 2, dim2 % 2) != (0, 1) or s.box.base is not None:
        return NotImplemented
    meaning = _diagonal(s, offset)
    return View(meaning) if isinstance(meaning, Diagonal) else NotImplemented


def _diagonal(s: Any, offset: int) -> Any:
    state = walk.matrix(s)
    if state is None or len(s.shape) != 2:
        return NotImplemented
    length = min(s.shape[0] + min(offset, 0), s.shape[1] - max(offset, 0))
    if length <= 0 or length * FEW > s.numel():
        return NotImplemented
    rows = torch.arange(length, device=s.device)
    where = rows - min(offset, 0), rows + max(offset, 0)
    if "cells" in walk.kinds_of(state):
        return Diagonal(length, lambda: walk.picked(state, *where))
    return taken(state, *where)


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
