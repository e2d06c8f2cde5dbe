"""Matryoshka losses: a loss of the first columns of all embeddings, added up for several numbers of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from fastqt.checks import check_number, check_size, shown


class Prefixes(NamedTuple):
    """The prefixes of the embeddings that a loss is the sum of.

    Attributes:
        dims: how many columns each has, ascending.
        weights: what the loss of each is multiplied by.
    """

    dims: tuple[int, ...]
    weights: tuple[float, ...]

    def sum(self, loss: Callable[[int], Tensor]) -> Tensor:
        """The weighted sum of a loss of so many columns."""
        first, *others = (weight * loss(dim) for dim, weight in zip(self.dims, self.weights, strict=True))
        return sum(others, first)


def check_matryoshka_dims(dims: object) -> None:
    """Raises ValueError or TypeError unless these are numbers of columns in ascending order."""
    if isinstance(dims, str) or not isinstance(dims, Sequence):
        raise TypeError(f"matryoshka_dims: want a sequence of integers, got {shown(dims)}")
    if not dims:
        raise ValueError("matryoshka_dims: want at least one number of columns, got an empty sequence")
    for dim in dims:
        check_size("matryoshka_dims", dim)
    if any(a >= b for a, b in itertools.pairwise(dims)):
        raise ValueError(f"matryoshka_dims: want numbers in ascending order, got {shown(dims)}")


def check_matryoshka_weights(weights: object) -> None:
    """Raises ValueError or TypeError unless these are finite numbers > 0."""
    if isinstance(weights, str) or not isinstance(weights, Sequence):
        raise TypeError(f"matryoshka_weights: want a sequence of numbers, got {shown(weights)}")
    for weight in weights:
        check_number("matryoshka_weights", weight)
        if weight <= 0:
            raise ValueError(f"matryoshka_weights: want numbers > 0, got {weight}")


def prefixes_of(
    dims: Sequence[int] | None, weights: Sequence[float] | None, D: int | None = None
) -> Prefixes | None:
    """The prefixes that a user asks for, checked; None for the embeddings as they are.

    Args:
        dims, weights: as of `fastqt.contrastive_loss`.
        D: how many columns the embeddings have, None where that is not known yet.

    Raises:
        ValueError, TypeError: naming the argument, what is wanted and what came.
    """
    if weights is not None:
        check_matryoshka_weights(weights)
    if dims is None:
        if weights is not None:
            raise ValueError(f"matryoshka_weights: want None without matryoshka_dims, got {shown(weights)}")
        return None
    check_matryoshka_dims(dims)
    if D is not None and dims[-1] > D:
        raise ValueError(f"matryoshka_dims: want at most D={D}, the embeddings' columns, got {dims[-1]}")
    if weights is None:
        return Prefixes(tuple(dims), (1.0,) * len(dims))
    if len(weights) != len(dims):
        raise ValueError(
            f"matryoshka_weights: want one for each of the {len(dims)} matryoshka_dims, got {len(weights)}"
        )
    return Prefixes(tuple(dims), tuple(map(float, weights)))
