"""Functions of scores that a loss of fastqt computes: cross-entropies, logsumexps, sums over rows."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastqt.devices import accumulation_dtype
from fastqt.functional import contrastive_loss, log_sum_exp, sigmoid_loss
from fastqt.losses.common import joined_loss
from fastqt.promises import closed
from fastqt.promises.directions import PairLoss, can_wait
from fastqt.promises.notes import are_row_numbers
from fastqt.promises.patterns import Pattern
from fastqt.promises.promise import Promise, known
from fastqt.promises.rules import RULES
from fastqt.promises.scores import (
    Exponentials,
    LogProbabilities,
    LogSigmoids,
    Product,
    RowTerms,
    Scores,
    Weighted,
    WeightedScores,
    equal,
    replace,
    width,
)
from fastqt.promises.terms import LogSumExp, RowTerm
from fastqt.targets import Pairs
from fastqt.targets.base import TargetRows, Targets
from fastqt.torch_modes import is_transformed

T = Tensor
rule = RULES.rule
MOST_ENTRIES = 2**20  # of a list of targets


class Columns(NamedTuple):
    """Scores as the general losses take them.

    Attributes:
        options: of these losses.
        first: where the columns of the product begin that has targets.
        numbers: (N, k), columns that are numbers, and before which product they stand.
    """

    options: dict[str, Any]
    first: int
    product: Product
    numbers: Tensor | None


def columns_of(scores: Scores) -> Columns | None:
    """The scores as arguments of the losses; None where they cannot have them."""
    blocks = _for_loss(scores.blocks)
    product = next(x for x in blocks if isinstance(x, Product))
    first = sum(map(width, itertools.takewhile(lambda block: block is not product, blocks)))
    more, numbers = [], []
    for block in blocks:
        if isinstance(block, Tensor):
            numbers.append(block)
        elif block is not product:
            same = block.queries is product.queries and equal(block.scale, product.scale)
            if not same or not block.is_plain or not block.has_no_bias or not product.has_no_bias:
                return None
            more.append(block.candidates)

    of_rows = torch.cat(numbers, 1) if numbers else None
    options: dict[str, Any] = {
        "queries": product.queries,
        "candidates": product.candidates,
        "scale": product.scale,
        "bias": product.bias,
        "exclude": product.mask,
        "diagonal": product.diagonal,
        "negatives": torch.cat(more) if more else None,
        "normalize": product.is_cosine,
    }
    if of_rows is not None:
        options["row_scores"] = of_rows
    if not isinstance(product.scale, Tensor) and product.scale <= 0:
        options |= {"queries": product.queries * product.scale, "scale": 1.0}
    return Columns(options, first, product, of_rows)


def _for_loss(blocks: tuple[Product | Tensor, ...]) -> list[Product | Tensor]:
    """The blocks as one loss can have them: all of cosines or all of rows."""
    for_loss = [x.for_loss() if isinstance(x, Product) else x for x in blocks]
    products = [x for x in for_loss if isinstance(x, Product)]
    # The scale of cosines is above 0, unless it is a tensor.
    are_cosines = all(x.is_cosine and (isinstance(x.scale, Tensor) or x.scale > 0) for x in products)
    return for_loss if are_cosines else [x.of_rows() if isinstance(x, Product) else x for x in blocks]


def _of_sigmoids(p: Product) -> dict[str, Any]:
    """A product as the sigmoid loss takes it."""
    p = p.for_loss()
    options = {name: getattr(p, name) for name in ("queries", "candidates", "scale", "bias")}
    return {**options, "normalize": p.is_cosine}


def _computed(loss: Callable[..., Tensor], **options: Any) -> Any:
    """A loss; NotImplemented where it refuses what plain PyTorch has an answer to."""
    try:
        value = loss(**options)
    except (ValueError, TypeError):
        return NotImplemented
    RULES.taken = f"fastqt.{loss.__name__}"
    return value


def _with_rows(result: Tensor, scores: Scores) -> Tensor:
    """A result that what is added to whole rows does not change, unless that is no number."""
    for row in () if scores.row is None else scores.row.tensors:
        result = result + 0 * row.sum()
    return result


def like(result: Any, s: Promise, function_casts: bool = True) -> Any:
    """A result in the dtype that plain PyTorch's has."""
    if result is NotImplemented:
        return result
    in_float32 = function_casts and torch.is_autocast_enabled(s.device.type)
    return result.to(torch.float32 if in_float32 else s.dtype)


def loss_of_targets(scores: Scores, target: Tensor, ignore_index: int, reduction: str) -> Any:
    """The cross-entropy of rows with their target columns, without those that are ignored."""
    columns = columns_of(scores)
    if columns is None:
        return NotImplemented
    if not columns.first and _are_pairs(columns.product, target, ignore_index):
        return _loss_of_pairs(scores, columns, reduction)

    product, first = columns.product, columns.first
    ignored = target == ignore_index
    if columns.numbers is None and not first and ignore_index == -100 and target.is_cpu:
        # There the loss refuses what is no target.
        loss = _computed(contrastive_loss, **columns.options, targets=target, reduction=_whole(reduction))
        return _finished(loss, scores, (~ignored).sum(), reduction)
    used = target.masked_fill(ignored, first)
    within = (used >= first) & (used < first + len(product.candidates))
    if not bool(within.all()):
        loss = _losses_of_numbers(scores, columns, target, ignored)
        loss = loss if loss is NotImplemented or reduction == "none" else loss.sum()
        return _finished(loss, scores, (~ignored).sum(), reduction)
    used = used - first
    if _hits(product, used, ignored):
        return NotImplemented
    targets = used.masked_fill(ignored, -100)
    loss = _computed(contrastive_loss, **columns.options, targets=targets, reduction=_whole(reduction))
    return _finished(loss, scores, (~ignored).sum(), reduction)


def _whole(reduction: str) -> str:
    """Of a sum the gradients are computed beside it; a mean is one divided."""
    return "none" if reduction == "none" else "sum"


def _loss_of_pairs(scores: Scores, columns: Columns, reduction: str) -> Any:
    loss = _computed(contrastive_loss, **columns.options, targets=Pairs(), reduction=reduction)
    return loss if loss is NotImplemented else _with_rows(loss, scores)


def _are_pairs(product: Product, target: Tensor, ignore_index: int) -> bool:
    """Whether the target of each row is the candidate of its index, and every row has one."""
    N = target.shape[0]
    if product.candidates.shape[0] < N or not are_row_numbers(target):
        return False
    is_free = product.is_plain or (product.mask is not None and not bool(product.mask.diagonal().any()))
    return not 0 <= ignore_index < N and product.diagonal == "keep" and is_free


def _promised_loss(
    s: Promise, scores: Scores, target: Tensor, ignore_index: int, reduction: str, *, casts: bool
) -> Any:
    """The cross-entropy of rows, which may wait for the other direction of the matrix."""
    with torch._C.DisableTorchFunctionSubclass():
        dtype = torch.float32 if casts and torch.is_autocast_enabled(s.device.type) else s.dtype

    def in_dtype(loss: Any) -> Any:
        return loss if loss is NotImplemented else loss.to(dtype)

    p = scores.alone
    waits = can_wait(p) and reduction in ("mean", "sum") and not is_transformed()
    if p is None or not waits or not _are_pairs(p, target, ignore_index):
        return in_dtype(loss_of_targets(scores, target, ignore_index, reduction))

    def alone() -> Any:
        columns = columns_of(scores)
        return NotImplemented if columns is None else in_dtype(_loss_of_pairs(scores, columns, reduction))

    count = target.shape[0] if reduction == "mean" else 1
    return PairLoss(size=(), dtype=dtype, product=p, count=count, alone=alone)


def _finished(loss: Any, scores: Scores, count: int | Tensor, reduction: str) -> Any:
    if loss is NotImplemented:
        return loss
    loss = _with_rows(loss, scores)
    return loss / count if reduction == "mean" else loss


def _hits(product: Product, target: Tensor, ignored: Tensor) -> bool:
    """Whether a target is a cell that is something else."""
    hit = torch.zeros_like(ignored)
    if product.mask is not None:
        hit = hit | product.mask.gather(1, target[:, None])[:, 0]
    if product.diagonal != "keep":
        hit = hit | (target == torch.arange(len(target), device=target.device))
    return bool((hit & ~ignored).any())


def _losses_of_numbers(scores: Scores, columns: Columns, target: Tensor, ignored: Tensor) -> Any:
    """The same for targets among the columns of numbers, which stand before all products."""
    numbers = columns.numbers
    is_first = all(isinstance(x, Tensor) for x in scores.blocks[: -1 if len(scores.blocks) > 1 else 1])
    if numbers is None or columns.first != numbers.shape[1] or not is_first:
        return NotImplemented
    used = target.masked_fill(ignored, 0)
    if not bool(((used >= 0) & (used < numbers.shape[1])).all()):
        return NotImplemented
    options = columns.options | {"row_scores": None}
    others = _computed(log_sum_exp, **options)
    if others is NotImplemented:
        return others
    is_target = F.one_hot(used, numbers.shape[1]).bool()
    positive = numbers.gather(1, used[:, None])[:, 0].to(others.dtype)
    rest = numbers.masked_fill(is_target, -math.inf).to(others.dtype)
    sets = [others] if numbers.shape[1] == 1 else [others, *rest.unbind(1)]
    return joined_loss(positive, sets).masked_fill(ignored, 0)


def _is_index(target: Any, N: int) -> bool:
    return type(target) is Tensor and target.dtype == torch.int64 and tuple(target.shape) == (N,)


@rule(F.cross_entropy)
def cross_entropy(
    s: Any,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    scores = known(s, Scores)
    if (
        scores is None
        or weight is not None
        or size_average is not None
        or reduce is not None
        or label_smoothing
    ):
        return NotImplemented
    if _is_index(target, scores.shape[0]):
        return _promised_loss(s, scores, target, ignore_index, reduction, casts=True)
    if target.dtype != s.dtype:
        return NotImplemented
    sums = _sums_of_weights(scores, known(target, Pattern) or target)
    if sums is NotImplemented or reduction == "none":
        return like(-sums if sums is not NotImplemented else sums, s)
    return like(-sums.sum() if reduction == "sum" else -sums.mean(), s)


@rule(F.nll_loss)
def nll_loss(
    s: Any,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
) -> Any:
    log_p = known(s, LogProbabilities)
    options_are_plain = weight is None and size_average is None and reduce is None
    if log_p is None or not options_are_plain or not _is_index(target, log_p.shape[0]):
        return NotImplemented
    return _promised_loss(s, log_p.scores, target, ignore_index, reduction, casts=False)


@rule(F.log_softmax, torch.log_softmax, T.log_softmax)
def log_softmax(s: Any, dim: Any = None, _stacklevel: int = 3, dtype: Any = None) -> Any:
    scores = known(s, Scores)
    casts = dtype is not None or torch.is_autocast_enabled(s.device.type)
    return NotImplemented if scores is None or dim not in (1, -1) or casts else LogProbabilities(scores)


def _sums_of_weights(scores: Scores, weights: Any) -> Any:
    """The sum of each row of weights times log-probabilities, (N,)."""
    columns = columns_of(scores)
    if columns is not None and isinstance(weights, Pattern):
        return _sums_of_pattern(scores, columns, weights)
    if columns is None or type(weights) is not Tensor or tuple(weights.shape) != scores.shape:
        return NotImplemented
    if len(scores.blocks) > 1 or weights.requires_grad or not columns.product.is_plain_but_diagonal(weights):
        return NotImplemented
    dense = weights.to(torch.promote_types(columns.product.queries.dtype, torch.float32))
    if not bool((dense >= 0).all()):
        return NotImplemented
    divergence = _computed(contrastive_loss, **columns.options, targets=dense, reduction="none")
    if divergence is NotImplemented:
        return divergence
    return _with_rows(torch.xlogy(dense, dense).sum(1) - divergence, scores)


def _sums_of_pattern(scores: Scores, columns: Columns, weights: Pattern) -> Any:
    """The same of weights that are equal in many cells."""
    if weights.size != scores.shape or len(scores.blocks) > 1 or not weights.table.is_floating_point():
        return NotImplemented
    product, targets = columns.product, _listed(weights)
    is_kept = product.diagonal == "keep" or (targets is not None and not targets.has_diagonal)
    if targets is not None and product.mask is None and is_kept:
        divergence = _computed(contrastive_loss, **columns.options, targets=targets, reduction="none")
        if divergence is not NotImplemented:
            return _with_rows(targets.entropies.to(divergence.dtype) - divergence, scores)
    if not _is_plain(scores) or not weights.is_finite:
        return NotImplemented
    logsumexps = _logsumexp(scores)
    if logsumexps is NotImplemented:
        return logsumexps
    return _sums_of_products(scores.plus(-1.0, logsumexps[:, None]), weights)


def _listed(weights: Pattern) -> Listed | None:
    """The weights by their list; None where it is long, or one of them is less than 0."""
    cells = weights.entries(MOST_ENTRIES)
    if cells is None or len(cells[0]) > MOST_ENTRIES:
        return None
    # Cases of the table that are below 0 may be those of no cell.
    if min(weights.values) < 0 and not bool((cells[2] >= 0).all()):
        return None
    return Listed(weights.size[0], *cells)


class Listed(Targets):
    """Weights of cells (rows[i], columns[i]), in the order of the rows."""

    def __init__(self, N: int, rows: Tensor, columns: Tensor, weights: Tensor) -> None:
        counts = torch.bincount(rows, minlength=N)
        starts = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        weights = weights.to(accumulation_dtype(weights.device))
        self._rows, self._numbers = TargetRows(starts, columns, weights), rows

    @property
    def has_diagonal(self) -> bool:
        """Whether a cell (i, i) is among them."""
        _, columns, _ = self._rows.compressed()
        return bool((self._numbers == columns).any())

    @property
    def entropies(self) -> Tensor:
        """The sum of each row of w log w, (N,)."""
        starts, _, weights = self._rows.compressed()
        entropies = torch.xlogy(weights, weights)
        return weights.new_zeros(len(starts) - 1).index_add_(0, self._numbers, entropies)

    def check(self, N: int, M: int, diagonal: str) -> None:
        return  # They are of a matrix of this shape.

    def rows(self, N: int, M: int, device: torch.device) -> TargetRows:
        return self._rows


@rule(F.kl_div)
def kl_div(
    s: Any,
    target: Any,
    size_average: Any = None,
    reduce: Any = None,
    reduction: str = "mean",
    log_target: bool = False,
) -> Any:
    log_p = known(s, LogProbabilities)
    if log_p is None or size_average is not None or reduce is not None or log_target or reduction == "none":
        return NotImplemented
    if target.dtype != s.dtype:
        return NotImplemented
    pattern = known(target, Pattern)
    sums = _sums_of_weights(log_p.scores, pattern or target)
    if sums is NotImplemented:
        return sums
    if pattern is None:
        entropies = torch.xlogy(target, target).sum(1)
    else:
        entropies = pattern.with_table(torch.xlogy(pattern.table, pattern.table)).sums()
    total = (entropies.to(sums.dtype) - sums).sum()
    divisor = {"sum": 1, "batchmean": log_p.shape[0], "mean": math.prod(log_p.shape)}[reduction]
    return like(total / divisor, s, False)


@rule(T.logsumexp, torch.logsumexp)
def logsumexp(s: Any, dim: Any, keepdim: bool = False) -> Any:
    scores = known(s, Scores)
    dim = dim[0] if isinstance(dim, tuple | list) and len(dim) == 1 else dim
    if scores is None or dim not in (0, 1, -1, -2):
        return NotImplemented
    if dim in (0, -2):
        alone = scores.alone
        turned = None if alone is None else alone.transposed()
        if turned is None:
            return NotImplemented
        scores = Scores((turned,))
    sums = _logsumexp(scores)
    return sums if sums is NotImplemented else like(sums.unsqueeze(dim) if keepdim else sums, s)


def _logsumexp(scores: Scores) -> Any:
    columns = columns_of(scores)
    sums = NotImplemented if columns is None else _computed(log_sum_exp, **columns.options)
    if sums is NotImplemented or scores.row is None:
        return sums
    return sums + scores.row.computed()[:, 0]


@rule(T.sum, torch.sum)
def summed(s: Any, dim: Any = None, keepdim: bool = False, **named: Any) -> Any:
    dim = dim[0] if isinstance(dim, tuple | list) and len(dim) == 1 else dim
    if named or dim not in (None, 1, -1):
        return NotImplemented
    if dim is None and (signed := known(s, LogSigmoids)) is not None:
        return like(_sum_of_log_sigmoids(signed.of), s, False)
    if dim is not None and (exponentials := known(s, Exponentials)) is not None:
        term = _sums_of_exponentials(s, exponentials.scores, keepdim)
        if term is not None:
            return term
    rows = _sums_of_rows(s)
    if rows is NotImplemented:
        return rows
    rows = like(rows, s, False)
    if dim is None:
        return rows.sum()
    return rows.unsqueeze(1) if keepdim else rows


@rule(T.mean, torch.mean)
def averaged(s: Any, dim: Any = None, keepdim: bool = False, **named: Any) -> Any:
    total = summed(s, dim, keepdim, **named)
    count = s.shape[1] if dim is not None else s.numel()
    return total if total is NotImplemented else total / count


def _sums_of_exponentials(s: Promise, scores: Scores, keepdim: bool) -> RowTerm | None:
    """The sum of each row as a promise, of which a program may want the logarithm alone."""
    if len(scores.blocks) > 1 or torch.is_autocast_enabled(s.device.type) or columns_of(scores) is None:
        return None
    state, of_cells, dtype = s.box.state, replace(scores, row=None), s.dtype

    def sums() -> Tensor:
        computed: Any = _logsumexp(of_cells)
        if isinstance(computed, Tensor):
            return computed[:, None]
        of_all = state.computed().sum(1, keepdim=True).log()
        return of_all if scores.row is None else of_all - scores.row.computed()

    terms = RowTerms(()) if scores.row is None else scores.row
    terms = RowTerms(((1.0, LogSumExp(of_cells, sums, state)), *terms.terms))
    return RowTerm(
        size=(scores.shape[0], 1) if keepdim else scores.shape[:1],
        dtype=dtype,
        terms=terms,
        is_exp=True,
        part=lambda: terms.computed().exp().to(dtype),
        by="fastqt.log_sum_exp",
    )


def _sums_of_rows(s: Any) -> Any:
    """The sum of each row of what follows from scores, (N,)."""
    if (exponentials := known(s, Exponentials)) is not None:
        sums = _logsumexp(exponentials.scores)
        return sums if sums is NotImplemented else sums.exp()
    if (weighted := known(s, Weighted)) is not None:
        sums = _sums_of_weights(weighted.of.scores, weighted.weights)
        return sums if sums is NotImplemented else weighted.sign * sums
    if (weighted := known(s, WeightedScores)) is not None:
        return _sums_of_weighted_scores(weighted)
    return NotImplemented


def _sums_of_weighted_scores(weighted: WeightedScores) -> Any:
    """The sum over the columns goes before the product with the query."""
    log_p = _log_probabilities(weighted.of)
    sums = NotImplemented if log_p is None else _sums_of_weights(log_p, weighted.weights)
    if sums is not NotImplemented:
        return sums

    RULES.taken = "a product with the weighted sums of candidates"
    return _sums_of_products(weighted.of, weighted.weights)


def _sums_of_products(scores: Scores, weights: Tensor | Pattern) -> Tensor:
    """The sum of each row of weights times scores of one product, (N,)."""
    p, row = scores.first.of_rows(), scores.row
    times: Callable[[Tensor], Tensor]
    if isinstance(weights, Pattern):
        dtype = torch.promote_types(weights.table.dtype, torch.float32)
        times, of_rows = weights.times, weights.sums().to(dtype)
    else:
        dtype = torch.promote_types(weights.dtype, torch.float32)
        dense = weights.to(dtype)
        times, of_rows = dense.__matmul__, dense.sum(1)

    sums: Tensor = (p.queries.to(dtype) * times(p.candidates.to(dtype))).sum(1) * p.scale
    if isinstance(p.bias, Tensor) and p.bias.dim():
        sums = sums + times(p.bias.to(dtype)[:, None])[:, 0]
    elif not p.has_no_bias:
        sums = sums + of_rows * p.bias
    return sums if row is None else sums + of_rows * row.computed()[:, 0]


def _log_probabilities(scores: Scores) -> Scores | None:
    """The scores of whose softmax these are the logarithm, but for cells that are not in it."""
    terms = () if scores.row is None else scores.row.terms
    if len(terms) != 1 or terms[0][0] != -1 or not isinstance(terms[0][1], LogSumExp):
        return None
    others = terms[0][1].scores
    block = others.blocks[0]
    is_one = len(scores.blocks) == len(others.blocks) == 1
    return others if is_one and scores.first.is_same(block) else None


def _times(s: Any, x: Any) -> Any:
    """Log-probabilities times weights, or exponentials times ones and zeros."""
    s, x = (s, x) if isinstance(s, Promise) else (x, s)
    if (weighted := known(s, Weighted)) is not None and type(x) in (int, float) and x == -1:
        return Weighted(weighted.weights, weighted.of, -weighted.sign)
    if (pattern := known(x, Pattern) or known(s, Pattern)) is not None:
        return _times_pattern(s if known(x, Pattern) is not None else x, pattern)
    if type(x) is not Tensor or tuple(x.shape) != tuple(s.shape) or x.requires_grad:
        return closed.multiplied(s, x)
    if (log_p := known(s, LogProbabilities)) is not None and x.dtype in (s.dtype, torch.bool):
        return Weighted(x.to(s.dtype), log_p)
    if (exponentials := known(s, Exponentials)) is not None and bool(((x == 0) | (x == 1)).all()):
        return _where_one(exponentials.scores, x) if x.dtype in (s.dtype, torch.bool) else NotImplemented
    if (scores := known(s, Scores)) is not None and x.dtype == s.dtype and _is_plain(scores):
        return WeightedScores(x, scores)
    return closed.multiplied(s, x)


def _times_pattern(s: Any, pattern: Pattern) -> Any:
    """The same with a mask that is promised."""
    if not isinstance(s, Promise) or pattern.size != tuple(s.shape):
        return NotImplemented
    if torch.promote_types(pattern.table.dtype, s.dtype) != s.dtype:
        return NotImplemented
    if not pattern.is_finite:
        return NotImplemented

    weights = pattern.with_table(pattern.table.to(s.dtype))
    if (log_p := known(s, LogProbabilities)) is not None:
        return Weighted(weights, log_p)
    if (exponentials := known(s, Exponentials)) is not None:
        p = exponentials.scores.first
        if len(exponentials.scores.blocks) == 1 and p.is_plain and weights.is_of_diagonal(1, 0):
            masked = replace(p, diagonal="exclude")
            if weights.size[0] > 1:
                return Exponentials(replace(exponentials.scores, blocks=(masked,)))
        is_of_ones = set(weights.values) <= {0, 1}
        return _where_one(exponentials.scores, weights.cells()) if is_of_ones else NotImplemented
    if (scores := known(s, Scores)) is not None and _is_plain(scores):
        return WeightedScores(weights, scores)
    return NotImplemented


def _where_one(scores: Scores, ones: Tensor) -> Any:
    """Exponentials of scores where ones are, and of minus infinity where zeros are."""
    if len(scores.blocks) > 1 or scores.first.diagonal == "zero":
        return NotImplemented
    p = scores.first
    mask = ones == 0
    # In a row without a one the logsumexp of nothing has no gradient.
    mask = mask if p.mask is None else p.mask | mask
    if p.diagonal != "keep" or bool(mask.all(1).any()):
        return NotImplemented
    masked = replace(p, mask=mask, stands_for=-math.inf)
    return Exponentials(replace(scores, blocks=(masked,)))


def _is_plain(scores: Scores) -> bool:
    return len(scores.blocks) == 1 and scores.first.is_plain


@rule(F.logsigmoid)
def log_sigmoids(s: Any) -> Any:
    weighted = known(s, WeightedScores)
    if weighted is None or weighted.of.row is not None:
        return NotImplemented
    weights = weighted.weights.table if isinstance(weighted.weights, Pattern) else weighted.weights
    return LogSigmoids(weighted) if bool((weights.abs() == 1).all()) else NotImplemented


def _sum_of_log_sigmoids(weighted: WeightedScores) -> Any:
    """The labels 1 and -1 of a score are the targets 1 and 0 of the sigmoid loss."""
    p, weights = weighted.of.first, weighted.weights
    if isinstance(weights, Pattern):
        targets = _targets(weights.with_table(weights.table > 0), p)
    else:
        targets = (weights > 0).to(torch.promote_types(p.queries.dtype, torch.float32))
    loss = _computed(sigmoid_loss, **_of_sigmoids(p), targets=targets, reduction="sum")
    return loss if loss is NotImplemented else -loss


def _targets(pattern: Pattern, p: Product) -> Targets | Tensor:
    """A mask as targets of a loss of this product."""
    listed = _listed(pattern)
    dtype = torch.promote_types(p.queries.dtype, torch.float32)
    return pattern.cells().to(dtype) if listed is None else listed


RULES.rule(T.mul, torch.mul, T.__mul__, T.__rmul__, T.multiply, torch.multiply)(_times)


def _minus(s: Any) -> Any:
    return _times(s, -1) if known(s, Weighted) is not None else closed.negated(s)


RULES.rule(T.neg, torch.neg, T.__neg__, T.negative, torch.negative)(_minus)


@rule(F.binary_cross_entropy_with_logits)
def binary_cross_entropy(
    s: Any,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    reduce: Any = None,
    reduction: str = "mean",
    pos_weight: Any = None,
) -> Any:
    scores = known(s, Scores)
    p = None if scores is None else scores.alone
    plain = weight is None and size_average is None and reduce is None and pos_weight is None
    if p is None or not plain or not p.is_plain or reduction == "none":
        return NotImplemented

    pattern = known(target, Pattern)
    if type(target) is not Tensor and pattern is None:
        return NotImplemented
    if tuple(target.shape) != tuple(s.shape) or target.requires_grad or not target.is_floating_point():
        return NotImplemented
    if target.dtype != s.dtype:
        return NotImplemented
    if not bool(((target if pattern is None else pattern.table) >= 0).all()):
        return NotImplemented
    if pattern is None:
        targets = target.to(torch.promote_types(p.queries.dtype, torch.float32))
    else:
        targets = _targets(pattern, p)
    loss = _computed(sigmoid_loss, **_of_sigmoids(p), targets=targets, reduction="sum")
    if loss is NotImplemented:
        return loss
    return like(loss if reduction == "sum" else loss / s.numel(), s)
