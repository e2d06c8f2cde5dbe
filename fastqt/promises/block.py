"""The block in which products of matrices become promises."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fastqt.promises import cells as cells
from fastqt.promises import closed as closed
from fastqt.promises import directions
from fastqt.promises import ends as ends
from fastqt.promises import rows as rows
from fastqt.promises import selections as selections
from fastqt.promises.calls import called
from fastqt.promises.ends.row_sums import RULES_OF_SUMS, RowSums
from fastqt.promises.in_place import CHANGES, changed_by_rule, changes_in_place
from fastqt.promises.masks import (
    IN_PLACE,
    MADE,
    PRODUCTS_OF_CELLS,
    RULES_OF_MASKS,
    changed_in_place,
    promised_mask,
)
from fastqt.promises.notes import NOTED, note
from fastqt.promises.patterns import Pattern
from fastqt.promises.products import PRODUCTS, Side, product_of
from fastqt.promises.promise import Promise, is_settled, promised, promises_in, settled, waits
from fastqt.promises.report import Report
from fastqt.promises.rules import RULES, Watch, answered, by_rule, state_of
from fastqt.promises.scores import Scores, UnitRows
from fastqt.promises.state import State, before_change, mapped, parts
from fastqt.promises.terms import RULES_OF_TERMS, RowTerm
from fastqt.promises.unit import NORMALIZED, RULES_OF_ROWS, unit_rows
from fastqt.torch_modes import is_transformed

P = ParamSpec("P")
T = TypeVar("T")

# By what waits, what functions make of it.
_RULES_OF_WAITING: dict[type, dict[Callable[..., Any], Callable[..., Any]]] = {
    UnitRows: RULES_OF_ROWS,
    Pattern: RULES_OF_MASKS,
    RowTerm: RULES_OF_TERMS,
    RowSums: RULES_OF_SUMS,
}
_TAKE_NAMES = (Pattern, RowSums)  # whose rules have all names of arguments of their functions
LEAST_CELLS = 2**16  # of a score matrix, below which the cells are faster


class fused:  # noqa: N801  # used as a function is: `with fastqt.fused():`, `@fastqt.fused()`
    """Runs a loss that is written in plain PyTorch without its score matrix.

    Inside of the block a product of two matrices of embeddings, `queries @ candidates.T`, is a promise.
    Functions of scores that a loss of fastqt knows, such as a temperature, a bias, masks, a softmax with its
    cross-entropy, a logsumexp and the cells of the pairs, are taken together and computed by that loss,
    without the matrix, and so are their gradients. Any other function gets the cells of the program itself,
    computed then, so that a program may be no faster, but has the same results. Its code does not change.

    Args:
        strict: raise RuntimeError where cells of a score matrix would be computed.
        least_cells: the size of a product from which it is a promise.

    Returns:
        A context manager, which gives a `Report`, and a decorator of functions.

    Raises:
        RuntimeError: with `strict`, cells that are wanted; embeddings that are changed in place, outside of
            the block, between product and use.

    Functions that torch.compile has compiled may be called in the block. A graph breaks at a block that is
    inside of such a function.

    Example:
        >>> import torch, fastqt
        >>> import torch.nn.functional as F
        >>> def my_loss(queries, candidates):
        ...     scores = queries @ candidates.T / 0.05
        ...     return F.cross_entropy(scores, torch.arange(len(queries)))
        >>> queries, candidates = F.normalize(torch.randn(2, 512, 16), dim=2)
        >>> with fastqt.fused() as report:
        ...     loss = my_loss(queries, candidates)
        >>> torch.testing.assert_close(loss, my_loss(queries, candidates))
        >>> report.fused, report.computed
        (1, 0)
    """

    def __init__(self, *, strict: bool = False, least_cells: int = LEAST_CELLS) -> None:
        self.strict, self.least_cells = strict, least_cells
        self._modes: list[_Mode] = []

    def __enter__(self) -> Report:
        mode = _Mode(strict=self.strict, least_cells=self.least_cells)
        self._modes.append(mode)
        mode.__enter__()  # type: ignore[no-untyped-call]  # torch gives it no types
        return mode.report

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        mode = self._modes.pop()
        mode.__exit__(kind, error, trace)  # type: ignore[no-untyped-call]  # nor this one
        if kind is None:
            mode.ended()

    def __call__(self, function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
            with type(self)(strict=self.strict, least_cells=self.least_cells):
                return function(*args, **kwargs)

        return wrapped


class _Mode(TorchFunctionMode):
    """What sees the functions that a program calls."""

    def __init__(self, *, strict: bool, least_cells: int) -> None:
        super().__init__()
        self.report = Report()
        self.watch, self.least_cells = Watch(self.report, strict=strict), least_cells

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if (kwargs or CHANGES.get(func, True)) and changes_in_place(func, kwargs):
            self._before_change(args, kwargs)
        # The types are those of some arguments only, where one of them is a list.
        promises = promises_in(args, kwargs.values())
        if promises:
            return self._of_promises(func, args, kwargs, promises)

        promise = None
        if func in PRODUCTS:
            promise = self._product(func, args, kwargs)
        elif func in NORMALIZED:
            promise = self._rows(func, args, kwargs)
        elif func in MADE:
            promise = self._mask(func, args, kwargs)
        if promise is not None:
            return promise
        answer = func(*args, **kwargs)
        if func in NOTED:
            note(func, args, kwargs, answer)
        return answer

    def _of_promises(
        self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any], promises: list[Promise]
    ) -> Any:
        if func in directions.SEEN_FROM_OUTSIDE:
            return called(func, args, kwargs, self.watch)
        waiting: list[Promise] = []
        others: list[Promise] = []
        for x in promises:
            (waiting if waits(x) else others).append(x)
        if waiting:
            return self._of_waiting(func, args, kwargs, waiting, others)
        if any(map(is_settled, promises)):
            args, kwargs = mapped(args, settled), {key: mapped(x, settled) for key, x in kwargs.items()}
            return self.__torch_function__(func, (), args, kwargs)
        answer = called(func, args, kwargs, self.watch, promises)
        if type(answer) is Promise and directions.loss_of(answer.box) is not None:
            return directions.begun(answer, func.__name__, self.watch)
        return answer

    def _of_waiting(
        self,
        func: Callable[..., Any],
        args: Any,
        kwargs: dict[str, Any],
        waiting: list[Promise],
        others: list[Promise],
    ) -> Any:
        """What a function gives of promises that wait, and of others, which may end that."""
        promise = self._product(func, args, kwargs) if func in PRODUCTS else None
        if promise is not None:
            return promise
        answer = self._by_rule_of_waiting(func, args, kwargs, waiting, others)
        if answer is not NotImplemented:
            return answer
        promise = directions.combined(func, args, kwargs, self.watch)
        if promise is not None:
            return promise
        boxes = [x.box for x in waiting]
        if func in PRODUCTS_OF_CELLS:  # A mask may be multiplied by the numbers of rows.
            boxes = [x for x in boxes if isinstance(x.state.meaning, RowTerm)] or boxes
        directions.become_tensors(boxes)
        return self.__torch_function__(func, (), args, kwargs)

    def _by_rule_of_waiting(
        self,
        func: Callable[..., Any],
        args: Any,
        kwargs: dict[str, Any],
        waiting: list[Promise],
        others: list[Promise],
    ) -> Any:
        """What a rule makes of promises that wait, and of scores beside masks; NotImplemented without one."""
        kind = type(waiting[0].box.state.meaning)
        if func in IN_PLACE and waiting[0] is args[0] and kind is Pattern:
            changed = changed_in_place(func, args, kwargs)
            return NotImplemented if changed is None else changed
        rules = _RULES_OF_WAITING.get(kind, {})
        rule = rules.get(func) if args and (kind in _TAKE_NAMES or not kwargs) else None
        if rule is not None:
            RULES.taken = ""
            answer = rule(*args, **kwargs)
            if RULES.taken and answer is not NotImplemented:
                self.watch.fused(getattr(func, "__name__", str(func)), RULES.taken)
            if type(answer) is Pattern:
                return promised_mask(answer)
            if answer is not NotImplemented:
                return answered(answer, func, args, kwargs, self.watch, (*others, *waiting)[0])

        if any(map(is_settled, others)) or not all(type(x.box.state.meaning) is Pattern for x in waiting):
            return NotImplemented
        if not others:
            is_of_rows = func in PRODUCTS_OF_CELLS and not kwargs and _has_numbers_of_rows(args)
            return by_rule(func, args, kwargs, self.watch, waiting) if is_of_rows else NotImplemented
        if changes_in_place(func, kwargs):
            is_changed = args[0] is others[0] and changed_by_rule(func, args, kwargs)
            return args[0] if is_changed else NotImplemented
        return by_rule(func, args, kwargs, self.watch, [*others, *waiting])

    def _mask(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Promise | None:
        """The promise of a mask that is worth it; None where a function makes something else."""
        if _is_small(args, self.least_cells) or torch.is_inference_mode_enabled() or is_transformed():
            return None
        mask = MADE[func](*args, **kwargs)
        if mask is None or mask.size[0] * mask.size[1] < self.least_cells:
            return None
        return promised_mask(mask)

    def ended(self) -> None:
        """Computes the losses and rows that have waited in vain."""
        kinds = (UnitRows, RowSums, directions.Waiting)
        waiting = [x for x in self.watch.live if x.promise is not None and isinstance(x.state.meaning, kinds)]
        directions.become_tensors(waiting)

    def _before_change(self, args: Any, kwargs: dict[str, Any]) -> None:
        """Computes what is still promised of tensors whose memory a function is about to change."""
        changed = [*parts(args[:1]), *parts(kwargs.get("out"))]
        storages = before_change(x for x in changed if type(x) is not Promise and isinstance(x, Tensor))
        if not storages:
            return
        for box in list(self.watch.live):
            if box.state.cells is None and any(
                x.untyped_storage()._cdata in storages for x in box.state.reads()
            ):
                box.state.computed()

    def _rows(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Promise | None:
        """The promise of rows that a function brings to norm 1; None where it does something else."""
        first = args[0] if args else None
        if isinstance(first, Tensor) and first.dim() == 2 and first.shape[0] ** 2 < self.least_cells:
            return None
        rows = unit_rows(func, args, kwargs)
        if rows is None or rows.of.shape[0] ** 2 < self.least_cells:
            return None
        if torch.is_inference_mode_enabled() or is_transformed():
            return None
        promise = promised(State(func, args, kwargs, rows), rows.of.dtype)
        self.watch.live.add(promise.box)
        return promise

    def _product(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Promise | None:
        """The promise of a product; None where it has to be computed."""
        sides = PRODUCTS[func](*args, **kwargs)
        if sides is None or not _are_promised(*sides, self.least_cells):
            return None
        sources = tuple(x for side in sides for x in side.sources)
        meaning = Scores((product_of(*sides),))
        promise = promised(state_of(func, args, kwargs, meaning, sources), meaning.first.queries.dtype)
        self.watch.live.add(promise.box)
        return promise


def _is_small(args: Any, least_cells: int) -> bool:
    """Whether a mask of these arguments, two lists of integers or one or two sizes, has fewer cells."""
    sizes = [x.numel() if isinstance(x, Tensor) else x for x in args[:2]]
    if not sizes or not all(type(x) is int for x in sizes):
        return False
    return bool(sizes[0] * sizes[-1] < least_cells)


def _has_numbers_of_rows(args: Any) -> bool:
    """Whether a mask is multiplied by a number of each row, whose products are as many as its cells."""
    return any(type(x) is Tensor and x.dim() == 2 and x.shape[1] == 1 and x.is_floating_point() for x in args)


def _are_promised(queries: Side, candidates: Side, least_cells: int) -> bool:
    """Whether a product of these rows is a promise."""
    a, b = queries.rows, candidates.rows
    if a.shape[0] * b.shape[0] < least_cells or a.shape[1] != b.shape[1] or a.dtype is not b.dtype:
        return False
    if (
        not a.is_floating_point()
        or a.device != b.device
        or (queries.unit is None) is not (candidates.unit is None)
    ):
        return False
    if torch.is_inference_mode_enabled() or is_transformed():
        return False
    return queries.unit is not None or not (queries.is_of_layer or candidates.is_of_layer)
