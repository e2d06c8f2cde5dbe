"""Scores -s |x - y|^2 as those that engines know: 2 s <x, y> with the bias -s |y|^2.

What is left over, -s |x|^2, is common to a row. A softmax does not see it, but a row's own cells lose it. A
logsumexp gains it, and is joined with the row's own cells after that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import torch
from torch import Tensor

from fastqt.checks import check_bias, check_flag, check_option, check_scale, input_dtype
from fastqt.functional.row_scores import (
    LEAST_NORM,
    added_up_in_float64,
    columns_of,
    joined,
    scores_of_row_negatives,
)
from fastqt.negatives import Mixed
from fastqt.options import Similarity
from fastqt.problem import DIAGONALS, loss_dtype

Completed = Callable[[Tensor], Tensor]
SIMILARITIES: tuple[str, ...] = get_args(Similarity)
FAR = 2.0  # standard deviations between embeddings and the origin, from which on they are moved to it


def check_euclidean(queries: Tensor, candidates: Tensor, options: dict[str, Any]) -> None:
    """Checks what `lower_euclidean` reads of the options, beside the embeddings.

    Raises:
        ValueError: options that have no meaning with similarity='euclidean'.
        ValueError, TypeError: as of the losses.
    """
    check_flag("normalize", options["normalize"])
    check_scale(options["scale"], queries.dtype)
    check_bias(options["bias"], len(candidates), queries.device, queries.dtype)
    check_option("diagonal", options["diagonal"], DIAGONALS)
    if options["diagonal"] == "zero":
        raise ValueError(
            "diagonal: want 'keep' or 'exclude' with similarity='euclidean', whose scores are at most 0, "
            "got 'zero'"
        )
    if options["guide"] is not None and options["negatives"] is not None:
        raise ValueError(
            "guide: want None with negatives and similarity='euclidean'; join them to candidates"
        )
    if isinstance(options["row_negatives"], Mixed):
        raise ValueError("row_negatives: want a tensor or None with similarity='euclidean', got Mixed")


def moments(*embeddings: Tensor | None) -> Tensor:
    """The number of rows, the sums of their elements and of the squares of these, (2, D + 1) float64."""
    with torch.no_grad():
        return torch.stack([_moments_of(x) for x in embeddings if x is not None]).sum(0)


def _moments_of(x: Tensor) -> Tensor:
    x = x.to(loss_dtype(x))
    count = x.new_full((2, 1), len(x), dtype=torch.float64)
    if not len(x):
        return torch.cat([count, count.new_zeros(2, x.shape[1])], 1)
    variance, mean = (y.double() for y in torch.var_mean(x, 0, correction=0))
    return torch.cat([count, len(x) * torch.stack([mean, variance + mean.square()])], 1)


def lower_euclidean(
    queries: Tensor,
    candidates: Tensor,
    options: dict[str, Any],
    of_all: Tensor,
    log_sum_exp: Callable[..., Tensor],
) -> tuple[Tensor, Tensor, Completed]:
    """Lowers checked arguments of a softmax or a logsumexp of Euclidean scores to those of products.

    Args:
        queries, candidates: as they were given.
        options: the other arguments, which are replaced. The negatives become a score of each row, since
            biases are those of candidates.
        of_all: the `moments` of queries, candidates and negatives, of all ranks.
        log_sum_exp: computes the logsumexp of queries and negatives, (N,), with the options that it is given.

    Returns:
        The queries and the candidates, and what makes of the lowered problem's loss that of the arguments.
    """
    normalize, negatives = options["normalize"], options["negatives"]
    scale = options["scale"] = added_up_in_float64(options["scale"])
    private = [] if options["row_scores"] is None else [columns_of(options["row_scores"])]
    if options["row_negatives"] is not None:
        scored = scores_of_row_negatives(
            queries, candidates, options["row_negatives"], options, euclidean=True
        )
        private.append(scored)
    read_as = input_dtype(queries)
    with torch.autocast(queries.device.type, enabled=False):
        origin = None if normalize else _origin(of_all)
        queries, candidates = _moved(queries, origin, read_as), _moved(candidates, origin, read_as)
        own = -scale * _squares(queries, normalize)
        options |= {"scale": 2 * scale, "bias": options["bias"] - scale * _squares(candidates, normalize)}
    if negatives is not None:
        negatives = _moved(negatives, origin, read_as)
        alone = {"bias": -scale * _squares(negatives, normalize), "link": "log_sum_exp", "diagonal": "keep"}
        of_cells = ("query_groups", "candidate_groups", "mask", "guide")
        absent = ("negatives", "row_negatives", "row_scores", *of_cells)
        sums = log_sum_exp(queries, negatives, {**options, **alone, **dict.fromkeys(absent)})
        private.append(sums[:, None] + own[:, None])
    options |= {"negatives": None, "row_negatives": None, "row_scores": None}
    if options["link"] == "log_sum_exp":
        # Where a row's own cells have most of its sum, the gradients of `own` and of products would cancel.
        return queries, candidates, lambda found: joined(found[:, None] + own[:, None], *private)
    if private:
        options["row_scores"] = torch.cat([x.to(own.dtype) - own[:, None] for x in private], 1)
    return queries, candidates, lambda found: found


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
    norms: Tensor = torch.linalg.vector_norm(x, dim=1, dtype=torch.float64)
    return (norms / norms.clamp(min=LEAST_NORM)).square().to(x.dtype)
