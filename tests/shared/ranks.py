"""Processes of a Gloo group that run a test's functions, one process a rank."""

from __future__ import annotations

import datetime
import multiprocessing
import os
import pickle
import tempfile
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

# The processes are forked from one that has imported what they need, which takes it three seconds.
# It finds installed modules alone: before Python 3.13 its path is not that of the tests.
CONTEXT = multiprocessing.get_context("forkserver")
PRELOADED = [
    *("torch.distributed.tensor", "torch.nn.parallel", "torch._dynamo", "torch.testing"),
    *("fastqt.losses", "fastqt.nn", "fastqt.engines.cpu"),
]
TIMEOUT = 180.0  # seconds, of every collective


class RankError(Exception):
    """What a function raised on some ranks.

    Attributes:
        errors: the exception of each rank, or None.
    """

    def __init__(self, errors: list[BaseException | None], text: str) -> None:
        super().__init__(text)
        self.errors = errors


class Ranks:
    """`size` processes of a Gloo group, which live until `close`.

    Functions are given to them by name: a function of a module that can be imported, such as one of
    tests/shared, and not of a test file.
    """

    def __init__(self, size: int, timeout: float = TIMEOUT) -> None:
        CONTEXT.set_forkserver_preload(PRELOADED)
        self.size = size
        self._directory = tempfile.TemporaryDirectory()
        file = os.path.join(self._directory.name, "store")
        pipes = [CONTEXT.Pipe() for _ in range(size)]
        self.connections = [mine for mine, _ in pipes]
        self.processes = [
            CONTEXT.Process(target=_serve, args=(rank, size, file, timeout, theirs), daemon=True)
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for process in self.processes:
            process.start()
        for _, theirs in pipes:
            theirs.close()

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """What function(*args) returns on each rank.

        Raises:
            RankError: it raised on a rank.
        """
        for connection in self.connections:
            connection.send((function, args))
        answers = [self._answer(rank) for rank in range(self.size)]
        errors = [answer if isinstance(answer, BaseException) else None for answer, _ in answers]
        if any(errors):
            text = "\n".join(f"rank {rank}: {text}" for rank, (_, text) in enumerate(answers) if text)
            raise RankError(errors, text)
        return [answer for answer, _ in answers]

    def _answer(self, rank: int) -> tuple[Any, str]:
        try:
            return self.connections[rank].recv()
        except EOFError as error:
            return error, "its process has ended"

    def close(self) -> None:
        for connection in self.connections:
            connection.close()
        for process in self.processes:
            process.join(5)
            if process.is_alive():
                process.kill()
        self._directory.cleanup()


def _sendable(error: Exception) -> Exception:
    """The error, or one with its text where it cannot be pickled, as those of torch.compile in torch 2.11."""
    try:
        pickle.loads(pickle.dumps(error))
    except (pickle.PicklingError, TypeError, AttributeError):
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def _serve(rank: int, size: int, file: str, timeout: float, connection: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{file}",
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=timeout),
    )
    while True:
        try:
            function, args = connection.recv()
        except EOFError:
            break
        try:
            answer = function(*args), ""
        except Exception as error:
            answer = _sendable(error), traceback.format_exc()
        connection.send(answer)
    dist.destroy_process_group()
