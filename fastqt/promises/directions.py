"""Cross-entropies of pairs, which wait for the other direction of their matrix.

Of scores with a row for each column the pairs' cross-entropy of rows is often followed by that of columns.
Both together take four matrix products, and six one after the other. The first one therefore is not computed
at once: it is a promise, as what the program makes of it by `+`, `-`, `*`, `/` with numbers. It is computed
with the other direction if that comes, and by itself if anything else is asked of it or the block ends. Its
promise then becomes the tensor.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastqt.losses.clip import losses_of_directions
from fastqt.promises.promise import Box, Promise, become_tensor, promised, waits
from fastqt.promises.rules import Watch, state_of
from fastqt.promises.scores import Meaning, Product, UnitRows, equal, is_number
from fastqt.promises.state import State

T = Tensor
_ARITHMETIC = {
    getattr(where, name) for name in ("add", "sub", "mul", "div", "neg") for where in (T, torch)
} | {T.__add__, T.__radd__, T.__sub__, T.__rsub__, T.__mul__, T.__rmul__, T.__truediv__, T.__neg__}
# What a promise is asked without being computed.
SEEN_FROM_OUTSIDE = {
    getattr(T, name).__get__ for name in ("shape", "dtype", "device", "ndim", "requires_grad", "is_cuda")
} | {T.size, T.dim, T.numel, T.__len__, T.is_floating_point}


@dataclass(frozen=True, eq=False, kw_only=True)
class Waiting(Meaning):
    """A number, or one for each row, that follows from losses which are not computed yet."""

    comes_first = True
    is_matrix = False
    waits = True
    size: tuple[int, ...]
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.size

    def detached(self) -> Waiting:
        return self


@dataclass(frozen=True, eq=False, kw_only=True)
class PairLoss(Waiting):
    """The cross-entropy of each row of a product with the candidate of its index.

    Attributes:
        count: by which the sum of the rows' losses is divided.
        alone: computes the program's tensor; NotImplemented where the cells are needed.
    """

    product: Product
    count: int
    alone: Callable[[], Any]

    def detached(self) -> PairLoss:
        return self  # Scores that have no gradient have detached tensors.

    def value(self) -> Tensor | None:
        value = self.alone()
        return None if value is NotImplemented else value

    def is_other_direction(self, other: PairLoss) -> bool:
        p, q = self.product.for_loss(), other.product.for_loss().transposed()
        if q is None or not equal(p.scale, q.scale) or p.is_cosine is not q.is_cosine:
            return False
        if self.dtype is not other.dtype:
            return False
        have_gradients = all(
            x.requires_grad == y.requires_grad
            for x, y in ((p.queries, q.queries), (p.candidates, q.candidates))
        )
        return have_gradients and all(x is y for x, y in zip(p.sources, q.sources, strict=True))


def can_wait(p: Product | None) -> bool:
    """Whether both directions of a product can be computed together."""
    if p is None or p.queries.shape[0] != p.candidates.shape[0] or p.queries.shape[0] < 2:
        return False
    is_positive = isinstance(p.scale, Tensor) or p.scale > 0
    return p.is_plain and not isinstance(p.bias, Tensor) and is_positive


def loss_of(box: Box) -> PairLoss | None:
    """The loss that is promised."""
    return box.state.meaning if isinstance(box.state.meaning, PairLoss) else None


def begun(promise: Promise, function: str, watch: Watch) -> Promise:
    """A loss that waits from now on, or that is computed with the one that has waited for it."""
    state, loss = promise.box.state, loss_of(promise.box)
    assert loss is not None
    state.told = _reporter(loss, function, watch)
    earlier, watch.losses = watch.losses, [weakref.ref(promise.box)]
    for box in (x() for x in earlier):
        other = None if box is None else loss_of(box)
        if box is None or other is None or box.is_shared or box.state.cells is not None:
            continue
        watch.losses.append(weakref.ref(box))
        is_other = other.is_other_direction(loss) and box.state.modes_are(state)
        if is_other and _computed_together(box.state, other, state, loss):
            become_tensors([box, promise.box])
            break
    return promise


def _reporter(loss: PairLoss, function: str, watch: Watch) -> Callable[[str], None]:
    """Reports a loss as computed by itself, and gives what corrects that."""
    assert watch.report is not None
    report, event = watch.report, watch.report.add(function, by="fastqt.contrastive_loss")
    shape, size = (loss.product.queries.shape[0],) * 2, loss.product.queries.element_size()

    def told(by: str) -> None:
        if by:
            report.correct(event, by=by)
        else:
            report.correct(event, by="", bytes_of_cells=math.prod(shape) * size)
            watch.allow(function, shape)

    return told


def _computed_together(first: State, loss: PairLoss, second: State, other: PairLoss) -> bool:
    """Computes both losses; False where they have to be computed one after the other."""
    p = loss.product.for_loss()
    first.check()
    try:
        with first.modes(grad=first.grad):
            both = losses_of_directions(
                p.queries,
                p.candidates,
                scale=p.scale,
                normalize=p.is_cosine,
                counts=(loss.count, other.count),
                dtype=loss.dtype,
            )
            if both is None:
                return False
            first.keep(both[0])
            second.keep(both[1])
    except (ValueError, TypeError):
        return False

    for state in (first, second):
        if state.told is not None:
            state.told("fastqt.clip_loss")
    return True


def combined(function: Callable[..., Any], args: Any, kwargs: dict[str, Any], watch: Watch) -> Promise | None:
    """The program's arithmetic of losses that wait, which waits too; None for what has to be computed."""
    if function not in _ARITHMETIC or kwargs:
        return None
    losses = [x for x in args if type(x) is Promise]
    if not all(is_number(x) if type(x) is not Promise else waits(x) for x in args):
        return None
    with torch._C.DisableTorchFunctionSubclass():
        tensors = [x for x in args if isinstance(x, Tensor)]
        dtype, device = tensors[0].dtype, tensors[0].device
        fits = all(x.dtype == dtype and x.device == device and not x.dim() for x in tensors)
    if not fits or all(x.box.state.cells is not None for x in losses):
        return None
    promise = promised(state_of(function, args, {}, Waiting(size=(), dtype=dtype)), dtype)
    # The program may keep nothing else of the losses, which another direction may find.
    promise.box.parts = [x.box for x in losses]
    watch.live.add(promise.box)
    return promise


def become_tensors(boxes: list[Box]) -> None:
    """Computes promises that wait, which from then on are the tensors that they have promised.

    Rows come first, so that a loss is of those that the program has.
    """
    for box in sorted(boxes, key=lambda box: not isinstance(box.state.meaning, UnitRows)):
        box.state.computed()
        become_tensor(box)
