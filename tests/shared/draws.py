"""Where random problems take their decisions from, and tensors: of any strides, random or learnt."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor

T = TypeVar("T")

LAYOUTS = ("plain", "transposed", "spread", "sliced", "one row expanded", "one column expanded")
VECTOR_LAYOUTS = ("plain", "spread", "expanded")


class Source(Protocol):
    def integer(self, low: int, high: int) -> int:
        """An integer in low..high."""


class Drawn:
    def __init__(self, draw: Callable[[Any], Any]) -> None:
        self.draw = draw

    def integer(self, low: int, high: int) -> int:
        return self.draw(st.integers(low, high))


class Seeded:
    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)

    def integer(self, low: int, high: int) -> int:
        return self.rng.randint(low, high)


class Draws:
    """Choices and tensors that are made from the decisions of a source, and a record of what was made."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.makes: list[str] = []

    def choice(self, options: Sequence[T]) -> T:
        return options[self.source.integer(0, len(options) - 1)]

    def flag(self) -> bool:
        return self.source.integer(0, 1) == 1

    def rarely(self, often: int) -> bool:
        return self.source.integer(1, often) == often

    def noted(self, make: str) -> None:
        self.makes.append(make)

    def laid_out(self, values: np.ndarray, dtype: torch.dtype) -> Tensor:
        """A matrix of these values, or of its first row or column alone, with any strides."""
        x = torch.from_numpy(values).to(dtype)
        rows, columns = x.shape
        layout = self.choice(LAYOUTS)
        self.noted(f"layout {layout}")
        match layout:
            case "transposed":
                x = x.T.contiguous().T
            case "spread":
                x = x.repeat_interleave(3, 1)[:, ::3]
            case "sliced":
                x = F.pad(x, (1, 2, 1, 0))[1:, 1 : columns + 1]
            case "one row expanded":
                x = x[:1].expand(rows, columns)
            case "one column expanded":
                x = x[:, :1].expand(rows, columns)
        return x

    def vector(self, values: np.ndarray, dtype: torch.dtype) -> Tensor:
        """A vector of these values, or of its first one alone."""
        x = torch.from_numpy(values).to(dtype)
        match self.choice(VECTOR_LAYOUTS):
            case "spread":
                x = x.repeat_interleave(2)[::2]
            case "expanded":
                x = x[:1].expand(len(values))
        return x


def converged(N: int, score: float, seed: int) -> tuple[Tensor, Tensor]:
    """Queries and candidates: the score of a pair is about `score`, all other scores are about 0."""
    generator = torch.Generator().manual_seed(seed)
    candidates = torch.linalg.qr(torch.randn(N, N, generator=generator)).Q
    candidates = F.normalize(candidates + 0.02 * torch.randn(N, N, generator=generator), dim=1)
    return score * candidates, candidates


def random_inputs(N: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(N, N, generator=generator), torch.randn(N, N, generator=generator)
