"""Scores -s |x - y|^2 as those that engines know: 2 s <x, y> with the bias -s |y|^2.

What is left over, -s |x|^2, is common to a row. A softmax does not see it, but a row's own cells lose it. A
logsumexp gains it, and is joined with the row's own cells after that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from fastqt.devices import accumulation_dtype
from fastqt.functional.call import Call, Completion
from fastqt.functional.row_cells import (
    added_up_in_float64,
    cells_alone,
    joined,
    with_cells,
)
from fastqt.norms import LEAST_NORM
from fastqt.problem import loss_dtype
from fastqt.targets import NoTargets
from fastqt.torch_modes import input_dtype, without_autocast

FAR = 2.0  # standard deviations between embeddings and the origin, from which on they are moved to it


def moments(*embeddings: Tensor | None) -> Tensor:
    """The number of rows, the sums of their elements and of the squares of these, (2, D + 1)."""
    with torch.no_grad():
        return torch.stack([_moments_of(x) for x in embeddings if x is not None]).sum(0)


def _moments_of(x: Tensor) -> Tensor:
    x = x.to(loss_dtype(x))
    dtype = accumulation_dtype(x.device)
    count = x.new_full((2, 1), len(x), dtype=dtype)
    if not len(x):
        return torch.cat([count, count.new_zeros(2, x.shape[1])], 1)
    variance, mean = (y.to(dtype) for y in torch.var_mean(x, 0, correction=0))
    return torch.cat([count, len(x) * torch.stack([mean, variance + mean.square()])], 1)


def in_products(
    call: Call, of_all: Tensor, log_sum_exp: Callable[[Call], Tensor]
) -> tuple[Call, Completion | None]:
    """A softmax or a logsumexp of Euclidean scores as one of products.

    The negatives become a score of each row, since biases are those of candidates.

    Args:
        call: checked.
        of_all: the `moments` of queries, candidates and negatives, of all ranks.
        log_sum_exp: computes the logsumexp of the queries' scores with the candidates of a call, (N,).
    """
    normalize, negatives = call.normalize, call.negatives
    scale = added_up_in_float64(call.scale)
    call = replace(call, scale=scale)
    private = cells_alone(call)

    read_as = input_dtype(call.queries)
    with without_autocast(call.queries):
        origin = None if normalize else _origin(of_all)
        queries, candidates = _moved(call.queries, origin, read_as), _moved(call.candidates, origin, read_as)
        own = -scale * _squares(queries, normalize)
        of_products = 2 * scale
        bias = call.bias - scale * _squares(candidates, normalize)
    products = replace(
        with_cells(call, None),
        queries=queries,
        candidates=candidates,
        scale=of_products,
        bias=bias,
        similarity="dot",
        negatives=None,
    )
    if negatives is not None:
        negatives = _moved(negatives, origin, read_as)
        # Nothing that is said of the candidates holds of the negatives: this is a call of its own.
        of_negatives = Call(
            "log_sum_exp",
            NoTargets(),
            queries,
            negatives,
            scale=of_products,
            bias=-scale * _squares(negatives, normalize),
            normalize=normalize,
            memory=call.memory,
            backend=call.backend,
        )
        private.append(log_sum_exp(of_negatives)[:, None] + own[:, None])

    if call.link == "log_sum_exp":

        def completed(loss: Tensor) -> Tensor:
            # A row that has been excluded as a whole stays -inf, without a gradient.
            moved = loss + own.masked_fill(loss.detach().isneginf(), 0)
            # Apart from `private`: where that has most of a sum, gradients of `own` and products cancel.
            return joined(moved[:, None], *private)

        return products, completed
    if private:
        cells = torch.cat([x.to(own.dtype) - own[:, None] for x in private], 1)
        products = with_cells(products, cells)
    return products, None


def _origin(of_all: Tensor) -> Tensor:
    """What is subtracted from all embeddings, (D,) float64: their mean where that is far from 0.

    Products of embeddings that share a large part have lost the digits of their differences. Elsewhere
    nothing is subtracted, since embeddings of 16 bits would be rounded once more.
    """
    count, (sums, squares) = of_all[0, 0], of_all[:, 1:]
    mean = sums / count
    variance = squares / count - mean.square()
    return torch.where(mean.square() > FAR**2 * variance, mean, 0.0)


def _moved(x: Tensor, origin: Tensor | None, read_as: torch.dtype) -> Tensor:
    """Embeddings less the origin, in the dtype in which a matrix product reads them."""
    if origin is None:
        return x.to(read_as)
    # Differences of numbers near to each other are exact if the origin has no more digits than these.
    return (x.to(loss_dtype(x)) - origin.to(read_as).to(loss_dtype(x))).to(read_as)


def _squares(x: Tensor, normalize: bool) -> Tensor:
    """The squared norms of rows, (rows,); those of normalised rows are 1, or less of nearly nothing."""
    x = x.to(loss_dtype(x))
    if not normalize:
        return x.square().sum(1)
    norms: Tensor = torch.linalg.vector_norm(x, dim=1, dtype=accumulation_dtype(x.device))
    return (norms / norms.clamp(min=LEAST_NORM)).square().to(x.dtype)
