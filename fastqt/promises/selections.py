"""Parts of matrices that a program takes, and matrices that it puts together or turns."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from fastqt.promises import closed, walk
from fastqt.promises.promise import Promise
from fastqt.promises.rows import FEW, also, taken
from fastqt.promises.rules import View
from fastqt.promises.scores import Diagonal
from fastqt.promises.state import State, functions
from fastqt.promises.walk import HOWS, ROWS, How, Parts, Walked, Window

T = Tensor


# Cells where a mask is true.


def _is_mask(x: Any, shape: tuple[int, ...]) -> bool:
    is_bool = isinstance(x, Tensor) and x.dtype == torch.bool and tuple(x.shape) == shape
    return is_bool and (not isinstance(x, Promise) or walk.matrix(x) is not None)


def _kinds_of_selected(state: State) -> frozenset[str]:
    return walk.kinds_of_parents(state) & ROWS


def _part_of_selected(through: Parts, state: State, window: Window) -> Tensor:
    s, mask = (through.alike(x, window) for x in state.args)
    return s[mask]


def _counts(mask: Tensor) -> Tensor:
    """How many are true in each row."""
    if not isinstance(mask, Promise):
        return mask.sum(1)
    return walk.walked(mask.box.state, "rows", lambda x, window: x.sum(1), grad=False)


_SELECTED = How(_kinds_of_selected, _part_of_selected)


@also(T.masked_select, torch.masked_select)
def selected(s: Any, mask: Any) -> Any:
    state = walk.matrix(s)
    if state is None or len(s.shape) != 2 or not _is_mask(mask, tuple(s.shape)):
        return NotImplemented
    if not isinstance(mask, Promise) and mask.sum() * FEW <= mask.numel():
        return taken(state, *mask.nonzero(as_tuple=True))
    if isinstance(mask, Promise) and "rows" not in walk.kinds_of(mask.box.state):
        return NotImplemented
    counts = _counts(mask)
    meaning = Walked((int(counts.sum()),), s.dtype, counts)
    made = walk.state_of(T.masked_select, (s, mask), {}, meaning)
    if "rows" not in walk.kinds_of(made):
        return NotImplemented
    if meaning.size[0] * FEW <= s.numel():
        return walk.walked(made, "rows", lambda x, window: x)
    return meaning


HOWS |= dict.fromkeys((T.masked_select, torch.masked_select), _SELECTED)


def _kinds_of_indexed(state: State) -> frozenset[str]:
    parent, where = state.args
    if isinstance(where, State | Tensor):
        return _kinds_of_selected(state)
    return walk.kinds_of(parent) & frozenset(("rows", "cells"))


def _part_of_indexed(through: Parts, state: State, window: Window) -> Tensor:
    parent, where = state.args
    if isinstance(where, State | Tensor):
        return _part_of_selected(through, state, window)
    rows, columns = where if isinstance(where, tuple) else (where, slice(None))
    first = rows.indices(walk.shape_of(parent)[0])[0]
    if window.kind == "rows":
        return through.of(parent, Window("rows", first + window.first, first + window.last))[:, columns]
    assert window.rows is not None
    assert window.columns is not None
    device = window.columns.device
    positions = torch.arange(walk.shape_of(parent)[1], device=device)[columns]
    return through.of(parent, Window("cells", rows=window.rows + first, columns=positions[window.columns]))


HOWS[T.__getitem__] = How(_kinds_of_indexed, _part_of_indexed)


@also(T.__getitem__)
def indexed(s: Any, where: Any) -> Any:
    """A mask, a row, a column, or rows and columns beside each other."""
    state = walk.matrix(s)
    if state is None or len(s.shape) != 2:
        return NotImplemented
    if isinstance(where, Tensor) and where.dtype == torch.bool:
        return selected(s, where)

    rows, columns = where if isinstance(where, tuple) and len(where) == 2 else (where, slice(None))
    if isinstance(columns, Tensor):
        return (
            _block(s, rows, columns) if _is_slice(rows) and _is_list(columns, s.shape[1]) else NotImplemented
        )
    if s.box.base is not None:
        return NotImplemented

    if _is_slice(rows) and _is_slice(columns):
        return View(_block(s, rows, columns))
    positions = [_positions(x, size, s.device) for x, size in zip((rows, columns), s.shape, strict=True)]
    if any(x is None for x in positions) or _is_slice(rows) == _is_slice(columns):
        return NotImplemented
    at = torch.broadcast_tensors(*(x for x in positions if x is not None))
    if walk.kinds_of(state) & frozenset(("rows", "cells")):
        return View(Diagonal(at[0].numel(), lambda: taken(state, *at)))
    return NotImplemented


def _is_slice(x: Any) -> bool:
    return isinstance(x, slice) and x.step in (None, 1)


def _positions(where: Any, length: int, device: torch.device) -> Tensor | None:
    """Those of a slice or of one number; None where there are none."""
    if _is_slice(where):
        return torch.arange(length, device=device)[where]
    is_inside = type(where) is int and -length <= where < length
    return torch.tensor([where % length], device=device) if is_inside else None


def _is_list(index: Tensor, length: int) -> bool:
    """Whether it is a list of rows or columns."""
    if type(index) is not Tensor or index.dtype != torch.int64 or index.dim() != 1:
        return False
    return not index.numel() or bool((index >= 0).all() and (index < length).all())


def _block(s: Promise, rows: slice, columns: Any) -> Walked:
    height = len(range(*rows.indices(s.shape[0])))
    is_list = isinstance(columns, Tensor)
    width = len(columns) if is_list else len(range(*columns.indices(s.shape[1])))
    return Walked((height, width), s.dtype)


# Other shapes.


def _part_of_shaped(through: Parts, state: State, window: Window) -> Tensor:
    part = through.of(state.args[0], window)
    return part.reshape(len(window), *walk.shape_of(state)[1:])


_SHAPED = How(lambda state: walk.kinds_of_parents(state) & ROWS, _part_of_shaped)


@also(T.view, T.reshape, torch.reshape)
def shaped(s: Any, *sizes: Any, **named: Any) -> Any:
    """Each row by itself in another shape; of selected cells, the same number of each row."""
    state = walk.matrix(s)
    flat = sizes[0] if len(sizes) == 1 and isinstance(sizes[0], tuple | list | torch.Size) else sizes
    if state is None or named or len(flat) < 2 or not all(type(x) is int for x in flat):
        return NotImplemented
    if "rows" not in walk.kinds_of(state) or not s.numel():
        return NotImplemented
    rest = torch.Size([x for x in flat if x != -1]).numel()
    count = list(flat).count(-1)
    if count > 1 or (s.numel() % rest if count else s.numel() != rest):
        return NotImplemented
    shape = tuple(s.numel() // rest if x == -1 else x for x in flat)
    counts = walk.counts_of(state)
    if shape[0] != (s.shape[0] if counts is None else len(counts)):
        return NotImplemented
    if counts is not None and not bool((counts == s.numel() // shape[0]).all()):
        return NotImplemented
    return View(Walked(shape, s.dtype)) if s.box.base is None else NotImplemented


HOWS |= dict.fromkeys((T.view, T.reshape, torch.reshape), _SHAPED)


def _kinds_of_turned(state: State) -> frozenset[str]:
    turned = {"rows": "columns", "columns": "rows", "cells": "cells"}
    return frozenset(turned[x] for x in walk.kinds_of(state.args[0]))


def _part_of_turned(through: Parts, state: State, window: Window) -> Tensor:
    part = through.of(state.args[0], window.turned())
    return part if window.kind == "cells" else part.T


_TURNED = How(_kinds_of_turned, _part_of_turned)


def _turned(s: Any) -> Any:
    is_matrix = walk.matrix(s) is not None and len(s.shape) == 2 and s.box.base is None
    return View(Walked((s.shape[1], s.shape[0]), s.dtype)) if is_matrix else NotImplemented


for _function in closed.TURNS:
    HOWS[_function] = _TURNED
    also(_function)(_turned)
for _function in closed.TURNS_BY_DIMS:
    HOWS[_function] = _TURNED
    also(_function)(lambda s, *dims: _turned(s) if closed.turns(dims) else NotImplemented)


# Matrices beside each other, and below each other.


def _several(args: Any, named: dict[str, Any]) -> tuple[Any, int]:
    dim = args[1] if len(args) > 1 else named.get("dim", 0)
    return args[0], dim % 2


def _kinds_of_joined(state: State) -> frozenset[str]:
    _, dim = _several(state.args, state.keywords)
    return walk.kinds_of_parents(state) & (ROWS if dim == 1 else frozenset(("rows", "columns")))


def _part_of_joined(through: Parts, state: State, window: Window) -> Tensor:
    several, dim = _several(state.args, state.keywords)
    if dim == 1 or window.kind == "columns":
        return torch.cat([through.alike(x, window) for x in several], dim)
    heights = [walk.shape_of(x)[0] if isinstance(x, State) else len(x) for x in several]
    ends = list(itertools.accumulate(heights))
    pieces = []
    for x, height, end in zip(several, heights, ends, strict=True):
        first, last = max(window.first - (end - height), 0), min(window.last - (end - height), height)
        if first < last:
            pieces.append(through.alike(x, Window("rows", first, last)))
    return torch.cat(pieces) if pieces else through.alike(several[0], Window("rows", 0, 0))


def _joined(*args: Any, **named: Any) -> Any:
    if len(args) > 2 or named.keys() - {"dim"} or not isinstance(args[0], tuple | list):
        return NotImplemented
    dim = args[1] if len(args) > 1 else named.get("dim", 0)
    several = args[0]
    if type(dim) is not int or not -2 <= dim < 2 or any(x.dim() != 2 for x in several):
        return NotImplemented
    if any(isinstance(x, Promise) and walk.matrix(x) is None for x in several):
        return NotImplemented
    same = {x.shape[1 - dim % 2] for x in several}
    if len(same) > 1 or len({x.dtype for x in several}) > 1 or len({x.device for x in several}) > 1:
        return NotImplemented
    total = sum(x.shape[dim % 2] for x in several)
    shape = (total, several[0].shape[1]) if dim % 2 == 0 else (several[0].shape[0], total)
    return Walked(shape, several[0].dtype)


for _function in functions("cat concat concatenate"):
    HOWS[_function] = How(_kinds_of_joined, _part_of_joined)
    also(_function)(_joined)


# Cells that are set.


def _is_list_of_cells(where: Any, shape: tuple[int, ...]) -> bool:
    if not isinstance(where, tuple) or len(where) != 2 or len(shape) != 2:
        return False
    return all(map(_is_list, where, shape)) and len(where[0]) == len(where[1])


def _kinds_of_set(state: State) -> frozenset[str]:
    is_list = isinstance(state.args[1], tuple)
    kinds = walk.kinds_of_parents(state)
    return kinds & ROWS if is_list else kinds


def _part_of_set(through: Parts, state: State, window: Window) -> Tensor:
    parent, where, value = state.args
    part = through.of(parent, window)
    if not isinstance(where, tuple):
        return torch.where(through.of_argument(where, window, walk.shape_of(state)), value, part)
    rows, columns = where
    here = (rows >= window.first) & (rows < window.last)
    part = part.clone()
    part[rows[here] - window.first, columns[here]] = value
    return part


HOWS[closed.with_cells] = How(_kinds_of_set, _part_of_set)


@also(closed.with_cells)
def with_cells(s: Any, where: Any, value: Any) -> Any:
    state = walk.matrix(s)
    if state is None or isinstance(value, bool) or not isinstance(value, int | float):
        return NotImplemented
    if not _is_mask(where, tuple(s.shape)) and not _is_list_of_cells(where, tuple(s.shape)):
        return NotImplemented
    return Walked(tuple(s.shape), s.dtype) if s.dtype.is_floating_point else NotImplemented


def _part_of_diagonal_filled(through: Parts, state: State, window: Window) -> Tensor:
    parent, value = state.args[:2]
    part = through.of(parent, window)
    if window.rows is not None and window.columns is not None:
        on_it = window.rows.eq(window.columns)
    else:
        height, width = part.shape
        down, right = (window.first, 0) if window.kind == "rows" else (0, window.first)
        rows = torch.arange(down, down + height, device=part.device)[:, None]
        on_it = rows.eq(torch.arange(right, right + width, device=part.device))
    return part.where(~on_it, value)


HOWS[closed.with_diagonal_filled] = How(walk.kinds_of_parents, _part_of_diagonal_filled)


@also(closed.with_diagonal_filled)
def with_diagonal_filled(s: Any, value: Any, wrap: bool = False) -> Any:
    state = walk.matrix(s)
    if state is None or wrap or len(s.shape) != 2 or not isinstance(value, int | float):
        return NotImplemented
    return Walked(tuple(s.shape), s.dtype) if s.dtype.is_floating_point else NotImplemented
