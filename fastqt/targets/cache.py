"""A cache of lowered targets: one CUDA stream makes their tensors, and others read them.

Nothing orders the work of two streams by itself, and freed memory goes back to the stream that it was
allocated on. Whoever takes rows from the cache is therefore made to wait, on the device, until they are
written, and their memory is reused only after that stream's work with them.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable

import torch

from fastqt.targets.base import TargetRows


class _Entry:
    """Rows, made by what the current stream of their device was given until now.

    Attributes:
        made: recorded on that stream once the rows were written; None where there are no streams.
        ordered: the handles of the streams whose later work comes after that, and for which the allocator
            keeps the memory until they are done with it.
    """

    def __init__(self, rows: TargetRows, device: torch.device) -> None:
        self.rows, self.device = rows, device
        self.made: torch.cuda.Event | None = None
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
    """The rows that were added last, and for ever those that a CUDA graph reads.

    Args:
        size: how many rows are kept beside those of graphs.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._entries: dict[Hashable, _Entry] = {}
        # A graph may be replayed at any time, so neither its rows nor their events are ever freed.
        self._of_graphs: set[_Entry] = set()
        self._adding = threading.Lock()

    def get(self, key: Hashable) -> TargetRows | None:
        """The rows of a key for the current stream; None if there are none."""
        entry = self._entries.get(key)
        return None if entry is None else entry.for_current_stream()

    def get_for_graph(self, key: Hashable) -> TargetRows | None:
        """The rows of a key for the CUDA graph that is being captured; None if there are none."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        self._of_graphs.add(entry)
        return entry.for_graph()

    def add(self, key: Hashable, rows: TargetRows, device: torch.device) -> None:
        """Keeps rows that the current stream of `device` has just made, outside of any capture."""
        entry = _Entry(rows, device)
        with self._adding:
            while len(self._entries) >= self._size:
                del self._entries[next(iter(self._entries))]
            self._entries[key] = entry
