"""The tiles of the one-launch kernel cover each cell once, and no choice of tiles changes a value."""

import numpy as np
import pytest

from tests.csrc.building import why_no_modules
from tests.csrc.cuda import random_problems
from tests.csrc.cuda.host_execution import ARITHMETICS, HostKernels, Small, build, decoded
from tests.csrc.cuda.test_small_kernel import problem
from tests.shared import oracle

pytestmark = pytest.mark.skipif(why_no_modules() is not None, reason=str(why_no_modules()))
by_arithmetic = pytest.mark.parametrize("arithmetic", ARITHMETICS)
M16, N8 = 16, 8


@pytest.fixture(scope="module")
def kernels() -> HostKernels:
    return HostKernels(build())


@pytest.mark.parametrize("seed", range(20))
def test_tiles_and_shares_of_warps_cover_each_cell_once(kernels, seed):
    rng = np.random.default_rng(seed)
    m16_tiles, n8_tiles = (int(n) for n in rng.integers(1, 70, 2))
    down, across = int(rng.integers(1, m16_tiles + 1)), int(rng.integers(1, n8_tiles + 1))
    covered = np.zeros((m16_tiles, n8_tiles), int)
    for index in range(down * across):
        tile, shares = kernels.areas(index, m16_tiles, down, n8_tiles, across)
        assert tile[1] <= -(-m16_tiles // down)
        assert tile[3] <= -(-n8_tiles // across)
        for m16_tile, height, n8_tile, width in shares:
            rows = slice(tile[0] + m16_tile, tile[0] + m16_tile + height)
            covered[rows, tile[2] + n8_tile : tile[2] + n8_tile + width] += 1
            assert height <= -(-tile[1] // 2)
            assert width <= -(-tile[3] // 4)
    assert (covered == 1).all()


@by_arithmetic
def test_chosen_tiles_are_not_larger_than_a_block_can_hold(kernels, arithmetic):
    rng = np.random.default_rng(0)
    most_m16_tiles, most_n8_tiles = kernels.largest_tile(arithmetic)
    for _ in range(300):
        N, M = (int(n) for n in rng.integers(1, 1025, 2))
        D, blocks = int(rng.integers(1, 4801)), int(rng.integers(1, 200))
        wanted = ("fg", "f", "g", "")[rng.integers(4)]
        t = kernels.tiles(arithmetic, N, M, D, blocks, wanted)
        assert 1 <= t["splits"] <= 16
        assert t["splits"] <= -(-D // 32)
        sides = [(N, "score_down", M16, most_m16_tiles), (M, "score_across", N8, most_n8_tiles)]
        assert (t["query_down"] > 0) == ("f" in wanted)
        assert (t["candidate_down"] > 0) == ("g" in wanted)
        sides += [(N, "query_down", M16, most_m16_tiles)] if "f" in wanted else []
        sides += [(M, "candidate_down", M16, most_m16_tiles)] if "g" in wanted else []
        sides += [(D, "gradient_across", N8, most_n8_tiles)] if wanted else []
        for size, name, piece, most in sides:
            pieces = -(-size // piece)
            assert -(-pieces // most) <= t[name] <= pieces, (name, N, M, D, t)


def random_tiles(kernels: HostKernels, rng: np.random.Generator, p: Small, splits: int) -> dict[str, int]:
    m16_tiles, n8_tiles = kernels.largest_tile(p.arithmetic)
    (N, D), M = p.queries.shape, len(p.candidates)

    def number(size: int, piece: int, most: int) -> int:
        pieces = -(-size // piece)
        return int(rng.integers(-(-pieces // most), pieces + 1))

    return {
        "splits": splits,
        "score_down": number(N, M16, m16_tiles),
        "score_across": number(M, N8, n8_tiles),
        "query_down": number(N, M16, m16_tiles),
        "candidate_down": number(M, M16, m16_tiles),
        "gradient_across": number(D, N8, n8_tiles),
    }


@by_arithmetic
def test_the_choice_of_tiles_does_not_change_the_result(kernels, arithmetic):
    """Whatever the tiles are, a sum is taken in the order of the inner dimension, so that even bits agree."""
    rng = np.random.default_rng(1)
    T = oracle.window(75, 83, [-1, 1])
    p = problem(arithmetic, 75, 83, 90, T, queries=0.3)
    found = []
    for n in range(4):
        p.tiles = random_tiles(kernels, rng, p, splits=2)
        found.append(kernels.run(p, blocks=1 + n, seed=n))
    for other in found[1:]:
        assert all(np.array_equal(other[name], found[0][name]) for name in found[0])


@by_arithmetic
@pytest.mark.parametrize("beyond", [-1, 0, 1])
def test_sizes_close_to_that_of_the_largest_tile(kernels, arithmetic, beyond):
    m16_tiles, n8_tiles = kernels.largest_tile(arithmetic)
    N, D = M16 * m16_tiles + beyond, N8 * n8_tiles + beyond
    M = D if beyond == 0 else 40
    p = problem(arithmetic, N, M, D, oracle.window(N, M, [0, 1]), queries=D**-0.5, diagonal="keep", scale=0.5)
    fewest = {"splits": 1, "score_down": -(-N // (M16 * m16_tiles)), "score_across": -(-M // (N8 * n8_tiles))}
    across = -(-D // (N8 * n8_tiles))
    p.tiles = fewest | {
        "query_down": fewest["score_down"],
        "candidate_down": -(-M // (M16 * m16_tiles)),
        "gradient_across": across,
    }
    errors = random_problems.errors(p, kernels.run(p, blocks=2), random_problems.expected(p))
    assert all(error <= 1 for error in errors.values()), errors


@pytest.mark.parametrize("arithmetic", ["bfloat16", "float16"])
@pytest.mark.parametrize(("row", "column"), [(15, 16), (16, 15), (31, 79), (79, 0)])
def test_a_single_target_is_not_rounded(kernels, arithmetic, row, column):
    """This holds for targets in any block of 16 x 16 cells and in any tile."""
    T = np.zeros((80, 80))
    T[row, column] = 1.7
    p = problem(arithmetic, 80, 80, 16, T, queries=1e-3, diagonal="keep")
    p.candidates[:] = p.candidates[column]  # no other cell of the row matters more than another
    exact = random_problems.expected(p)
    found = kernels.run(p, blocks=2)["candidates"][column]
    nearest = random_problems.encoded(exact.candidates[column], arithmetic)
    assert (found == decoded(nearest, arithmetic)).mean() > 0.9
