"""Functions of scores that give scores: scales, biases, masks, other blocks of columns, the other side."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fastqt.promises.patterns import Pattern
from fastqt.promises.promise import Promise, known
from fastqt.promises.rules import RULES, View
from fastqt.promises.scores import Exponentials, Meaning, Product, Scores, is_number, replace

T = Tensor
rule = RULES.rule
RULES.in_place |= {
    T.mul_: T.mul,
    T.__imul__: T.mul,
    T.div_: T.div,
    T.__itruediv__: T.div,
    T.add_: T.add,
    T.__iadd__: T.add,
    T.sub_: T.sub,
    T.__isub__: T.sub,
    T.neg_: T.neg,
    T.masked_fill_: T.masked_fill,
}


def _scores(x: Any) -> Scores | None:
    scores: Scores | None = known(x, Scores)
    return scores


def _or_not(answer: Meaning | View | None) -> Any:
    return NotImplemented if answer is None else answer


TURNS = (T.t, torch.t, T.adjoint, *(getattr(T, name).__get__ for name in ("T", "mT", "H")))
TURNS_BY_DIMS = (T.transpose, torch.transpose, T.swapaxes, torch.swapaxes, T.permute, torch.permute)


@rule(*TURNS)
def transposed(s: Any) -> Any:
    scores = _scores(s)
    alone = None if scores is None or s.box.base is not None else scores.alone
    turned = None if alone is None else alone.transposed()
    return NotImplemented if turned is None else View(Scores((turned,)))


@rule(*TURNS_BY_DIMS)
def transposed_by_dims(s: Any, *dims: Any) -> Any:
    return transposed(s) if turns(dims) else NotImplemented


def turns(dims: tuple[Any, ...]) -> bool:
    """Whether these dimensions are those of a transposed matrix."""
    flat = dims[0] if len(dims) == 1 and isinstance(dims[0], tuple | list) else dims
    is_turned = len(flat) == 2 and all(isinstance(x, int) for x in flat) and {x % 2 for x in flat} == {0, 1}
    return is_turned and (tuple(x % 2 for x in flat) == (1, 0) or not isinstance(dims[0], tuple | list))


@rule(T.detach, torch.detach)
def detached(s: Any) -> Any:
    meaning = known(s)
    return NotImplemented if meaning is None or s.box.base is not None else View(meaning.detached())


@rule(T.clone, torch.clone)
def copied(s: Any, **named: Any) -> Any:
    scores = _scores(s)
    return NotImplemented if scores is None or named else scores


@rule(T.contiguous)
def same(s: Any, *options: Any, **named: Any) -> Any:
    scores = _scores(s)
    return NotImplemented if options or named or scores is None or s.box.base is not None else View(scores)


@rule(T.to_dense)
def dense(s: Any, *options: Any, **named: Any) -> Any:
    return NotImplemented if options or named or known(s) is None else s


@rule(T.view, T.reshape, torch.reshape)
def shaped(s: Any, *sizes: Any, **named: Any) -> Any:
    """The shape that the scores have: what shares their cells is the promise itself."""
    scores = _scores(s)
    flat = sizes[0] if len(sizes) == 1 and isinstance(sizes[0], tuple | list) else sizes
    if named or scores is None or len(flat) != 2 or not all(isinstance(x, int) for x in flat):
        return NotImplemented
    if s.requires_grad and not torch.is_grad_enabled():
        return NotImplemented  # It would have a gradient.
    kept = [x in (size, -1) for x, size in zip(flat, scores.shape, strict=True)]
    return s if all(kept) and tuple(flat) != (-1, -1) else NotImplemented


@rule(T.float, T.double, T.to, T.type_as, T.half, T.bfloat16)
def converted(s: Any, *options: Any, **named: Any) -> Any:
    wanted = options[0] if len(options) == 1 and not named else None
    is_same = isinstance(s, Promise) and wanted == s.dtype
    return same(s) if is_same else NotImplemented


@rule(T.neg, torch.neg, T.__neg__, T.negative, torch.negative)
def negated(s: Any) -> Any:
    return multiplied(s, -1.0)


@rule(T.mul, torch.mul, T.__mul__, T.__rmul__, T.multiply, torch.multiply)
def multiplied(s: Any, x: Any) -> Any:
    s, x = (s, x) if isinstance(s, Promise) else (x, s)
    scores = _scores(s)
    if scores is None or not is_number(x) or scores.row is not None or not _keeps_dtype(s, x):
        return NotImplemented
    return _or_not(scores.each(lambda p: _scaled(p, x), lambda numbers: numbers * x))


@rule(T.div, torch.div, T.__truediv__, T.true_divide, torch.true_divide, T.divide, torch.divide)
def divided(s: Any, x: Any, **named: Any) -> Any:
    if named or not isinstance(s, Promise) or not is_number(x) or (not isinstance(x, Tensor) and x == 0):
        return NotImplemented
    return multiplied(s, 1 / x)


def _scaled(p: Product, x: float | Tensor) -> Product | None:
    """A product times a number."""
    if not p.is_plain and (isinstance(x, Tensor) or x <= 0 or p.stands_for != -math.inf):
        return None  # Minus infinity times what may be 0 or less, or a number that may become a small one.
    if p.diagonal == "zero" and not p.has_no_bias:
        return None
    # Products that are multiplied by one tensor have one scale.
    is_one = not isinstance(p.scale, Tensor) and p.scale == 1 and isinstance(x, Tensor)
    scale = x if is_one else p.scale * x
    return replace(p, scale=scale, bias=p.bias if p.has_no_bias else p.bias * x)


@rule(T.add, torch.add, T.__add__, T.__radd__)
def added(s: Any, x: Any, **named: Any) -> Any:
    s, x = (s, x) if isinstance(s, Promise) else (x, s)
    scores = _scores(s)
    if scores is None or named or not _keeps_dtype(s, x) or isinstance(x, Promise):
        return NotImplemented
    if isinstance(x, Tensor) and tuple(x.shape) == (scores.shape[0], 1):
        return scores.plus(1.0, x) if scores.takes_rows else NotImplemented
    columns = scores.shape[1]
    if isinstance(x, Tensor) and tuple(x.shape) in ((columns,), (1, columns)) and len(scores.blocks) == 1:
        return _or_not(scores.each(lambda p: _biased(p, x.reshape(columns))))
    if not is_number(x):
        return NotImplemented
    return _or_not(scores.each(lambda p: _biased(p, x), lambda numbers: numbers + x))


def _biased(p: Product, x: float | Tensor) -> Product | None:
    # Beside a number that stands for minus infinity another one has to be small.
    is_small = is_number(x) and not isinstance(x, Tensor) and abs(x) < 1e-3 * abs(p.stands_for)
    if p.diagonal == "zero" or not (is_small or p.stands_for == -math.inf):
        return None
    return replace(p, bias=x if p.has_no_bias else p.bias + x)


@rule(T.sub, torch.sub, T.__sub__, T.subtract, torch.subtract)
def subtracted(s: Any, x: Any, **named: Any) -> Any:
    is_plain = isinstance(x, Tensor | int | float) and not isinstance(x, Promise | bool)
    return added(s, -x) if isinstance(s, Promise) and is_plain and not named else NotImplemented


def _keeps_dtype(s: Promise, x: Any) -> bool:
    """Whether a result with scores has their dtype."""
    return not isinstance(x, Tensor) or x.dim() == 0 or x.dtype == s.dtype


@rule(T.masked_fill, torch.masked_fill)
def filled(s: Any, mask: Any, value: Any) -> Any:
    scores = _scores(s)
    if scores is None:
        return NotImplemented
    pattern = known(mask, Pattern)
    if pattern is not None:
        return _filled_by_pattern(scores, pattern, value)
    if not _is_mask(mask, scores):
        return NotImplemented
    return _or_not(scores.each(lambda p: _masked(p, mask, value)))


@rule(torch.where)
def chosen(condition: Any, s: Any = None, other: Any = None) -> Any:
    """Scores where a condition holds, and minus infinity elsewhere, or the reverse."""
    if isinstance(s, Promise) and not isinstance(other, Promise):
        scores, pattern = _scores(s), known(condition, Pattern)
        if scores is not None and pattern is not None and pattern.dtype == torch.bool:
            return _filled_by_pattern(scores, pattern.with_table(~pattern.table), other)
        if scores is None or not _is_mask(condition, scores):
            return NotImplemented
        return filled(s, ~condition, other)
    if isinstance(other, Promise) and not isinstance(s, Promise):
        return filled(other, condition, s)
    return NotImplemented


def _filled_by_pattern(scores: Scores, mask: Pattern, value: Any) -> Any:
    """Scores of which the cells of a promised mask are minus infinity."""
    if mask.dtype != torch.bool or mask.size != scores.shape or len(scores.blocks) > 1:
        return NotImplemented
    p = scores.alone
    if p is None or not mask.is_of_diagonal(False, True) or not p.is_plain or mask.size[0] == 1:
        cells = mask.cells()
        return _or_not(scores.each(lambda p: _masked(p, cells, value)))
    if type(value) is Tensor and not value.dim() and not value.requires_grad:
        value = value.item()
    if isinstance(value, Tensor) or not _is_minus_infinity(p, value):
        return NotImplemented
    return Scores((replace(p, diagonal="exclude", stands_for=float(value)),))


def _is_mask(mask: Any, scores: Scores) -> bool:
    is_bool = type(mask) is Tensor and mask.dtype == torch.bool
    return is_bool and tuple(mask.shape) == scores.shape and len(scores.blocks) == 1


def _masked(p: Product, mask: Tensor, value: Any) -> Product | None:
    if isinstance(value, Tensor):
        if value.dim() or value.requires_grad or type(value) is not Tensor:
            return None
        value = value.item()
    if p.diagonal == "zero" or not _is_minus_infinity(p, value):
        return None
    both = mask if p.mask is None else p.mask | mask
    if value != -math.inf and (p.diagonal != "keep" or bool(both.all(1).any())):
        return None  # A row of such cells alone has a softmax.
    return replace(p, mask=both, stands_for=max(value, p.stands_for))


def _is_minus_infinity(p: Product, value: Any) -> bool:
    """Whether exp of a value is 0 beside that of any other score of these."""
    if not isinstance(value, int | float):
        return False
    if value == -math.inf:
        return True
    if value > -1e4:
        return False
    p = p.of_rows()
    with torch.no_grad():
        norms = [torch.linalg.vector_norm(x.detach().float(), dim=1).max() for x in (p.queries, p.candidates)]
        bias = p.bias.detach().abs().max() if isinstance(p.bias, Tensor) else abs(p.bias)
        largest = (
            norms[0] * norms[1] * abs(p.scale if not isinstance(p.scale, Tensor) else p.scale.detach()) + bias
        )
        # exp(-104) is 0 in float32, and exp(-746) in float64.
        is_below = largest + 750 < -value
    return bool(is_below)


@rule(T.fill_diagonal_)
def diagonal_filled(s: Any, value: Any, wrap: bool = False) -> Any:
    scores = _scores(s)
    p = None if scores is None else scores.alone
    is_square = scores is not None and scores.shape[0] == scores.shape[1]
    if p is None or wrap or not is_square or not p.is_plain or not isinstance(value, int | float):
        return NotImplemented
    if value == 0:
        return Scores((replace(p, diagonal="zero"),))
    return Scores((replace(p, diagonal="exclude"),)) if value == -math.inf else NotImplemented


def with_diagonal_filled(s: Tensor, value: float, wrap: bool = False) -> Tensor:
    """`fill_diagonal_` as a function that changes nothing."""
    return s.clone().fill_diagonal_(value, wrap)


RULES.of[with_diagonal_filled] = diagonal_filled
RULES.in_place[T.fill_diagonal_] = with_diagonal_filled


@rule(T.__setitem__)
def set_cells(s: Any, where: Any, value: Any) -> Any:
    is_mask = type(where) is Tensor or known(where, Pattern) is not None
    return filled(s, where, value) if is_mask else NotImplemented


def with_cells(s: Tensor, where: Tensor, value: Any) -> Tensor:
    """`scores[where] = value` as a function that changes nothing."""
    s = s.clone()
    s[where] = value
    return s


RULES.of[with_cells] = set_cells
RULES.in_place[T.__setitem__] = with_cells


@rule(torch.cat, torch.concat, torch.concatenate, torch.hstack)
def beside(several: Any, dim: int = 0) -> Any:
    """Blocks of columns beside each other."""
    blocks: list[Product | Tensor] = []
    if dim not in (1, -1) or len({x.dtype for x in several}) != 1:
        return NotImplemented
    for x in several:
        scores = _scores(x)
        if isinstance(x, Promise) and (scores is None or scores.row is not None):
            return NotImplemented
        if scores is None and (type(x) is not Tensor or x.dim() != 2):
            return NotImplemented
        blocks += [x] if scores is None else scores.blocks
    return Scores(tuple(blocks))


@rule(T.exp, torch.exp)
def exponentials(s: Any) -> Any:
    scores = _scores(s)
    return NotImplemented if scores is None else Exponentials(scores)
