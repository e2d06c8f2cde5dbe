"""A cache of lowered targets: one CUDA stream makes their tensors, and others read them.

Lowering the targets of a small batch takes longer than computing its scores, and training asks for the
same ones at every step. Targets that depend on nothing but sizes and options are therefore cached.

Nothing orders the work of two streams by itself, and freed memory goes back to the stream that it was
allocated on. Whoever takes rows from the cache is therefore made to wait, on the device, until they are
written, and their memory is reused only after that stream's work with them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import TypeAlias

import torch
from torch import Tensor

from fastqt.devices import ONE_STREAM, is_capturing
from fastqt.targets.base import TargetRows

MOST_ENTRIES = 2**16  # of rows that are cached

Lower: TypeAlias = Callable[[int, int, torch.device], TargetRows]  # for N queries and M candidates


class _Entry:
    """Rows, made by what the current stream of their device was given until now."""

    def __init__(self, rows: TargetRows, device: torch.device) -> None:
        self.rows, self.device = rows, device
        # Recorded on that stream once the rows were written; None where there are no streams.
        self.made: torch.cuda.Event | None = None
        # The handles of the streams whose later work comes after that, and for which the allocator keeps the
        # memory until they are done with it.
        self.ordered: set[int] = set()
        if device.type == "cuda":
            stream = torch.cuda.current_stream(device)
            self.made = torch.cuda.Event(external=True)
            self.made.record(stream)
            self.ordered.add(stream.cuda_stream)

    def for_current_stream(self) -> TargetRows:
        """The rows, for what the current stream of their device is given from now on."""
        if self.made is None:
            return self.rows
        stream = torch.cuda.current_stream(self.device)
        if stream.cuda_stream not in self.ordered:
            self.made.wait(stream)
            for tensor in (*self.rows.compressed(), self.rows.offsets):
                if tensor is not None:
                    tensor.record_stream(stream)
            # Last, because another thread may launch on the same stream.
            self.ordered.add(stream.cuda_stream)
        return self.rows

    def for_graph(self) -> TargetRows:
        """The rows, for the CUDA graph that the current stream of their device is recorded into.

        A capture may not depend on an event of outside (cudaErrorStreamCaptureIsolation), nor ask whether it
        is complete. The wait for an external event is a node of the graph instead: every replay waits,
        whichever stream it is on. That the rows are ordered before the stream of the capture says nothing
        of the streams of the replays.
        """
        if self.made is not None:
            self.made.wait(torch.cuda.current_stream(self.device))
        return self.rows


class RowsCache:
    """The `size` rows that were added last, and for ever those that a CUDA graph reads."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._entries: dict[Hashable, _Entry] = {}
        # A graph may be replayed at any time, so neither its rows nor their events are ever freed.
        self._of_graphs: set[_Entry] = set()
        self._adding = threading.Lock()

    def rows(self, of: Hashable, lower: Lower, N: int, M: int, device: torch.device) -> TargetRows:
        """The rows of an operator, for what the current stream of `device` is given from now on.

        `of` is what tells the operator from others, beside its sizes, and `lower` makes the rows.
        """
        if torch.compiler.is_compiling():
            return lower(N, M, device)

        # Other devices have streams too, of whose order `_Entry` knows nothing.
        if device.type not in (*ONE_STREAM, "cuda"):
            return lower(N, M, device)

        key = (of, N, M, device)
        entry = self._entries.get(key)
        if entry is not None and entry.made is None:  # There are no streams.
            return entry.rows

        # A device "cuda" without an index is whichever device is the current one.
        if device.type == "cuda" and device.index is None:
            return lower(N, M, device)

        if is_capturing(device):
            # Tensors made during a capture live in the graph's memory pool, so they must not enter the cache.
            return self._get_for_graph(key) or lower(N, M, device)

        if entry is not None:
            return entry.for_current_stream()

        # A later call may save these tensors for backward, which inference tensors do not allow.
        with torch.inference_mode(False):
            rows = replace(lower(N, M, device), cached=True)

        # Fake tensors of a tracer must not be cached, nor those that a transform of torch.func has wrapped.
        if type(rows.columns) is Tensor and not torch._C._functorch.is_functorch_wrapped_tensor(rows.columns):
            self._add(key, rows, device)
        return rows

    def _get_for_graph(self, key: Hashable) -> TargetRows | None:
        """The rows of a key for the CUDA graph that is being captured; None if there are none."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        self._of_graphs.add(entry)
        return entry.for_graph()

    def _add(self, key: Hashable, rows: TargetRows, device: torch.device) -> None:
        """Keeps rows that the current stream of `device` has just made, outside of any capture."""
        entry = _Entry(rows, device)
        with self._adding:
            while len(self._entries) >= self._size:
                del self._entries[next(iter(self._entries))]
            self._entries[key] = entry


CACHED = RowsCache(size=8)
