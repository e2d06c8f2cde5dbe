"""What the threads of a warp do together: exchanges, votes, and matrices that all of them hold.

Source: Parallel Thread Execution ISA, "shfl.sync", "redux.sync", "vote.sync", "elect.sync", "ldmatrix",
"stmatrix", "mma".
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.emulator import matrices

Array = NDArray[Any]

WARP = 32


class Warps:
    """Instructions of whole warps; a part of a warp that meets one alone is reported."""

    def __init__(self, machine: Any) -> None:
        self.machine = machine

    @staticmethod
    def want_all(members: Array) -> None:
        """A mask of lanes that is known only when it is executed."""
        if (members != 0xFFFFFFFF).any():
            raise NotImplementedError(f"want all lanes of a warp, got the mask {int(members.min()):#x}")

    def elect(self, threads: Any) -> Array:
        """elect.sync: the first lane of each warp."""
        self.machine.whole_warps(threads, threads.at)
        return threads.lane == 0

    def shuffle(self, threads: Any, how: str, value: Array, lane: Array, clamp: Array) -> tuple[Array, Array]:
        """shfl.sync of whole warps: the values, and whether their lanes are within the segment."""
        if not self.machine.whole_warps(threads, threads.at):
            return value, np.ones(threads.n, bool)
        mine = threads.lane.astype(np.int64)
        b, c = (np.broadcast_to(x, threads.n).astype(np.int64) for x in (lane, clamp))
        segment, bound = c >> 8 & 31, c & 31
        first, last = mine & segment, (mine & segment) | (bound & ~segment)
        if how == "bfly":
            source = mine ^ (b & 31)
        elif how == "idx":
            source = first | (b & 31 & ~segment)
        elif how == "up":
            source = mine - (b & 31)
        else:
            raise NotImplementedError(f"shfl.sync.{how}")
        # The clamp of "up" is the first lane that may be read.
        inside = source >= last if how == "up" else source <= last
        source = np.where(inside, source, mine)
        in_rows = value.reshape(-1, WARP)
        taken: Array = np.take_along_axis(in_rows, source.reshape(-1, WARP), 1).reshape(-1)
        return taken, inside

    def reduce(self, threads: Any, how: str, value: Array) -> Array:
        """redux.sync of whole warps."""
        if not self.machine.whole_warps(threads, threads.at):
            return value
        function = {
            "max": np.maximum,
            "min": np.minimum,
            "add": np.add,
            "or": np.bitwise_or,
            "and": np.bitwise_and,
        }[how]
        return np.repeat(function.reduce(value.reshape(-1, WARP), axis=1).astype(value.dtype), WARP)

    def multiply(self, threads: Any, shape: str, kind: str, a: Any, b: Any, c: Any) -> list[Array]:
        if not self.machine.whole_warps(threads, threads.at):
            return list(c)
        return matrices.multiply(shape, kind, a, b, c)

    def load_matrices(self, threads: Any, address: Array, count: int, transposed: bool) -> list[Array]:
        """ldmatrix: lane 8 k + r gives the address of row r of matrix k, of 8 numbers of 16 bits."""
        if not self.machine.whole_warps(threads, threads.at):
            return [np.zeros(threads.n, np.uint32)] * count
        wanted = threads.lane < 8 * count
        rows = np.stack(
            self.machine.shared_memory.load(threads, address, wanted, 8, 2), 1
        )  # (threads, 2), 16 bytes
        halves = rows.view(np.uint16).reshape(-1, WARP, 8)
        result = []
        for k in range(count):
            matrix = halves[:, 8 * k : 8 * k + 8]
            if transposed:
                matrix = matrix.swapaxes(1, 2)
            result.append(np.ascontiguousarray(matrix).reshape(-1, 64).view(np.uint32).reshape(-1))
        return result

    def store_matrices(self, threads: Any, address: Array, values: list[Array], transposed: bool) -> None:
        if not self.machine.whole_warps(threads, threads.at):
            return
        rows = np.zeros((threads.n, 8), np.uint16)
        for k, value in enumerate(values):
            matrix = np.ascontiguousarray(value).reshape(-1, WARP).view(np.uint16).reshape(-1, 8, 8)
            if transposed:
                matrix = matrix.swapaxes(1, 2)
            rows.reshape(-1, WARP, 8)[:, 8 * k : 8 * k + 8] = matrix
        halves = rows.view(np.uint64)
        parts = [np.ascontiguousarray(halves[:, k]) for k in range(2)]
        self.machine.shared_memory.store(threads, address, threads.lane < 8 * len(values), parts)
