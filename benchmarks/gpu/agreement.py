"""How closely results agree where fastqt does not promise equal bits: in a CUDA graph, on another stream.

"What is bitwise equal on a GPU" in docs/architecture.md says where that is. Two such results differ in the
order in which cuBLAS adds up the terms of a product, and in how many rows a chunk has.

The bound follows from this. A sum of K terms in float32 takes K - 1 additions in whatever order. An addition
loses less than 2^-23 of the sizes of the terms that it has added so far, also on tensor cores, which may cut
off where others round to nearest. So two orders of one sum are at most 2 K 2^-23 of the sum of its terms'
sizes apart. TERMS relates this sum to the largest element of the gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

UNIT = 2.0**-23  # what an addition of float32 numbers loses at most
# The sizes of the terms of an element of a gradient add up to at most so many times the gradient's largest
# element, also behind the backward pass of a normalisation. That holds for the inputs of the checks, as the
# test of this module shows, and not where the gradients of a problem cancel.
TERMS = 4.0


@dataclass(frozen=True)
class Sums:
    """What a loss leaves to cuBLAS.

    Attributes:
        terms: of the longest sum for an element of a gradient: the number of queries, or of candidates and
            negatives, whichever is larger.
        scores: how far the scores of two calls are apart; 0 where fastqt's own kernels make the scores.
        roundings: to the inputs' dtype, of numbers from which a gradient is then computed.
    """

    terms: int
    scores: float = 0.0
    roundings: int = 0


def of_rows(N: int) -> Sums:
    """Of `contrastive_loss` without normalisation, and with targets that are not dense.

    A product to which no chunk adds another is rounded to bfloat16, and before it the sums of the parts in
    which cuBLAS may take it, whose sizes add up to no more than those of all terms.
    """
    return Sums(N, roundings=2)


def of_unit_rows(N: int) -> Sums:
    """Of a loss of cosines, as `clip_loss`: the gradient of a row of norm 1 is rounded, then the input's."""
    return Sums(N, roundings=1)


def of_three_blocks(N: int, D: int, scale: float = 20.0) -> Sums:
    """Of `mixcse_loss(form="released")`: cuBLAS makes the cosines, and a matrix of dL/dS is rounded as well.

    The sizes of the D terms of a cosine add up to 1 at most.
    """
    return Sums(N, scores=2 * D * UNIT * scale, roundings=2)


def agree(results: Sequence[Tensor], wanted: Sequence[Tensor], sums: Sums) -> tuple[bool, str]:
    """Whether two results of a step agree as closely as fastqt promises it of a graph or another stream.

    The losses are bitwise equal if the scores are. If the scores are at most d apart, so are log-sum-exps and
    the scores of targets, and probabilities are 2 d of themselves apart. Close numbers may be rounded to
    neighbours, at most eps of themselves apart: once for every rounding on the way, and once for the
    result.

    Args:
        results, wanted: the loss and the gradients, of equal shapes and dtypes.
        sums: what the loss leaves to cuBLAS.

    Returns:
        Whether they agree, and the largest difference of each as a share of what is allowed.
    """
    (loss, wanted_loss), *gradients = zip(results, wanted, strict=True)
    rounding = UNIT * wanted_loss.double().abs() if sums.scores else torch.zeros(())
    shares = [_share(loss, wanted_loss, 2 * sums.scores + rounding)]
    for x, y in gradients:
        eps = torch.finfo(y.dtype).eps
        of_terms = 2 * sums.terms * UNIT + 2 * sums.scores + sums.roundings * eps
        sizes = torch.maximum(x.double().abs(), y.double().abs())
        shares.append(_share(x, y, eps * sizes + TERMS * of_terms * y.double().abs().amax()))
    names = ("loss", *(f"gradient {place}" for place in range(1, len(shares))))
    details = ", ".join(f"{name} {share:.2g}" for name, share in zip(names, shares, strict=True))
    return all(share <= 1 for share in shares), f"of what is allowed: {details}"


def _share(x: Tensor, y: Tensor, allowed: Tensor) -> float:
    """The largest difference as a share of what is allowed: 0 for equal numbers, NaN where one is NaN."""
    difference = (x.double() - y.double()).abs()
    return float((difference / allowed.to(difference.device)).where(difference != 0, 0.0).max())
