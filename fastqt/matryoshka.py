"""Matryoshka losses: a loss of the first columns of all embeddings, added up for several numbers of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor

from fastqt.checks import check_number, check_size, shown


@dataclass(frozen=True, init=False)
class Matryoshka:
    """The prefixes of the embeddings that a loss is the sum of, for the argument `matryoshka` of losses.

        loss = fastqt.info_nce_loss(queries, candidates, matryoshka=fastqt.Matryoshka((768, 256), (1.0, 0.5)))

    Args:
        dims: how many of the first columns each prefix has; different numbers, which are kept in ascending
            order.
        weights: numbers > 0, one for each, that the losses of the prefixes are multiplied by; 1 each if None.

    Raises:
        ValueError, TypeError: naming the argument, what is wanted and what came.

    Example:
        >>> import fastqt
        >>> fastqt.Matryoshka((16, 8), (1.0, 0.5))
        Matryoshka(dims=(8, 16), weights=(0.5, 1.0))

    Source: Kusupati et al., "Matryoshka representation learning" (2022).
    """

    dims: tuple[int, ...]
    weights: tuple[float, ...]

    def __init__(self, dims: Sequence[int], weights: Sequence[float] | None = None) -> None:
        _check_dims("dims", dims)
        if weights is None:
            weights = (1.0,) * len(dims)
        _check_weights(weights, len(dims))
        pairs = sorted(zip(dims, weights, strict=True))
        object.__setattr__(self, "dims", tuple(dim for dim, _ in pairs))
        object.__setattr__(self, "weights", tuple(float(weight) for _, weight in pairs))

    def sum(self, loss: Callable[[int], Tensor]) -> Tensor:
        """The weighted sum of a loss of so many columns."""
        return sum_of_prefixes(self.dims, self.weights, loss)


MatryoshkaLike: TypeAlias = Sequence[int] | Matryoshka
"""Numbers of columns, whose losses have the weight 1, or these with their weights."""


def sum_of_prefixes(dims: Sequence[int], weights: Sequence[float], loss: Callable[[int], Tensor]) -> Tensor:
    """The weighted sum of a loss of so many columns."""
    first, *others = (weight * loss(dim) for dim, weight in zip(dims, weights, strict=True))
    return sum(others, first)


def prefixes_of(matryoshka: MatryoshkaLike | None, D: int | None = None) -> Matryoshka | None:
    """The prefixes that a user asks for, checked; None for the embeddings as they are.

    Args:
        matryoshka: as of `fastqt.contrastive_loss`.
        D: how many columns the embeddings have, None where that is not known yet.

    Raises:
        ValueError, TypeError: naming the argument, what is wanted and what came.
    """
    if matryoshka is None:
        return None
    check_matryoshka(matryoshka)
    prefixes = matryoshka if isinstance(matryoshka, Matryoshka) else Matryoshka(matryoshka)
    if D is not None and prefixes.dims[-1] > D:
        raise ValueError(f"matryoshka: want at most D={D}, the embeddings' columns, got {prefixes.dims[-1]}")
    return prefixes


def check_matryoshka(matryoshka: object) -> None:
    """Raises ValueError or TypeError unless the argument `matryoshka` of a loss may be this."""
    if matryoshka is not None and not isinstance(matryoshka, Matryoshka):
        _check_dims("matryoshka", matryoshka)


def _check_dims(name: str, dims: object) -> None:
    if isinstance(dims, str) or not isinstance(dims, Sequence):
        more = "" if name == "dims" else " or a fastqt.Matryoshka"
        raise TypeError(f"{name}: want a sequence of integers{more}, got {shown(dims)}")
    if not dims:
        raise ValueError(f"{name}: want at least one number of columns, got an empty sequence")
    for dim in dims:
        check_size(name, dim)
    if len(set(dims)) < len(dims):
        raise ValueError(f"{name}: want different numbers of columns, got {shown(dims)}")


def _check_weights(weights: object, wanted: int) -> None:
    if isinstance(weights, str) or not isinstance(weights, Sequence):
        raise TypeError(f"weights: want a sequence of numbers, got {shown(weights)}")
    for weight in weights:
        check_number("weights", weight)
        if weight <= 0:
            raise ValueError(f"weights: want numbers > 0, got {weight}")
    if len(weights) != wanted:
        raise ValueError(f"weights: want {wanted}, one for each of dims, got {len(weights)}")
