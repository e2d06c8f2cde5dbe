"""The rows that a loss is of: those of one process, or as `Shards` those of all ranks of a group.

A loss is written once. What it asks a batch for, one process has already: its rows are all rows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from typing import ClassVar

import torch
from torch import Tensor

from fastqt.options import Reduction
from fastqt.problem import reduce
from fastqt.targets import Targets

NOTHING = contextlib.nullcontext()


class Batch:
    """The rows of one process, which exchanges nothing.

    Args:
        sizes: by the argument's name, the number of its rows here.

    Attributes:
        is_of_process: whether its rows are those of one process, and no group's.
    """

    is_of_process: ClassVar[bool] = True

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self.sizes = sizes

    def total(self, of: str = "rows") -> int:
        """The number of rows of the whole batch."""
        return self.sizes[of]

    def each(self, of: str = "rows") -> tuple[int, ...]:
        """The number of rows of each process."""
        return (self.sizes[of],)

    def first(self, of: str = "rows") -> int:
        """The index of this process's first row in the batch."""
        return 0

    def of(self, **names: str | tuple[str, int]) -> Batch:
        """The same call, whose rows have other names: by the new name, the one that they have had.

        With a number these are so many times as many rows.
        """
        sizes = {}
        for new, old in names.items():
            name, times = (old, 1) if isinstance(old, str) else old
            sizes[new] = times * self.sizes[name]
        return Batch(sizes)

    def local(self, name: str, x: Tensor) -> Tensor:
        """This rank's rows of an argument, of which a DTensor holds a part."""
        return x

    def agreeing(self) -> contextlib.AbstractContextManager[None]:
        """A context whose errors all ranks raise, on first use."""
        return NOTHING

    def leaving_word(self) -> contextlib.AbstractContextManager[None]:
        """A context in which ranks exchange something: where one fails, the others learn why."""
        return NOTHING

    def gather(self, x: Tensor, of: str = "rows", dtype: torch.dtype | None = None) -> Tensor:
        """The rows of the whole batch, of which each rank has some; gradients flow back to their rank.

        Args:
            x: (n, ...), this rank's.
            of: the name under which their number is known.
            dtype: what they travel in, and have there; by default their own.
        """
        return x

    def rolled(self, x: Tensor, of: str = "rows") -> Tensor:
        """Rows of the whole batch from this rank's first row on, and after the last those before it."""
        return x

    def gather_own_first(self, x: Tensor, of: str = "rows", dtype: torch.dtype | None = None) -> Tensor:
        """`gather` with this rank's rows first, so that cells (i, i) are those of its own rows."""
        return x

    def gather_constant(self, x: Tensor, of: str = "rows") -> Tensor:
        """`gather` of what has no gradient."""
        return x

    def gather_constant_own_first(self, x: Tensor, of: str = "rows") -> Tensor:
        """`gather_own_first` of what has no gradient."""
        return x

    def gather_replicated(self, x: Tensor, of: str = "rows") -> Tensor:
        """The rows of the whole batch, for a loss that every rank computes alike.

        Gradients flow to this rank's rows, without an exchange.
        """
        return x

    def sum_replicated(self, x: Tensor) -> Tensor:
        """The sum of a tensor over all ranks, for a loss that every rank computes alike.

        Gradients flow to this rank's tensor, without an exchange.
        """
        return x

    def log_add_up(self, x: Tensor, of: str = "rows") -> Tensor:
        """log sum_r exp(x_r) over all ranks r, where x is of all ranks' rows with this rank's first."""
        return x

    def of_first_rank(self, x: Tensor) -> Tensor:
        """What the first rank has."""
        return x

    def sum_over_ranks(self, x: Tensor) -> Tensor:
        """The sum of a tensor of any shape over all ranks; gradients flow back to each."""
        return x

    def sum_of_constants(self, x: Tensor) -> Tensor:
        """`sum_over_ranks` of what has no gradient."""
        return x

    def sum_of_lengths(self, length: int, device: torch.device) -> int | Tensor:
        """The sum of a number of rows over all ranks, which equal shards have alike and do not exchange."""
        return length

    def sum_of_counts(self, count: int | Tensor, device: torch.device) -> int | Tensor:
        """The sum over all ranks of what each has counted, () int64 if it is a tensor; at least 1."""
        return count.clamp(min=1) if isinstance(count, Tensor) else max(count, 1)

    def targets(self, targets: Targets, queries: str = "rows", candidates: str = "rows") -> Targets:
        """The targets of this rank's queries over the candidates of the whole batch."""
        return targets

    def own_first(
        self, targets: Targets, diagonal: str, queries: str = "rows", candidates: str = "rows"
    ) -> Targets:
        """Targets of this rank, once its candidates are before all others, as by `gather_own_first`.

        Raises:
            ValueError: a diagonal that is replaced, in a group with more queries than candidates.
        """
        return targets

    def loss(
        self,
        reduction: Reduction,
        leaves: Iterable[object],
        compute: Callable[[str], Tensor],
        of: str = "rows",
    ) -> Tensor:
        """The loss of the whole batch.

        Args:
            reduction: "mean", "sum" or "none".
            leaves: what gradients may flow to; a rank without rows takes part in their sums.
            compute: gives the loss of this rank's rows, of which there are some, for the reduction that it is
                called with: that of one process is `reduction`, that of a rank "sum" or "none".
            of: the name under which the number of rows is known.
        """
        return compute(reduction)

    def local_reduction(self, reduction: Reduction) -> Reduction:
        """How this process's rows are reduced, before those of all ranks are."""
        return reduction

    def part(self, rows: Tensor) -> Tensor:
        """The rows of another loss of this batch as a part of a loss, which is still to be reduced."""
        return rows

    def whole(self, local: Tensor, reduction: Reduction, of: str = "rows") -> Tensor:
        """The loss of the whole batch from that of this process's rows, reduced by `local_reduction`."""
        return local

    def reduced(self, rows: Tensor, reduction: Reduction, of: str = "rows") -> Tensor:
        """The loss of the whole batch from those of this rank's rows, (n,), of which there may be none."""
        return self.whole(reduce(rows, self.local_reduction(reduction)), reduction, of)
