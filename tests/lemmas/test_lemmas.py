"""Lemmas on angles in a spherical cap (MixCSE), against draws from the cap and against closed forms."""

import math
from itertools import pairwise

import numpy as np
import pytest

from tests.lemmas.geometry import cap_cosine_moments
from tests.shared.tolerances import FLOAT64

DRAWS = 400_000
# A mean over n draws is off by more than five of its standard errors once in two million times.
STANDARD_ERRORS = 5


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


@pytest.mark.parametrize("d", [3, 8])
def test_cosine_from_the_three_angles(d):
    phi, x = 0.7, in_the_cap(1.2, d)[:1000]
    angle, beta = np.arccos(x[:, 0]), azimuths(x)
    by_angles = math.cos(phi) * np.cos(angle) + math.sin(phi) * np.sin(angle) * np.cos(beta)
    np.testing.assert_allclose(x @ at(phi, d), by_angles, atol=FLOAT64)


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


def test_a_narrow_cap_in_many_dimensions_is_a_cone():
    """Vectors lie at its rim, so that the mean goes to cos(phi) cos(omega) and the variance to 0."""
    omega, phi = 0.8, 0.5
    found = [cap_cosine_moments(omega, phi, d) for d in (10, 100, 1000, 10_000)]
    distances = [mean - math.cos(phi) * math.cos(omega) for mean, _ in found]
    assert all(0 < later < earlier / 5 for earlier, later in pairwise(distances))
    assert all(b.variance < a.variance / 5 for a, b in pairwise(found))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0.0, 0.0, 3), r"omega: want an angle in \(0, pi\], got 0.0"),
        ((3.2, 0.0, 3), r"omega: want an angle in \(0, pi\], got 3.2"),
        ((1.0, -0.1, 3), r"phi: want an angle in \[0, pi\], got -0.1"),
        ((1.0, math.nan, 3), r"phi: want an angle in \[0, pi\], got nan"),
        ((1.0, 0.1, 1), "d: want at least 2 dimensions, got 1"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        cap_cosine_moments(*arguments)
