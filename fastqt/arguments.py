"""The arguments that losses have in common, each declared once: its type, its check, what ranks have alike.

A loss names them in its signature, and `fastqt.loss.loss` reads them there. What a type says is not declared:
a bool is a flag, a `Literal` a choice, a float a number, and a tensor that may be None is given on all ranks
or on none.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from fastqt import options
from fastqt.checks import (
    FLOATING,
    check_flag,
    check_number,
    check_option,
    check_scale,
    check_size,
    check_tensor,
)
from fastqt.exclusions import (
    EVERY_KIND,
    Cells,
    ExcludeLike,
    Exclusions,
    Filter,
    Margin,
    Mask,
    as_exclusions,
)
from fastqt.ids import as_ids
from fastqt.matryoshka import MatryoshkaLike, prefixes_of
from fastqt.options import Backend, Memory
from fastqt.problem import check_memory
from fastqt.targets import TargetsLike, Window


class Known(NamedTuple):
    """What is known of the embeddings of a call when its other arguments are checked.

    Attributes:
        dtype: that of the first embeddings.
        device: where they are.
        columns: D; None where there is no batch yet, as for a module that holds options.
        sizes: the number of rows by the argument's name, and of the first embeddings as "rows".
        first: the name of the first embeddings.
        of_group: whether other processes have rows of the same batch.
        shapes: what tells the embeddings of calls that are computed alike from others; None if nothing does.
    """

    dtype: torch.dtype
    device: torch.device | None
    columns: int | None
    sizes: Mapping[str, int]
    first: str
    of_group: bool = False
    shapes: Hashable | None = None


NO_BATCH = Known(torch.float64, None, None, {}, "")

# Under which name ranks tell each other how many columns a bool tensor of `exclude` has.
COLUMNS = "columns of exclude"

# Gives the value that the loss reads; raises ValueError or TypeError for a wrong one.
Check: TypeAlias = Callable[[str, Any, Known], Any]


def itself(value: Any) -> Hashable:
    """What ranks have alike of a value that they compare."""
    fact: Hashable = value
    return fact


def as_float(value: Any) -> Hashable:
    """The same of a number, of which an integer is as good as a float."""
    return None if value is None else float(value)


def is_given(value: Any) -> Hashable:
    return value is not None


@dataclass(frozen=True)
class Argument:
    """What is known of an argument beside its type and its default, which the signature says.

    Attributes:
        check: as `Check`; None: what the type implies.
        fact: what all ranks have alike of the value; None: nothing.
        is_leaf: whether gradients may flow to it.
        is_local: whether it has something for each row, of which a DTensor holds a part.
        rows: of embeddings, whose rows they have: "rows" for as many as the first, "own" for a number of
            their own, "paired" for that and at least as many as the first.
        like: of another model's embeddings, whose gradients nobody wants, the argument that has as many rows.
        counts: gives further sizes that ranks tell each other, from the checked value.
        of_each_call: whether a module takes it in each call, though it has nothing for each row.
        matrices: of embeddings that come as several matrices, makes these, each with its name.
    """

    check: Check | None = None
    fact: Callable[[Any], Hashable] | None = itself
    is_leaf: bool = False
    is_local: bool = False
    rows: Literal["rows", "own", "paired"] | None = None
    matrices: Callable[[str, Any], dict[str, Tensor]] | None = None
    of_each_call: bool = False
    like: str | None = None
    counts: Callable[[Any], dict[str, int]] | None = None

    @property
    def is_of_batch(self) -> bool:
        """Whether it has something for each row, so that it cannot be checked before there is a batch."""
        return self.rows is not None or self.like is not None or self.fact is is_given or self.of_each_call


def _plain(check: Callable[[Any], object]) -> Check:
    """A check that needs the value alone."""

    def checked(name: str, value: Any, known: Known) -> Any:
        check(value)
        return value

    return checked


def _named(check: Callable[[str, Any], object]) -> Check:
    """A check that needs the value and its name."""

    def checked(name: str, value: Any, known: Known) -> Any:
        check(name, value)
        return value

    return checked


def _any(name: str, value: Any, known: Known) -> Any:
    return value


def _backend(name: str, value: Any, known: Known) -> Any:
    if known.device is None or known.of_group:  # In one process it is checked where an engine is chosen.
        check_option(name, value, typing.get_args(Backend))
    return value


def _choice(choices: tuple[str, ...]) -> Check:
    return _named(partial(_check_choice, choices))


def _check_choice(choices: tuple[str, ...], name: str, value: Any) -> None:
    check_option(name, value, choices)


def _scale(name: str, value: Any, known: Known) -> Any:
    check_scale(value, known.dtype)
    return value


def _number(name: str, value: Any, known: Known) -> Any:
    check_number(name, value, dtype=known.dtype)
    return value


def _number_or_tensor(name: str, value: Any, known: Known) -> Any:
    if isinstance(value, Tensor):
        check_tensor(name, value)
        if known.device not in (None, value.device):
            raise ValueError(f"{name}: want device {known.device} as {known.first}, got {value.device}")
    if not (isinstance(value, Tensor) and value.dim() == 0 and value.dtype in FLOATING):
        check_number(name, value, "a 0-d tensor", known.dtype)
    return value


def _prefixes(name: str, value: Any, known: Known) -> Any:
    return prefixes_of(value, known.columns)


def _generator(name: str, value: Any, known: Known) -> Any:
    if not isinstance(value, torch.Generator):
        raise TypeError(f"{name}: want a torch.Generator or None, got {type(value).__name__}")
    return value


def numbers(wanted: str, is_right: Callable[[float], bool]) -> Argument:
    """A number for which a condition holds that `wanted` says in words."""

    def check(name: str, value: Any, known: Known) -> Any:
        check_number(name, value, dtype=known.dtype)
        if not is_right(value):
            raise ValueError(f"{name}: want {wanted.format(name=name)}, got {value}")
        return value

    return Argument(check, as_float)


def ids_of(rows: str, of: str | None = None) -> Argument:
    """Integers, one for each of the rows that are counted as `rows` and called `of`, which become int64."""

    def check(name: str, value: Any, known: Known) -> Any:
        ids, wanted = as_ids(name, value), known.sizes.get(rows)
        if wanted is not None and len(ids) != wanted:
            called = of or f"rows of {known.first}"
            raise ValueError(f"{name}: want one for each of the {wanted} {called}, got {len(ids)}")
        return ids

    return Argument(check, is_given)


def mask_of(what: str) -> Argument:
    """A bool tensor of cells of rows, True where there is `what`; the loss compares its shape."""

    def check(name: str, value: Any, known: Known) -> Any:
        check_tensor(name, value)
        if value.dtype is not torch.bool:
            raise TypeError(
                f"{name}: want dtype torch.bool (True = {what}), got {value.dtype}; convert it by bool()"
            )
        if value.device != known.device:
            raise ValueError(f"{name}: want device {known.device} as {known.first}, got {value.device}")
        return value

    return Argument(check, is_given, is_local=True)


def exclusions_of(*kinds: type[Filter]) -> Argument:
    """What leaves a loss that takes filters of these kinds."""

    def check(name: str, value: Any, known: Known) -> Exclusions | None:
        exclusions = as_exclusions(name, value, kinds)
        if not exclusions.filters:
            return None
        if known.device is None:
            # Before there is a batch a module holds a margin, to which a call's filters are added.
            if exclusions.without(Margin) is not None:
                kinds_held = exclusions.names
                raise ValueError(
                    f"{name}: want filters of a batch in each call, got {kinds_held} when the module is made"
                )
            return exclusions
        N, M = known.sizes["rows"], known.sizes[candidates_of(known.sizes)]
        cells = Cells(N, M, known.sizes.get("negatives"), known.device, known.dtype, known.of_group)
        for filter_ in exclusions.filters:
            filter_.check(name, cells)
        return exclusions

    return Argument(check, fact=_alike, counts=_columns, of_each_call=Margin not in kinds)


def _alike(exclusions: Exclusions | None) -> Hashable:
    return None if exclusions is None else exclusions.alike()


def _columns(exclusions: Exclusions | None) -> dict[str, int]:
    mask = None if exclusions is None else exclusions.of(Mask)
    return {} if mask is None else {COLUMNS: mask.cells.shape[1]}


def candidates_of(sizes: Mapping[str, Any]) -> str:
    """The name under which the candidates of a loss are counted."""
    return next((name for name in sizes if name not in ("rows", "negatives", COLUMNS)), "rows")


def check_columns(counts: Mapping[str, tuple[int, ...]]) -> None:
    """Raises ValueError unless each rank's bool tensor has a column for each candidate of all ranks.

    Args:
        counts: by name, how many each rank has.
    """
    if COLUMNS not in counts:
        return
    M = sum(counts[candidates_of(counts)])
    for rank, (rows, columns) in enumerate(zip(counts["rows"], counts[COLUMNS], strict=True)):
        if columns != M:
            raise ValueError(
                f"exclude: want shape (N, M) = ({rows}, {M}), got ({rows}, {columns}) "
                f"(on rank {rank} of {len(counts['rows'])})"
            )


# Embeddings, to which gradients flow.
Rows: TypeAlias = Annotated[Tensor, Argument(rows="rows")]
OwnRows: TypeAlias = Annotated[Tensor, Argument(rows="own")]
PairedRows: TypeAlias = Annotated[Tensor, Argument(rows="paired")]

# Numbers.
Scale: TypeAlias = Annotated[float | Tensor, Argument(_scale, fact=None, is_leaf=True)]
Number: TypeAlias = Annotated[float | Tensor, Argument(_number_or_tensor, fact=None, is_leaf=True)]
NotNegative: TypeAlias = Annotated[float, numbers("a number >= 0", lambda x: x >= 0)]
Positive: TypeAlias = Annotated[float, numbers("a number > 0", lambda x: x > 0)]
Share: TypeAlias = Annotated[float, numbers("a number in 0..1", lambda x: 0 <= x <= 1)]
ShareBelow1: TypeAlias = Annotated[float, numbers("0 <= {name} < 1", lambda x: 0 <= x < 1)]
ContextSize: TypeAlias = Annotated[int, Argument(_plain(Window))]

# What goes with rows.
Ids: TypeAlias = Annotated[Tensor, ids_of("rows")]
# A parameter that all ranks have alike, of so many rows.
Shared: TypeAlias = Annotated[Tensor, Argument(_named(check_tensor), len, is_leaf=True, of_each_call=True)]

# Types that say what their values are of, in whatever argument.
OF_TYPES: dict[Any, Argument] = {
    MatryoshkaLike: Argument(_prefixes),
    ExcludeLike: exclusions_of(*EVERY_KIND),
    Memory: Argument(_plain(check_memory), fact=None),
    Backend: Argument(_backend, fact=None),
    torch.Generator: Argument(_generator, fact=None, of_each_call=True),
    bool: Argument(_named(check_flag)),
    float: Argument(_number, as_float),
    int: Argument(_named(check_size)),
    Tensor: Argument(_named(check_tensor), is_given),
}
UNIONS = (typing.Union, types.UnionType)
# The names that signatures show in place of what they stand for.
NAMED = {
    name: type_ for name, type_ in vars(options).items() if typing.get_origin(type_) in (Literal, *UNIONS)
} | {"MatryoshkaLike": MatryoshkaLike, "ExcludeLike": ExcludeLike, "TargetsLike": TargetsLike}


def argument_of(hint: Any) -> Argument:
    """What a type in a signature declares, or implies."""
    kinds = kinds_of(hint)
    for type_, argument in OF_TYPES.items():
        if kinds == kinds_of(type_):
            return argument
    for kind in kinds:
        if typing.get_origin(kind) is Annotated:
            return next(x for x in typing.get_args(kind)[1:] if isinstance(x, Argument))
        if typing.get_origin(kind) is Literal:
            return Argument(_choice(typing.get_args(kind)))
    return Argument(_any, fact=None)


def kinds_of(hint: Any) -> frozenset[Any]:
    """The types of which a value is one, without None."""
    parts = typing.get_args(hint) if typing.get_origin(hint) in UNIONS else (hint,)
    return frozenset(part for part in parts if part is not type(None))


def may_be_none(hint: Any) -> bool:
    """Whether None is a value of a type."""
    if typing.get_origin(hint) is Annotated:
        hint, *_ = typing.get_args(hint)
    return typing.get_origin(hint) in UNIONS and type(None) in typing.get_args(hint)


def shown_type(hint: Any) -> str:
    """A type without what is declared beside it, as a signature shows it."""
    if typing.get_origin(hint) is Annotated:
        return shown_type(typing.get_args(hint)[0])
    for name, type_ in NAMED.items():
        if kinds_of(hint) == kinds_of(type_):
            return f"{name} | None" if may_be_none(hint) else name
    if typing.get_origin(hint) in UNIONS:
        return " | ".join(map(shown_type, typing.get_args(hint)))
    if hint is type(None):
        return "None"
    if isinstance(hint, type) and typing.get_origin(hint) is None:
        return hint.__name__
    if typing.get_args(hint):
        return f"{typing.get_origin(hint).__name__}[{', '.join(map(shown_type, typing.get_args(hint)))}]"
    return str(hint)
