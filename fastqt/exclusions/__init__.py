"""What leaves a softmax or a sigmoid over a batch: the values of the argument `exclude` of losses.

A candidate that is no negative of a query, although it is not its target, is a false negative. Each class
here says which candidates are. A loss takes one of them or several, of which all leave.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar, cast

import torch
from torch import Tensor

from fastqt.checks import shown
from fastqt.exclusions.filter import Cells as Cells
from fastqt.exclusions.filter import Filter as Filter
from fastqt.exclusions.guide import MARGIN_STRATEGIES as MARGIN_STRATEGIES
from fastqt.exclusions.guide import Guide as Guide
from fastqt.exclusions.ids import OfIds as OfIds
from fastqt.exclusions.ids import Same as Same
from fastqt.exclusions.ids import Within as Within
from fastqt.exclusions.ids import groups_of as groups_of
from fastqt.exclusions.mask import Mask as Mask
from fastqt.exclusions.padding import Padding as Padding
from fastqt.exclusions.similarity import Above as Above
from fastqt.exclusions.similarity import Margin as Margin

Kind = TypeVar("Kind", bound=Filter)
ExcludeLike: TypeAlias = Filter | Tensor | Sequence[Filter | Tensor]
"""A filter, a bool tensor (N, M) that is True where a cell leaves the loss, or several of both."""
EVERY_KIND: tuple[type[Filter], ...] = (Margin, Above, OfIds, Guide, Padding, Mask)


@dataclass(frozen=True, eq=False)
class Exclusions:
    """The filters of a call."""

    filters: tuple[Filter, ...]

    def of(self, kind: type[Kind]) -> Kind | None:
        """The filter of a kind of which there may be one, None if there is none."""
        return next((x for x in self.filters if isinstance(x, kind)), None)

    def without(self, kind: type[Filter]) -> Exclusions | None:
        """The others."""
        others = tuple(x for x in self.filters if not isinstance(x, kind))
        return Exclusions(others) if others else None

    def turned(self) -> Exclusions:
        """The filters of the candidates as queries, and of the queries as candidates.

        Raises:
            ValueError: a filter that says what it does for the queries alone.
        """
        return Exclusions(tuple(x.turned() for x in self.filters))

    @property
    def needs_masks(self) -> bool:
        """Whether what leaves is found some rows at a time, because no engine knows it."""
        ids = [x for x in self.filters if isinstance(x, OfIds)]
        return self.of(Guide) is not None or (len(ids) > 0 and groups_of(ids) is None)

    @property
    def names(self) -> str:
        """The kinds of the filters, as an error says them."""
        return " and ".join(x.name() for x in self.filters)

    def ids(self, device: torch.device) -> tuple[OfIds, ...]:
        """The filters by integers, with all of these on a device."""
        return tuple(x.on(device) for x in self.filters if isinstance(x, OfIds))

    def alike(self) -> Hashable:
        """What all ranks have alike."""
        return tuple(x.alike() for x in self.filters)


def as_exclusions(name: str, value: object, kinds: tuple[type[Filter], ...] = EVERY_KIND) -> Exclusions:
    """What a user has given as `exclude`, as a record.

    Args:
        name: the argument.
        value: a filter or several.
        kinds: the filters that the loss takes.

    Raises:
        ValueError, TypeError: another kind, or two of a kind of which there can be one.
    """
    if isinstance(value, Exclusions):
        return value
    several = isinstance(value, Sequence) and not isinstance(value, str)
    values: tuple[Any, ...] = tuple(cast(Sequence[Any], value)) if several else (value,)
    filters = tuple(Mask(x) if isinstance(x, Tensor) else x for x in values)
    for x in filters:
        if not isinstance(x, EVERY_KIND):
            raise TypeError(f"{name}: want {_listed(kinds)}, or a sequence of them, got {shown(x)}")
        if not isinstance(x, kinds):
            raise ValueError(f"{name}: this loss takes {_listed(kinds)}, got {x.name()}")
    for kind in EVERY_KIND:
        if kind.at_most_one and sum(isinstance(x, kind) for x in filters) > 1:
            advice = "; join them by |" if kind is Mask else ""
            what = kind.name().removeprefix("a ")
            raise ValueError(f"{name}: want at most one {what}, got several{advice}")
    return Exclusions(filters)


def _listed(kinds: tuple[type[Filter], ...]) -> str:
    *others, last = (kind.name() for kind in _leaves(kinds))
    return f"{', '.join(others)} or {last}" if others else last


def _leaves(kinds: Sequence[type[Filter]]) -> Iterator[type[Filter]]:
    """The classes of filters that are of these kinds."""
    for kind in kinds:
        below = kind.__subclasses__()
        yield from _leaves(below) if below else (kind,)
