"""How a promised tensor is computed: what the program has called for it, and what is known of its cells."""

from __future__ import annotations

import contextlib
import operator
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from fastqt.promises.scores import Meaning

Function = Callable[..., Any]
_AS_NOW = contextlib.nullcontext()
_CHANGED = (
    "a tensor of a score matrix was changed in place outside of fastqt.fused() before the matrix was used; "
    "use the matrix before, or put the change into the block"
)
_version_of = operator.attrgetter("_version")
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


class Holder(Protocol):
    """What needs matrices for a gradient that a function in place may change before it."""

    def copy(self, storages: set[int]) -> None:
        """Keeps copies of matrices of these storages."""


HOLDERS: weakref.WeakSet[Holder] = weakref.WeakSet()


def before_change(several: Iterable[Tensor]) -> set[int]:
    """Tells those that need tensors as they are, before these are changed in place; gives their storages."""
    storages = {x.untyped_storage()._cdata for x in several}
    for holder in list(HOLDERS) if storages else ():
        holder.copy(storages)
    return storages


def functions(names: str) -> list[Function]:
    """All functions of torch with these names."""
    named = [getattr(x, name, None) for name in names.split() for x in (Tensor, torch, F)]
    return [x for x in dict.fromkeys(named) if callable(x)]


def autocast_of(device: str) -> torch.dtype | None:
    """The dtype of autocast; None where it is disabled."""
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


class State:
    """How a promise's tensor is computed: a function and its arguments, in which states stand for promises.

    Attributes:
        meaning: what is known of it; None once it is to be taken as it is.
        cells: the tensor, once it is computed.
        first_meaning: what was known of it at first.
        taken: cells (rows, columns, numbers) that a program has, which keep these numbers.
        kinds: of its parts that can be computed; see `walk`.
        is_differentiable: whether a gradient may flow through it.
        leaves: the tensors to which its gradient flows.
        when_computed: is called then.
        reports: is told of the call of fastqt that has computed it in place of the program's function.
        free_at: how many tensors had been pinned when it was seen to be made of none of them.
        told: of a loss that waits, is told what computes it in place of itself; "" for the cells.
    """

    pins: ClassVar[int] = 0  # how many tensors have been pinned since the start

    # As most states have them, so that making one sets few attributes.
    cells: Tensor | None = None
    kinds: frozenset[str] | None = None
    told: Callable[[str], None] | None = None
    when_computed: Callable[[], None] | None = None
    reports: Callable[[str], None] | None = None
    taken: Sequence[tuple[Tensor, Tensor, Tensor]] = ()
    inputs: Sequence[Tensor] = ()
    parents: Sequence[State] = ()
    read: Sequence[Tensor] = ()
    versions: Sequence[int] = ()
    leaves: Sequence[Tensor] = ()

    def __init__(
        self,
        function: Function,
        args: Any,
        keywords: dict[str, Any],
        meaning: Meaning | None,
        sources: tuple[Tensor, ...] = (),
    ) -> None:
        """With what its inputs are made of, where its meaning is of that; a gradient flows there.

        One is made for each function that a program calls, so that its body calls few others.
        """
        self.function, self.args, self.keywords, self.meaning = function, args, keywords, meaning
        self.first_meaning = meaning
        self.grad = torch.is_grad_enabled()
        dtype = None if meaning is None else meaning.dtype
        is_number = dtype is None or dtype.is_floating_point
        self.is_differentiable = self.grad and is_number and function not in (Tensor.detach, torch.detach)

        inputs: list[Tensor] = []
        made_of: list[State] = []
        for x in (*args, *keywords.values()) if keywords else args:
            if type(x) is State:
                made_of.append(x)
            elif isinstance(x, Tensor):
                inputs.append(x)
            elif isinstance(x, _LISTS):
                several = parts(x)
                made_of += [y for y in several if type(y) is State]
                inputs += [y for y in several if isinstance(y, Tensor)]

        self.inputs, self.parents = inputs, made_of
        if inputs or sources:
            self.read = [*inputs, *sources]
            self.versions = list(map(_version_of, self.read))
        leaves: dict[int, Tensor] = {}  # each once
        if self.is_differentiable:
            for x in sources or inputs:
                if x.requires_grad:
                    leaves[id(x)] = x
        is_free = True
        for parent in made_of:
            is_free = is_free and parent.meaning is not None and parent.free_at == State.pins
            if self.is_differentiable:
                for x in parent.leaves:
                    leaves[id(x)] = x
        if leaves:
            self.leaves = list(leaves.values())
        self.free_at: int = State.pins if is_free else -1
        self.device: torch.device = inputs[0].device if inputs else made_of[0].device
        name = self.device.type
        self.autocast = torch.get_autocast_dtype(name) if torch.is_autocast_enabled(name) else None

    @classmethod
    def constant(cls, function: Function, meaning: Any) -> State:
        """That of a function of nothing but what is known, which no program can change."""
        state = object.__new__(cls)
        state.function, state.args, state.keywords = function, (meaning,), {}
        state.meaning = state.first_meaning = meaning
        state.grad, state.is_differentiable, state.free_at = torch.is_grad_enabled(), False, State.pins
        state.device = meaning.device
        state.autocast = autocast_of(state.device.type)
        return state

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the tensor, where anything was known of it at first."""
        assert self.first_meaning is not None
        return tuple(self.first_meaning.shape)

    @property
    def known(self) -> Meaning | None:
        """What is known of it, unless its tensor or one that it is made of has to be computed."""
        if self.meaning is None or self.cells is not None:
            return None
        return self.meaning if self.free_at == State.pins or not self.is_of_pinned() else None

    def is_of_pinned(self) -> bool:
        """Whether it is made of a tensor that has to be computed."""
        if self.free_at == State.pins:
            return False
        for parent in self.parents:
            if parent.meaning is None or (parent.parents and parent.is_of_pinned()):
                return True
        self.free_at = State.pins
        return False

    def pin(self) -> None:
        """Has the tensor taken as it is from now on."""
        self.meaning = None
        State.pins += 1

    @property
    def is_there(self) -> bool:
        """Whether its tensor, or one that it is made of, is computed."""
        return self.cells is not None or any(x.is_there for x in self.parents)

    def detached(self) -> State:
        return State(Tensor.detach, (self,), {}, None)

    def reads(self) -> Iterator[Tensor]:
        """The tensors whose numbers its cells are made of."""
        yield from self.read
        for parent in self.parents:
            yield from parent.reads() if parent.cells is None else (parent.cells,)

    def check(self) -> None:
        """Raises RuntimeError where an input has changed since the program called the function."""
        if self.read and list(map(_version_of, self.read)) != self.versions:
            raise RuntimeError(_CHANGED)
        for parent in self.parents:
            if parent.cells is None:
                parent.check()
            elif parent.is_changed:
                raise RuntimeError(_CHANGED)

    def computed(self) -> Tensor:
        """The tensor, by the functions that the program has called."""
        if self.cells is None:
            self.check()
            if self.meaning is not None and self.meaning.comes_first:
                self._take_what_is_known(self.meaning)
            if self.cells is None:
                self.keep(self._computed_by(State.computed))
            if self.when_computed is not None:
                self.when_computed()
        assert self.cells is not None
        return self.cells

    @property
    def is_repeatable(self) -> bool:
        """Whether the functions that the program has called would give the tensor again."""
        is_same = not self.read or list(map(_version_of, self.read)) == self.versions
        is_as_called = self.meaning is not None and not self.is_changed and is_same
        return is_as_called and all(x.is_repeatable for x in self.parents)

    def computed_again(self) -> Tensor:
        """Another tensor of the same numbers, with a graph of its own."""
        self.check()
        return self._computed_by(State.computed_again)

    def _computed_by(self, compute: Callable[[State], Tensor]) -> Tensor:
        """What the program's function gives of tensors that are computed so."""
        args, keywords = (
            mapped(x, lambda y: compute(y) if isinstance(y, State) else y)
            for x in (self.args, tuple(self.keywords.values()))
        )
        with self.modes(grad=self.grad):
            cells: Tensor = self.function(*args, **dict(zip(self.keywords, keywords, strict=True)))
            for rows, columns, values in self.taken:
                cells = with_numbers(cells, rows, columns, values)
        return cells

    def _take_what_is_known(self, meaning: Meaning) -> None:
        """Computes the tensor by what is known of it, if that is possible."""
        value = None
        if not self.is_of_pinned():
            with self.modes(grad=self.grad):
                value = meaning.value()
        if value is not None:
            self.keep(value)
            if self.reports is not None:
                self.reports(meaning.by)
        elif self.told is not None:
            self.told("")

    def modes(self, *, grad: bool) -> contextlib.AbstractContextManager[None]:
        """The modes of torch that there were when the program called the function."""
        is_same = grad is torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
        if is_same and autocast_of(self.device.type) is self.autocast:
            return _AS_NOW
        return self._other_modes(grad)

    @contextlib.contextmanager
    def _other_modes(self, grad: bool) -> Iterator[None]:
        dtype = self.autocast
        casts = torch.autocast(self.device.type, dtype=dtype, enabled=dtype is not None)
        with torch.inference_mode(mode=False), torch.set_grad_enabled(grad), casts:
            yield

    def modes_are(self, other: State) -> bool:
        return self.grad == other.grad and self.autocast == other.autocast

    def take(self, rows: Tensor, columns: Tensor, values: Tensor) -> None:
        """Notes cells that a program has, which may compare them with the others of the matrix."""
        for taken in self.taken:
            if torch.equal(taken[0], rows) and torch.equal(taken[1], columns):
                return
        self.taken = (*self.taken, (rows, columns, values.detach()))

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


# torch gives `apply` no types.
with_numbers: Callable[..., Tensor] = _WithNumbers.apply
