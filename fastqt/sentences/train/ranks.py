"""The processes that train one model together, and what they exchange.

Each process, a rank, has a whole model and takes its own sentences. A step's batch is the sentences of all
ranks. Rank 0 alone writes, validates and reports.
"""

from __future__ import annotations

import contextlib
import os
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from types import FrameType
from typing import Any, NamedTuple, TypeVar

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
from fastqt.errors import InputError, one_line
from fastqt.sentences.runs.model import choose_device
from fastqt.sentences.train.gradients import sum_gradients
from fastqt.sentences.train.watch import BEAT, Watch, sigterm_handled

T = TypeVar("T")
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
    """Several processes, in torch's default process group; `watch` notices failures of the others.

    A step that is not an epoch's last has `batch_size` sentences of each rank.
    """

    def __init__(self, watch: Watch, batch_size: int) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._watch, self._store = watch, watch.store
        self._batch_size = batch_size
        # The ranks read separate parts of the corpus: where one ends, the next one's is no neighbour.
        self._equal, self._uneven = (
            Group(shards=shards, edges="cut", gradients="sum") for shards in ("equal", "uneven")
        )
        self._works = 0

    def close(self) -> None:
        """Closes the connections to the other ranks, so that they notice at once that this one failed."""
        dist.destroy_process_group()

    def first(self, work: Callable[[], T]) -> T:
        self._watch.count_exchange()
        self._works += 1
        results: list[Any] = [None]
        if self.is_first:
            results[0] = work()
            self._store.add("works", 1)
        else:
            self._wait_for_first()
        dist.broadcast_object_list(results, src=0, device=torch.device("cpu"))
        result: T = results[0]
        return result

    def _wait_for_first(self) -> None:
        """Waits until rank 0 has finished its work. An exchange would give up after the timeout."""
        pause = 0.001
        while self._store.add("works", 0) < self._works:
            self._watch.check()
            time.sleep(pause)
            pause = min(2 * pause, POLL)

    def gather(self, value: T) -> list[T]:
        self._watch.count_exchange()
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def stop_signal(self, number: int | None) -> int | None:
        self._watch.count_exchange()
        largest = torch.tensor(number or 0, device="cpu")
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        return int(largest) or None

    def share(self, sizes: Sequence[int]) -> Share:
        self._watch.count_exchange()
        is_full = all(size == self._batch_size for size in sizes)
        return Share(sum(sizes), self._equal if is_full else self._uneven)

    def equalize(self, tensors: Iterable[Tensor]) -> None:
        self._watch.count_exchange()
        for tensor in tensors:
            values = tensor.detach().contiguous()
            dist.broadcast(values, src=0)
            tensor.detach().copy_(values)

    def sum_gradients(self, parameters: Iterable[Tensor]) -> None:
        self._watch.count_exchange()
        sum_gradients(parameters)

    def total(self, value: Tensor) -> Tensor:
        self._watch.count_exchange()
        total = value.detach().clone()
        dist.all_reduce(total)
        return total


@contextlib.contextmanager
def joined(device: str, batch_size: int, timeout: float) -> Iterator[Ranks]:
    """The processes that torchrun started, or this one alone; OtherRankError where another one has failed.

    With GPUs, each process takes that of its number on its machine. A step has `batch_size` sentences of each
    rank. `timeout` is in seconds, after which an exchange with a process that does not answer fails.
    """
    if os.environ.get("WORLD_SIZE", "1") == "1":
        yield Ranks()
        return

    with sigterm_handled(_exit):
        watch = _connect(device, timeout)
        ranks = Processes(watch, batch_size)

        try:
            if choose_device(device).type == "cuda":
                _take_gpu()
            yield ranks
            dist.barrier()
        except BaseException as error:
            explanation = watch.explain(error)
            if dist.get_backend() == "gloo":  # with NCCL, it could wait for an exchange that never ends
                traceback.clear_frames(error.__traceback__)  # they hold the connections
                ranks.close()
            if ranks.is_first and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
                time.sleep(2 * BEAT)  # this process keeps the store, in which the others read what has failed
            if explanation is error:
                raise
            raise explanation from error
        watch.stop()
        dist.destroy_process_group()


def _connect(device: str, timeout: float) -> Watch:
    """Makes the default process group and the watch over it."""
    if dist.is_initialized():
        raise InputError(
            "train: want to make the process group itself, but torch.distributed has one already"
        )
    on_gpu = choose_device(device).type == "cuda"
    limit = timedelta(seconds=timeout)
    try:
        store, rank, size = next(rendezvous("env://", timeout=limit))
        watch = Watch(PrefixStore("fastqt", store), rank, size, timeout)
        # What is on the host, such as objects and agreements, is exchanged without the GPU.
        backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit)
        dist.barrier()
    except (RuntimeError, ValueError) as error:
        raise InputError(
            f"the processes that torchrun started cannot reach each other: {one_line(error)}"
        ) from error
    watch.start()
    return watch


def _take_gpu() -> None:
    number, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if number >= count:
        raise InputError(f"device: want a GPU for each process, got {count} for process {number + 1} here")
    torch.cuda.set_device(number)


def _exit(number: int, frame: FrameType | None) -> None:
    """Handles SIGTERM, which torchrun also sends after another rank has failed."""
    raise SystemExit(128 + number)
