"""What every filter is: a value that says which cells leave a loss, and checks itself."""

from __future__ import annotations

from collections.abc import Hashable
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from typing_extensions import Self


class Cells(NamedTuple):
    """The cells of a loss, of which filters take out some.

    Attributes:
        N, M, K: how many queries, candidates and negatives this process has; K is None without negatives.
        device, dtype: those of the embeddings.
        of_group: whether other processes have candidates of the same batch.
    """

    N: int
    M: int
    K: int | None
    device: torch.device
    dtype: torch.dtype
    of_group: bool


class Filter:
    """Which cells leave a loss."""

    called: ClassVar[str] = ""  # in errors; by default the name of the class
    at_most_one: ClassVar[bool] = True  # whether a call may have one alone

    def check(self, name: str, cells: Cells) -> None:
        """Raises ValueError or TypeError unless there is something for each row of the embeddings.

        Args:
            name: the argument, which errors name.
            cells: those of the loss.
        """
        raise NotImplementedError

    def alike(self) -> Hashable:
        """What all ranks of a group have alike."""
        return self.name()

    def turned(self) -> Self:
        """The filter of the candidates as queries, and of the queries as candidates.

        Raises:
            ValueError: it says what it does for the queries alone.
        """
        raise ValueError(
            f"exclude: want a filter of both directions, got {self.name()} of thresholds or negatives"
        )

    @property
    def is_of_negatives(self) -> bool:
        """Whether it says anything of the negatives."""
        return False

    @classmethod
    def name(cls) -> str:
        return cls.called or cls.__name__


def check_length(name: str, what: str, x: Tensor, wanted: int | None) -> None:
    """Raises ValueError unless there are so many numbers."""
    if len(x) != wanted:
        raise ValueError(f"{name}: want {wanted} {what}, got {len(x)}")
