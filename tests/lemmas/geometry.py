"""Angles within a spherical cap: what MixCSE's analysis says of embeddings that lie in a cone."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

NODES = 256


class Moments(NamedTuple):
    mean: float
    variance: float


def cap_cosine_moments(omega: float, phi: float, d: int) -> Moments:
    """Mean and variance of a fixed unit vector's cosine with one drawn uniformly from a spherical cap.

    With phi' the drawn vector's angle to the axis of the cap and beta the angle between both vectors' parts
    perpendicular to it, cos theta = cos phi cos phi' + sin phi sin phi' cos beta. The density of phi' is
    proportional to sin(phi')^(d-2) on [0, omega], that of beta to sin(beta)^(d-3) on [0, pi], so that
    E cos beta = 0 and E cos(beta)^2 = 1 / (d - 1).

    Args:
        omega: half the cap's opening in radians, in (0, pi]; pi is the whole sphere.
        phi: the fixed vector's angle to the axis of the cap in radians, in [0, pi].
        d: the number of dimensions, at least 2.

    Raises:
        ValueError: an angle or a dimension out of its range.

    Source: the slides of MixCSE (Zhang et al., AAAI 2022), with d-3 where they print d-2 for beta.
    """
    if not 0 < omega <= math.pi:
        raise ValueError(f"omega: want an angle in (0, pi], got {omega}")
    if not 0 <= phi <= math.pi:
        raise ValueError(f"phi: want an angle in [0, pi], got {phi}")
    if d < 2:
        raise ValueError(f"d: want at least 2 dimensions, got {d}")
    nodes, weights = _gauss_legendre()
    # log sin is concave, with a second derivative of -1 at most: beyond 12 standard deviations of the normal
    # density that bounds this one lies less than exp(-72) of it.
    densest, reach = min(omega, math.pi / 2), 12 / math.sqrt(max(d - 2, 1))
    low, high = max(0.0, densest - reach), min(omega, densest + reach)
    angles = low + (high - low) * (nodes + 1) / 2
    # Relative to the largest value: the powers themselves underflow in high dimensions.
    density = weights * np.exp((d - 2) * (np.log(np.sin(angles)) - np.log(np.sin(angles)).max()))
    density /= density.sum()
    cosine, square = density @ np.cos(angles), density @ np.cos(angles) ** 2
    mean = math.cos(phi) * cosine
    # Var cos phi' without the difference of two near ones
    spread = density @ (np.cos(angles) - cosine) ** 2
    variance = math.cos(phi) ** 2 * spread + math.sin(phi) ** 2 * (1 - square) / (d - 1)
    return Moments(float(mean), float(variance))


@functools.cache
def _gauss_legendre() -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    return np.polynomial.legendre.leggauss(NODES)
