"""Shards that visit all ranks, and their gradients that go home.

A shard crosses to another machine once, and not once for each of that machine's ranks. With G ranks on each
machine, a rank is at one of G places. In phase k it fetches the shard of the rank at its own place k machines
further on, and then, over the machine's own links, each of the shards that its neighbours have fetched.
Gradients take the same way back: they are added up at the place that fetched the shard, and cross once. While
a rank computes, the next visitors arrive, and the gradients of the last ones leave.

On one machine there is one phase, and every shard comes from its owner.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fastqt.distributed import faults, steps
from fastqt.distributed.collectives import travelling_dtype
from fastqt.distributed.group import Group
from fastqt.problem import loss_dtype

# What travels.
VISITORS, RETURNING = "visiting rows", "gradients of visiting rows"


class Exchange:
    """Shards that visit all ranks, and their gradients that go home.

    Args:
        group: the ranks.
        shards: this rank's tensors, of rows.
        counts: for each of them, the number of rows of each rank.
    """

    def __init__(self, group: Group, shards: Sequence[Tensor], counts: Sequence[tuple[int, ...]]) -> None:
        steps.compare(group, VISITORS)
        self.group, self.counts = group, counts
        self.shards = [shard.detach().contiguous() for shard in shards]
        self.places = group.node_size
        self.machines = group.size // self.places
        self.machine, self.place = divmod(group.rank, self.places)
        # Room for two visitors of each kind: one is computed with, or shown, while the next one arrives.
        self._visiting = self._room(min(2, self.places - 1))
        self._fetched = self._room(min(2, self.machines - 1))
        self._guests: list[Tensor | None] = []  # sums of gradients of the shards that this rank has fetched
        self._within = self._across = _NOTHING

    def visits(self) -> Iterator[tuple[int, list[Tensor]]]:
        """Each rank's shards in turn, this rank's first, with the rank that they belong to.

        A visitor is overwritten once the one after it has been asked for.
        """
        fetched = self.shards
        for phase in range(self.machines):
            next_phase = self._fetch(phase + 1) if phase + 1 < self.machines else None
            visitors = fetched
            for step in range(self.places):
                next_step = self._show(fetched, phase, step + 1) if step + 1 < self.places else None
                yield self._rank(phase, step), visitors
                if next_step is not None:
                    visitors = next_step.arrived()
            if next_phase is not None:
                fetched = next_phase.arrived()

    def send_home(self, owner: int, parts: Sequence[Tensor | None], sums: Sequence[Tensor | None]) -> None:
        """Sends this visit's parts of gradients to the rank that they belong to.

        Args:
            owner: that rank.
            parts: like its shards, or None where no gradient is wanted.
            sums: of this rank's own shards, to which what arrives is added.
        """
        machine, place = divmod(owner, self.places)
        phase, step = (machine - self.machine) % self.machines, (place - self.place) % self.places
        if step == 0:
            self._end_phase(phase - 1, sums)
            self._guests = list(sums) if phase == 0 else [zeros_like(part) for part in parts]
            add(zip(parts, self._guests, strict=True))
        else:
            self._within.add_to(self._guests)
            self._within = self._return(parts, self._rank(0, step), self._guests, self._rank(0, -step))

    def arrived(self, sums: Sequence[Tensor | None]) -> None:
        """Waits until all parts are at home.

        Args:
            sums: as of `send_home`.
        """
        self._end_phase(self.machines - 1, sums)
        self._across.add_to(sums)
        self._across = _NOTHING

    def _rank(self, phase: int, step: int) -> int:
        """The rank that is so many machines and so many places after this one."""
        machine, place = (self.machine + phase) % self.machines, (self.place + step) % self.places
        return machine * self.places + place

    def _fetch(self, phase: int) -> _Messages:
        """Fetches the shards of the rank at this place of another machine, where this rank's are fetched."""
        source, room = self._rank(phase, 0), self._fetched[phase % len(self._fetched)]
        return self._swap(self.shards, self._rank(-phase, 0), source, source, room)

    def _show(self, fetched: list[Tensor], phase: int, step: int) -> _Messages:
        """Takes what a neighbour has fetched, and gives it what this rank has."""
        room = self._visiting[step % len(self._visiting)]
        return self._swap(fetched, self._rank(0, -step), self._rank(0, step), self._rank(phase, step), room)

    def _room(self, number: int) -> list[list[Tensor]]:
        """Memory for so many times the longest of all ranks' shards."""
        return [
            [
                shard.new_empty(max(counts), *shard.shape[1:])
                for shard, counts in zip(self.shards, self.counts, strict=True)
            ]
            for _ in range(number)
        ]

    def _swap(
        self, sent: Sequence[Tensor], target: int, source: int, owner: int, room: list[Tensor]
    ) -> _Messages:
        """Sends tensors to a rank, and receives the shards of `owner` from another one."""
        received = [into[: counts[owner]] for into, counts in zip(room, self.counts, strict=True)]
        return _under_way(self.group, VISITORS, sent, target, received, source)

    def _return(
        self, parts: Sequence[Tensor | None], target: int, like: Sequence[Tensor | None], source: int
    ) -> _Messages:
        """Sends gradients to a rank, and receives some that are added to what they are like."""
        sent, received = [], []
        for part, to in zip(parts, like, strict=True):
            if part is not None and to is not None:
                dtype = travelling_dtype(part.dtype, self.group)
                sent.append(part.to(dtype).contiguous())
                received.append(torch.empty_like(to, dtype=dtype))
        return _under_way(self.group, RETURNING, sent, target, received, source)

    def _end_phase(self, phase: int, sums: Sequence[Tensor | None]) -> None:
        """Sends what neighbours have given for the shards that this rank has fetched to their owner."""
        self._within.add_to(self._guests)
        self._within = _NOTHING
        if phase > 0:
            self._across.add_to(sums)
            self._across = self._return(self._guests, self._rank(phase, 0), sums, self._rank(-phase, 0))


class _Messages:
    """Tensors that are under way to one rank, and others from another one; by default none.

    Args:
        sent: live until they have been read.
        received: where the others arrive.
        wait: returns when all are there.
    """

    def __init__(
        self,
        sent: Sequence[Tensor] = (),
        received: Sequence[Tensor] = (),
        wait: Callable[[], None] | None = None,
    ) -> None:
        self.sent, self.received, self.wait = sent, list(received), wait

    def arrived(self) -> list[Tensor]:
        """What has been received, when it is there."""
        if self.wait is not None:
            self.wait()
        return self.received

    def add_to(self, sums: Sequence[Tensor | None]) -> None:
        """Adds what has been received to what it is like, once, and frees it."""
        parts = iter(self.arrived())
        for to in sums if self.received else ():
            if to is not None:
                to += next(parts)
        self.wait, self.sent, self.received = None, [], []


_NOTHING = _Messages()


def _under_way(
    group: Group, what: str, sent: Sequence[Tensor], target: int, received: Sequence[Tensor], source: int
) -> _Messages:
    """Begins to send some tensors to a rank, and to receive others from another one."""
    operations = [
        dist.P2POp(operation, x, group=group.process_group, group_peer=peer)
        for operation, tensors, peer in ((dist.isend, sent, target), (dist.irecv, received, source))
        for x in tensors
        if x.numel()
    ]
    if not operations:
        return _Messages(sent, received)
    works = faults.exchange(group, what, dist.batch_isend_irecv, operations)
    return _Messages(sent, received, partial(faults.exchange, group, what, _wait, works))


def zeros_like(x: Tensor | None) -> Tensor | None:
    """Zeros to add gradients of `x` to, in float32 at least."""
    return None if x is None else torch.zeros(x.shape, dtype=loss_dtype(x), device=x.device)


def add(pairs: Iterable[tuple[Tensor | None, Tensor | None]]) -> None:
    """Adds each part to its sum, where both are there."""
    for part, to in pairs:
        if part is not None and to is not None:
            to += part


def _wait(works: list[Any]) -> None:
    for work in works:
        work.wait()
