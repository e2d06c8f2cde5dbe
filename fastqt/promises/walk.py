"""Parts of a matrix by the functions that the program has called: some rows, some columns, a list of cells.

A matrix that is reduced is walked over: some rows of it are there at a time, and again for the gradients.
What a function needs for a part of its result is told by its `How`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastqt.promises.patterns import Pattern
from fastqt.promises.promise import Promise, known
from fastqt.promises.rules import RULES
from fastqt.promises.rules import state_of as state_of
from fastqt.promises.scores import Diagonal, Meaning, Product, Scores, UnitRows, equal, products
from fastqt.promises.state import HOLDERS, State, with_numbers
from fastqt.promises.terms import RowTerm

CELLS_AT_ONCE = 2**20  # of a matrix that is walked over
Shape = tuple[int, ...]
Index = tuple[Any, ...]


@dataclass(frozen=True, eq=False)
class Walked(Meaning):
    """A matrix of which nothing is known but how parts of it are computed.

    Attributes:
        size: its shape.
        dtype: of the tensor.
        counts: how many cells are of each row, (N,), of cells that are selected, which are one row after
            the other; None for a matrix.
    """

    name = "cells"
    size: Shape
    dtype: torch.dtype | None = None
    counts: Tensor | None = None

    @property
    def shape(self) -> Shape:
        return self.size

    def detached(self) -> Walked:
        return self


@dataclass(frozen=True, eq=False)
class Window:
    """A part of a matrix: its rows or its columns from `first` to `last`, or cells (rows[i], columns[i])."""

    kind: str
    first: int = 0
    last: int = 0
    rows: Tensor | None = None
    columns: Tensor | None = None

    def index(self, x: Tensor, shape: Shape) -> Index:
        """The part of what is broadcast to a matrix of this shape."""
        if self.kind == "rows":
            return (slice(self.first, self.last),) if x.dim() == len(shape) and len(x) != 1 else ()
        if self.kind == "columns":
            return (..., slice(self.first, self.last)) if x.dim() and x.shape[-1] != 1 else ()
        rows, columns = self.rows, self.columns
        assert rows is not None
        assert columns is not None
        if x.dim() == 0:
            return ()
        if x.dim() == 1:
            return (columns,) if len(x) != 1 else ()
        return (
            rows if len(x) != 1 else torch.zeros_like(rows),
            columns if x.shape[1] != 1 else torch.zeros_like(columns),
        )

    def turned(self) -> Window:
        """The part of the transposed matrix that is the same, but for its transposition."""
        kind = {"rows": "columns", "columns": "rows"}.get(self.kind, self.kind)
        return Window(kind, self.first, self.last, self.columns, self.rows)

    @property
    def key(self) -> tuple[Any, ...]:
        return self.kind, self.first, self.last, id(self.rows), id(self.columns)

    def __len__(self) -> int:
        return self.last - self.first


ALL = frozenset(("rows", "columns", "cells"))
ROWS = frozenset(("rows",))
NONE: frozenset[str] = frozenset()


@dataclass(frozen=True)
class How:
    """How a part of a function's result is computed.

    Attributes:
        kinds: of windows, by the state of the result.
        part: the part of the result, by the parts of its arguments.
    """

    kinds: Callable[[State], frozenset[str]]
    part: Callable[[Parts, State, Window], Tensor]


HOWS: dict[Callable[..., Any], How] = {}


def counts_of(state: State) -> Tensor | None:
    """Of selected cells, how many are of each row."""
    return state.first_meaning.counts if isinstance(state.first_meaning, Walked) else None


def shape_of(state: State) -> Shape:
    assert state.first_meaning is not None
    return tuple(state.first_meaning.shape)


def cells_of(state: State) -> Tensor | None:
    """The matrix, if it is there. Of selected cells it is not known which are of some rows."""
    return None if counts_of(state) is not None else state.cells


def is_mask(state: State) -> bool:
    """Whether it is of integers, of which any part is computed."""
    return isinstance(state.first_meaning, Pattern)


def is_product(state: State) -> bool:
    """Whether it is made of no other matrices."""
    return not is_mask(state) and all(isinstance(x.first_meaning, UnitRows) for x in state.parents)


def is_few(state: State) -> bool:
    """Whether it is a diagonal, whose cells are there."""
    return isinstance(state.first_meaning, Diagonal)


def kinds_of(state: State) -> frozenset[str]:
    """The windows through which parts of a state can be computed."""
    if cells_of(state) is not None or is_product(state) or is_mask(state):
        return ALL if len(shape_of(state)) == 2 else ROWS
    how = HOWS.get(state.function)
    if how is None:
        return NONE
    if state.kinds is None:
        state.kinds = how.kinds(state)
    return state.kinds


def kinds_of_parents(state: State) -> frozenset[str]:
    return together([x for x in state.parents if not is_few(x)])


class Parts:
    """Parts of a state and of what it is made of.

    Attributes:
        leaves: the ids of tensors whose parts are noted, each as one to which a gradient flows.
        there: the matrices that are there, by the id of their state; None for those that are there now.
        noted: the parts of leaves: (position of the leaf, index, part).
        aliases: of the leaves, to which gradients flow in place of parts, for second derivatives.
    """

    def __init__(self, leaves: tuple[int, ...] = (), there: dict[int, Tensor] | None = None) -> None:
        self.there = there
        self.leaves = {leaf: position for position, leaf in enumerate(leaves)}
        self.aliases: list[Tensor] = []
        self.noted: list[tuple[int, Index, Tensor]] = []
        self.known: dict[Any, tuple[Tensor, Window]] = {}

    def of_tensor(self, x: Tensor, index: Index) -> Tensor:
        part = x[index] if index else x
        position = self.leaves.get(id(x))
        if position is None:
            return part
        if self.aliases:
            return self.aliases[position][index] if index else self.aliases[position]
        part = part.detach().requires_grad_()
        self.noted.append((position, index, part))
        return part

    def of(self, state: State, window: Window) -> Tensor:
        key = (id(state), window.key)
        if key not in self.known:
            self.known[key] = self._computed(state, window), window  # whose tensors keep their ids
        return self.known[key][0]

    def of_argument(self, x: Any, window: Window, shape: Shape) -> Any:
        """A part of what is broadcast to a matrix of this shape."""
        if isinstance(x, State):
            if not is_few(x):
                return self.of(x, window)
            x = self.cells_of(x)
        if not isinstance(x, Tensor):
            return x
        return self.of_tensor(x, window.index(x, shape))

    def alike(self, x: Any, window: Window) -> Tensor:
        """The same rows, or the same columns, of an argument."""
        part: Tensor = self.of_argument(x, window, shape_of(x) if isinstance(x, State) else tuple(x.shape))
        return part

    def cells_of(self, state: State) -> Tensor | None:
        return cells_of(state) if self.there is None else self.there.get(id(state))

    def _computed(self, state: State, window: Window) -> Tensor:
        cells = self.cells_of(state)
        if cells is not None:
            return self.of_tensor(cells, window.index(cells, tuple(cells.shape)))
        with state.modes(grad=state.grad and torch.is_grad_enabled()):
            if isinstance(mask := state.first_meaning, Pattern):
                part = _part_of_mask(mask, window)
            elif is_product(state):
                part = self._of_product(state, window)
            else:
                part = HOWS[state.function].part(self, state, window)
            return _with_taken(part, state, window)

    def _of_product(self, state: State, window: Window) -> Tensor:
        p = product_of(state)
        if window.kind == "cells":
            rows, columns = window.rows, window.columns
            assert rows is not None
            assert columns is not None
            values = products(p.queries, p.candidates, rows, columns) * p.scale
            state.take(rows, columns, values)
            return values
        is_rows = window.kind == "rows"
        piece = slice(window.first, window.last)
        queries = self.of_tensor(p.queries, (piece,) if is_rows else ())
        candidates = self.of_tensor(p.candidates, () if is_rows else (piece,))
        part = queries @ candidates.T
        if equal(p.scale, 1.0):
            return part
        return part * (self.of_tensor(p.scale, ()) if isinstance(p.scale, Tensor) else p.scale)


def _part_of_mask(mask: Pattern, window: Window) -> Tensor:
    if window.rows is not None and window.columns is not None:
        return mask.of_cells(window.rows, window.columns)
    of = mask.of_rows if window.kind == "rows" else mask.of_columns
    return of(window.first, window.last)


def _with_taken(part: Tensor, state: State, window: Window) -> Tensor:
    """Cells that a program has are the same numbers in the parts of a matrix."""
    if window.kind == "cells":
        return part
    for rows, columns, values in state.taken:
        place = rows if window.kind == "rows" else columns
        inside = (place >= window.first) & (place < window.last)
        at = [rows[inside], columns[inside]]
        if len(at[0]):
            at[window.kind == "columns"] = at[window.kind == "columns"] - window.first
            part = with_numbers(part, *at, values[inside])
    return part


def product_of(state: State) -> Product:
    assert isinstance(state.first_meaning, Scores)
    return state.first_meaning.first.of_rows()


def _sources(state: State, seen: set[int]) -> Iterator[Tensor]:
    """What a gradient may flow to from a walk."""
    if id(state) in seen:
        return
    seen.add(id(state))
    if (cells := cells_of(state)) is not None:
        yield cells
    elif is_product(state):
        if state.grad:
            p = product_of(state)
            yield from (p.queries, p.candidates, *((p.scale,) if isinstance(p.scale, Tensor) else ()))
    elif state.is_differentiable:
        yield from state.inputs
        for parent in state.parents:
            yield from _sources(parent, seen)


def _there(state: State, there: dict[int, Tensor], seen: set[int]) -> dict[int, Tensor]:
    """The matrices among what a state is made of."""
    if id(state) not in seen:
        seen.add(id(state))
        if (cells := cells_of(state)) is not None:
            there[id(state)] = cells
        for parent in state.parents:
            _there(parent, there, seen)
    return there


def _inputs(state: State, there: dict[int, Tensor], seen: set[int]) -> Iterator[Tensor]:
    """The tensors that a walk reads."""
    if id(state) in seen or id(state) in there:
        return
    seen.add(id(state))
    yield from state.inputs
    for parent in state.parents:
        yield from _inputs(parent, there, seen)


def _roots(state: State, seen: set[int]) -> Iterator[State]:
    """The products, and the matrices that are there, of which a state is made."""
    if id(state) in seen or is_few(state) or is_mask(state):
        return
    seen.add(id(state))
    if cells_of(state) is not None or is_product(state):
        yield state
        return
    for parent in state.parents:
        yield from _roots(parent, seen)


def windows(state: State, kind: str) -> list[Window]:
    """Some rows or columns at a time, the same of each matrix that is made of a product."""
    counts = counts_of(state)
    length = len(counts) if counts is not None else shape_of(state)[0 if kind == "rows" else 1]
    if kind == "rows":
        roots = list(_roots(state, set())) or [state]  # of masks alone it has none
        widest = max(_numel(x) // max(shape_of(x)[0], 1) for x in roots)
    else:
        widest = max(shape_of(x)[0] for x in list(_roots(state, set())) or [state])
    step = max(CELLS_AT_ONCE // max(widest, 1), 1)
    return [Window(kind, first, min(first + step, length)) for first in range(0, max(length, 1), step)]


def _numel(state: State) -> int:
    return torch.Size(shape_of(state)).numel()


@dataclass(eq=False)
class Plan:
    """A walk: the matrix, its parts, what is made of each, and where the results are beside each other."""

    state: State
    windows: list[Window]
    reduce: Callable[[Tensor, Window], Tensor]
    dim: int
    autocast: tuple[str, bool, torch.dtype]
    there: dict[int, Tensor]
    leaves: tuple[int, ...]
    versions: list[tuple[Tensor, int]]

    def part(self, window: Window, parts: Parts) -> Tensor:
        cells = parts.of(self.state, window)
        device, is_enabled, dtype = self.autocast
        with torch.autocast(device, dtype=dtype, enabled=is_enabled):
            return self.reduce(cells, window)

    def copy(self, storages: set[int]) -> None:
        """Keeps what it needs of matrices of these storages, which are about to change; see `Holder`.

        Functions of plain PyTorch, such as a cross-entropy, often need no matrix for their gradients.
        """
        self.check()
        for key, cells in self.there.items():
            if cells.untyped_storage()._cdata in storages:
                copied = cells.detach().clone()
                self.there[key] = copied
                self.versions = [x for x in self.versions if x[0] is not cells]
                self.leaves = tuple(id(copied) if leaf == id(cells) else leaf for leaf in self.leaves)
                self.versions.append((copied, copied._version))

    def check(self) -> None:
        """Raises RuntimeError where a matrix or what it is made of has changed since."""
        if any(x._version != version for x, version in self.versions):
            raise RuntimeError(
                "a tensor that a score matrix of fastqt.fused() is made of was changed in place before its "
                "gradient; take the gradient before, or change a clone"
            )


class _Walk(torch.autograd.Function):
    """Parts of a matrix, each reduced, and computed again for its gradients."""

    @staticmethod
    def forward(ctx: Any, plan: Plan, *leaves: Tensor) -> Tensor:
        there = {id(x) for x in plan.there.values()}
        # A function in place may change a matrix, of which the plan has a copy then.
        ctx.matrices = {i: x for i, x in enumerate(leaves) if id(x) in there}
        ctx.plan, ctx.count = plan, len(leaves)
        ctx.save_for_backward(*(x for i, x in enumerate(leaves) if i not in ctx.matrices))
        results = [plan.part(window, Parts(there=plan.there)) for window in plan.windows]
        ctx.lengths = [x.shape[plan.dim] for x in results]
        return torch.cat(results, plan.dim)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Any:
        plan = ctx.plan
        plan.check()
        saved = iter(ctx.saved_tensors)
        leaves = tuple(ctx.matrices[i] if i in ctx.matrices else next(saved) for i in range(ctx.count))
        if torch.is_grad_enabled():
            return (None, *_recorded(plan, leaves, upstream))

        gradients = [torch.zeros_like(x, memory_format=torch.contiguous_format) for x in leaves]
        for window, part in zip(plan.windows, upstream.split(ctx.lengths, plan.dim), strict=True):
            parts = Parts(plan.leaves, plan.there)
            with torch.enable_grad():
                result = plan.part(window, parts)
            if not result.requires_grad or not result.numel():
                continue
            noted = [x for _, _, x in parts.noted]
            for (position, index, _), gradient in zip(
                parts.noted, torch.autograd.grad(result, noted, part, allow_unused=True), strict=True
            ):
                if gradient is not None:
                    gradients[position][index] += gradient
        return (None, *gradients)


def _recorded(plan: Plan, leaves: tuple[Tensor, ...], upstream: Tensor) -> tuple[Tensor | None, ...]:
    """The gradients of a matrix that is there, which can be differentiated again."""
    parts = Parts(plan.leaves, plan.there)
    parts.aliases = [x.view_as(x) for x in leaves]
    results = [plan.part(window, parts) for window in plan.windows]
    result = torch.cat(results, plan.dim)
    return torch.autograd.grad(result, parts.aliases, upstream, create_graph=True, allow_unused=True)


_walk: Callable[..., Tensor] = _Walk.apply


def walked(
    state: State, kind: str, reduce: Callable[[Tensor, Window], Tensor], dim: int = 0, *, grad: bool = True
) -> Tensor:
    """What is made of a matrix, some rows or columns at a time."""
    state.check()
    RULES.taken = "a walk over rows" if kind == "rows" else "a walk over columns"
    device = state.device.type
    autocast = (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
    unique = {id(x): x for x in _sources(state, set()) if x.requires_grad}
    there = _there(state, {}, set())
    versions = [(x, x._version) for x in (*_inputs(state, there, set()), *there.values())]
    plan = Plan(state, windows(state, kind), reduce, dim, autocast, there, tuple(unique), versions)
    if not (grad and unique and torch.is_grad_enabled()):
        with torch.no_grad():
            return torch.cat([plan.part(window, Parts(there=there)) for window in plan.windows], dim)
    if there:
        HOLDERS.add(plan)
    return _walk(plan, *unique.values())


def matrix(x: Any) -> State | None:
    """The state of a promise that has parts, and no cells."""
    meaning = known(x)
    if meaning is None or not (meaning.is_matrix or isinstance(meaning, Pattern)):
        return None
    state = x.box.state
    _compute_terms(state, set())
    return state if kinds_of(state) else None


def _compute_terms(state: State, seen: set[int]) -> None:
    """Computes the numbers of rows of which a matrix is made."""
    if id(state) in seen or state.cells is not None:
        return
    seen.add(id(state))
    if isinstance(state.first_meaning, RowTerm):
        state.computed()
        return
    for parent in state.parents:
        _compute_terms(parent, seen)


def picked(state: State, rows: Tensor, columns: Tensor) -> Tensor:
    """The cells (rows[i], columns[i]) of a matrix."""
    state.check()
    return Parts().of(state, Window("cells", rows=rows.flatten(), columns=columns.flatten())).view(rows.shape)


def numbers(x: Any) -> Any:
    """An argument; a diagonal has its cells from now on."""
    if isinstance(x, Promise) and known(x, Diagonal) is not None:
        state = x.box.state
        with state.modes(grad=state.grad):
            state.keep(known(x, Diagonal).value().to(x.dtype))
    return x


def together(states: list[State]) -> frozenset[str]:
    """The windows through which parts of all of these can be computed."""
    kinds = ALL
    for state in states:
        kinds = kinds & kinds_of(state)
    return kinds
