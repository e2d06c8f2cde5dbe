"""Masks that a program makes of numbers of rows and of labels: promises, which losses read by their lists.

What a program makes of masks by functions that round nothing is computed of their tables. When it asks
anything else of a mask, the promise becomes the tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fastqt.promises.closed import TURNS, TURNS_BY_DIMS, turns
from fastqt.promises.notes import are_row_numbers
from fastqt.promises.patterns import Equality, Pattern, constant, of_diagonal, union
from fastqt.promises.promise import Promise, known, promised
from fastqt.promises.rules import View
from fastqt.promises.state import State, functions, mapped, parts

T = Tensor
Function = Callable[..., Any]
MOST_EQUALITIES = 3
PRODUCTS_OF_CELLS = {T.mul, torch.mul, T.__mul__, T.__rmul__, T.multiply, torch.multiply}
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def promised_mask(pattern: Pattern) -> Promise:
    return promised(state_of_mask(pattern), pattern.table.dtype)


def state_of_mask(pattern: Pattern) -> State:
    """How a mask is computed, of integers that no program can change."""
    return State.constant(Pattern.cells, pattern)


# What makes a mask.


def _eye(n: Any = None, m: Any = None, **named: Any) -> Pattern | None:
    n, m = named.pop("n", n), named.pop("m", m)
    m = n if m is None else m
    dtype, device = named.pop("dtype", None), named.pop("device", None)
    if named or type(n) is not int or type(m) is not int:
        return None
    like = torch.empty(0, dtype=dtype, device=device)
    return of_diagonal(n, m, like.dtype, like.device)


def _equal(a: Any = None, b: Any = None, **named: Any) -> Pattern | None:
    """Where integers of rows, (N, 1) or repeated along them, are those of columns."""
    if named or type(a) is not Tensor or type(b) is not Tensor or max(a.dim(), b.dim()) != 2:
        return None
    if a.dtype != b.dtype or a.dtype not in _INTEGERS or a.device != b.device:
        return None
    for rows, columns in ((a, b), (b, a)):
        of_rows, of_columns = _ids_of_rows(rows), _ids_of_columns(columns)
        if of_rows is not None and of_columns is not None:
            N, M = len(of_rows), len(of_columns)
            if (columns.dim() == 2 and columns.shape[0] not in (1, N)) or rows.shape[1] not in (1, M):
                return None  # One of them is repeated by the other.
            equality = Equality(_copied(of_rows), _copied(of_columns))
            return Pattern((N, M), (equality,), _IS_EQUAL, a.device)
    return None


_IS_EQUAL = torch.tensor([False, True], device="cpu")


def _copied(ids: Tensor) -> Tensor:
    return ids.clone() if ids.dtype == torch.int64 else ids.long()


def _ids_of_rows(x: Tensor) -> Tensor | None:
    is_such = x.dim() == 2 and (x.shape[1] == 1 or x.stride(1) == 0)
    return x[:, 0] if is_such and x.shape[1] else None


def _ids_of_columns(x: Tensor) -> Tensor | None:
    if x.dim() == 1:
        return x
    return x[0] if x.dim() == 2 and x.shape[0] and (x.shape[0] == 1 or x.stride(0) == 0) else None


def _different(a: Any = None, b: Any = None, **named: Any) -> Pattern | None:
    equal = _equal(a, b, **named)
    return None if equal is None else equal.with_table(~equal.table)


# By function the mask that it makes; None of what it makes else.
MADE: dict[Function, Callable[..., Pattern | None]] = {
    torch.eye: _eye,
    **dict.fromkeys((T.eq, torch.eq, T.__eq__), _equal),
    **dict.fromkeys((T.ne, torch.ne, T.__ne__), _different),
}


# What becomes of masks.

RULES_OF_MASKS: dict[Function, Function] = {}
_EXACT = """
    neg negative abs absolute square logical_not bitwise_not
    add sub subtract rsub mul multiply div divide true_divide maximum minimum clamp clip clamp_min clamp_max
    gt lt ge le eq ne greater less greater_equal less_equal not_equal
    logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_xor where masked_fill
    __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __neg__ __invert__
    __gt__ __lt__ __ge__ __le__ __eq__ __ne__ __and__ __or__ __xor__ __rand__ __ror__ __rxor__
    clone float double half bfloat16 long int bool
"""


def rule(*several: Function) -> Callable[[Function], Function]:
    def add(rule: Function) -> Function:
        RULES_OF_MASKS.update(dict.fromkeys(several, rule))
        return rule

    return add


def masks_in(args: Any) -> list[Pattern] | None:
    """The masks among arguments whose other tensors are numbers; None where there is something else."""
    masks: list[Pattern] = []
    for x in parts(args):
        if isinstance(x, Tensor):
            mask = known(x, Pattern)
            if mask is not None:
                masks.append(mask)
            elif type(x) is not Tensor or x.dim() or x.requires_grad or not x.is_cpu:
                return None
    return masks


def _of_tables(function: Function) -> None:
    @rule(function)
    def exact(*args: Any, **named: Any) -> Any:
        masks = masks_in((args, tuple(named.values())) if named else args)
        if not masks or any(x.size != masks[0].size or x.device != masks[0].device for x in masks):
            return NotImplemented
        equalities = union(masks) if len(masks) > 1 else masks[0].equalities
        if len(equalities) > MOST_EQUALITIES:
            return NotImplemented

        def table(x: Any) -> Any:
            return known(x, Pattern).tables_of(equalities) if isinstance(x, Promise) else x

        table_of_all = function(*mapped(args, table), **{name: mapped(x, table) for name, x in named.items()})
        if type(table_of_all) is not Tensor or table_of_all.dim() != max(len(equalities), 1):
            return NotImplemented  # such as `torch.where` of a mask alone
        is_conversion = len(args) == 1 and not named and function.__name__ in _CONVERT
        if is_conversion and table_of_all.dtype == masks[0].dtype:
            return args[0]  # What has the dtype already is the tensor itself.
        return Pattern(masks[0].size, equalities, table_of_all, masks[0].device)


_CONVERT = ("float", "double", "half", "bfloat16", "long", "int", "bool")
for _function in functions(_EXACT):
    _of_tables(_function)


@rule(T.to, T.type)
def converted(x: Any, *options: Any, **named: Any) -> Any:
    mask = known(x, Pattern)
    wanted = [*options, *named.values()]
    if mask is None or len(wanted) != 1 or named.keys() - {"dtype", "device"}:
        return NotImplemented
    if isinstance(wanted[0], torch.dtype):
        return x if wanted[0] == mask.dtype else mask.with_table(mask.table.to(wanted[0]))
    if isinstance(wanted[0], torch.device | str):
        device = torch.device(wanted[0])
        is_there = device.type == mask.device.type and device.index in (None, mask.device.index)
        return x if is_there else NotImplemented
    return NotImplemented


@rule(T.contiguous)
def same(x: Any, *options: Any, **named: Any) -> Any:
    is_plain = known(x, Pattern) is not None and not options and not named and x.box.base is None
    return x if is_plain else NotImplemented


@rule(*TURNS)
def turned(x: Any, **named: Any) -> Any:
    mask = known(x, Pattern)
    return NotImplemented if mask is None or named or x.box.base is not None else View(mask.turned())


@rule(*TURNS_BY_DIMS)
def turned_by_dims(x: Any, *dims: Any, **named: Any) -> Any:
    return turned(x, **named) if turns(dims) else NotImplemented


@rule(T.repeat)
def repeated(x: Any, *counts: Any, **named: Any) -> Any:
    mask = known(x, Pattern)
    flat = counts[0] if len(counts) == 1 and isinstance(counts[0], tuple | list) else counts
    if mask is None or named or len(flat) != 2 or not all(type(c) is int and c > 0 for c in flat):
        return NotImplemented
    down, right = flat
    if down == right == 1:
        return mask
    equalities = tuple(Equality(e.rows.repeat(down), e.columns.repeat(right)) for e in mask.equalities)
    size = (mask.size[0] * down, mask.size[1] * right)
    return Pattern(size, equalities, mask.table, mask.device)


def _constant_like(function: Function) -> None:
    @rule(function)
    def made(x: Any, **named: Any) -> Any:
        mask = known(x, Pattern)
        if mask is None or named.keys() - {"dtype"}:
            return NotImplemented
        return constant(mask.size, function(mask.table.flatten()[:1], **named), mask.device)


for _function in (torch.ones_like, torch.zeros_like):
    _constant_like(_function)


@rule(torch.scatter, T.scatter)
def scattered(x: Any, dim: Any, index: Any, value: Any = None, **named: Any) -> Any:
    """One cell of each row that becomes a number."""
    mask = known(x, Pattern)
    if mask is None or named or dim not in (1, -1) or type(value) not in (int, float, bool):
        return NotImplemented
    if type(index) is not Tensor or index.dtype != torch.int64 or index.device != mask.device:
        return NotImplemented
    N, M = mask.size
    if tuple(index.shape) != (N, 1) or len(mask.equalities) == MOST_EQUALITIES:
        return NotImplemented
    if N == M and are_row_numbers(index[:, 0]):
        (equality,) = of_diagonal(N, M, torch.bool, mask.device).equalities
    elif not bool(((index >= 0) & (index < M)).all()):
        return NotImplemented
    else:
        equality = Equality(index[:, 0].clone(), torch.arange(M, device=mask.device))
    return _where_equal(mask, equality, value)


def _where_equal(mask: Pattern, equality: Equality, value: float) -> Pattern:
    """A mask of which the cells where something is equal are a number."""
    equalities = union([mask, Pattern(mask.size, (equality,), torch.zeros(2, device="cpu"), mask.device)])
    table = mask.tables_of(equalities).clone()
    place = next(i for i, x in enumerate(equalities) if x.is_same(equality))
    table.select(place, 1).fill_(value)
    return Pattern(mask.size, equalities, table, mask.device)


def with_diagonal(x: Any, value: Any, wrap: bool = False) -> Any:
    """`fill_diagonal_` as a function that changes nothing."""
    mask = known(x, Pattern)
    is_number = type(value) in (int, float, bool)
    if mask is None or wrap or not is_number or mask.size[0] != mask.size[1]:
        return NotImplemented
    (equality,) = of_diagonal(mask.size[0], mask.size[1], torch.bool, mask.device).equalities
    filled = _where_equal(mask, equality, value)
    return filled if len(filled.equalities) <= MOST_EQUALITIES else NotImplemented


@rule(T.sum, torch.sum)
def summed(x: Any, dim: Any = None, keepdim: bool = False, **named: Any) -> Any:
    mask = known(x, Pattern)
    dim = dim[0] if isinstance(dim, tuple | list) and len(dim) == 1 else dim
    if mask is None or named or dim not in (1, -1) or not mask.is_finite:
        return NotImplemented
    sums = mask.sums().to(mask.dtype if mask.dtype.is_floating_point else torch.int64)
    return sums[:, None] if keepdim else sums


# By function that changes its first argument the one that gives its result.
IN_PLACE: dict[Function, Function] = {T.fill_diagonal_: with_diagonal, T.scatter_: scattered}
for _name in ("mul", "div", "add", "sub", "masked_fill", "clamp", "logical_not", "logical_and", "logical_or"):
    IN_PLACE[getattr(T, f"{_name}_")] = RULES_OF_MASKS[getattr(T, _name)]
for _name in ("add", "sub", "mul", "and", "or", "xor"):
    IN_PLACE[getattr(T, f"__i{_name}__")] = RULES_OF_MASKS[getattr(T, f"__{_name}__")]


def changed_in_place(function: Function, args: Any, kwargs: dict[str, Any]) -> Promise | None:
    """The mask that a function changes, which is another one from now on; None where it has to be there."""
    mask, box = known(args[0], Pattern), args[0].box
    if mask is None or box.base is not None or box.views or kwargs.get("out") is not None:
        return None
    answer = IN_PLACE[function](*args, **kwargs)
    if not isinstance(answer, Pattern) or answer.size != mask.size or answer.dtype != mask.dtype:
        return None
    state = state_of_mask(answer)
    state.when_computed, box.state.when_computed = box.state.when_computed, None
    box.state = state
    promise: Promise = args[0]
    return promise
