"""Processes of one group of torch.distributed, which run functions for tests one after the other."""

from __future__ import annotations

import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from queue import Empty
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

TIMEOUT = 60.0  # seconds that collectives wait for other ranks


class Ranks:
    """A Gloo group of processes. Starting it takes seconds, so that many tests share one.

    Args:
        size: how many processes there are.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.processes: list[Any] = []

    def start(self) -> None:
        """Starts the processes, which `run` does where there are none."""
        context = mp.get_context("spawn")
        self.folder = tempfile.TemporaryDirectory()
        store = str(Path(self.folder.name) / "store")
        self.tasks = [context.Queue() for _ in range(self.size)]
        self.results = context.Queue()
        for rank in range(self.size):
            arguments = (rank, self.size, store, self.tasks[rank], self.results)
            self.processes.append(context.Process(target=_work, args=arguments, daemon=True))
            self.processes[-1].start()

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Calls a function on all ranks.

        Args:
            function: of a module that all processes can import, with results that can be pickled.
            *arguments: the same for all ranks.

        Returns:
            What each rank returned.

        Raises:
            AssertionError: with the traceback of the first rank that raised, or for one that ended.
        """
        if not self.processes:
            self.start()
        for tasks in self.tasks:
            tasks.put((function, arguments))
        found: dict[int, Any] = {}
        while len(found) < self.size:
            try:
                rank, result, error = self.results.get(timeout=1.0)
            except Empty:
                ended = [rank for rank, process in enumerate(self.processes) if not process.is_alive()]
                if ended:
                    self.close()
                    raise AssertionError(f"the processes of ranks {ended} have ended") from None
                continue
            if error:
                self.close()  # the other ranks may be waiting for this one
                raise AssertionError(f"rank {rank}:\n{error}")
            found[rank] = result
        return [found[rank] for rank in range(self.size)]

    def close(self) -> None:
        """Ends the processes."""
        for process in self.processes:
            process.kill()
            process.join()
        if self.processes:
            self.processes = []
            self.folder.cleanup()


def _work(rank: int, size: int, store: str, tasks: Any, results: Any) -> None:
    """What each process does until it is ended."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, size),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=TIMEOUT),
    )
    while True:
        function, arguments = tasks.get()
        try:
            results.put((rank, function(*arguments), None))
        except Exception:
            results.put((rank, None, traceback.format_exc()))
