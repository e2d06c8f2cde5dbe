"""A tensor that is not there yet, its place in autograd's graph, and how it becomes the tensor.

A promise is asked for shape and dtype without an answer being computed. What wants its cells gets those of
the program itself: the functions that it called are called then, with their gradients.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor

from fastqt.promises.scores import Meaning, UnitRows
from fastqt.promises.state import Function, State, mapped, parts

_LISTS = (tuple, list)
# torch gives it no types.
_made: Callable[..., Promise] = Tensor._make_wrapper_subclass
# By its name, since a type checker takes the attribute for a size and not for what gives one.
_shape_of: Callable[..., torch.Size] = getattr(Tensor, "shape").__get__  # noqa: B009


class Box:
    """The state of a promise, which functions in place replace by another one.

    Attributes:
        base: that of the promise of which this is a view.
        all_views: the views of it.
        owner: of what has views and does not wait, its promise, which the program may have forgotten.
        dtype: of the tensor.
        promise: of what waits.
        parts: those of the losses of which a number is made.
        is_shared: whether a function of autograd has the promise, so that gradients have to go to its node.
        settled: the tensor from which they do, which others get.
    """

    def __init__(self, state: State, dtype: torch.dtype, base: Box | None) -> None:
        self.state, self.dtype, self.base = state, dtype, base
        self.all_views: list[weakref.ref[Box]] = []
        self.owner: weakref.ref[Promise] | None = None
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

    @property
    def is_alone(self) -> bool:
        """Whether the program has no other tensor that shares its memory."""
        base = self.base
        if base is None:
            return not self.views
        is_forgotten = base.owner is not None and base.owner() is None
        return is_forgotten and all(x is self for x in base.views)


class Promise(Tensor):
    """A tensor of which no cell is there; see `Box`."""

    box: Box
    called: ClassVar[Function]  # what a function gives of promises outside of a block; see calls.py

    # What is most often asked of it, without the way through torch's functions. Its form never changes.

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]  # which torch's stub has as attributes
        with torch._C.DisableTorchFunction():
            return _shape_of(self)

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]  # as of `shape`
        return self.box.dtype

    @property
    def device(self) -> torch.device:  # type: ignore[override]  # as of `shape`
        return self.box.state.device

    def __len__(self) -> int:
        return self.shape[0]

    @classmethod
    def __torch_function__(cls, func: Function, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return cls.called(func, args, kwargs or {})

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
        return _made(Promise, shape, dtype=dtype, device=box.state.device)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        state = ctx.box.state
        # What else the program makes of the tensor has its graph, which this backward pass may have freed.
        is_again = isinstance(state.meaning, UnitRows) or (state.cells is not None and state.is_repeatable)
        cells = state.computed_again() if is_again else state.computed()
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
    promise: Promise
    if leaves:
        promise = _anchored(box, shape, dtype, *leaves)
    else:
        promise = _made(Promise, shape, dtype=dtype, device=state.device)
    promise.box = box
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
        node = x.grad_fn  # as in `has_own_node`
        if node is not None and getattr(node, "box", None) is not x.box:
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


def known(x: Any, kind: type[Any] = Meaning) -> Any:
    """What is known of a promise, if it is of this kind; None of anything else."""
    if type(x) is not Promise:
        return None
    state = x.box.state
    meaning = state.meaning
    if state.cells is not None or not isinstance(meaning, kind):
        return None
    return meaning if state.free_at == State.pins or not state.is_of_pinned() else None


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
