"""A tensor that is not there yet, and what becomes of functions that a program calls with it.

A promise is asked for shape and dtype without an answer being computed. What wants its cells gets those of
the program itself: the functions that it called are called then, with their gradients.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from fastqt.promises.report import Report
from fastqt.promises.scores import Meaning, UnitRows
from fastqt.promises.state import Function, State, before_change, mapped, parts

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


class Box:
    """The state of a promise, which functions in place replace by another one.

    Attributes:
        base: that of the promise of which this is a view.
        all_views: the views of it.
        dtype: of the tensor.
        promise: of what waits.
        parts: those of the losses of which a number is made.
        is_shared: whether a function of autograd has the promise, so that gradients have to go to its node.
        settled: the tensor from which they do, which others get.
    """

    def __init__(self, state: State, dtype: torch.dtype, base: Box | None) -> None:
        self.state, self.dtype, self.base = state, dtype, base
        self.all_views: list[weakref.ref[Box]] = []
        self.promise: weakref.ref[Promise] | None = None
        self.parts: list[Box] = []
        self.is_shared = False
        self.settled: Tensor | None = None
        if base is not None:
            base.all_views.append(weakref.ref(self))

    @property
    def views(self) -> list[Box]:
        """Those that there are."""
        views = (x() for x in self.all_views)
        return [x for x in views if x is not None]


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
        state = ctx.box.state
        # What else the program makes of rows has their graph, which this backward pass may have freed.
        cells = state.computed_again() if isinstance(state.meaning, UnitRows) else state.computed()
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
    box = Box(state, dtype, base)
    leaves, shape = state.leaves, state.meaning.shape
    promise = _anchored(box, shape, dtype, *leaves) if leaves else Promise(box, shape, dtype)
    if state.meaning.waits:
        box.promise = weakref.ref(promise)
        # Whoever computes it, the program has the same tensor, before there are views of it.
        of_box = weakref.ref(box)
        state.when_computed = lambda: become_tensor(of_box())
    return promise


def waits(x: Any) -> bool:
    """Whether it is a promise that waits, and that no function of autograd has been given or has returned."""
    if type(x) is not Promise or x.box.is_shared:
        return False
    meaning = x.box.state.meaning
    if meaning is None or not meaning.waits:
        return False
    with torch._C.DisableTorchFunctionSubclass():
        if not has_own_node(x):
            return False
        # A function of autograd that is being called holds its arguments. It has the node of the promise, to
        # which all gradients have to go then.
        x.box.is_shared = Tensor._use_count(x) > 1  # type: ignore[attr-defined]  # which torch's stub lacks
    return not x.box.is_shared


def become_tensor(box: Box | None) -> None:
    """Makes a promise whose tensor is computed this tensor, unless a function of autograd has it."""
    promise = None if box is None or box.promise is None else box.promise()
    if box is None or promise is None:
        return
    box.promise = None  # A tensor with a weak reference is not swapped.
    if waits(promise):
        with torch._C.DisableTorchFunction():
            torch.utils.swap_tensors(promise, box.state.computed())
        box.state.keep(promise)


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


# What torch's `apply` calls where no transform is active, in which there are no promises.
_anchored: Callable[..., Promise] = super(torch.autograd.Function, _Anchor).apply
# torch gives `apply` no types.
_cells_of: Callable[..., Tensor] = _Cells.apply


def is_settled(x: Promise) -> bool:
    """Whether gradients have to go to its node, which a function of autograd has or has made."""
    return x.box.is_shared or not has_own_node(x)


def settled(x: Any) -> Any:
    """A tensor in place of a promise whose node has to get the gradients."""
    if not isinstance(x, Promise) or not is_settled(x):
        return x
    if not has_own_node(x) or not torch.is_grad_enabled():
        return _cells_of(x)
    if x.box.settled is None:
        x.box.settled = _cells_of(x)
    return x.box.settled


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
        self.live: weakref.WeakSet[Box] = weakref.WeakSet()
        self.losses: list[weakref.ref[Box]] = []

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
_LISTS = (tuple, list)


def known(x: Any, kind: type[Any] = Meaning) -> Any:
    """What is known of a promise, if it is of this kind; None of anything else."""
    if not isinstance(x, Promise):
        return None
    meaning = x.box.state.known
    return meaning if isinstance(meaning, kind) else None


def promises_in(*several: Iterable[Any]) -> list[Promise]:
    """The promises in lists, and in those that they hold."""
    promises: list[Promise] = []
    for x in several:
        for y in x:
            if type(y) is Promise:
                promises.append(y)
            elif y is not None and isinstance(y, _LISTS):
                promises += promises_in(y)
    return promises


def called(func: Function, args: Any, kwargs: dict[str, Any], watch: Watch) -> Any:
    """What a function gives of arguments among which are promises."""
    if func in _ANSWERED and (not isinstance(args[0], Promise) or args[0].box.state.meaning is not None):
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    promises = promises_in(args, kwargs.values())
    for x in promises:
        if is_settled(x):
            args, kwargs = mapped(args, settled), {key: mapped(x, settled) for key, x in kwargs.items()}
            promises = promises_in(args, kwargs.values())
            break
    if not promises:
        return func(*args, **kwargs)
    name = getattr(func, "__name__", str(func))
    if func in _PINS and isinstance(args[0], Promise):
        args[0].box.state.computed()
        args[0].box.state.pin()
    elif kwargs.get("out") is not None:
        return _into(func, name, args, kwargs, watch)
    elif args and isinstance(args[0], Promise) and changes_in_place(func, kwargs):
        return _in_place(func, name, args, kwargs, watch)
    else:
        answer = by_rule(func, args, kwargs, watch, promises)
        if answer is not NotImplemented:
            return answer

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
        elif state.meaning is None or state.meaning.is_matrix:
            watch.computes(name, x)
        return state.computed()

    return func(*mapped(args, cells), **{key: mapped(x, cells) for key, x in kwargs.items()})


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


def changes_in_place(func: Function, kwargs: dict[str, Any]) -> bool:
    """Whether a function changes its first argument, or one named `out`."""
    changes = _CHANGES.get(func)
    if changes is None:
        changes = _changes_its_first(func)
        if not torch.compiler.is_compiling():  # A graph depends on no dictionary that grows.
            _CHANGES[func] = changes
    return changes or kwargs.get("out") is not None


_CHANGES: dict[Function, bool] = {}  # functions that are known


def _changes_its_first(func: Function) -> bool:
    """Whether a function changes its first argument, as its name says."""
    name = getattr(func, "__name__", "")
    operator = (
        name.startswith("__i") and name.endswith("__") and name not in ("__index__", "__int__", "__invert__")
    )
    named = name.endswith("_") and not name.endswith("__")
    return named or operator or name in ("__setitem__", "__set__")


def states(args: Any) -> Any:
    """Arguments of a function with states in place of promises."""
    several = [x.box.state if type(x) is Promise else states(x) if isinstance(x, _LISTS) else x for x in args]
    return several if isinstance(args, list) else tuple(several)


def state_of(
    func: Function, args: Any, kwargs: dict[str, Any], meaning: Meaning, sources: tuple[Tensor, ...] = ()
) -> State:
    """The state of what a function makes of arguments, of which this is known."""
    keywords = dict(zip(kwargs, states(kwargs.values()), strict=True)) if kwargs else {}
    meaning = meaning if torch.is_grad_enabled() else meaning.detached()
    return State(func, states(args), keywords, meaning, sources)


def answered(
    answer: Any, func: Function, args: Any, kwargs: dict[str, Any], watch: Watch, first: Promise
) -> Any:
    """What a program gets for a rule's answer to a function whose first promise is this one."""
    if isinstance(answer, Several):
        each = [answered(meaning, part, args, kwargs, watch, first) for part, meaning in answer.answers]
        return answer.joined(each)
    base = None
    if isinstance(answer, View):
        answer, base = answer.meaning, first.box
    if not isinstance(answer, Meaning):
        return answer
    state = state_of(func, args, kwargs, answer)
    promise = promised(state, answer.dtype or first.box.dtype, base)
    if answer.by:
        state.reports = functools.partial(watch.fused, getattr(func, "__name__", ""))
    watch.live.add(promise.box)
    return promise


def _into(func: Function, name: str, args: Any, kwargs: dict[str, Any], watch: Watch) -> Any:
    """A function that writes its result to `out`."""
    out, others = kwargs["out"], {key: x for key, x in kwargs.items() if key != "out"}
    if isinstance(out, Promise):

        def into(target: Tensor, *rest: Any, **named: Any) -> Any:
            return func(*rest, **named, out=target)

        return _in_place(into, name, (out, *args), others, watch)
    args, others = mapped(args, _cells), {key: mapped(x, _cells) for key, x in others.items()}
    return func(*args, **others, out=out)


def _cells(x: Any) -> Any:
    return x.box.state.computed() if isinstance(x, Promise) else x


def _share_memory(a: Tensor, b: Tensor) -> bool:
    return bool(a.untyped_storage()._cdata == b.untyped_storage()._cdata)


def changed_by_rule(func: Function, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a promise, the first argument, stands for what a function in place makes of it from now on."""
    promise, box = args[0], args[0].box
    alone = box.base is None and not box.views
    instead = RULES.in_place.get(func)
    rule = None if instead is None else RULES.of.get(instead)
    has_new_leaf = torch.is_grad_enabled() and any(
        isinstance(x, Tensor) and x.requires_grad for x in parts((args[1:], tuple(kwargs.values())))
    )
    if not alone or rule is None or instead is None or has_new_leaf:
        return False
    answer = rule(*args, **kwargs)
    is_same = isinstance(answer, Meaning) and tuple(answer.shape) == tuple(promise.shape)
    if not is_same or answer.dtype not in (None, promise.dtype):
        return False
    box.state = state_of(instead, args, kwargs, answer)
    return True


def _in_place(func: Function, name: str, args: Any, kwargs: dict[str, Any], watch: Watch) -> Any:
    """A function that changes its first argument, a promise."""
    promise, box = args[0], args[0].box
    if changed_by_rule(func, args, kwargs):
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
    before_change([target])
    rest, named = mapped(args[1:], _cells), {key: mapped(x, _cells) for key, x in kwargs.items()}
    with torch._C.DisableTorchFunctionSubclass():
        func(target, *rest, **named)
    for each in (family, *family.views):
        each.state.pin()
        each.state.keep(each.state.computed())
    return promise
