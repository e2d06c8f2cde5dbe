"""A tensor that is not there yet: what a program has called to get it, and what is known of its cells.

A promise is asked for shape and dtype without an answer being computed. What wants its cells gets those of
the program itself: the functions that it called are called then, with their gradients.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from fastqt.promises.report import Report
from fastqt.promises.scores import Diagonal, Meaning

Function = Callable[..., Any]

# What a promise answers itself, as the tensor would that it stands for.
_ANSWERED = {
    getattr(Tensor, name).__get__
    for name in (
        "shape",
        "dtype",
        "device",
        "ndim",
        "layout",
        "is_cuda",
        "requires_grad",
        "is_leaf",
        "grad_fn",
    )
} | {Tensor.size, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.__len__, Tensor.is_floating_point}
# What is of the tensor itself, so that everything has to go through it from then on.
_PINS = {Tensor.register_hook, Tensor.retain_grad, Tensor.requires_grad_}


_LISTS = (tuple, list)  # A union of both would be made anew in each of many calls.


def mapped(x: Any, change: Callable[[Any], Any]) -> Any:
    """Arguments of a function with each of their parts changed."""
    if isinstance(x, tuple):
        return tuple(mapped(y, change) for y in x)
    if isinstance(x, list):
        return [mapped(y, change) for y in x]
    return change(x)


def parts(x: Any) -> list[Any]:
    """What lists and tuples within each other hold."""
    if not isinstance(x, _LISTS):
        return [x]
    flat: list[Any] = []
    for y in x:
        if isinstance(y, _LISTS):
            flat += parts(y)
        else:
            flat.append(y)
    return flat


class State:
    """How a promise's tensor is computed: a function and its arguments, in which states stand for promises.

    Attributes:
        meaning: what is known of it; None once it is to be taken as it is.
        cells: the tensor, once it is computed.
        first_meaning: what was known of it at first.
        taken: cells (rows, columns, numbers) that a program has, which keep these numbers.
        kinds: of its parts that can be computed; see `walk`.
        is_differentiable: whether a gradient may flow through it.
        sources: the tensors that its inputs are made of, of which its meaning is; its inputs unless given.
        told: of a loss that waits, is told what computes it in place of itself; "" for the cells.
    """

    def __init__(
        self,
        function: Function,
        args: Any,
        keywords: dict[str, Any],
        meaning: Meaning | None,
        sources: tuple[Tensor, ...] = (),
    ) -> None:
        self.function, self.args, self.keywords, self.meaning = function, args, keywords, meaning
        self.cells: Tensor | None = None
        self.first_meaning = meaning
        self.taken: list[tuple[Tensor, Tensor, Tensor]] = []
        self.kinds: frozenset[str] | None = None
        self.grad = torch.is_grad_enabled()
        dtype = None if meaning is None else meaning.dtype
        is_number = dtype is None or dtype.is_floating_point
        self.is_differentiable = self.grad and is_number and function not in (Tensor.detach, torch.detach)
        flat = parts((args, tuple(keywords.values())))
        self.inputs = [x for x in flat if isinstance(x, Tensor)]
        self.parents = [x for x in flat if isinstance(x, State)]
        self.sources = sources or self.inputs
        self.read = [*self.inputs, *sources]
        self.versions = [x._version for x in self.read]
        self.told: Callable[[str], None] | None = None
        device = self.device.type
        self.autocast = (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))

    @property
    def device(self) -> torch.device:
        return self.inputs[0].device if self.inputs else self.parents[0].device

    @property
    def known(self) -> Meaning | None:
        """What is known of it, unless its tensor or one that it is made of has to be computed."""
        if self.meaning is None or self.cells is not None:
            return None
        return None if any(x.is_pinned for x in self.ancestors()) else self.meaning

    @property
    def is_pinned(self) -> bool:
        return self.meaning is None

    def ancestors(self) -> Iterator[State]:
        for parent in self.parents:
            yield parent
            yield from parent.ancestors()

    def leaves(self) -> Iterator[Tensor]:
        """What a gradient may flow to."""
        if not self.is_differentiable:
            return
        yield from self.sources
        for parent in self.parents:
            yield from parent.leaves()

    def reads(self) -> Iterator[Tensor]:
        """The tensors whose numbers its cells are made of."""
        yield from self.read
        for parent in self.parents:
            yield from parent.reads() if parent.cells is None else (parent.cells,)

    def check(self) -> None:
        """Raises RuntimeError where an input has changed since the program called the function."""
        changed = [x._version != version for x, version in zip(self.read, self.versions, strict=True)]
        if any(changed) or any(x.is_changed for x in self.parents):
            raise RuntimeError(
                "a tensor of a score matrix was changed in place outside of fastqt.fused() before the matrix "
                "was used; use the matrix before, or put the change into the block"
            )
        for parent in self.parents:
            if parent.cells is None:
                parent.check()

    def computed(self) -> Tensor:
        """The tensor, by the functions that the program has called."""
        if self.cells is None:
            self.check()
            if self.meaning is not None and self.meaning.comes_first:
                self._take_what_is_known(self.meaning)
        if self.cells is None:
            args, keywords = (
                mapped(x, lambda y: y.computed() if isinstance(y, State) else y)
                for x in (self.args, tuple(self.keywords.values()))
            )
            with self.modes(grad=self.grad):
                cells = self.function(*args, **dict(zip(self.keywords, keywords, strict=True)))
                for rows, columns, values in self.taken:
                    cells = with_numbers(cells, rows, columns, values)
                self.keep(cells)
        assert self.cells is not None
        return self.cells

    def _take_what_is_known(self, meaning: Meaning) -> None:
        """Computes the tensor by what is known of it, if that is possible."""
        value = None
        if not any(x.is_pinned for x in self.ancestors()):
            with self.modes(grad=self.grad):
                value = meaning.value()
        if value is not None:
            self.keep(value)
        elif self.told is not None:
            self.told("")

    @contextlib.contextmanager
    def modes(self, *, grad: bool) -> Iterator[None]:
        """The modes of torch that there were when the program called the function."""
        device, is_enabled, dtype = self.autocast
        casts = torch.autocast(device, dtype=dtype, enabled=True) if is_enabled else contextlib.nullcontext()
        with torch.inference_mode(mode=False), torch.set_grad_enabled(grad), casts:
            yield

    def modes_are(self, other: State) -> bool:
        return self.grad == other.grad and self.autocast == other.autocast

    def take(self, rows: Tensor, columns: Tensor, values: Tensor) -> None:
        """Notes cells that a program has, which may compare them with the others of the matrix."""
        for taken in self.taken:
            if torch.equal(taken[0], rows) and torch.equal(taken[1], columns):
                return
        self.taken.append((rows, columns, values.detach()))

    def keep(self, cells: Tensor) -> None:
        self.cells, self.cells_version = cells, cells._version

    @property
    def is_changed(self) -> bool:
        """Whether its tensor was computed and then changed in place."""
        return self.cells is not None and self.cells._version != self.cells_version


class _WithNumbers(torch.autograd.Function):
    """A matrix with other roundings of some cells, whose gradients are theirs."""

    @staticmethod
    def forward(ctx: Any, cells: Tensor, rows: Tensor, columns: Tensor, values: Tensor) -> Tensor:
        return cells.index_put((rows, columns), values.to(cells.dtype))

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        return upstream[0], None, None, None


class Box:
    """The state of a promise, which functions in place replace by another one.

    Attributes:
        base: that of the promise of which this is a view.
        views: the views that there are.
        promise: of a loss that waits.
        parts: those of the losses of which a number is made.
        is_shared: whether a function of autograd has the promise, so that gradients have to go to its node.
    """

    def __init__(self, state: State, base: Box | None) -> None:
        self.state, self.base = state, base
        self.views: weakref.WeakSet[Box] = weakref.WeakSet()
        self.promise: weakref.ref[Promise] | None = None
        self.parts: list[Box] = []
        self.is_shared = False
        if base is not None:
            base.views.add(self)


class Promise(Tensor):
    """A tensor of which no cell is there; see `Box`."""

    box: Box

    @staticmethod
    def __new__(cls, box: Box, shape: tuple[int, ...], dtype: torch.dtype) -> Promise:
        made: Promise = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=box.state.device)
        made.box = box
        return made

    @classmethod
    def __torch_function__(cls, func: Function, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return called(func, args, kwargs or {}, SILENT)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's own stub has another signature
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """What reaches it past torch's functions: inside of functions of C++ and of `autograd.Function`."""
        if func._schema.is_mutable and any(isinstance(x, Promise) for x in parts(args[:1])):
            raise RuntimeError(
                f"{func}: a score matrix of fastqt.fused() is changed in place; clone it before"
            )

        def cells(x: Any) -> Any:
            if not isinstance(x, Promise):
                return x
            computed = x.box.state.computed()
            with torch._C.DisableTorchFunctionSubclass():
                if computed.requires_grad and not x.requires_grad:
                    raise RuntimeError(
                        f"{func}: a score matrix of fastqt.fused() was changed in place; clone it before"
                    )
            return computed.detach()

        keywords = {name: mapped(x, cells) for name, x in (kwargs or {}).items()}
        return func(*mapped(args, cells), **keywords)


class _Anchor(torch.autograd.Function):
    """Gives a promise its place in autograd's graph, for functions that nobody sees."""

    @staticmethod
    def forward(ctx: Any, box: Box, shape: Any, dtype: Any, *leaves: Tensor) -> Tensor:
        ctx.box, ctx.leaves = box, leaves
        return Promise(box, shape, dtype)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        cells = ctx.box.state.computed()
        gradients = torch.autograd.grad(
            cells,
            ctx.leaves,
            upstream[0],
            retain_graph=True,
            create_graph=torch.is_grad_enabled(),
            allow_unused=True,
        )
        return (None, None, None, *gradients)


def promised(state: State, dtype: torch.dtype, base: Box | None = None) -> Promise:
    """A promise of a state whose meaning is known."""
    assert state.meaning is not None
    box = Box(state, base)
    leaves = [x for x in state.leaves() if x.requires_grad]
    shape = tuple(state.meaning.shape)
    if not leaves:
        return Promise(box, shape, dtype)
    return _anchored(box, shape, dtype, *leaves)


def has_own_node(promise: Promise) -> bool:
    """Whether its node in autograd's graph is its anchor; what a function of autograd returns has another."""
    with torch._C.DisableTorchFunctionSubclass():
        node = promise.grad_fn
    return node is None or getattr(node, "box", None) is promise.box


class _Cells(torch.autograd.Function):
    """The cells of a promise that a function of autograd has returned, to which their gradient goes."""

    @staticmethod
    def forward(ctx: Any, promise: Promise) -> Tensor:
        return promise.box.state.computed().detach()

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Tensor:
        return upstream[0]


# torch gives `apply` no types.
_anchored: Callable[..., Promise] = _Anchor.apply
_cells_of: Callable[..., Tensor] = _Cells.apply
with_numbers: Callable[..., Tensor] = _WithNumbers.apply


def _settled(x: Any) -> Any:
    if isinstance(x, Promise) and (x.box.is_shared or not has_own_node(x)):
        return _cells_of(x)
    return x


class View:
    """A rule's answer that shares its cells with the promise that it is made of."""

    def __init__(self, meaning: Meaning) -> None:
        self.meaning = meaning


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


class Watch:
    """Who is told of what becomes of promises.

    Attributes:
        report: of the block; None outside.
        live: the promises of the block.
        strict: whether cells that are computed are an error.
    """

    def __init__(self, report: Report | None = None, *, strict: bool = False) -> None:
        self.report, self.strict = report, strict
        self.live: weakref.WeakSet[Box] = weakref.WeakSet()

    def fused(self, function: str, by: str) -> None:
        if self.report is not None:
            self.report.add(function, by)

    def computes(self, function: str, promise: Promise) -> None:
        state = promise.box.state
        if state.cells is not None or state.meaning is None:
            return
        size = promise.numel() * promise.dtype.itemsize
        if self.report is not None:
            self.report.add(function, bytes_of_cells=size)
        self.allow(function, tuple(promise.shape))

    def allow(self, function: str, shape: tuple[int, ...]) -> None:
        """Raises RuntimeError where a function may not have the cells of a matrix of this shape."""
        if self.strict:
            raise RuntimeError(
                f"fastqt.fused(strict=True): {function} wants the cells of a score matrix, {shape}"
            )


SILENT = Watch()


def known(x: Any, kind: type[Any] = Meaning) -> Any:
    """What is known of a promise, if it is of this kind; None of anything else."""
    if not isinstance(x, Promise):
        return None
    meaning = x.box.state.known
    if meaning is None or not isinstance(meaning, kind):
        return None
    x.box.state.check()
    return meaning


def called(func: Function, args: Any, kwargs: dict[str, Any], watch: Watch) -> Any:
    """What a function gives of arguments among which are promises."""
    if func in _ANSWERED and (not isinstance(args[0], Promise) or args[0].box.state.meaning is not None):
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    promises = [x for x in parts((args, tuple(kwargs.values()))) if isinstance(x, Promise)]
    if any(x.box.is_shared or not has_own_node(x) for x in promises):
        args, kwargs = mapped(args, _settled), {key: mapped(x, _settled) for key, x in kwargs.items()}
        if not any(isinstance(x, Promise) for x in parts((args, tuple(kwargs.values())))):
            return func(*args, **kwargs)
    name = getattr(func, "__name__", str(func))
    if func in _PINS and isinstance(args[0], Promise):
        args[0].box.state.computed()
        args[0].box.state.meaning = None
    elif args and isinstance(args[0], Promise) and changes_in_place(func, kwargs):
        return _in_place(func, name, args, kwargs, watch)
    elif (rule := RULES.of.get(func)) is not None:
        RULES.taken = ""
        answer = rule(*args, **kwargs)
        if watch.report is None and isinstance(answer, Meaning) and answer.comes_first:
            # Nothing comes after it that it could wait for.
            value = answer.value()
            answer = NotImplemented if value is None else value
        if answer is not NotImplemented:
            if RULES.taken:
                watch.fused(name, RULES.taken)
            return _answered(answer, func, args, kwargs, watch)

    def cells(x: Any) -> Any:
        if not isinstance(x, Promise):
            return x
        state = x.box.state
        value = None
        if state.known is not None:
            RULES.taken = ""
            with state.modes(grad=state.grad):
                value = state.known.value()
            if RULES.taken:
                watch.fused(name, RULES.taken)
        if value is not None:
            state.keep(value.to(x.dtype))
        elif state.meaning is None or not (state.meaning.comes_first or isinstance(state.meaning, Diagonal)):
            watch.computes(name, x)
        return state.computed()

    return func(*mapped(args, cells), **{key: mapped(x, cells) for key, x in kwargs.items()})


def changes_in_place(func: Function, kwargs: dict[str, Any]) -> bool:
    return kwargs.get("out") is not None or _changes_its_first(func)


@functools.lru_cache(maxsize=1024)
def _changes_its_first(func: Function) -> bool:
    """Whether a function changes its first argument, as its name says."""
    name = getattr(func, "__name__", "")
    operator = (
        name.startswith("__i") and name.endswith("__") and name not in ("__index__", "__int__", "__invert__")
    )
    named = name.endswith("_") and not name.endswith("__")
    return named or operator or name in ("__setitem__", "__set__")


def _states(x: Any) -> Any:
    return x.box.state if isinstance(x, Promise) else x


def state_of(func: Function, args: Any, kwargs: dict[str, Any], meaning: Meaning) -> State:
    keywords = {key: mapped(x, _states) for key, x in kwargs.items()}
    meaning = meaning if torch.is_grad_enabled() else meaning.detached()
    return State(func, mapped(args, _states), keywords, meaning)


def _answered(answer: Any, func: Function, args: Any, kwargs: dict[str, Any], watch: Watch) -> Any:
    base = None
    if isinstance(answer, View):
        answer = answer.meaning
        base = next(x.box for x in args if isinstance(x, Promise))
    if not isinstance(answer, Meaning):
        return answer
    dtype = answer.dtype or next(x.dtype for x in parts(args) if isinstance(x, Promise))
    promise = promised(state_of(func, args, kwargs, answer), dtype, base)
    watch.live.add(promise.box)
    return promise


def _share_memory(a: Tensor, b: Tensor) -> bool:
    return bool(a.untyped_storage()._cdata == b.untyped_storage()._cdata)


def _in_place(func: Function, name: str, args: Any, kwargs: dict[str, Any], watch: Watch) -> Any:
    """A function that changes its first argument, a promise."""
    promise, box = args[0], args[0].box
    alone = box.base is None and not any(box.views)
    instead = RULES.in_place.get(func)
    rule = None if instead is None else RULES.of.get(instead)
    has_new_leaf = torch.is_grad_enabled() and any(
        isinstance(x, Tensor) and x.requires_grad for x in parts((args[1:], tuple(kwargs.values())))
    )
    if alone and rule is not None and instead is not None and not has_new_leaf:
        answer = rule(*args, **kwargs)
        is_same = isinstance(answer, Meaning) and tuple(answer.shape) == tuple(promise.shape)
        if is_same and answer.dtype in (None, promise.dtype):
            box.state = state_of(instead, args, kwargs, answer)
            return promise

    family = box.base or box
    watch.computes(name, promise)
    for each in (family, *family.views):
        if each.state.cells is not None:
            each.state.keep(each.state.cells)
    # What was made of the old cells keeps them.
    for other in [*watch.live, family]:
        other.state.computed()
    for view in family.views:
        # Its value may have come from what is known of it.
        if view.state.meaning is not None and not _share_memory(
            view.state.computed(), family.state.computed()
        ):
            view.state = State(
                view.state.function, (family.state, *view.state.args[1:]), view.state.keywords, None
            )
            view.state.computed()
    target = box.state.computed()
    rest = mapped(args[1:], lambda x: x.box.state.computed() if isinstance(x, Promise) else x)
    with torch._C.DisableTorchFunctionSubclass():
        func(target, *rest, **kwargs)
    for each in (family, *family.views):
        each.state.meaning = None
        each.state.keep(each.state.computed())
    return promise
