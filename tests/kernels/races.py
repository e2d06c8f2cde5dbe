"""Watches the interpreter for elements of memory that threads of one program would race for on a GPU.

Where a tile has fewer elements than its program has threads, Triton gives an element to several threads,
which may be in several warps. All of them load it, and one stores it. Nothing orders the warps, so a load may
come after the store that it precedes in the source. The same holds for two tiles that have an element at
different places, because nothing says that one thread has both.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder

WARP = 32  # threads

Array = Any  # of numpy, of integers


@dataclass(frozen=True)
class _Access:
    """A tile's elements that are loaded or stored."""

    shape: tuple[int, ...]
    places: Array  # (n,): of which elements of the tile
    addresses: Array  # (n,)

    @functools.cached_property
    def ends(self) -> tuple[int, int]:
        return int(self.addresses.min()), int(self.addresses.max())

    def meets(self, other: _Access) -> tuple[Array, Array]:
        """The places of common elements of memory, in this tile and in the other."""
        (first, last), (others_first, others_last) = self.ends, other.ends
        if last < others_first or others_last < first:
            return self.places[:0], self.places[:0]
        _, here, there = np.intersect1d(self.addresses, other.addresses, return_indices=True)
        return self.places[here], other.places[there]


class Watch:
    """What one program after the other loads and stores between two barriers.

    Only barriers that the source asks for count. Those that the compiler adds to a reduction are its own.

    Attributes:
        launches: the names of the kernels that have run.
        races: what is not ordered, in words.
    """

    def __init__(self) -> None:
        self.launches: set[str] = set()
        self.races: set[str] = set()
        self._kernel, self._threads = "", 0
        self._loads: list[_Access] = []
        self._stores: list[_Access] = []

    def launch(self, kernel: str, warps: int) -> None:
        self.launches.add(kernel)
        self._kernel, self._threads = kernel, WARP * warps

    def barrier(self) -> None:
        self._loads.clear()
        self._stores.clear()

    def load(self, addresses: Array, mask: Array) -> None:
        self._access(addresses, mask, self._stores, self._loads)

    def store(self, addresses: Array, mask: Array) -> None:
        self._access(addresses, mask, self._loads, self._stores)

    def _access(self, addresses: Array, mask: Array, opposite: list[_Access], kept: list[_Access]) -> None:
        places = mask.reshape(-1).nonzero()[0]
        if not len(places):
            return
        access = _Access(addresses.shape, places, addresses.reshape(-1)[places])
        for other in opposite:
            here, there = access.meets(other)
            if not len(here):
                continue
            if access.shape != other.shape or (here != there).any():
                self.races.add(f"{self._kernel}: elements of {access.shape} are elsewhere in {other.shape}")
            elif addresses.size < self._threads:
                self.races.add(f"{self._kernel}: {self._threads} threads for {addresses.size} elements")
        kept.append(access)


@contextlib.contextmanager
def watched() -> Iterator[Watch]:
    """Notes the races of what the interpreter runs meanwhile."""
    watch = Watch()
    call, load, store, barrier, program = (
        GridExecutor.__call__,
        InterpreterBuilder.create_masked_load,
        InterpreterBuilder.create_masked_store,
        InterpreterBuilder.create_barrier,
        InterpreterBuilder.set_grid_idx,
    )

    def launched(executor: Any, *args: Any, **kwargs: Any) -> Any:
        watch.launch(executor.fn.__name__, kwargs["num_warps"])
        return call(executor, *args, **kwargs)

    def begun(builder: Any, *indices: int) -> Any:
        watch.barrier()  # Programs are none of each other's threads.
        return program(builder, *indices)

    def loaded(builder: Any, pointers: Any, mask: Any, *more: Any, **named: Any) -> Any:
        watch.load(pointers.data, mask.data)
        return load(builder, pointers, mask, *more, **named)

    def stored(builder: Any, pointers: Any, value: Any, mask: Any, *more: Any, **named: Any) -> Any:
        watch.store(pointers.data, mask.data)
        return store(builder, pointers, value, mask, *more, **named)

    def waited(builder: Any) -> Any:
        watch.barrier()
        return barrier(builder)

    with (
        mock.patch.object(GridExecutor, "__call__", launched),
        mock.patch.object(InterpreterBuilder, "set_grid_idx", begun),
        mock.patch.object(InterpreterBuilder, "create_masked_load", loaded),
        mock.patch.object(InterpreterBuilder, "create_masked_store", stored),
        mock.patch.object(InterpreterBuilder, "create_barrier", waited),
    ):
        yield watch
