"""How a batch lies on the ranks of a group."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor

from fastqt.distributed import collectives, faults, steps
from fastqt.distributed.batch import Batch
from fastqt.distributed.group import Group
from fastqt.distributed.local import local_rows
from fastqt.options import Reduction
from fastqt.targets import Rolled, ShardRows, Targets

# The errors of an exchange, after which the ranks exchange nothing more of the call.
IN_VAIN = faults.ExchangeError, faults.OutOfStepError


class Shards(Batch):
    """The rows of all ranks of a group, of which this rank has some.

    Attributes:
        group: the ranks.
        counts: by the argument's name, the number of its rows at each rank.
        first_use: whether the ranks have agreed on such a call just now.
        key: what they have agreed on.
    """

    is_of_process = False

    def __init__(
        self, group: Group, counts: Mapping[str, tuple[int, ...]], first_use: bool, key: Hashable = None
    ) -> None:
        super().__init__({name: rows[group.rank] for name, rows in counts.items()})
        self.group, self.counts, self.first_use, self.key = group, counts, first_use, key

    def of(self, **names: str | tuple[str, int]) -> Shards:
        counts = {}
        for new, old in names.items():
            name, times = (old, 1) if isinstance(old, str) else old
            counts[new] = tuple(times * count for count in self.counts[name])
        return Shards(self.group, counts, self.first_use, self.key)

    def total(self, of: str = "rows") -> int:
        return sum(self.counts[of])

    def each(self, of: str = "rows") -> tuple[int, ...]:
        return self.counts[of]

    def first(self, of: str = "rows") -> int:
        return sum(self.counts[of][: self.group.rank])

    def local(self, name: str, x: Tensor) -> Tensor:
        return local_rows(self.group, name, x)

    def leaving_word(self) -> contextlib.AbstractContextManager[None]:
        return faults.leaving_word(self.group)

    def gather(self, x: Tensor, of: str = "rows", dtype: torch.dtype | None = None) -> Tensor:
        return collectives.gather(x, self.counts[of], self.group, dtype)

    def rolled(self, x: Tensor, of: str = "rows") -> Tensor:
        return x.roll(-self.first(of), 0)

    def gather_own_first(self, x: Tensor, of: str = "rows", dtype: torch.dtype | None = None) -> Tensor:
        return self.rolled(self.gather(x, of, dtype), of)

    def gather_constant(self, x: Tensor, of: str = "rows") -> Tensor:
        return collectives.gather_constant(x, self.counts[of], self.group)

    def gather_constant_own_first(self, x: Tensor, of: str = "rows") -> Tensor:
        return self.rolled(self.gather_constant(x, of), of)

    def gather_replicated(self, x: Tensor, of: str = "rows") -> Tensor:
        rows, first = self.gather_constant(x, of), self.first(of)
        return torch.cat([rows[:first], collectives.shared(x, self.group), rows[first + len(x) :]])

    def sum_replicated(self, x: Tensor) -> Tensor:
        return collectives.sum_replicated(x, self.group)

    def log_add_up(self, x: Tensor, of: str = "rows") -> Tensor:
        first = self.first(of)
        return collectives.log_add_up(x.roll(first, 0), self.group).roll(-first, 0)

    def of_first_rank(self, x: Tensor) -> Tensor:
        return collectives.of_first_rank(x, self.group)

    def sum_over_ranks(self, x: Tensor) -> Tensor:
        return collectives.gather(x[None], (1,) * self.group.size, self.group).sum(0)

    def sum_of_constants(self, x: Tensor) -> Tensor:
        return collectives.gather_constant(x[None], (1,) * self.group.size, self.group).sum(0)

    def sum_of_lengths(self, length: int, device: torch.device) -> int | Tensor:
        if self.group.shards == "equal":
            return length * self.group.size
        return collectives.add_up(torch.tensor(length, device=device), self.group)

    def sum_of_counts(self, count: int | Tensor, device: torch.device) -> int | Tensor:
        return collectives.add_up(torch.as_tensor(count, device=device), self.group).clamp(min=1)

    def targets(self, targets: Targets, queries: str = "rows", candidates: str = "rows") -> Targets:
        own = self.first(candidates), self.first(candidates) + self.sizes[candidates]
        within = own if self.group.edges == "cut" else (0, self.total(candidates))
        gather = partial(self.gather_constant, of=queries)
        rows = ShardRows(self.first(queries), self.total(queries), self.total(candidates), within, gather)
        return targets.of_shard(rows)

    def own_first(
        self, targets: Targets, diagonal: str, queries: str = "rows", candidates: str = "rows"
    ) -> Targets:
        N, M, first = self.total(queries), self.total(candidates), self.first(queries)
        if diagonal != "keep" and N > M:
            raise ValueError(
                f"diagonal: want 'keep' in a group with more queries (N={N}) than candidates (M={M}), "
                f"got {diagonal!r}"
            )
        return Rolled(targets, first) if first else targets

    def loss(
        self,
        reduction: Reduction,
        leaves: Iterable[object],
        compute: Callable[[str], Tensor],
        of: str = "rows",
    ) -> Tensor:
        with self.agreeing():
            if self.sizes[of]:
                local = compute(self.local_reduction(reduction))
            else:
                local = collectives.nothing(leaves, reduction)
        return self.whole(local, reduction, of)

    def local_reduction(self, reduction: Reduction) -> Reduction:
        return "none" if reduction == "none" else "sum"

    def part(self, rows: Tensor) -> Tensor:
        return collectives.unshared(rows, self.group)

    def whole(self, local: Tensor, reduction: Reduction, of: str = "rows") -> Tensor:
        return collectives.reduced(local, reduction, self.total(of), self.group)

    @contextlib.contextmanager
    def agreeing(self) -> Iterator[None]:
        """A context whose errors all ranks raise, on first use.

        Raises:
            ValueError, TypeError: what a rank raises in the context; the message names the ranks.
            RuntimeError: a rank raises another error.
        """
        fault: Exception | None = None
        try:
            yield
        except Exception as error:
            if not self.first_use or isinstance(error, IN_VAIN):
                faults.leave_word(self.group, error)
                raise
            fault = error
        if self.first_use:
            found = steps.objects(self.group, "errors", faults.described(fault))
            if any(found):
                self.group.agreed.pop(self.key, None)  # The next such call is checked on all ranks again.
            faults.raise_first(found, fault)
