"""Lemmas on angles in a spherical cap (MixCSE), against draws from the cap and against closed forms."""

import math

import numpy as np
import pytest

from tests.shared.tolerances import FLOAT64

DRAWS = 400_000
# A mean over n draws is off by more than five of its standard errors once in two million times.
STANDARD_ERRORS = 5
NODES = np.polynomial.legendre.leggauss(256)


def cap_cosine_moments(omega: float, phi: float, d: int) -> tuple[float, float]:
    """Mean and variance of a fixed unit vector's cosine with one drawn uniformly from a spherical cap.

    With phi' the drawn vector's angle to the axis of the cap and beta the angle between both vectors' parts
    perpendicular to it, cos theta = cos phi cos phi' + sin phi sin phi' cos beta. The density of phi' is
    proportional to sin(phi')^(d-2) on [0, omega], that of beta to sin(beta)^(d-3) on [0, pi], so that
    E cos beta = 0 and E cos(beta)^2 = 1 / (d - 1).

    Args:
        omega: half the cap's opening in radians, in (0, pi]; pi is the whole sphere.
        phi: the fixed vector's angle to the axis of the cap in radians, in [0, pi].
        d: the number of dimensions, at least 2.

    Source: the slides of MixCSE (Zhang et al., AAAI 2022), with d-3 where they print d-2 for beta.
    """
    nodes, weights = NODES
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
    return float(mean), float(variance)


def on_the_sphere(n: int, d: int) -> np.ndarray:
    x = np.random.default_rng(0).normal(size=(n, d))
    return x / np.linalg.norm(x, axis=1, keepdims=True)


def in_the_cap(omega: float, d: int) -> np.ndarray:
    """Points of the sphere within omega of the first axis: uniform by construction, no density is used."""
    x = on_the_sphere(DRAWS, d)
    return x[x[:, 0] >= math.cos(omega)]


def at(phi: float, d: int) -> np.ndarray:
    """A unit vector at an angle of phi to the first axis."""
    y = np.zeros(d)
    y[:2] = math.cos(phi), math.sin(phi)
    return y


def follows(values: np.ndarray, density, low: float, high: float) -> bool:
    """Whether drawn values fall into twelve bins as often as a density, up to a factor, says."""
    edges = np.linspace(low, high, 13)
    fine = np.linspace(low, high, 12 * 200 + 1)
    middles = density((fine[1:] + fine[:-1]) / 2).reshape(12, 200).sum(1)
    share = middles / middles.sum()
    counts, _ = np.histogram(values, edges)
    assert counts.sum() == len(values)
    errors = np.sqrt(len(values) * share * (1 - share))
    return bool((np.abs(counts - len(values) * share) <= STANDARD_ERRORS * errors + 1).all())


def azimuths(x: np.ndarray) -> np.ndarray:
    """The angles beta of points, seen from the axis, to the second axis."""
    return np.arccos(x[:, 1] / np.linalg.norm(x[:, 1:], axis=1))


@pytest.mark.parametrize("d", [3, 4, 8])
def test_density_of_the_angle_to_the_axis(d):
    omega = 1.2
    angles = np.arccos(in_the_cap(omega, d)[:, 0])
    assert follows(angles, lambda angle: np.sin(angle) ** (d - 2), 0, omega)
    assert not follows(angles, lambda angle: np.sin(angle) ** (d - 1), 0, omega)


@pytest.mark.parametrize("d", [3, 4, 8])
def test_density_of_the_angle_around_the_axis(d):
    """With d - 3 in the exponent; the slides print d - 2."""
    beta = azimuths(in_the_cap(1.2, d))
    assert follows(beta, lambda angle: np.sin(angle) ** (d - 3), 0, math.pi)
    assert not follows(beta, lambda angle: np.sin(angle) ** (d - 2), 0, math.pi)


@pytest.mark.parametrize("d", [3, 4, 8, 50])
def test_mean_square_of_the_cosine_around_the_axis(d):
    square = np.cos(azimuths(on_the_sphere(DRAWS // 4, d))) ** 2
    error = STANDARD_ERRORS * square.std() / math.sqrt(len(square))
    assert abs(square.mean() - 1 / (d - 1)) <= error
    assert abs(square.mean() - 1 / d) > error


@pytest.mark.parametrize("d", [2, 3, 5, 8])
@pytest.mark.parametrize(("omega", "phi"), [(1.2, 0.0), (1.2, 0.7), (1.5, 1.2), (2.5, 2.0)])
def test_moments_are_those_of_draws(omega, phi, d):
    cosines = in_the_cap(omega, d) @ at(phi, d)
    mean, variance = cap_cosine_moments(omega, phi, d)
    n = len(cosines)
    assert abs(cosines.mean() - mean) <= STANDARD_ERRORS * cosines.std() / math.sqrt(n)
    squares = (cosines - cosines.mean()) ** 2
    assert abs(squares.mean() - variance) <= STANDARD_ERRORS * squares.std() / math.sqrt(n)


@pytest.mark.parametrize("d", [2, 3, 10, 768, 10_000])
def test_closed_forms(d):
    """The whole sphere: mean 0, variance 1 / d. Half of it: E cos phi' = G(d/2) / (sqrt(pi) G((d+1)/2))."""
    for phi in (0.0, 0.4, 2.0):
        mean, variance = cap_cosine_moments(math.pi, phi, d)
        assert abs(mean) <= FLOAT64
        assert variance == pytest.approx(1 / d, rel=1e-10)
    mean, variance = cap_cosine_moments(math.pi / 2, 0.0, d)
    wanted = math.exp(math.lgamma(d / 2) - math.lgamma((d + 1) / 2)) / math.sqrt(math.pi)
    # lgamma's own rounding, of values near 40,000, is what limits this one.
    assert mean == pytest.approx(wanted, rel=1e-10)
    assert variance == pytest.approx(1 / d - wanted**2, rel=1e-9)
