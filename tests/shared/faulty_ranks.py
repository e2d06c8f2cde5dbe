"""Ranks that fail on purpose, and what the others say of it.

Each fault has processes of its own, as torch closes a group's connections when an exchange fails.
"""

from __future__ import annotations

import datetime
import os
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

import fastqt
from fastqt.distributed import Group, faults, ring
from fastqt.functional import computed
from tests.shared.ranks import CONTEXT, PRELOADED

TIMEOUT = 5.0  # seconds, of every exchange of the group with the fault
STARTING = 60.0  # seconds, of what comes before the fault
LATE = TIMEOUT + 2
SLOW = 1.0
ROWS, WIDTH = 6, 8

# A process's exit status can be read once. Starting a process reads those of all that have ended; of two
# threads that read the same one, the later finds nothing and reports 255 (CPython's popen_forkserver.py).
STATUSES = threading.Lock()


@dataclass(frozen=True)
class Fault:
    """What goes wrong.

    Attributes:
        kind: "kill"; "late": sleeps longer than the timeout; "slow": sleeps less; "raise": an error of its
            own; "none".
        before: which exchange, by what travels (see fastqt.distributed.faults.exchange); for "raise" where:
            "check" or "computation".
        times: how often that has taken place before in the step.
        loss, exchange, shards: the loss and its group.
        step: in which of the steps it happens.
        size: how many ranks there are.
        victim: the rank that fails.
        store: "file", or "tcp", which rank 0 holds.
        seed: of the embeddings.
    """

    kind: str
    before: str
    times: int = 0
    loss: str = "contrastive_loss"
    exchange: str = "gather"
    shards: str = "equal"
    step: int = 1
    size: int = 3
    victim: int = 1
    store: str = "file"
    seed: int = 0


@dataclass
class End:
    """How a process ended."""

    code: int | None = None  # None: it had to be ended
    seconds: float = float("inf")  # after the fault's step began
    error: str = ""  # the message of what it raised
    kinds: tuple[str, ...] = ()  # the classes of that, and of its cause
    cause: str = ""


def endings(fault: Fault) -> list[End]:
    """How each rank ends, in the order of ranks."""
    with tempfile.TemporaryDirectory() as directory:
        address = f"file://{directory}/store"
        if fault.store == "tcp":
            with socket.create_server(("127.0.0.1", 0)) as server:
                address = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        pipes = [CONTEXT.Pipe(duplex=False) for _ in range(fault.size)]
        processes = [
            CONTEXT.Process(target=_rank, args=(rank, address, theirs, fault), daemon=True)
            for rank, (_, theirs) in enumerate(pipes)
        ]
        with STATUSES:
            for process in processes:
                process.start()
        for _, theirs in pipes:
            theirs.close()
        # Whoever dies closes the other end of its pipe.
        with ThreadPoolExecutor(fault.size) as pool:
            said = list(pool.map(_listen, [mine for mine, _ in pipes]))
        began = min((time for _, _, time in said if time), default=float("inf"))
        ends = []
        for process, (end, ended, _) in zip(processes, said, strict=True):
            wait([process.sentinel], timeout=5)
            with STATUSES:
                end.code, end.seconds = process.exitcode, ended - began
            process.kill()
            ends.append(end)
        return ends


def all_endings(faults: list[Fault], at_once: int = 4) -> list[list[End]]:
    """`endings` of many; most of their time is spent waiting."""
    CONTEXT.set_forkserver_preload(PRELOADED)
    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(endings, faults))


def _listen(connection: Connection) -> tuple[End, float, float | None]:
    """What a rank raised, when it ended, and when the step of the fault began."""
    end, began = End(), None
    while True:
        try:
            if not connection.poll(2 * STARTING):
                return end, float("inf"), began
            said = connection.recv()
        except (EOFError, ConnectionResetError):
            return end, time.monotonic(), began
        if isinstance(said, float):
            began = said
        else:
            end = said


def _rank(rank: int, address: str, connection: Connection, fault: Fault) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        *("gloo", address),
        rank=rank,
        world_size=fault.size,
        timeout=datetime.timedelta(seconds=STARTING),
    )
    everyone = list(range(fault.size))
    # Processes that the machine starts late do not count as late ranks.
    short = dist.new_group(everyone, timeout=datetime.timedelta(seconds=TIMEOUT))
    error: BaseException | None = None
    try:
        _steps(rank, Group(short, shards=fault.shards, exchange=fault.exchange), fault, connection.send)
    except Exception as raised:
        error = raised
        kinds = tuple(kind.__name__ for kind in type(error).__mro__)
        connection.send(End(error=str(error), kinds=kinds, cause=type(error.__cause__).__name__))
    connection.close()
    os._exit(error is not None)  # without the group's own end, which waits for other ranks


def _steps(rank: int, group: Group, fault: Fault, tell: Callable[[float], None]) -> None:
    """Some steps of training, with a fault in one of them."""
    torch.manual_seed(fault.seed + rank)
    loss = getattr(fastqt, fault.loss)
    for step in range(
        fault.step + 3
    ):  # those that did not need the rank any more notice that in the next step
        options: dict[str, Any] = {"scale": 1.0}
        if step == fault.step:
            dist.barrier()
            tell(time.monotonic())
            if rank == fault.victim and fault.kind != "none":
                options |= _arm(fault)
        a, b = (torch.randn(ROWS, WIDTH, requires_grad=True) for _ in range(2))
        loss(a, b, **options, group=group).backward()


def _arm(fault: Fault) -> dict[str, Any]:
    """Has this process fail; the options of the loss with which it does."""
    if fault.kind == "raise":
        if fault.before == "check":
            return {"scale": -1.0}
        if fault.exchange == "ring":
            ring.Ring._problem = _fail  # type: ignore[method-assign]
        else:
            computed.computed_loss = _fail
        return {}
    exchange, seen = faults.exchange, 0

    def failing(group: Group, what: str, /, *rest: Any, **options: Any) -> Any:
        nonlocal seen
        if what == fault.before:
            seen += 1
            if seen == fault.times + 1:
                if fault.kind == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(LATE if fault.kind == "late" else SLOW)
        return exchange(group, what, *rest, **options)

    faults.exchange = failing  # type: ignore[assignment]
    return {}


def _fail(*args: object, **options: object) -> Any:
    raise ArithmeticError("this rank cannot count")


def questions_of_good_steps() -> int:
    """How often this rank asks the process group's store in steps that go well, the first one included."""
    asked, questions = faults._asked, 0

    def counting(*args: Any) -> Any:
        nonlocal questions
        questions += 1
        return asked(*args)

    faults._asked = counting  # type: ignore[assignment]
    try:
        for loss in ("contrastive_loss", "clip_loss"):
            for exchange in ("gather", "ring"):
                _steps(
                    dist.get_rank(), Group(exchange=exchange), Fault("none", "", loss=loss), lambda _: None
                )
    finally:
        faults._asked = asked
    return questions
