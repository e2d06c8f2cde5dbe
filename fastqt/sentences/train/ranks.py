"""The processes that train one model together, and what they exchange.

Each process, a rank, has a whole model and takes its own sentences. A step's batch is the sentences of all
ranks. Rank 0 alone writes, validates and reports.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from types import FrameType
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
import torch.distributed as dist

# Its functions have the default group as a default argument, that of the time of the import. Imported later,
# as torch's optimisers do, it would keep the group and its threads alive after `destroy_process_group`, and a
# thread of Gloo that releases a tensor while Python ends aborts the process.
import torch.distributed.nn.functional
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from fastqt.distributed import Group
from fastqt.distributed.faults import WORD_SECONDS, ExchangeError, exchange, leave_word
from fastqt.errors import InputError, one_line
from fastqt.nn.sparse_gradients import distinct_rows, row_gradient
from fastqt.sentences.errors import OtherRankError
from fastqt.sentences.runs.model import choose_device

T = TypeVar("T")
P = ParamSpec("P")
FAILED = "failed"  # in the store: what rank 0 has raised in its own work
POLL = 0.2  # seconds; how often a rank looks whether rank 0 has finished its work


class Share(NamedTuple):
    """The part of one rank in the batch of a step."""

    sentences: int  # of all ranks
    group: Group | None  # what the loss takes; None with one process


class Ranks:
    """One process that trains alone. It is the base of several processes, and exchanges nothing.

    `rank` is the number of this process, from 0, and `size` how many train together.
    """

    rank, size = 0, 1

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which alone writes, validates and reports."""
        return self.rank == 0

    def first(self, work: Callable[[], T]) -> T:
        """Has rank 0 do some work, and gives its result to all. The others wait as long as rank 0 lives."""
        return work()

    def gather(self, value: T) -> list[T]:
        """The values of all ranks."""
        return [value]

    def stop_signal(self, number: int | None) -> int | None:
        """The number of the signal that a rank has received, if any; all ranks get the same answer."""
        return number

    def share(self, sizes: Sequence[int]) -> Share:
        """What this rank's loss is computed with, in a step with these numbers of sentences of each rank."""
        return Share(sum(sizes), None)

    def equalize(self, tensors: Iterable[Tensor]) -> None:
        """Gives the tensors of all ranks, in place, the values of those of rank 0."""

    def sum_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Replaces the gradients by their sums over all ranks, which are the same bits on each."""

    def total(self, value: Tensor) -> Tensor:
        """The sum of a tensor over all ranks, without gradient."""
        return value.detach()


class Processes(Ranks):
    """Several processes, in torch's default process group, which meet in `store` where rank 0 works alone.

    A step that is not an epoch's last has `batch_size` sentences of each rank.
    """

    def __init__(self, store: Any, batch_size: int) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._store, self._batch_size = store, batch_size
        # The ranks read separate parts of the corpus: where one ends, the next one's is no neighbour.
        self._equal, self._uneven = (
            Group(shards=shards, edges="cut", gradients="sum").of_function("train")
            for shards in ("equal", "uneven")
        )
        self._works = 0

    def leave_word(self, error: Exception) -> None:
        """Tells the ranks that are going to wait for this one what it has raised."""
        leave_word(self._equal, error)

    def first(self, work: Callable[[], T]) -> T:
        self._works += 1
        results: list[Any] = [None]
        if self.is_first:
            try:
                results[0] = work()
            except Exception as error:  # raised again, and told to the ranks that wait for this one
                self._store.set(FAILED, _in_words(error))
                raise
            self._store.add("works", 1)
        else:
            self._wait_for_first()
        self._exchange(
            "results of rank 0", dist.broadcast_object_list, results, 0, device=torch.device("cpu")
        )
        result: T = results[0]
        return result

    def _wait_for_first(self) -> None:
        """Waits until rank 0 has finished its work. An exchange would give up after the timeout."""
        pause = 0.001
        try:
            while self._store.add("works", 0) < self._works:
                if self._store.check([FAILED]):
                    words = self._store.get(FAILED).decode()
                    raise OtherRankError(f"rank 0 has failed: {words}", is_told=True)
                time.sleep(pause)
                pause = min(2 * pause, POLL)
        except RuntimeError as error:  # the store is gone, which rank 0 keeps where torchrun does not
            raise OtherRankError(f"rank 0 has ended: {one_line(error)}") from error

    def gather(self, value: T) -> list[T]:
        values: list[Any] = [None] * self.size
        self._exchange("values", dist.all_gather_object, values, value)
        return values

    def stop_signal(self, number: int | None) -> int | None:
        largest = torch.tensor(number or 0, device="cpu")
        self._exchange("signals", dist.all_reduce, largest, dist.ReduceOp.MAX)
        return int(largest) or None

    def share(self, sizes: Sequence[int]) -> Share:
        is_full = all(size == self._batch_size for size in sizes)
        return Share(sum(sizes), self._equal if is_full else self._uneven)

    def equalize(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            values = tensor.detach().contiguous()
            self._exchange("weights of rank 0", dist.broadcast, values, 0)
            tensor.detach().copy_(values)

    def sum_gradients(self, parameters: Iterable[Tensor]) -> None:
        self._exchange("gradients", sum_gradients, parameters)

    def total(self, value: Tensor) -> Tensor:
        total = value.detach().clone()
        self._exchange("losses", dist.all_reduce, total)
        return total

    def _exchange(self, what: str, function: Callable[P, object], *args: P.args, **options: P.kwargs) -> None:
        """Calls a collective; ExchangeError, which names the ranks that do not take part."""
        exchange(self._equal, what, function, *args, **options)


@contextlib.contextmanager
def joined(device: str, batch_size: int, timeout: float) -> Iterator[Ranks]:
    """The processes that torchrun started, or this one alone; OtherRankError where another one has failed.

    With GPUs, each process takes that of its number on its machine. A step has `batch_size` sentences of each
    rank. `timeout` is in seconds, after which an exchange with a process that does not answer fails.
    """
    if os.environ.get("WORLD_SIZE", "1") == "1":
        yield Ranks()
        return

    with _ends_by_sigterm():
        ranks = Processes(_connect(device, timeout), batch_size)

        try:
            if choose_device(device).type == "cuda":
                _take_gpu()
            yield ranks
            dist.barrier()
        except BaseException as error:
            if isinstance(error, Exception) and not isinstance(error, OtherRankError):
                ranks.leave_word(error)
            if dist.get_backend() == "gloo":  # with NCCL, it could wait for an exchange that never ends
                traceback.clear_frames(error.__traceback__)  # they hold the connections
                dist.destroy_process_group()  # so that the others notice at once that this rank has failed
            if ranks.is_first and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
                time.sleep(WORD_SECONDS)  # this process keeps the store, in which the others read what failed
            if isinstance(error, ExchangeError):
                # Ranks 0 and 1 say so, one of which may be the one that has ended.
                raise OtherRankError(str(error), is_told=ranks.rank > 1) from error
            raise
        dist.destroy_process_group()


def _connect(device: str, timeout: float) -> Any:
    """Makes the default process group, and returns a store for what the ranks tell each other besides."""
    if dist.is_initialized():
        raise InputError(
            "train: want to make the process group itself, but torch.distributed has one already"
        )
    on_gpu = choose_device(device).type == "cuda"
    limit = timedelta(seconds=timeout)
    try:
        store, rank, size = next(rendezvous("env://", timeout=limit))
        # What is on the host, such as objects and agreements, is exchanged without the GPU.
        backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit)
        dist.barrier()
    except (RuntimeError, ValueError) as error:
        raise InputError(
            f"the processes that torchrun started cannot reach each other: {one_line(error)}"
        ) from error
    return PrefixStore("fastqt train", store)


def _take_gpu() -> None:
    number, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if number >= count:
        raise InputError(f"device: want a GPU for each process, got {count} for process {number + 1} here")
    torch.cuda.set_device(number)


def _in_words(error: Exception) -> str:
    return one_line(str(error) if isinstance(error, InputError) else f"{type(error).__name__}: {error}", 1000)


@contextlib.contextmanager
def _ends_by_sigterm() -> Iterator[None]:
    """A context in which SIGTERM, which torchrun sends once another rank has failed, raises SystemExit.

    The main thread alone may set a handler.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGTERM, _exit)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _exit(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def sum_gradients(parameters: Iterable[Tensor]) -> None:
    """Replaces the gradients of all processes of the default process group by their sums.

    The parameters are the same on each process, on one device; each has a gradient on all processes or on
    none, and a sparse one on all or on none. All gradients of one dtype travel in one exchange. Of a sparse
    one, which has rows of a table, the rows go that any process has: the union of these rows is found first,
    by an exchange of one byte for each row of the table. Each sum is made on one process or in one order, so
    that all processes get the same bits.
    """
    graded = [parameter for parameter in parameters if parameter.grad is not None]
    _align_rows(
        [parameter for parameter in graded if parameter.grad is not None and parameter.grad.is_sparse]
    )
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for parameter in graded:
        by_dtype.setdefault(parameter.dtype, []).append(parameter)
    for same in by_dtype.values():
        _sum_values(same)


def _align_rows(tables: list[Tensor]) -> None:
    """Gives the sparse gradient of each table the rows that it has on any process; new rows are zeros."""
    if not tables:
        return
    local = [distinct_rows(table.grad) for table in tables if table.grad is not None]
    used = [
        rows.new_zeros(len(table), dtype=torch.uint8) for table, (rows, _) in zip(tables, local, strict=True)
    ]
    for mask, (rows, _) in zip(used, local, strict=True):
        mask.index_fill_(0, rows, 1)
    whole = torch.cat(used)
    dist.all_reduce(whole, dist.ReduceOp.MAX)
    masks = whole.split([len(mask) for mask in used])
    for table, mask, (rows, values) in zip(tables, masks, local, strict=True):
        union = mask.nonzero()[:, 0]
        aligned = values.new_zeros(len(union), *values.shape[1:])
        aligned.index_copy_(0, torch.searchsorted(union, rows), values)
        table.grad = row_gradient(union, aligned, table.shape)


def _sum_values(parameters: list[Tensor]) -> None:
    values = [_values(parameter) for parameter in parameters]
    flat = torch.cat([each.reshape(-1) for each in values])
    dist.all_reduce(flat)
    for each, summed in zip(values, flat.split([each.numel() for each in values]), strict=True):
        each.copy_(summed.view(each.shape))


def _values(parameter: Tensor) -> Tensor:
    gradient = parameter.grad
    assert gradient is not None  # for mypy: `sum_gradients` has chosen those with one
    return gradient.values() if gradient.is_sparse else gradient
