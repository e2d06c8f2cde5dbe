"""A loss that is computed as one of the same kind was: its launches are repeated with other addresses.

What a loss of a small batch costs is the time of its host, which finds the same sizes, tiles and strides in
every step of a training. The second computation of a kind is therefore noted: its launches and products, and
of every address which tensor it is in. The next ones allocate one workspace in place of all temporary
tensors, and repeat what was noted.

Only computations that consist of launches, products and memory are noted; any other operation of torch's may
depend on what it reads. A problem of a kind has embeddings and the targets of a band, and all else in common
with the others: sizes, strides, dtypes, options, scale (unless a tensor holds it), stream and precision.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fastqt.devices import AMD, is_capturing, is_described
from fastqt.engines.triton import operands as memory
from fastqt.engines.triton.free_memory import room_within
from fastqt.engines.triton.operands import Operands
from fastqt.kernels.launch import INTERPRETED, on_device
from fastqt.kernels.plan import TensorDescriptor, driver, may_be_repeated, noted
from fastqt.kernels.tuning import REPEATED_BYTES
from fastqt.problem import Gradients, Inputs, Needs, Problem
from fastqt.targets import TargetRows
from fastqt.torch_modes import PLAIN, tf32_allowed

MOST_KNOWN = 256  # kinds; after so many all are forgotten
ALIGNMENT = 256  # bytes, at multiples of which temporary tensors begin, as the allocator's do

NAMED = ("queries", "candidates", "scale", "targets")
OPTIONS = frozenset((str, int, float, bool, tuple, type(None)))  # the types of what is in a kind by its value
_options = attrgetter(*(field.name for field in fields(Problem) if field.name not in NAMED))
_ALLOCATIONS = ("empty", "new_empty", "empty_like")
_CONSTANTS = ("full", "new_full")
_PRODUCTS = ("addmm", "addmm_")

SEEN, REFUSED = "seen", "refused"  # in place of steps


class View(NamedTuple):
    """A tensor within another one, which is known by its place among those of a step."""

    base: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int  # in elements
    dtype: torch.dtype

    def of(self, bases: Sequence[Tensor]) -> Tensor:
        base = bases[self.base]
        if base.dtype is not self.dtype:
            base = base.view(self.dtype)
        return base.as_strided(self.shape, self.stride, base.storage_offset() + self.offset)


class Pointer(NamedTuple):
    """An address among the arguments of a launch."""

    argument: int
    base: int
    offset: int  # in bytes


@dataclass(frozen=True)
class Launch:
    """A launch, with the arguments that it was made with, among which no tensor is kept."""

    made: Any  # fastqt.kernels.plan.Launched
    pointers: tuple[Pointer, ...]

    def repeat(self, stream: int, bases: Sequence[Tensor], addresses: Sequence[int]) -> None:
        arguments: list[Any] = list(self.made.arguments)
        for argument, base, offset in self.pointers:
            arguments[argument] = addresses[base] + offset
        self.made.repeat(stream, arguments)


@dataclass(frozen=True)
class Product:
    """A matrix product of the vendor's library."""

    function: Callable[..., Any]
    operands: tuple[View, ...]
    into: View | None  # where the first operand is not overwritten
    more: tuple[Any, ...]
    named: dict[str, Any]

    def repeat(self, stream: int, bases: Sequence[Tensor], addresses: Sequence[int]) -> None:
        named = self.named if self.into is None else {**self.named, "out": self.into.of(bases)}
        self.function(*[view.of(bases) for view in self.operands], *self.more, **named)


@dataclass(frozen=True)
class Step:
    """A computation that can be repeated."""

    events: tuple[Launch | Product, ...]
    results: tuple[tuple[str, tuple[int, ...], torch.dtype], ...]  # names, shapes and dtypes
    workspace: int  # bytes of temporary tensors
    room: int  # bytes that the problem may take
    constants: tuple[Tensor, ...]  # which launches read and nothing writes
    targets: TargetRows  # which are known by their identity, for as long as they are kept

    @functools.cached_property
    def kernels(self) -> list[Any]:
        """Each once."""
        kernels = (event.made.kernel for event in self.events if isinstance(event, Launch))
        return list({id(kernel): kernel for kernel in kernels}.values())

    def repeat(self, p: Problem) -> dict[str, Tensor]:
        """The results for a problem of the same kind, by their names."""
        new = p.queries.new_empty
        results = {name: new(shape, dtype=dtype) for name, shape, dtype in self.results}
        workspace = new(self.workspace // p.queries.element_size())

        bases = (*_inputs(p), *results.values(), workspace)
        addresses = [x.data_ptr() for x in bases]
        with on_device(p.queries):
            stream = driver.active.get_current_stream(driver.active.get_current_device())
            for event in self.events:
                event.repeat(stream, bases, addresses)
        return results


_known: dict[Hashable, Step | str] = {}


def computed(
    p: Problem, row_weight: float, needs: Needs, compute: Callable[[], Operands]
) -> tuple[Tensor, Gradients]:
    """The loss of each row and the gradients of their weighted sum: repeated, or computed by `compute`."""
    kind = kind_of(p, row_weight, needs)
    step = None if kind is None else _known.get(kind)

    if isinstance(step, Step) and may_be_repeated(step.kernels) and _has_room(p, step.room):
        results = step.repeat(p)
        return results["loss"], _gradients(results)

    if step is SEEN and kind is not None and _has_room(p, memory.room_for(p)):
        with _Notes() as notes:
            operands = compute()
        _known[kind] = notes.step(p, operands) or REFUSED
    else:
        operands = compute()
        if kind is not None and step is None:
            if len(_known) >= MOST_KNOWN:
                _known.clear()
            _known[kind] = SEEN
    return operands.loss, operands.gradients()


def kind_of(p: Problem, row_weight: float, needs: Needs) -> Hashable | None:
    """What all problems of a kind have in common; None where the computation is not to be repeated."""
    queries, candidates, t, scale = p.queries, p.candidates, p.targets, p.scale
    plain = type(queries) in PLAIN and type(candidates) in PLAIN
    if INTERPRETED or AMD or not plain or p.memory == "low" or not queries.is_cuda or is_described():
        return None
    options = _options(p)
    if not t.cached or t.offsets is None or not OPTIONS.issuperset(map(type, options)):
        return None
    if queries.shape[0] * candidates.shape[0] * queries.element_size() > REPEATED_BYTES:
        return None
    device = queries.device
    if torch._C._len_torch_dispatch_stack() or is_capturing(device):
        return None

    return (
        row_weight,
        needs,
        options,
        scale.device if isinstance(scale, Tensor) else scale,
        device,
        driver.active.get_current_stream(device.index),
        queries.dtype is torch.float32 and tf32_allowed(),
        id(t),
        *[(x.shape, x.stride(), x.dtype, x.data_ptr() % 16) for x in _inputs(p)],
    )


def _inputs(p: Problem) -> tuple[Tensor, ...]:
    """Those whose addresses differ between problems of a kind."""
    if isinstance(p.scale, Tensor):
        return (p.queries, p.candidates, p.scale.detach())
    return (p.queries, p.candidates)


def _has_room(p: Problem, room: int) -> bool:
    """Whether the GPU has room for what `memory` allows, so that chunks are as high as they were."""
    queries = p.queries
    size = queries.shape[0] * p.candidates.shape[0] * queries.element_size()
    return room_within(room, queries.device, size) >= room


def _gradients(results: dict[str, Tensor]) -> Gradients:
    by_row = results.get("scale")
    return Inputs(
        queries=results.get("queries"),
        candidates=results.get("candidates"),
        scale=None if by_row is None else by_row.sum(dtype=torch.float64),
    )


class _Notes(TorchDispatchMode):
    """Notes what a computation does, in its order, and keeps its tensors meanwhile."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.allocated: list[Tensor] = []
        self.constants: list[Tensor] = []
        self.products: list[tuple[int, Any, Any, Any]] = []  # each with how many launches are before it
        self.unknown = False

    def __enter__(self) -> _Notes:
        self._noted = noted()
        self.launches = self._noted.__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._noted.__exit__(*error)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        name = function.overloadpacket.__name__
        if name in _PRODUCTS:
            self.products.append((len(self.launches), function, args, kwargs))
        elif name in _ALLOCATIONS:
            self.allocated.append(result)
        elif name in _CONSTANTS:
            self.constants.append(result)
        elif not function.is_view:
            self.unknown = True
        return result

    def step(self, p: Problem, operands: Operands) -> Step | None:
        """What can be repeated of a computation of a problem; None if it did more than is noted."""
        if self.unknown or None in self.launches:
            return None
        results = {
            "loss": operands.loss,
            "queries": operands.query_gradient,
            "candidates": operands.blocks[0].gradient,
            "scale": operands.scale_gradient,
        }
        try:
            return _step(self, p, {name: x for name, x in results.items() if x is not None})
        except _UnknownAddressError:
            return None


class _UnknownAddressError(Exception):
    """An address is in none of the tensors of a problem, in several, or in a descriptor."""


class _Places:
    """Which tensor an address is in, and where. Those within constants are the same at each repetition."""

    def __init__(self, p: Problem, results: Sequence[Tensor], notes: _Notes) -> None:
        assert p.targets.offsets is not None
        of_targets = (*p.targets.compressed(), p.targets.offsets)
        self.constants = [_interval(x) for x in (*notes.constants, *of_targets)]
        # Inputs may be a part of a larger tensor; all others have a memory of their own.
        known = (*_inputs(p), *results)
        self.bases = [(*_interval(x), i, 0) for i, x in enumerate(known)]

        starts = {first for first, _, _, _ in self.bases}
        self.size, self.workspace = 0, len(known)
        for x in notes.allocated:
            first, last = _interval(x)
            if first not in starts and first != last:
                starts.add(first)
                self.bases.append((first, last, self.workspace, self.size))
                self.size += -(-(last - first) // ALIGNMENT) * ALIGNMENT

    def of(self, address: int) -> tuple[int, int] | None:
        """The place of the tensor among a step's and the offset in bytes; None within a constant."""
        if any(first <= address < last for first, last in self.constants):
            return None
        places = [(i, at + address - first) for first, last, i, at in self.bases if first <= address < last]
        if len(places) != 1:
            raise _UnknownAddressError
        return places[0]

    def view(self, x: Tensor) -> View:
        place = self.of(x.data_ptr())
        if place is None or place[1] % x.element_size():
            raise _UnknownAddressError
        return View(place[0], tuple(x.shape), x.stride(), place[1] // x.element_size(), x.dtype)


def _interval(x: Tensor) -> tuple[int, int]:
    """The addresses from a tensor's first element to the end of its last one."""
    extent = 1 + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
    first = x.data_ptr()
    return first, first + (extent * x.element_size() if x.numel() else 0)


def _step(notes: _Notes, p: Problem, results: dict[str, Tensor]) -> Step:
    places = _Places(p, list(results.values()), notes)
    of_results = tuple((name, tuple(x.shape), x.dtype) for name, x in results.items())
    events, room = tuple(_events(notes, places)), memory.room_for(p)
    return Step(events, of_results, places.size, room, tuple(notes.constants), p.targets)


def _events(notes: _Notes, places: _Places) -> Iterator[Launch | Product]:
    products = list(notes.products)
    for number, made in enumerate(notes.launches):
        while products and products[0][0] == number:
            yield _product(*products.pop(0)[1:], places)
        yield _launch(made, places)
    for _, function, args, kwargs in products:
        yield _product(function, args, kwargs, places)


def _launch(made: Any, places: _Places) -> Launch:
    # A descriptor holds an address and would have to be made anew each time.
    if any(isinstance(value, TensorDescriptor) for value in made.arguments):
        raise _UnknownAddressError
    pointers = []
    for argument in made.pointers:
        place = places.of(made.arguments[argument])
        if place is not None:
            pointers.append(Pointer(argument, *place))
    return Launch(made, tuple(pointers))


def _product(function: Any, args: Any, kwargs: Any, places: _Places) -> Product:
    named = dict(kwargs)
    into = named.pop("out", None)
    tensors = [x for x in args if isinstance(x, Tensor)]
    if function.overloadpacket.__name__ == "addmm_":
        function = Tensor.addmm_  # which takes the host less time
    more = tuple(args[len(tensors) :])
    views = tuple(map(places.view, tensors))
    return Product(function, views, None if into is None else places.view(into), more, named)
