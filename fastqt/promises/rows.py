"""Functions of matrices without a loss of fastqt: promises of parts, and walks that reduce them.

A rule here is asked where no other one has an answer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastqt.promises import ends as ends
from fastqt.promises import walk
from fastqt.promises.promise import Promise, known
from fastqt.promises.rules import RULES, Several, View
from fastqt.promises.scores import RowTerms, Scores
from fastqt.promises.state import State, functions, mapped, parts
from fastqt.promises.terms import Largest, RowTerm
from fastqt.promises.walk import HOWS, NONE, ROWS, How, Parts, Walked, Window

T = Tensor
Function = Callable[..., Any]
FEW = 8  # A matrix has so many times the cells that are taken of it.

OF_CELLS = """
    neg negative abs absolute exp exp2 expm1 log log1p log2 log10 sqrt rsqrt square pow sigmoid tanh relu
    softplus logsigmoid silu gelu elu leaky_relu relu6 hardtanh softsign mish clamp clip clamp_min clamp_max
    reciprocal acos arccos sin cos cosh sinh atan arctan sign floor ceil round nan_to_num isnan isinf isfinite
    logical_not bitwise_not threshold
    float double half bfloat16 long int bool to type_as detach clone contiguous to_dense
    add sub subtract rsub mul multiply div divide true_divide maximum minimum fmax fmin lerp xlogy
    gt lt ge le eq ne greater less greater_equal less_equal not_equal
    logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_xor where masked_fill
    __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __rdiv__ __pow__ __rpow__
    __neg__ __invert__ __gt__ __lt__ __ge__ __le__ __eq__ __ne__ __and__ __or__ __xor__ __abs__
    __rand__ __ror__ __rxor__
"""
_CONVERT = {
    "detach",
    "contiguous",
    "float",
    "double",
    "half",
    "bfloat16",
    "long",
    "int",
    "bool",
    "to",
    "type_as",
}
_IN_PLACE = "add sub mul div clamp clamp_min clamp_max relu exp log sqrt pow sigmoid tanh masked_fill neg"
_OF_ALL = """
    binary_cross_entropy_with_logits binary_cross_entropy kl_div mse_loss l1_loss smooth_l1_loss huber_loss
    soft_margin_loss
"""


def also(*functions: Function) -> Callable[[Function], Function]:
    """A rule for what other rules of these functions do not answer."""

    def add(rule: Function) -> Function:
        for function in functions:
            RULES.of[function] = _in_turn(RULES.of[function], rule) if function in RULES.of else rule
        return rule

    return add


def _in_turn(first: Function, second: Function) -> Function:
    def rule(*args: Any, **named: Any) -> Any:
        answer = first(*args, **named)
        if answer is not NotImplemented:
            return answer
        RULES.taken = ""
        return second(*args, **named)

    return rule


# Of each cell by itself.


def _kinds_of_cells(state: State) -> frozenset[str]:
    kinds = walk.kinds_of_parents(state)
    return kinds if len(walk.shape_of(state)) == 2 else kinds & ROWS


def _part_of_cells(through: Parts, state: State, window: Window) -> Tensor:
    shape = walk.shape_of(state)

    def part(x: Any) -> Any:
        return through.of_argument(x, window, shape)

    named = {name: mapped(x, part) for name, x in state.keywords.items()}
    answer: Tensor = state.function(*mapped(state.args, part), **named)
    return answer


def cell_by_cell(function: Function, args: Any, named: dict[str, Any]) -> Any:
    """The matrix of which each cell is of the same cells of others; NotImplemented where it is not."""
    tensors = [x for x in parts((args, tuple(named.values()))) if isinstance(x, Tensor)]
    states = [walk.matrix(x) for x in tensors if _is_matrix(x)]
    matrices = [x for x in states if x is not None]
    if not matrices or len(matrices) < len(states) or not walk.together(matrices):
        return NotImplemented
    tensors = [walk.numbers(x) for x in tensors]
    shape, counts = walk.shape_of(matrices[0]), walk.counts_of(matrices[0])
    numbers = [tuple(x.shape) for x in tensors if not _is_matrix(x)]
    if any(walk.shape_of(x) != shape or walk.counts_of(x) is not counts for x in matrices):
        return NotImplemented
    if not all(not x if counts is not None else _is_spread(x, shape) for x in numbers):
        return NotImplemented

    def example(x: Any) -> Any:
        """An argument of a matrix without a row."""
        if not isinstance(x, Tensor):
            return x
        if _is_matrix(x):
            return torch.empty((0, *shape[1:]), dtype=x.dtype, device=x.device)
        x = x.box.state.computed() if isinstance(x, Promise) else x
        return x[:0] if x.dim() == len(shape) else x

    try:
        with torch.no_grad():
            result = function(
                *mapped(args, example), **{name: mapped(x, example) for name, x in named.items()}
            )
    except (RuntimeError, TypeError, ValueError):
        return NotImplemented
    is_such = isinstance(result, Tensor) and tuple(result.shape) == (0, *shape[1:])
    if not is_such or result.device != matrices[0].device:
        return NotImplemented
    return Walked(shape, result.dtype, counts)


def _is_matrix(x: Tensor) -> bool:
    return isinstance(x, Promise) and not walk.is_few(x.box.state)


def _is_spread(shape: tuple[int, ...], over: tuple[int, ...]) -> bool:
    padded = (1,) * (len(over) - len(shape)) + shape
    return len(padded) == len(over) and all(x in (1, y) for x, y in zip(padded, over, strict=True))


def _of_cells(function: Function) -> None:
    HOWS[function] = How(_kinds_of_cells, _part_of_cells)
    name = function.__name__

    @also(function)
    def rule(*args: Any, **named: Any) -> Any:
        meaning = cell_by_cell(function, args, named)
        if meaning is NotImplemented or name not in _CONVERT:
            return meaning
        # What has the dtype already is the tensor itself.
        if meaning.dtype != args[0].dtype:
            return meaning
        is_plain = not named and len(args) <= 2 and args[0].box.base is None
        return View(meaning) if is_plain else NotImplemented


for _function in functions(OF_CELLS):
    _of_cells(_function)
for _name in _IN_PLACE.split():
    RULES.in_place.setdefault(getattr(T, f"{_name}_"), getattr(T, _name))


# Of whole rows, or of whole columns.


def _direction(state: State, dim: Any) -> str | None:
    """Over what a function of these dimensions walks; None where it cannot."""
    several = dim if isinstance(dim, tuple | list) else [dim]
    if not several or not all(type(x) is int for x in several) or walk.counts_of(state) is not None:
        return None
    count = len(walk.shape_of(state))
    dims = {x % count for x in several}
    direction = "columns" if dims == {0} and count == 2 else "rows"
    is_possible = direction in walk.kinds_of(state) and not (direction == "rows" and 0 in dims)
    return direction if is_possible else None


def _kinds_of_softmax(state: State) -> frozenset[str]:
    dim = state.args[1] if len(state.args) > 1 else state.keywords.get("dim")
    direction = _direction(state.args[0], dim)
    return NONE if direction is None else frozenset((direction,))


def _part_of_softmax(through: Parts, state: State, window: Window) -> Tensor:
    answer: Tensor = state.function(through.of(state.args[0], window), *state.args[1:], **state.keywords)
    return answer


def _softmax(function: Function) -> None:
    HOWS[function] = How(_kinds_of_softmax, _part_of_softmax)

    @also(function)
    def rule(s: Any, *options: Any, **named: Any) -> Any:
        state = walk.matrix(s)
        dim = options[0] if options else named.get("dim")
        if state is None or _direction(state, dim) is None:
            return NotImplemented
        with torch.no_grad():
            result = function(torch.empty((1, 1, 1, 1), dtype=s.dtype, device=s.device), *options, **named)
        return Walked(tuple(s.shape), result.dtype)


for _function in functions("softmax log_softmax"):
    _softmax(_function)


# What reduces rows, columns or everything.


def _total(state: State, dtype: torch.dtype, name: str = "sum") -> Tensor:
    """The sum of all cells."""
    if not dtype.is_floating_point:
        return walk.walked(state, "rows", lambda x, window: x.sum().reshape(1)).sum()
    precise = torch.promote_types(dtype, torch.float32)
    total = walk.walked(state, "rows", lambda x, window: x.sum(dtype=precise).reshape(1)).sum()
    count = torch.Size(walk.shape_of(state)).numel()
    return (total / count if name == "mean" else total).to(dtype)


def _reduction(function: Function) -> None:
    name = function.__name__

    @also(function)
    def rule(s: Any, *options: Any, **named: Any) -> Any:
        state = walk.matrix(s)
        dim = options[0] if options else named.get("dim")
        if state is None or any(isinstance(x, Tensor) for x in (*options, *named.values())):
            return NotImplemented
        if dim is None:
            is_whole = not options and not named and name in ("sum", "mean")
            is_number = name == "sum" or s.dtype.is_floating_point
            can = is_whole and is_number and "rows" in walk.kinds_of(state)
            return _total(state, s.dtype, name) if can else NotImplemented
        direction = _direction(state, dim)
        if direction is None:
            return NotImplemented
        return walk.walked(
            state,
            direction,
            lambda x, window: function(x, *options, **named),
            0 if direction == "rows" else -1,
        )


for _function in functions("sum mean logsumexp amax amin any all count_nonzero"):
    _reduction(_function)


def taken(state: State, rows: Tensor, columns: Tensor) -> Any:
    """Cells of a matrix, whose gradients go to them alone where each is of few numbers."""
    kinds = walk.kinds_of(state)
    if "cells" in kinds:
        return walk.picked(state, rows, columns)
    if "rows" not in kinds or len(walk.shape_of(state)) != 2:
        return NotImplemented
    order = rows.flatten().argsort(stable=True)
    in_order = rows.flatten()[order], columns.flatten()[order]

    def inside(x: Tensor, window: Window) -> Tensor:
        here = (in_order[0] >= window.first) & (in_order[0] < window.last)
        return x[in_order[0][here] - window.first, in_order[1][here]]

    values = walk.walked(state, "rows", inside)
    state.take(*in_order, values)
    return values[order.argsort()].view(rows.shape)


def _best(function: Function) -> None:
    """The largest cells of rows, or the least, and where they are."""
    name = function.__name__

    @also(function)
    def rule(s: Any, *options: Any, **named: Any) -> Any:
        if any(isinstance(x, Tensor) for x in (*options, *named.values())) or not isinstance(s, Promise):
            return cell_by_cell(function, (s, *options), named) if name != "topk" else NotImplemented
        k, dim, keepdim = _options_of_best(name, options, named)
        state = walk.matrix(s)
        if state is None or len(s.shape) != 2 or _direction(state, dim) != "rows" or k * FEW > s.shape[1]:
            return NotImplemented
        if name == "max" and known(s, Scores) is not None:
            return _largest(function, s, state, keepdim, lambda: best_of(state, options, named))
        return best_of(state, options, named)

    def best_of(state: State, options: tuple[Any, ...], named: dict[str, Any]) -> Any:
        _, _, keepdim = _options_of_best(name, options, named)
        best = walk.walked(state, "rows", lambda x, window: function(x, *options, **named)[1], grad=False)
        columns = best if keepdim else best[:, None]
        rows = torch.arange(len(best), device=best.device)[:, None].expand_as(columns)
        values = taken(state, rows, columns)
        return getattr(torch.return_types, name)((values if keepdim else values[:, 0], best))

    if name != "topk":
        HOWS[function] = How(_kinds_of_cells, _part_of_cells)


def _largest(
    function: Function, s: Promise, state: State, keepdim: bool, compute: Callable[[], Any]
) -> Several:
    """The largest cells and their places as promises, for most programs only take them off again."""
    size = (s.shape[0], 1) if keepdim else (s.shape[0],)
    result: list[Any] = []

    def part(place: int) -> Tensor:
        if not result:
            with state.modes(grad=state.grad):
                result.append(compute())
        answer: Tensor = result[0][place]
        return answer

    largest = Largest(lambda: part(0).detach().reshape(-1, 1))
    values, places = (
        RowTerm(
            size=size,
            terms=RowTerms(((1.0, largest),)),
            dtype=dtype,
            is_constant=place == 0 and not state.leaves,
            part=functools.partial(part, place),
            by="a walk over rows",
        )
        for place, dtype in enumerate((s.dtype, torch.int64))
    )
    return Several(
        [(_MAXIMA[function], values), (_PLACES_OF_MAXIMA[function], places)], torch.return_types.max
    )


def _field(function: Function, place: int) -> Function:
    @functools.wraps(function)
    def field(*args: Any, **named: Any) -> Any:
        return function(*args, **named)[place]

    return field


_MAXIMA, _PLACES_OF_MAXIMA = ({x: _field(x, place) for x in (T.max, torch.max)} for place in (0, 1))


def _options_of_best(name: str, options: tuple[Any, ...], named: dict[str, Any]) -> tuple[int, Any, bool]:
    """How many of a row are wanted, the dimension, and whether it is kept."""
    if name == "topk":
        k = options[0] if options else named["k"]
        return k, options[1] if len(options) > 1 else named.get("dim", -1), True
    dim = options[0] if options else named.get("dim")
    keepdim = options[1] if len(options) > 1 else named.get("keepdim", named.get("keepdims", False))
    return 0, dim, keepdim


for _function in functions("max min topk"):
    _best(_function)


def _placed(function: Function) -> None:
    @also(function)
    def rule(s: Any, *options: Any, **named: Any) -> Any:
        state = walk.matrix(s)
        direction = None if state is None else _direction(state, options[0] if options else named.get("dim"))
        if state is None or direction is None:
            return NotImplemented
        along = 0 if direction == "rows" else -1
        return walk.walked(state, direction, lambda x, _: function(x, *options, **named), along, grad=False)


for _function in functions("argmax argmin"):
    _placed(_function)


# Losses.


def _loss_of_all(function: Function) -> None:
    """A loss that is the sum of those of all cells."""
    HOWS[function] = How(_kinds_of_cells, _part_of_cells)

    @also(function)
    def rule(*args: Any, reduction: str = "mean", **named: Any) -> Any:
        named["reduction"] = "none"
        meaning = cell_by_cell(function, args, named)
        if meaning is NotImplemented or reduction not in ("sum", "mean", "batchmean"):
            return meaning if reduction == "none" else NotImplemented
        losses = walk.state_of(function, args, named, meaning)
        if "rows" not in walk.kinds_of(losses):
            return NotImplemented
        total = _total(losses, meaning.dtype, reduction)
        return total / meaning.shape[0] if reduction == "batchmean" else total


for _function in functions(_OF_ALL):
    _loss_of_all(_function)


def _part_of_losses(through: Parts, state: State, window: Window) -> Tensor:
    """The losses of some rows."""
    s, target = (through.alike(x, window) for x in state.args)
    answer: Tensor = state.function(s, target, **state.keywords)
    return answer


def _loss_alike(function: Function) -> None:
    HOWS[function] = How(lambda state: walk.kinds_of_parents(state) & ROWS, _part_of_losses)

    @also(function)
    def rule(
        s: Any,
        target: Any,
        weight: Any = None,
        size_average: Any = None,
        *options: Any,
        reduce: Any = None,
        reduction: str = "mean",
        **named: Any,
    ) -> Any:
        ignore_index = named.get("ignore_index", -100)
        state = walk.matrix(s)
        is_index = isinstance(target, Tensor) and target.dtype == torch.int64 and target.dim() == 1
        unusual = options or any(x is not None for x in (weight, size_average, reduce))
        if state is None or len(s.shape) != 2 or unusual or not isinstance(target, Tensor):
            return NotImplemented
        if tuple(target.shape) != ((s.shape[0],) if is_index else tuple(s.shape)):
            return NotImplemented
        if isinstance(target, Promise) and walk.matrix(target) is None:
            return NotImplemented
        losses = walk.state_of(
            function, (s, target), {**named, "reduction": "none"}, Walked((s.shape[0],), s.dtype)
        )
        if "rows" not in walk.kinds_of(losses):
            return NotImplemented
        of_rows = walk.walked(losses, "rows", lambda x, window: x)
        if reduction != "mean":
            return of_rows.sum() if reduction == "sum" else of_rows
        return of_rows.sum() / ((target != ignore_index).sum() if is_index else s.shape[0])


for _function in (F.cross_entropy, F.nll_loss):
    _loss_alike(_function)
