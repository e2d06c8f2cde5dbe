"""Decides from bytes: a fuzzer's input becomes numbers and choices, of which a target builds its problem."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


class Bytes:
    """Takes decisions from the front of `data`. Where none is left, each is the first of its choices."""

    def __init__(self, data: bytes) -> None:
        self.data, self.position = data, 0

    def take(self, count: int) -> bytes:
        piece = self.data[self.position : self.position + count]
        self.position += len(piece)
        return piece

    def rest(self) -> bytes:
        return self.take(len(self.data))

    def integer(self, low: int, high: int) -> int:
        span = high - low + 1
        width = ((span - 1).bit_length() + 7) // 8
        return low + int.from_bytes(self.take(width), "little") % span

    def flag(self) -> bool:
        return bool(self.integer(0, 1))

    def choice(self, options: Sequence[T]) -> T:
        return options[self.integer(0, len(options) - 1)]
