"""Global memory whose stores other blocks see as late as the memory model allows.

Each block has a copy of what it sees. A store changes its own block's copy at once, and another block's when
that block acquires what a release after the store has offered, so that the store comes before in causality
order. Strong accesses, atomics among them, read and write the one value of an address that all agree on. A
missing fence, or one of too small a scope, leaves a block with values of before, whatever the order in which
warps have run.

The model allows more than this imitates: two stores of a thread may also be seen in the order in which they
were made though nothing asks for it, and warps of one block see each other's stores at once here.

Source: Parallel Thread Execution ISA, chapter 8: "Causality order", "Axioms".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.emulator.memory import UNSIGNED, Memory, views_of

Array = NDArray[Any]


@dataclass(frozen=True)
class Stores:
    """Values that threads have stored at once, each with its block, its warp and the warp's time."""

    region: int
    at: Array  # in units of the values' size
    values: Array
    block: Array
    warp: Array
    time: Array

    def some(self, chosen: Array) -> Stores:
        return Stores(
            self.region,
            self.at[chosen],
            self.values[chosen],
            self.block[chosen],
            self.warp[chosen],
            self.time[chosen],
        )


class LateMemory(Memory):
    """Global memory of which each block sees a copy."""

    def __init__(self, machine: Any, *args: Any, **options: Any) -> None:
        super().__init__(machine, *args, **options)
        self.copies = [
            [views_of(region.views[1].copy()) for _ in range(machine.blocks)] for region in self.regions
        ]
        self.stores: list[Stores] = []
        self.unseen: list[list[Stores]] = [[] for _ in range(machine.blocks)]
        self.looked_at = [0] * machine.blocks  # how many of the stores each block has looked at

    def read(self, number: int, width: int, at: Array, blocks: Array, strong: bool = False) -> Array:
        agreed = super().read(number, width, at, blocks)
        values = np.zeros(at.size, UNSIGNED[width])
        for block in np.unique(blocks):
            view, here = self.copies[number][block][width], blocks == block
            if strong:  # what has been seen once is not forgotten
                view[at[here]] = agreed[here]
            values[here] = view[at[here]]
        return values

    def write(self, number: int, at: Array, values: Array, blocks: Array, warps: Array) -> None:
        super().write(number, at, values, blocks, warps)
        for block in np.unique(blocks):
            here = blocks == block
            self.copies[number][block][values.itemsize][at[here]] = values[here]
        times = self.shadow.clocks.now(warps)
        self.stores.append(Stores(number, at, values.copy(), blocks, warps, times))

    def learn(self, warp: int) -> None:
        """A warp's block sees the stores that the warp has learnt of."""
        block = warp // self.machine.warps_of_block
        new, self.looked_at[block] = self.stores[self.looked_at[block] :], len(self.stores)
        kept = []
        for stores in [*self.unseen[block], *(x.some(x.block != block) for x in new)]:
            known = self.shadow.clocks.times[warp, stores.warp] >= stores.time
            seen = stores.some(known)
            self.copies[stores.region][block][stores.values.itemsize][seen.at] = seen.values
            if not known.all():
                kept.append(stores.some(~known))
        self.unseen[block] = kept
