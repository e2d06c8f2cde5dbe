"""A loss whose candidates visit each rank, those of one rank after the other; exchange.py moves them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from fastqt.devices import accumulation_dtype
from fastqt.distributed import faults
from fastqt.distributed.exchange import Exchange, add, zeros_like
from fastqt.distributed.shards import Shards
from fastqt.engines import Computation, ComputationOfColumns
from fastqt.problem import ROW_CELLS, Gradients, Needs, Problem, Rows, loss_dtype


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
        engine: what computes each visit; of a softmax a `ComputationOfColumns`.
    """

    def __init__(self, shards: Shards, engine: Computation) -> None:
        self.shards, self.engine = shards, engine

    def gradients_in_forward(self, p: Problem) -> bool:
        """Whether a scalar loss takes its gradients in the forward pass."""
        return p.link == "sigmoid"

    @faults.telling
    def forward(self, p: Problem) -> Rows:
        """The loss of each row."""
        sums = _RowSums(p)
        for _, visit in self._visits(p, self._exchange(p)):
            if visit is not None:
                sums.add(self.engine.forward(visit))
        return sums.rows()

    @faults.telling
    def forward_with_gradients(self, p: Problem, row_weight: float, needs: Needs) -> tuple[Tensor, Gradients]:
        """row_weight * sum_i loss_i, and its gradients; for a sigmoid."""
        total = p.queries.new_zeros((), dtype=accumulation_dtype(p.queries.device))

        def compute(visit: Problem, needs: Needs) -> Gradients:
            part, gradients = self.engine.forward_with_gradients(visit, row_weight, needs)
            total.add_(part)
            return Gradients(*gradients)

        gradients = self._gradients(p, needs, compute)
        return total.to(loss_dtype(p.queries)), gradients

    @faults.telling
    def backward(self, p: Problem, saved: tuple[Tensor, ...], row_weights: Tensor, needs: Needs) -> Gradients:
        """The gradients of sum_i row_weights_i loss_i, from what `forward` found."""

        def compute(visit: Problem, needs: Needs) -> Gradients:
            if p.link == "sigmoid":
                return Gradients(*self.engine.backward(visit, saved, row_weights, needs))
            engine = cast(ComputationOfColumns, self.engine)
            logsumexp, mass = saved
            return Gradients(*engine.backward_of_columns(visit, logsumexp, mass, row_weights, needs))

        return self._gradients(p, needs, compute)

    def _gradients(
        self, p: Problem, needs: Needs, compute: Callable[[Problem, Needs], Gradients]
    ) -> Gradients:
        exchange = self._exchange(p)
        inputs = p.inputs()
        sums = Gradients(*(zeros_like(x) if need else None for x, need in zip(inputs, needs, strict=True)))
        home = [sums.candidates] if p.negatives is None else [sums.candidates, sums.negatives]
        for owner, visit in self._visits(p, exchange):
            found: Gradients = Gradients()
            if visit is not None:
                wanted = Needs(
                    *(need and x is not None for need, x in zip(needs, visit.inputs(), strict=True))
                )
                found = compute(visit, wanted)
                of_columns = sums._replace(
                    bias=None if sums.bias is None else sums.bias[self._columns(owner)]
                )
                # Those of the candidates and negatives go home.
                add(zip(found, of_columns._replace(candidates=None, negatives=None), strict=True))
            exchange.send_home(owner, self._parts(p, owner, found, needs), home)
        exchange.arrived(home)
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
        cells = {name: getattr(p, name) for name in ROW_CELLS}
        for owner, embeddings in exchange.visits():
            visit = None
            if len(p.queries) and len(embeddings[0]):
                visit = self._problem(p, owner, embeddings, cells)
                cells = dict.fromkeys(cells)  # They count once.
            yield owner, visit

    def _problem(
        self, p: Problem, owner: int, embeddings: list[Tensor], cells: Mapping[str, Tensor | None]
    ) -> Problem:
        """The problem of one visit."""
        columns, diagonal = self._columns(owner), p.diagonal if owner == self.shards.group.rank else "keep"
        candidates, *rest = embeddings
        negatives = rest[0] if rest and len(rest[0]) else None
        visit = replace(
            p,
            candidates=candidates,
            negatives=negatives,
            targets=p.targets.of_columns(columns.start, len(candidates)),
            bias=None if p.bias is None else p.bias[columns].contiguous(),
            mask=None if p.mask is None else p.mask[:, columns],
            candidate_groups=None if p.candidate_groups is None else p.candidate_groups[columns].contiguous(),
            diagonal=diagonal,
        )
        for name, x in cells.items():
            setattr(visit, name, x)
        return visit

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
        n, dtype = len(p.queries), accumulation_dtype(p.queries.device)
        self.logsumexp = p.queries.new_full((n,), -torch.inf, dtype=dtype)
        self.mass, self.loss = (p.queries.new_zeros(n, dtype=dtype) for _ in range(2))

    def add(self, rows: Rows) -> None:
        if self.link == "sigmoid":
            self.loss += rows.loss
            return
        logsumexp, mass = rows.saved
        if self.link == "softmax":
            # A target's loss grows by what the logsumexp grows, which is found without a difference of
            # large sums, so that a loss near 0 keeps its digits.
            apart = logsumexp - self.logsumexp
            zero = torch.zeros_like(apart)
            self.loss += (rows.loss + mass * torch.logaddexp(-apart, zero)).where(mass > 0, 0)
            self.loss += (self.mass * torch.logaddexp(apart, zero)).where(self.mass > 0, 0)
            self.mass += mass
        self.logsumexp = torch.logaddexp(self.logsumexp, logsumexp)

    def rows(self) -> Rows:
        if self.link == "sigmoid":
            return Rows(self.loss, (self.logsumexp, self.mass))
        if self.link == "log_sum_exp":
            return Rows(self.logsumexp, (self.logsumexp, torch.ones_like(self.mass)))
        return Rows(self.loss, (self.logsumexp, self.mass))


def in_dtypes_of(inputs: Sequence[Tensor | None], sums: Gradients) -> Gradients:
    """The gradients in the dtypes of what they are gradients of."""
    found = zip(inputs, sums, strict=True)
    return Gradients(*(g if g is None or x is None else g.to(x.dtype) for x, g in found))
