"""Processes of a Gloo group that run functions for a benchmark, each on one thread."""

from __future__ import annotations

import multiprocessing
import resource
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

# Imported later, it would keep the group's threads alive (see fastqt/sentences/train/ranks.py).
import torch.distributed.nn.functional

CONTEXT = multiprocessing.get_context("forkserver")


class Ranks:
    """`size` processes, which live until `close`.

    Args:
        size: how many.
        make: a function of a module; make(*args) is called once on each, and returns the functions that `run`
            can name.
    """

    def __init__(self, size: int, make: Callable[..., dict[str, Callable[[], Any]]], *args: Any) -> None:
        CONTEXT.set_forkserver_preload(["benchmarks.measure.workloads", "fastqt"])
        self.size = size
        self._directory = tempfile.TemporaryDirectory()
        store = f"file://{self._directory.name}/store"
        pipes = [CONTEXT.Pipe() for _ in range(size)]
        self.connections = [mine for mine, _ in pipes]
        self.processes = [
            CONTEXT.Process(target=_serve, args=(rank, size, store, theirs, make, args), daemon=True)
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for process in self.processes:
            process.start()
        for _, theirs in pipes:
            theirs.close()

    def run(self, name: str) -> list[Any]:
        """What a function returns on each rank; a rank that raises ends, and this raises EOFError."""
        for connection in self.connections:
            connection.send(name)
        return [connection.recv() for connection in self.connections]

    def close(self) -> None:
        for connection in self.connections:
            connection.close()
        for process in self.processes:
            process.join(10)
        self._directory.cleanup()


def cpu_seconds() -> float:
    """The CPU time of all threads of this process, in the system included."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _serve(
    rank: int,
    size: int,
    store: str,
    connection: Any,
    make: Callable[..., dict[str, Callable[[], Any]]],
    args: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size)
    functions = make(*args)
    while True:
        try:
            name = connection.recv()
        except EOFError:
            break
        connection.send(functions[name]())
    dist.destroy_process_group()
