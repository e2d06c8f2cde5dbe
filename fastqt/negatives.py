"""Negatives that are made for each row: mixed from the candidates of the batch, or drawn from all."""

from __future__ import annotations

from numbers import Real

import torch
import torch.nn.functional as F
from torch import Tensor

from fastqt.checks import FLOATING, INTEGERS, check_number, check_tensor, require, shown
from fastqt.devices import accumulation_dtype, has_float64
from fastqt.ids import as_ids

STEPS = 2**15  # A draw without float64 is a number of two digits to this base.


class Mixed:
    """One hard negative per row: a mixture of the row's own candidate and another one, scaled to norm 1.

    The negative of row i is normalize(mix * g_i + (1 - mix) * g_j) with j = partners[i], where g are the
    candidates after the loss has normalised them, if it does. No gradient flows through the negative to the
    candidates. The "triton" backend scores large problems without storing the negatives.

    Args:
        mix: the weight of the row's own candidate, 0 <= mix <= 1.
        partners: (N,) integers in [0, M). By default row i takes candidate i + 1, and the last row takes
            candidate 0.

    Raises:
        ValueError: mix outside [0, 1], or partners that are not 1-D.
        TypeError: partners that are not integers.

    Example:
        >>> import torch, fastqt
        >>> queries, candidates = torch.randn(2, 8, 16)
        >>> fastqt.contrastive_loss(
        ...     queries, candidates, fastqt.Diagonal(), diagonal="keep", row_negatives=fastqt.Mixed(0.2)
        ... ).shape
        torch.Size([])

    Source: Zhang et al., "Unsupervised Sentence Representation via Contrastive Learning with Mixing
    Negatives" (AAAI 2022).
    """

    mix: float
    partners: Tensor | None

    def __init__(self, mix: float = 0.2, partners: Tensor | None = None) -> None:
        if isinstance(mix, bool) or not isinstance(mix, Real) or not 0 <= mix <= 1:
            raise ValueError(f"mix: want a number in 0..1, got {shown(mix)}")
        self.mix = float(mix)
        self.partners = None if partners is None else as_ids("partners", partners)

    def partners_of(self, N: int, M: int, device: torch.device) -> Tensor:
        """The index of each row's second candidate, (N,) int64.

        ValueError for more queries than candidates, and for partners of a wrong length or outside [0, M).
        """
        if N > M:
            raise ValueError(f"row_negatives: Mixed wants a candidate for each of N={N} queries, got M={M}")
        if self.partners is None:
            return torch.arange(1, N + 1, device=device).remainder(N)
        if self.partners.numel() != N:
            raise ValueError(f"partners: want one for each of N={N} queries, got {self.partners.numel()}")
        partners = self.partners.to(device)
        inside = (partners >= 0) & (partners < M)
        require(inside.all(), "partners: want values in 0..{last}, the candidates", partners, last=M - 1)
        return partners


def mixed_rows(candidates: Tensor, mix: float, partners: Tensor) -> Tensor:
    """The negatives (N, D) of `Mixed`, computed from candidates (M, D) and partners (N,)."""
    candidates = candidates.detach()
    return mixtures(candidates[: len(partners)], candidates[partners], mix)


def mixtures(own: Tensor, others: Tensor, mix: float) -> Tensor:
    """The rows mix * own + (1 - mix) * others at norm 1, (N, D), computed in float32 at least.

    In float16 the smallest norm that is divided by would be 0, and a mixture of zeros no number.
    """
    computed = torch.promote_types(own.dtype, torch.float32)
    return F.normalize(mix * own.to(computed) + (1 - mix) * others.to(computed), dim=1).to(own.dtype)


class Noise:
    """A distribution over candidates that negatives are drawn from: their counts to a power, as in word2vec.

    Args:
        counts: (M,) numbers that are finite and at least 0, some of them above 0; how often each candidate
            occurs. All ones give the uniform distribution.
        power: the exponent of the counts, at least 0. A candidate with the count 0 is never drawn.

    Attributes:
        shares: (M,) float64, the probability of each candidate; float32 on a device without float64, which
            draws in steps of 10⁻⁹.

    Raises:
        ValueError: counts that are not 1-D, negative, not finite or all 0, or a negative power.
        TypeError: counts that are no tensor of numbers, or a power that is no number.

    Example:
        >>> import torch, fastqt
        >>> noise = fastqt.Noise(torch.tensor([16.0, 1.0, 0.0]))
        >>> noise.shares  # 16 ** 0.75 is 8
        tensor([0.8889, 0.1111, 0.0000], dtype=torch.float64)
        >>> noise.draw(4, 5).shape
        torch.Size([4, 5])

    Source: Mikolov et al., "Distributed representations of words and phrases and their compositionality"
    (2013), section 2.2: unigram counts to the power of 3/4.
    """

    shares: Tensor

    def __init__(self, counts: Tensor, *, power: float = 0.75) -> None:
        check_tensor("counts", counts)
        if counts.dim() != 1:
            raise ValueError(f"counts: want shape (M,), got {tuple(counts.shape)}")
        if counts.dtype not in INTEGERS | FLOATING:
            raise TypeError(f"counts: want integers or floating-point numbers, got {counts.dtype}")

        check_number("power", power)
        if power < 0:
            raise ValueError(f"power: want at least 0, got {power}")

        device, in_steps = counts.device, not has_float64(counts.device)
        # The ends of shares are sums of many, so without float64 the host finds them.
        weights = counts.detach().to("cpu" if in_steps else device).double()
        require((weights.isfinite() & (weights >= 0)).all(), "counts: want finite numbers >= 0")
        require((weights > 0).any(), "counts: want at least one above 0")
        # Divided by the greatest, no power overflows. 0 to the power of 0 would be 1.
        weights = torch.where(weights > 0, (weights / weights.max()) ** power, 0.0)
        shares = weights / weights.sum()
        self.shares = shares.to(device, accumulation_dtype(device))
        ends = shares.cumsum(0)
        if in_steps:
            ends = (ends * (STEPS**2 / ends[-1])).round().int()
        self._ends = ends.to(device)
        places = torch.arange(len(weights), device=weights.device)
        self._last = places.where(weights > 0, 0).max().to(device)

    def draw(self, *shape: int, generator: torch.Generator | None = None) -> Tensor:
        """Draws candidates with replacement: int64 in [0, M), of a shape such as N, K.

        They are on the device of the counts, and so is the generator; torch's default one if None.
        """
        device = self._ends.device
        if self._ends.is_floating_point():
            places = torch.rand(shape, dtype=torch.float64, device=device, generator=generator)
            places *= self._ends[-1]
        else:
            coarse, fine = (
                torch.randint(STEPS, shape, dtype=torch.int32, device=device, generator=generator)
                for _ in range(2)
            )
            places = coarse * STEPS + fine
        # To the right of a share's end begins the next that is not 0, so that no candidate without a share is
        # drawn. A place is less than 1, but rounding may make it the end of the last share.
        drawn = torch.searchsorted(self._ends, places, right=True)
        return drawn.clamp(max=self._last)
