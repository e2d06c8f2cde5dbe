"""The candidates of one rank after the other: what a ring of ranks exchanges, and a loss from it.

At step t each rank has the candidates of the rank t places after it, which sends them directly: the ring is
the order of the visits and not the way that data takes. While a step is computed, the next one's candidates
arrive, so that a rank holds two visiting shards at most. What a visit gives to the gradient of the visitors
goes home while the next one is computed, and is added up there. With the gradients of its own rows, those of
a visit, and the parts that leave and arrive, a rank holds eight shards beside its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fastqt.distributed.collectives import travelling_dtype
from fastqt.distributed.group import Group
from fastqt.distributed.shards import Shards
from fastqt.engines import Computation
from fastqt.problem import Gradients, Needs, Problem, Rows, loss_dtype


class Exchange:
    """Shards that visit all ranks, and their gradients that go home.

    Args:
        group: the ranks.
        shards: this rank's tensors, of rows.
        counts: for each of them, the number of rows of each rank.
    """

    def __init__(self, group: Group, shards: Sequence[Tensor], counts: Sequence[tuple[int, ...]]) -> None:
        self.group, self.counts = group, counts
        self.shards = [shard.detach().contiguous() for shard in shards]
        # Two visitors of each kind: one is computed with while the next one arrives.
        most = [max(counts) for counts in self.counts]
        self._room = [
            [shard.new_empty(rows, *shard.shape[1:]) for shard, rows in zip(self.shards, most, strict=True)]
            for _ in range(min(2, group.size - 1))
        ]
        self._returning: list[Any] = []
        self._arriving: list[tuple[Tensor, Tensor]] = []  # parts, and the sums that they are for

    def visits(self) -> Iterator[tuple[int, list[Tensor]]]:
        """Each rank's shards in turn, this rank's first, with the rank that they belong to.

        A visitor is overwritten once the one after it has been asked for.
        """
        size, rank = self.group.size, self.group.rank
        visitors = self.shards
        for step in range(size):
            owner = (rank + step) % size
            following = self._fetch(step + 1) if step + 1 < size else None
            yield owner, visitors
            if following is not None:
                works, visitors = following
                _wait(works)

    def send_home(self, owner: int, parts: Sequence[Tensor | None], sums: Sequence[Tensor | None]) -> None:
        """Sends this visit's parts of gradients to the rank that they belong to.

        Args:
            owner: that rank.
            parts: like its shards, or None where no gradient is wanted.
            sums: of this rank's own shards, to which the part that arrives at this step is added.
        """
        self.arrived()
        size, rank = self.group.size, self.group.rank
        step = (owner - rank) % size
        if step == 0:
            add(zip(parts, sums, strict=True))
            return
        operations = []
        for part, to in zip(parts, sums, strict=True):
            if part is None or to is None:
                continue
            dtype = travelling_dtype(part.dtype, self.group)
            arriving = to.new_empty(to.shape, dtype=dtype)
            operations += self._swap(part.to(dtype).contiguous(), owner, arriving, (rank - step) % size)
            self._arriving.append((arriving, to))
        self._returning = dist.batch_isend_irecv(operations) if operations else []

    def arrived(self) -> None:
        """Waits for the parts that were sent last, and adds those that have arrived."""
        _wait(self._returning)
        add(self._arriving)
        self._returning, self._arriving = [], []

    def _fetch(self, step: int) -> tuple[list[Any], list[Tensor]]:
        """Starts to receive the shards of the rank `step` places after this one, and to send this rank's."""
        size, rank = self.group.size, self.group.rank
        source, target = (rank + step) % size, (rank - step) % size
        operations, found = [], []
        rooms = self._room[step % len(self._room)]
        for shard, counts, room in zip(self.shards, self.counts, rooms, strict=True):
            arriving = room[: counts[source]]
            operations += self._swap(shard, target, arriving, source)
            found.append(arriving)
        return dist.batch_isend_irecv(operations) if operations else [], found

    def _swap(self, sent: Tensor, target: int, received: Tensor, source: int) -> list[dist.P2POp]:
        group = self.group.process_group
        operations = []
        if sent.numel():
            operations.append(dist.P2POp(dist.isend, sent, group=group, group_peer=target))
        if received.numel():
            operations.append(dist.P2POp(dist.irecv, received, group=group, group_peer=source))
        return operations


def visiting_rows(shards: Shards, candidates: Tensor, indices: Tensor) -> Tensor:
    """The rows of all ranks' candidates at some indices, copied while they visit."""
    found = candidates.new_empty(len(indices), candidates.shape[1])
    counts = shards.counts["candidates"]
    for owner, (visitors,) in Exchange(shards.group, [candidates], [counts]).visits():
        first = sum(counts[:owner])
        inside = (indices >= first) & (indices < first + counts[owner])
        found[inside] = visitors[indices[inside] - first]
    return found


class Ring:
    """A `Problem` of this rank's queries and all ranks' candidates; see `fastqt.engines` for the functions.

    The problem that it is given has this rank's candidates and negatives, and the targets, bias, mask and
    groups of all candidates. A softmax takes two trips and eight matrix products, a sigmoid one trip and six.
    A rank without candidates has no negatives, and where the diagonal is replaced each rank has as many
    candidates as queries.

    Args:
        shards: how candidates and negatives lie on the ranks.
        engine: what computes each visit.
    """

    def __init__(self, shards: Shards, engine: Computation) -> None:
        self.shards, self.engine = shards, engine

    def gradients_in_forward(self, p: Problem) -> bool:
        """Whether a scalar loss takes its gradients in the forward pass."""
        return p.link == "sigmoid"

    def forward(self, p: Problem) -> Rows:
        """The loss of each row."""
        sums = _RowSums(p)
        for _, visit in self._visits(p, self._exchange(p)):
            if visit is not None:
                sums.add(self.engine.forward(visit))
        return sums.rows()

    def forward_with_gradients(self, p: Problem, row_weight: float, needs: Needs) -> tuple[Tensor, Gradients]:
        """row_weight * sum_i loss_i, and its gradients; for a sigmoid."""
        total = p.queries.new_zeros((), dtype=torch.float64)

        def compute(visit: Problem, needs: Needs) -> Gradients:
            part, gradients = self.engine.forward_with_gradients(visit, row_weight, needs)
            total.add_(part)
            return Gradients(*gradients)

        gradients = self._gradients(p, needs, compute)
        return total.to(loss_dtype(p.queries)), gradients

    def backward(self, p: Problem, saved: tuple[Tensor, ...], row_weights: Tensor, needs: Needs) -> Gradients:
        """The gradients of sum_i row_weights_i loss_i, from what `forward` found."""

        def compute(visit: Problem, needs: Needs) -> Gradients:
            return Gradients(*self.engine.backward(visit, saved, row_weights, needs))

        return self._gradients(p, needs, compute)

    def _gradients(
        self, p: Problem, needs: Needs, compute: Callable[[Problem, Needs], Gradients]
    ) -> Gradients:
        exchange = self._exchange(p)
        inputs = p.inputs()
        sums = Gradients(*(zeros_like(x) if need else None for x, need in zip(inputs, needs, strict=True)))
        for owner, visit in self._visits(p, exchange):
            found = Gradients()
            if visit is not None:
                wanted = Needs(
                    *(need and x is not None for need, x in zip(needs, visit.inputs(), strict=True))
                )
                found = compute(visit, wanted)
                columns = self._columns(owner)
                add(((found.queries, sums.queries), (found.row_negatives, sums.row_negatives)))
                add(((found.scale, sums.scale),))
                if sums.bias is not None and found.bias is not None:
                    sums.bias[columns] += found.bias
            parts = self._parts(p, owner, found, needs)
            exchange.send_home(owner, parts, [sums.candidates, sums.negatives][: len(parts)])
        exchange.arrived()
        return in_dtypes_of(inputs, sums)

    def _exchange(self, p: Problem) -> Exchange:
        names = ["candidates"] if p.negatives is None else ["candidates", "negatives"]
        embeddings = [x for x in (p.candidates, p.negatives) if x is not None]
        return Exchange(self.shards.group, embeddings, [self.shards.counts[name] for name in names])

    def _columns(self, owner: int) -> slice:
        """Which of all candidates a rank has."""
        counts = self.shards.counts["candidates"]
        first = sum(counts[:owner])
        return slice(first, first + counts[owner])

    def _visits(self, p: Problem, exchange: Exchange) -> Iterator[tuple[int, Problem | None]]:
        """For each owner of candidates the problem with them, or None where there is nothing to compute."""
        row_negatives = p.row_negatives
        for owner, embeddings in exchange.visits():
            visit = None
            if len(p.queries) and len(embeddings[0]):
                visit = self._problem(p, owner, embeddings, row_negatives)
                row_negatives = None  # They count once.
            yield owner, visit

    def _problem(
        self, p: Problem, owner: int, embeddings: list[Tensor], row_negatives: Tensor | None
    ) -> Problem:
        """The problem of one visit."""
        columns, diagonal = self._columns(owner), p.diagonal if owner == self.shards.group.rank else "keep"
        candidates, *rest = embeddings
        negatives = rest[0] if rest and len(rest[0]) else None
        return replace(
            p,
            candidates=candidates,
            negatives=negatives,
            row_negatives=row_negatives,
            targets=p.targets.of_columns(columns.start, len(candidates)),
            bias=None if p.bias is None else p.bias[columns].contiguous(),
            mask=None if p.mask is None else p.mask[:, columns],
            candidate_groups=None if p.candidate_groups is None else p.candidate_groups[columns].contiguous(),
            diagonal=diagonal,
        )

    def _parts(self, p: Problem, owner: int, found: Gradients, needs: Needs) -> list[Tensor | None]:
        """What a visit gives to the gradients of the owner's candidates and negatives; zeros if nothing."""
        given = [(p.candidates, found.candidates, needs.candidates, "candidates")]
        if p.negatives is not None:
            given.append((p.negatives, found.negatives, needs.negatives, "negatives"))
        parts: list[Tensor | None] = []
        for x, gradient, need, name in given:
            if need and gradient is None:
                gradient = x.new_zeros(self.shards.counts[name][owner], x.shape[1])
            parts.append(gradient if need else None)
        return parts


class _RowSums:
    """The loss of rows from those of parts of their columns."""

    def __init__(self, p: Problem) -> None:
        self.link = p.link
        n = len(p.queries)
        self.logsumexp = p.queries.new_full((n,), -torch.inf, dtype=torch.float64)
        self.mass, self.rest = (p.queries.new_zeros(n, dtype=torch.float64) for _ in range(2))

    def add(self, rows: Rows) -> None:
        if self.link == "sigmoid":
            self.rest += rows.loss
            return
        logsumexp, mass = rows.saved
        self.logsumexp = torch.logaddexp(self.logsumexp, logsumexp)
        if self.link == "softmax":
            # What the targets' scores and the entropy give, without the mass times the logsumexp.
            self.rest += (rows.loss - mass * logsumexp).where(mass > 0, 0)
            self.mass += mass

    def rows(self) -> Rows:
        if self.link == "sigmoid":
            return Rows(self.rest, (self.logsumexp, self.mass))
        if self.link == "log_sum_exp":
            return Rows(self.logsumexp, (self.logsumexp, torch.ones_like(self.mass)))
        loss = (self.mass * self.logsumexp + self.rest).where(self.mass > 0, 0)
        return Rows(loss, (self.logsumexp, self.mass))


def zeros_like(x: Tensor | None) -> Tensor | None:
    """Zeros to add gradients of `x` to, in float32 at least."""
    return None if x is None else torch.zeros(x.shape, dtype=loss_dtype(x), device=x.device)


def in_dtypes_of(inputs: Sequence[Tensor | None], sums: Gradients) -> Gradients:
    """The gradients in the dtypes of what they are gradients of."""
    found = zip(inputs, sums, strict=True)
    return Gradients(*(g if g is None or x is None else g.to(x.dtype) for x, g in found))


def add(pairs: Iterable[tuple[Tensor | None, Tensor | None]]) -> None:
    """Adds each part to its sum, where both are there."""
    for part, to in pairs:
        if part is not None and to is not None:
            to += part


def _wait(works: list[Any]) -> None:
    for work in works:
        work.wait()
