"""Launches without what Triton would find out again at each: which compiled kernel serves the arguments.

Triton compiles a kernel anew for other dtypes, constants and options, for pointers and integers that are not
multiples of 16 where earlier ones were, for integers that are 1, and for integers of 64 bits. At each launch
`JITFunction.run` writes a text about all arguments and looks it up. A planned kernel looks up a tuple, and
calls what was compiled. The first launch of each kind, and every launch that a profiler or another tool wants
to see, go through Triton.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter, itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from fastqt.devices import AMD
from fastqt.kernels.launch import INTERPRETED

BELOW_16 = 15  # the bits that are 0 in a multiple of 16
ONE = "one"
_TRITONS_RUN = JITFunction.run
_dtype = attrgetter("dtype")

Picker = Callable[[Sequence[Any]], tuple[Any, ...]]
# Takes a kernel, what it is to be compiled for, which is equal where the code is, and the arguments.
Instead = Callable[[JITFunction[Any], Hashable, tuple[Any, ...], dict[str, Any]], None]

_instead: ContextVar[Instead | None] = ContextVar("_instead", default=None)
_noted: ContextVar[list[Launched | None] | None] = ContextVar("_noted", default=None)


@contextlib.contextmanager
def handed_over(instead: Instead) -> Iterator[None]:
    """What this thread would launch is handed over and not launched."""
    token = _instead.set(instead)
    try:
        yield
    finally:
        _instead.reset(token)


@contextlib.contextmanager
def noted() -> Iterator[list[Launched | None]]:
    """The launches that this thread makes, in their order; None where one could not be repeated."""
    launches: list[Launched | None] = []
    token = _noted.set(launches)
    try:
        yield launches
    finally:
        _noted.reset(token)


@dataclass(frozen=True)
class Launched:
    """A launch that was made, and can be repeated with other addresses."""

    kernel: JITFunction[Any]
    loaded: _Loaded
    sizes: tuple[int, ...]  # of the grid
    arguments: tuple[Any, ...]  # of every parameter; addresses in place of tensors
    pointers: tuple[int, ...]  # where these are

    def repeat(self, stream: int, arguments: Sequence[Any]) -> None:
        """Launches the same code on the current device; the arguments have to be of the same kinds."""
        loaded = self.loaded
        loaded.run(*self.sizes, stream, loaded.function, loaded.metadata, None, None, None, *arguments)


def may_be_repeated(kernels: Iterable[JITFunction[Any]]) -> bool:
    """Whether nobody wants to see launches of these kernels before they are made."""
    if JITFunction.run is not _TRITONS_RUN or _instead.get() is not None or _all_are_seen():
        return False
    return not any(kernel.pre_run_hooks for kernel in kernels)


@dataclass(frozen=True)
class _Loaded:
    """A compiled kernel on its device; `kernel` keeps it loaded."""

    kernel: CompiledKernel
    run: Callable[..., None]
    function: int
    metadata: Any


@dataclass(frozen=True)
class _Layout:
    """Where the arguments of a call are: how many are positional, the names of the others, and all types.

    Pickers take operands of a type from the values of a call.
    """

    constants: Picker  # with the options
    tensors: Picker
    integers: Picker
    unspecialised: Picker  # the integers that are compiled for by their size alone
    descriptors: Picker
    bound: Picker  # every parameter in its order, from the values, the tensors' addresses and a None
    pointers: tuple[int, ...]  # where the addresses are among these
    loaded: dict[tuple[Any, ...], _Loaded] = field(default_factory=dict)  # what was compiled for such calls


class Planned:
    """A kernel that is launched as Triton's own are: `kernel[grid](*arguments, **options)`."""

    def __init__(self, jit_function: JITFunction[Any]) -> None:
        self.jit_function = jit_function
        self._layouts: dict[tuple[Any, ...], _Layout | None] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], /, *args: Any, **kwargs: Any) -> None:
        # A tool that has put itself in the place of Triton's method is to see every launch.
        if JITFunction.run is not _TRITONS_RUN:
            self.jit_function.run(*args, grid=grid, warmup=False, **kwargs)
            return

        values = (*args, *kwargs.values())
        call = (len(args), *kwargs, *map(type, values))
        try:
            layout = self._layouts[call]
        except KeyError:
            layout = self._layouts[call] = _layout(self.jit_function, values, len(args), tuple(kwargs))

        instead, launches = _instead.get(), _noted.get()
        if launches is not None:
            launches.append(None)  # until it is known to be one that can be repeated
        if layout is None:
            if instead is not None:
                instead(self.jit_function, object(), args, kwargs)
                return
            self.jit_function.run(*args, grid=grid, warmup=False, **kwargs)
            return

        # Whatever Triton would compile anew for is in the key; the addresses themselves are not.
        tensors = layout.tensors(values)
        addresses = [*map(Tensor.data_ptr, tensors)]
        device = driver.active.get_current_device()
        key = (
            device,
            *layout.constants(values),
            *map(_dtype, tensors),
            *[address & BELOW_16 == 0 for address in addresses],
            *_kinds(layout.integers(values)),
            *_sizes(layout.unspecialised(values)),
            *[(x.base.dtype, *x.block_shape) for x in layout.descriptors(values)],
        )

        if instead is not None:
            instead(self.jit_function, (self.jit_function.__name__, call, key), args, kwargs)
            return

        loaded = layout.loaded.get(key)
        if loaded is None:
            self._check_nothing_is_captured()
            kernel = self.jit_function.run(*args, grid=grid, warmup=False, **kwargs)
            if isinstance(kernel, CompiledKernel):
                layout.loaded[key] = _Loaded(kernel, kernel.run, kernel.function, kernel.packed_metadata)
        elif _somebody_looks(self.jit_function):
            self.jit_function.run(*args, grid=grid, warmup=False, **kwargs)
        else:
            stream = driver.active.get_current_stream(device)
            sizes = (*grid, 1, 1)[:3]
            bound = layout.bound((*values, *addresses, None))
            loaded.run(*sizes, stream, loaded.function, loaded.metadata, None, None, None, *bound)
            if launches is not None:
                launches[-1] = Launched(self.jit_function, loaded, sizes, bound, layout.pointers)

    def _check_nothing_is_captured(self) -> None:
        """Raises RuntimeError where the driver forbids to load code."""
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"{self.jit_function.__name__}: want its code loaded before a CUDA graph is captured, got "
                "its first launch for such arguments during a capture; run one step with inputs of the same "
                "shapes, strides and dtypes before the capture"
            )


def planned(kernel: Any) -> Any:
    """Decorates a kernel, above `triton.jit`. In the interpreter and on AMD's GPUs it changes nothing."""
    return kernel if INTERPRETED or AMD else Planned(kernel)


def _layout(
    kernel: JITFunction[Any], values: tuple[Any, ...], positional: int, named: tuple[str, ...]
) -> _Layout | None:
    """Where the arguments of a call are; None where Triton is to be asked at each launch."""
    places = {name: i for i, name in enumerate([*kernel.arg_names[:positional], *named])}
    nothing = len(values) + sum(isinstance(x, Tensor) for x in values)  # follows values and addresses

    tensors, integers, unspecialised, descriptors = [], [], [], []
    order: list[int] = []
    pointers = []
    for p in kernel.params:
        if p.is_constexpr:
            if p.name not in places:
                return None
            order.append(nothing)
            continue

        place = places.pop(p.name, None)
        value = p.default if place is None else values[place]

        if value is None:
            order.append(nothing)
        elif place is None:
            return None
        elif type(value) in (Tensor, Parameter):
            pointers.append(len(order))
            order.append(len(values) + len(tensors))
            tensors.append(place)
        else:
            order.append(place)
            if type(value) is int:
                (unspecialised if p.do_not_specialize else integers).append(place)
            elif type(value) is TensorDescriptor:
                descriptors.append(place)
            elif type(value) not in (float, bool):
                return None

    # What no parameter has taken is a constant of the kernel or an option of the launch.
    constants = list(places.values())
    pickers = map(_picker, (constants, tensors, integers, unspecialised, descriptors, order))
    return _Layout(*pickers, tuple(pointers))


def _picker(places: list[int]) -> Picker:
    """What picks these places of a sequence, as a tuple however many there are."""
    if len(places) > 1:
        return itemgetter(*places)
    return lambda values: tuple([values[place] for place in places])


def _kinds(integers: tuple[int, ...]) -> list[Any]:
    """What Triton compiles for of some integers."""
    kinds: list[Any] = [ONE if x == 1 else x & BELOW_16 == 0 for x in integers]
    if integers and not (min(integers) >= -(2**31) and max(integers) < 2**31):
        kinds += _sizes(integers)
    return kinds


def _sizes(integers: tuple[int, ...]) -> list[Any]:
    """Which of some integers have 32 bits, and which of the others a sign."""
    return [(-(2**31) <= x < 2**31, x < 2**63) for x in integers]


def _somebody_looks(kernel: JITFunction[Any]) -> bool:
    """Whether a hook or a mode of the compiler is set that Triton minds at each launch of a kernel."""
    return bool(kernel.pre_run_hooks) or _all_are_seen()


def _all_are_seen() -> bool:
    """Whether such a hook or mode is set for all kernels."""
    runtime = knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(
        runtime.debug
        or runtime.add_stages_inspection_hook
        # An environment variable holds from the beginning; what a profiler sets is in the dictionary.
        or vars(knobs.compilation).get("instrumentation_mode")
        # Triton's own are chains of hooks, which may be empty.
        or (enter is not None and getattr(enter, "calls", True))
        or (leave is not None and getattr(leave, "calls", True))
    )
