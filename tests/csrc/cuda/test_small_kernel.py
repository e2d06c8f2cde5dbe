"""The one-launch kernel, executed on a CPU, has the values of the oracle in any order of threads."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fastqt.engines import cuda as cuda_schedule
from tests.csrc.building import ROOT, compiler, why_no_modules
from tests.csrc.cuda import random_problems
from tests.csrc.cuda.host_execution import ARITHMETICS, HostKernels, Small, build, decoded, encoded
from tests.shared import oracle
from tests.shared.draws import converged, random_inputs
from tests.shared.tolerances import EAGER_FACTOR, HALF_ULP

pytestmark = pytest.mark.skipif(why_no_modules() is not None, reason=str(why_no_modules()))
by_arithmetic = pytest.mark.parametrize("arithmetic", ARITHMETICS)
BATCH = 50  # problems for each test
SANITIZED = range(1000, 1024)


@pytest.fixture(scope="session")
def kernels() -> HostKernels:
    return HostKernels(build())


@pytest.mark.parametrize("first", range(0, 600, BATCH))
@pytest.mark.thinned(6)
def test_random_problems_have_the_values_of_the_oracle(kernels, first):
    for seed in range(first, first + BATCH):
        problem, blocks = random_problems.make(seed)
        found = kernels.run(problem, blocks=blocks, seed=seed)
        errors = random_problems.errors(problem, found, random_problems.expected(problem))
        assert all(error <= 1 for error in errors.values()), (seed, problem.arithmetic, errors)


def problem(arithmetic, N, M, D, T, *, seed=0, queries=1.0, candidates=1.0, **more) -> Small:
    rng = np.random.default_rng(seed)
    rows, columns = T.nonzero()
    starts = np.concatenate([[0], (T > 0).sum(1).cumsum()]).astype(np.int64)
    return Small(
        arithmetic,
        random_problems.representable(queries * rng.standard_normal((N, D)), arithmetic),
        random_problems.representable(candidates * rng.standard_normal((M, D)), arithmetic),
        starts,
        columns.astype(np.int64),
        T[rows, columns],
        **more,
    )


@by_arithmetic
@pytest.mark.parametrize(
    ("N", "M", "D"), [(1, 1, 1), (128, 128, 32), (129, 127, 129), (2, 260, 8), (260, 3, 40)], ids=str
)
def test_sizes_close_to_that_of_a_tile(kernels, arithmetic, N, M, D):
    """And more rows than a block has threads."""
    p = problem(arithmetic, N, M, D, oracle.window(N, M, [0, 1]), queries=D**-0.5, diagonal="keep", scale=0.5)
    found = kernels.run(p, blocks=3)
    errors = random_problems.errors(p, found, random_problems.expected(p))
    assert all(error <= 1 for error in errors.values()), errors


@pytest.mark.parametrize("arithmetic", ["bfloat16", "float16"])
def test_coefficients_of_targets_are_not_rounded(kernels, arithmetic):
    """Where all cells are targets, gradients are the exact ones rounded once, as if all was in float32."""
    rng = np.random.default_rng(0)
    N = 40
    p = problem(arithmetic, N, N, N, rng.random((N, N)) + 0.5, queries=0.3, diagonal="keep")
    found, exact = kernels.run(p, blocks=2), random_problems.expected(p)
    for name in ("queries", "candidates"):
        nearest = decoded(encoded(getattr(exact, name), arithmetic), arithmetic)
        assert (found[name] == nearest).mean() > 0.98, name


@pytest.mark.parametrize(
    ("column", "weight", "message"),
    [
        (9, 1.0, "want columns of candidates"),
        (-1, 1.0, "want columns of candidates"),
        (2, 1.0, "none on a replaced diagonal"),
        (3, -1.0, "want weights >= 0"),
        (3, np.nan, "want weights >= 0"),
    ],
)
def test_targets_that_a_loss_cannot_have_are_refused(kernels, column, weight, message):
    p = problem("float32", 9, 9, 4, oracle.window(9, 9, [1]))
    p.columns[2], p.weights[2] = column, weight
    with pytest.raises(RuntimeError, match=message):
        kernels.run(p, blocks=2)


@pytest.mark.parametrize("arithmetic", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("score", [None, 12.0, 24.0], ids=["random", "p > 0.999", "p > 1 - 1e-9"])
def test_error_is_at_most_that_of_eager_pytorch(kernels, score, arithmetic):
    N, seeds = 64, 2
    dtype = getattr(torch, arithmetic)
    ours, eagers = [], []
    for seed in range(seeds):
        made = random_inputs(N, seed) if score is None else converged(N, score, seed)
        inputs = [x.to(dtype).requires_grad_() for x in made]
        arrays = [x.detach().double().numpy() for x in inputs]
        exact = oracle.contrastive(*arrays, np.eye(N), diagonal="keep")
        if score is not None:
            assert np.exp(-exact.loss).min() > {12.0: 0.999, 24.0: 1 - 1e-8}[score]
        p = problem(arithmetic, N, N, N, np.eye(N), diagonal="keep", row_weights=1 / N)
        p.queries, p.candidates = (encoded(x, arithmetic) for x in arrays)
        found = kernels.run(p, blocks=2)
        rows = F.cross_entropy(inputs[0] @ inputs[1].T, torch.arange(N), reduction="none")
        gradients = torch.autograd.grad(rows.mean(), inputs)
        results = [x.detach().double().numpy() for x in (rows, *gradients)]
        for errors, of in ((ours, [found[n] for n in ("loss", "queries", "candidates")]), (eagers, results)):
            truths = (exact.loss, exact.queries, exact.candidates)
            errors.append(
                [np.linalg.norm(a - b) / np.linalg.norm(b) for a, b in zip(of, truths, strict=True)]
            )
    bound = EAGER_FACTOR * np.mean(eagers, axis=0) + HALF_ULP[torch.float32]
    assert (np.mean(ours, axis=0) <= bound).all(), (np.mean(ours, axis=0), np.mean(eagers, axis=0))


def test_the_engine_knows_the_shared_memory_of_a_block(kernels):
    found = [kernels.sizes(arithmetic)[2] for arithmetic in ARITHMETICS]
    dtypes = (torch.float32, torch.float32, torch.bfloat16, torch.float16)
    assert found == [cuda_schedule.SHARED_BYTES[dtype] for dtype in dtypes]


@pytest.mark.slow
def test_random_problems_under_sanitizers():
    """AddressSanitizer and UBSan must be loaded before Python, and so in a process of their own."""
    runtimes = [
        subprocess.run(
            [str(compiler()), f"-print-file-name=lib{name}.so"], capture_output=True, text=True
        ).stdout.strip()
        for name in ("asan", "ubsan")
    ]
    if not all(os.path.isabs(path) for path in runtimes):
        pytest.skip("the compiler has no shared libraries of AddressSanitizer and UBSan")
    library = build(sanitized=True)
    environment = {
        **os.environ,
        "LD_PRELOAD": ":".join(runtimes),
        "ASAN_OPTIONS": "detect_leaks=0",  # Python itself leaks
        "OMP_NUM_THREADS": "1",
    }
    ends = (str(SANITIZED.start), str(SANITIZED.stop))
    done = subprocess.run(
        [sys.executable, "-m", "tests.csrc.cuda.random_problems", str(library), *ends],
        capture_output=True,
        text=True,
        env=environment,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]


M16, N8 = 16, 8


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
    most_m16_tiles, most_n8_tiles = kernels.sizes(arithmetic)[:2]
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
    m16_tiles, n8_tiles = kernels.sizes(p.arithmetic)[:2]
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
    m16_tiles, n8_tiles = kernels.sizes(arithmetic)[:2]
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


def test_float16_keeps_its_digits_with_small_row_weights(kernels):
    p = problem("float16", 48, 48, 16, np.eye(48), queries=1e-3, candidates=1e3, diagonal="keep")
    p.row_weights = 1e-6
    p.wanted = ("queries",)
    found, exact = kernels.run(p, blocks=2)["queries"], random_problems.expected(p).queries
    assert np.abs(found - exact).max() < random_problems.GRADIENT["float16"] * np.abs(exact).max()
