"""What rules make of functions of promises, and who is told of it."""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from fastqt.promises.promise import Box, Promise, promised
from fastqt.promises.report import Report
from fastqt.promises.scores import Meaning
from fastqt.promises.state import Function, State

_LISTS = (tuple, list)


class View:
    """A rule's answer that shares its cells with the promise that it is made of."""

    def __init__(self, meaning: Meaning) -> None:
        self.meaning = meaning


class Several:
    """A rule's answer of several tensors.

    Attributes:
        answers: by the function of the same arguments that gives it, each answer.
        joined: what the program gets of the promises.
    """

    def __init__(self, answers: list[tuple[Function, Meaning]], joined: Callable[..., Any]) -> None:
        self.answers, self.joined = answers, joined


class Rules:
    """By function, what it makes of promises: another meaning, a `View`, a tensor, or NotImplemented.

    Attributes:
        of: the rules.
        taken: the call of fastqt that the last rule has made; "" for none.
        in_place: by a function that changes its first argument, the one that gives the result.
    """

    def __init__(self) -> None:
        self.of: dict[Function, Function] = {}
        self.taken = ""
        self.in_place: dict[Function, Function] = {}

    def rule(self, *functions: Function) -> Callable[[Function], Function]:
        def add(rule: Function) -> Function:
            for function in functions:
                self.of[function] = rule
            return rule

        return add


RULES = Rules()


class Boxes:
    """Those of the promises that there are, without what a `WeakSet` does when one goes."""

    def __init__(self) -> None:
        self._all: list[weakref.ref[Box]] = []
        self._most = 64  # of which those that have gone are forgotten

    def add(self, box: Box) -> None:
        self._all.append(weakref.ref(box))
        if len(self._all) > self._most:
            self._all = [x for x in self._all if x() is not None]
            self._most = 2 * len(self._all) + 64

    def __iter__(self) -> Iterator[Box]:
        boxes = [x() for x in self._all]
        return iter([x for x in boxes if x is not None])


class Watch:
    """Who is told of what becomes of promises.

    Attributes:
        report: of the block; None outside.
        live: the promises of the block.
        losses: those that may wait for another direction.
        strict: whether cells that are computed are an error.
    """

    def __init__(self, report: Report | None = None, *, strict: bool = False) -> None:
        self.report, self.strict = report, strict
        self.live = Boxes()
        self.losses: list[weakref.ref[Box]] = []

    def fused(self, function: str, by: str) -> None:
        if self.report is not None:
            self.report.add(function, by)

    def computes(self, function: str, promise: Promise) -> None:
        state = promise.box.state
        if state.cells is not None or state.meaning is None:
            return
        self.computes_cells(function, tuple(promise.shape), promise.dtype.itemsize)

    def computes_cells(self, function: str, shape: tuple[int, ...], itemsize: int, by: str = "") -> None:
        """The cells of a matrix are computed for a function, unless a call of fastqt does it."""
        if by:
            return
        if self.report is not None:
            self.report.add(function, bytes_of_cells=math.prod(shape) * itemsize)
        self.allow(function, shape)

    def allow(self, function: str, shape: tuple[int, ...]) -> None:
        """Raises RuntimeError where a function may not have the cells of a matrix of this shape."""
        if self.strict:
            raise RuntimeError(
                f"fastqt.fused(strict=True): {function} wants the cells of a score matrix, {shape}"
            )


SILENT = Watch()


def by_rule(func: Function, args: Any, kwargs: dict[str, Any], watch: Watch, promises: list[Promise]) -> Any:
    """What a rule makes of a function that changes nothing; NotImplemented where none has an answer.

    Args:
        promises: those among the arguments, the first of which gives the dtype and is what views are of.
    """
    rule = RULES.of.get(func)
    if rule is None:
        return NotImplemented
    RULES.taken = ""
    answer = rule(*args, **kwargs)
    if watch.report is None and isinstance(answer, Meaning) and answer.comes_first:
        # Nothing comes after it that it could wait for.
        value = answer.value()
        answer = NotImplemented if value is None else value
    if answer is NotImplemented:
        return answer
    if not isinstance(answer, Meaning | View | Several):
        for x in promises:
            if x.box.state.cells is None:
                x.box.state.check()
    if RULES.taken:
        watch.fused(getattr(func, "__name__", str(func)), RULES.taken)
    return answered(answer, func, args, kwargs, watch, promises[0])


def states(args: Any) -> Any:
    """Arguments of a function with states in place of promises."""
    several = [x.box.state if type(x) is Promise else states(x) if isinstance(x, _LISTS) else x for x in args]
    return several if isinstance(args, list) else tuple(several)


def state_of(
    func: Function, args: Any, kwargs: dict[str, Any], meaning: Meaning, sources: tuple[Tensor, ...] = ()
) -> State:
    """The state of what a function makes of arguments, of which this is known."""
    keywords = dict(zip(kwargs, states(kwargs.values()), strict=True)) if kwargs else {}
    state = State(func, states(args), keywords, meaning, sources)
    if not state.grad:
        state.meaning = state.first_meaning = meaning.detached()
    return state


def answered(
    answer: Any, func: Function, args: Any, kwargs: dict[str, Any], watch: Watch, first: Promise
) -> Any:
    """What a program gets for a rule's answer to a function whose first promise is this one."""
    if type(answer) is Several:
        each = [answered(meaning, part, args, kwargs, watch, first) for part, meaning in answer.answers]
        return answer.joined(each)
    base = None
    if type(answer) is View:
        answer, base = answer.meaning, first.box
        if base.promise is None:
            base.owner = weakref.ref(first)
    if not isinstance(answer, Meaning):
        return answer
    state = state_of(func, args, kwargs, answer)
    promise = promised(state, answer.dtype or first.box.dtype, base)
    if answer.by:
        name, shape = getattr(func, "__name__", ""), first.box.state.shape
        state.reports = functools.partial(watch.fused, name)
        state.told = functools.partial(watch.computes_cells, name, shape, first.box.dtype.itemsize)
    watch.live.add(promise.box)
    return promise
