"""The vectorised functions of csrc/cpu on every processor that can run here, against float64 numpy."""

import numpy as np
import pytest
import torch

from tests.csrc.cpu.processors import Passes, passes, processors
from tests.shared.tolerances import FLOAT32, FLOAT64, relative

DTYPES = ("float32", "float64")
LENGTHS = (*range(71), 1023, 1024, 1025, 4099)


def mapped(passes: Passes, name: str, x: np.ndarray) -> np.ndarray:
    x = x.copy()
    getattr(passes, f"map_{name}")(x, len(x))
    return x


def whole_range(dtype: str) -> np.ndarray:
    """Numbers of every magnitude and both signs, subnormal ones too, and the edges of exp's range."""
    info = np.finfo(dtype)
    magnitudes = np.geomspace(float(info.smallest_subnormal) * 1.5, float(info.max) / 2, 20001)
    edges = np.concatenate(
        [c + np.linspace(-2, 2, 4001) for c in (0, 87, 88.5, 89, 103, 104, 0.625, 709, 745)]
    )
    special = np.array([0.0, float(info.tiny), float(info.smallest_subnormal), float(info.max), np.inf])
    x = np.concatenate([magnitudes, edges, np.linspace(0, 110, 50001), special])
    return np.concatenate([x, -x]).astype(dtype)


def true_sigmoid(x: np.ndarray) -> np.ndarray:
    e = np.exp(-np.abs(x))
    return np.where(x > 0, 1, e) / (1 + e)


# The truth, the bound in units in the last place that csrc/cpu/vector_math.h promises, and where it does.
FUNCTIONS = {
    "exp": (np.exp, 1.5, lambda x: x == x),
    "exp_normal": (np.exp, 1.5, lambda x: x <= 88),
    "sigmoid": (true_sigmoid, 3, lambda x: x >= -87),
    "tanh": (np.tanh, 3, lambda x: x == x),
    "log1p_unit": (np.log1p, 3, lambda x: (x >= 0) & (x <= 1)),
}


def ulps(got: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """The distance from the truth in units in the last place that float32 has there."""
    with np.errstate(over="ignore"):
        rounded = truth.astype(np.float32)
    # numpy finds a unit from the next larger number, which the largest one does not have.
    unit = np.spacing(np.minimum(np.abs(rounded), np.float32(2.0**127))).astype(np.float64)
    both = np.isinf(got) & np.isinf(rounded) & (np.sign(got) == np.sign(truth))
    with np.errstate(invalid="ignore"):
        return np.where(both, 0, np.abs(got.astype(np.float64) - truth) / unit)


@processors
@pytest.mark.parametrize("name", FUNCTIONS)
def test_errors_are_within_the_promised_ulps(processor, name):
    function, bound, promised = FUNCTIONS[name]
    x = whole_range("float32")
    x = x[promised(x)]
    with np.errstate(over="ignore", under="ignore"):
        truth = function(x.astype(np.float64))
    if name == "exp_normal":  # which gives 0 in place of a subnormal number
        truth[x < -87] = 0
    assert ulps(mapped(passes(processor), name, x), truth).max() <= bound


@processors
def test_sigmoid_is_nearly_zero_where_the_true_one_is(processor):
    x = whole_range("float32")
    x = x[x < -87]
    found = mapped(passes(processor), "sigmoid", x)
    assert (found >= 0).all()
    assert np.abs(found - true_sigmoid(x.astype(np.float64))).max() <= np.finfo(np.float32).tiny


@processors
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["exp", "sigmoid", "tanh"])
def test_nan_stays_and_infinities_give_the_limits(processor, dtype, name):
    limits = {"exp": (np.inf, 0), "sigmoid": (1, 0), "tanh": (1, -1)}[name]
    for length in (3, 16, 35):  # the remainder of a vector, a whole one, both
        x = np.resize(np.array([np.inf, -np.inf, np.nan], dtype), length)
        np.testing.assert_array_equal(
            mapped(passes(processor), name, x), np.resize([*limits, np.nan], length)
        )


def row(dtype: str, length: int, seed: int = 0) -> np.ndarray:
    """Scores, one in ten of them excluded, whose address is not that of a whole vector."""
    generator = np.random.default_rng((seed, length))
    x = (10 * generator.standard_normal(length + 1)).astype(dtype)[1:]
    x[generator.random(length) < 0.1] = -np.inf
    return x


@processors
@pytest.mark.parametrize("dtype", DTYPES)
def test_row_passes_over_scores(processor, dtype):
    on, tolerance = passes(processor), {"float32": FLOAT32, "float64": FLOAT64}[dtype]
    for length in LENGTHS:
        x = row(dtype, length)
        wide = x.astype(np.float64)
        largest = wide.max(initial=-np.inf)
        assert on.row_max(x, length) == largest
        shift = float(largest) if np.isfinite(largest) else 0.0
        e = np.exp(wide - shift)
        assert on.row_exp_sum(x, length, shift) == pytest.approx(e.sum(), rel=tolerance)
        kept = x.copy()
        assert on.row_exp(kept, length, shift) == pytest.approx(e.sum(), rel=tolerance)
        assert relative(kept, e) < tolerance
        softplus = np.logaddexp(0, wide).sum()
        assert on.row_softplus_sum(x, length) == pytest.approx(softplus, rel=tolerance)
        kept = x.copy()
        assert on.row_sigmoid(kept, length, 0.5, 0.25) == pytest.approx(softplus, rel=tolerance)
        assert np.abs(kept - (0.5 * true_sigmoid(wide) - 0.25)).max(initial=0) < tolerance
        groups = np.arange(length) % 3
        on.row_exclude_group(x, groups, length, 2)
        np.testing.assert_array_equal(x, np.where(groups == 2, -np.inf, wide))


@processors
@pytest.mark.parametrize("dtype", DTYPES)
def test_row_passes_that_sum_columns(processor, dtype):
    on, tolerance = passes(processor), {"float32": FLOAT32, "float64": FLOAT64}[dtype]
    for length in LENGTHS:
        x, y = row(dtype, length), row(dtype, length, seed=1)
        largest = np.full(length, np.finfo(dtype).min, dtype)
        on.row_raise(largest, x, length)
        on.row_raise(largest, y, length)
        np.testing.assert_array_equal(largest, np.maximum(np.maximum(x, y), np.finfo(dtype).min))
        sums = np.ones(length, dtype)
        on.row_exp_add(sums, x, largest, length)
        wide = x.astype(np.float64)
        e = np.exp(wide - largest)
        assert relative(sums, 1 + e) < tolerance
        factors = np.linspace(0.5, 1, length, dtype=dtype)
        on.row_two_exps(x, length, 40.0, 3.0, largest, factors)
        assert relative(x, 3 * np.exp(wide - 40) + factors * e) < tolerance


@processors
@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_row_passes(processor, dtype):
    on, tolerance = passes(processor), {"float32": FLOAT32, "float64": FLOAT64}[dtype]
    for length in LENGTHS:
        x, y = (np.nan_to_num(row(dtype, length, seed), neginf=0) for seed in (0, 1))
        wide_x, wide_y = x.astype(np.float64), y.astype(np.float64)
        scale = np.abs(wide_x).sum() + 1
        assert abs(on.row_sum(x, length) - wide_x.sum()) < FLOAT64 * scale  # summed in double
        dot = on.row_dot(x, y, length)
        assert abs(dot - wide_x @ wide_y) <= FLOAT64 * (np.abs(wide_x) @ np.abs(wide_y))
        for name, arguments, expected in (
            ("row_add", (y, length), wide_x + wide_y),
            ("row_affine", (length, 3.0, 0.5), 3 * wide_x - 0.5),
            ("row_scale", (y, length, 3.0), 3 * wide_y * wide_x),
            ("row_multiple", (y, length, 3.0, False), 3 * wide_y),
            ("row_multiple", (y, length, 3.0, True), wide_x + 3 * wide_y),
        ):
            out = x.copy()
            getattr(on, name)(out, *arguments)
            assert relative(out, expected) < tolerance, name


@processors
@pytest.mark.parametrize("dtype", DTYPES)
def test_row_passes_leave_no_subnormal_number_and_keep_nan(processor, dtype):
    on, tiny = passes(processor), np.finfo(dtype).tiny
    x = np.array([-745.0, -104.0, -88.0, -87.0, 0.0, np.nan, -np.inf] * 5, dtype)
    for name, arguments in (
        ("row_exp", (0.0,)),
        ("row_sigmoid", (1e-30, 0.0)),
        ("row_affine", (float(tiny), 0.0)),
        ("row_scale", (np.full(18, tiny, dtype), 1.0)),
    ):
        linear = name in ("row_affine", "row_scale")
        out = np.array([0.5, np.nan] * 9, dtype) if linear else x.copy()
        given = np.isnan(out)
        arrays = [each for each in arguments if isinstance(each, np.ndarray)]
        numbers = [each for each in arguments if not isinstance(each, np.ndarray)]
        total = getattr(on, name)(out, *arrays, len(out), *numbers)
        assert (np.isnan(out) == given).all()
        assert linear or np.isnan(total)
        if name != "row_exp" or dtype == "float32":  # the exp of float64 is that of the C library
            assert not ((np.abs(out) > 0) & (np.abs(out) < tiny)).any()


@processors
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_nan_is_no_maximum_and_infinities_are(processor, dtype):
    on = passes(processor)
    for length in range(1, 71):
        for place in {0, length // 2, length - 1}:
            x = np.full(length, -np.inf, dtype)
            x[place] = np.nan
            assert on.row_max(x, length) == -np.inf
            largest = np.full(length, -5, dtype)
            on.row_raise(largest, x, length)
            assert (largest == -5).all()
            for value in (-1e30, 0.0, np.inf):
                x[:] = np.nan
                x[place] = value
                assert on.row_max(x, length) == np.asarray(value, dtype)


def rounded(x: np.ndarray) -> np.ndarray:
    """float32 numbers in bfloat16, by torch."""
    return torch.from_numpy(x).bfloat16().view(torch.uint16).numpy()


def widened(bits: np.ndarray) -> np.ndarray:
    return torch.from_numpy(bits).view(torch.bfloat16).float().numpy()


@processors
def test_every_bfloat16_is_read_and_every_kind_of_float_is_rounded(processor):
    on = passes(processor)
    every = np.arange(2**16).astype(np.uint16)
    found = np.empty(len(every), np.float32)
    on.row_multiple_of_bfloat16(found, every, len(every), 1.0, False)
    np.testing.assert_array_equal(found, widened(every))
    # All upper halves with the lower halves beside which the direction changes, ties among them.
    halves = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    x = ((every.astype(np.uint32) << 16)[:, None] | halves).ravel().view(np.float32)
    bits = np.empty(len(x), np.uint16)
    on.row_round(bits, x, len(x), 1.0)
    np.testing.assert_array_equal(widened(bits), widened(rounded(x)))
    assert np.isnan(widened(bits)[np.isnan(x)]).all()


@processors
def test_row_passes_over_bfloat16(processor):
    on = passes(processor)
    for length in LENGTHS:
        x, y = (np.nan_to_num(row("float32", length, seed), neginf=0) for seed in (0, 1))
        a, b = rounded(x), rounded(y)
        wide, other = widened(a).astype(np.float64), widened(b).astype(np.float64)
        size = np.abs(wide) @ np.abs(other)
        assert abs(on.row_dot(a, b, length) - wide @ other) <= FLOAT32 * size
        assert abs(on.row_dot_with_floats(a, y, length) - wide @ y) <= FLOAT32 * size + 1e-30
        sums = y.copy()
        on.row_multiple_of_bfloat16(sums, a, length, 0.3, True)
        assert np.abs(sums - (y + 0.3 * wide)).max(initial=0) <= FLOAT32 * np.abs(y).max(initial=1)
        on.row_round_bfloat16(b, a, length, 0.25)
        np.testing.assert_array_equal(widened(b), 0.25 * wide)


@processors
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_nan_or_an_infinity_in_a_row_reaches_its_sums(processor, dtype):
    on = passes(processor)
    for length in (1, 7, 16, 70):
        for value, wanted in ((np.nan, np.nan), (np.inf, np.inf)):
            x, ones = row(dtype, length), np.ones(length, dtype)
            x[length - 1] = value
            with np.errstate(over="ignore"):
                for name, arguments in (
                    ("row_softplus_sum", (length,)),
                    ("row_sigmoid", (length, 1.0, 0.0)),
                    ("row_sum", (length,)),
                    ("row_dot", (ones, length)),
                ):
                    finite = np.nan_to_num(x, nan=np.nan, posinf=np.inf, neginf=-1)
                    np.testing.assert_equal(getattr(on, name)(finite, *arguments), wanted)
