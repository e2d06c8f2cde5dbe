"""The vectorised functions of csrc/cpu at every x86 level that this machine has, against float64 numpy."""

import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from tolerances import FLOAT32, FLOAT64, relative

from tests.csrc import building

SOURCES = ("tests/csrc/cpu/vector_functions.cpp", "csrc/cpu/row_passes.cpp")
BINDINGS = "tests/csrc/cpu/bindings.cpp"
HEADERS = ("csrc/cpu/row_passes.h", "csrc/cpu/vector_math.h", "tests/csrc/cpu/vector_functions.h")
FLAGS = ("-O3", "-std=c++20", "-fopenmp-simd", "-fno-trapping-math", "-fno-math-errno", "-fPIC", "-Icsrc")
# The feature that each level asks of the processor. "clones" is a build like that of the package, which has
# all levels and chooses by itself.
LEVELS = {"x86-64": "sse2", "x86-64-v3": "avx2", "x86-64-v4": "avx512vl", "clones": None}
DTYPES = ("float32", "float64")
LENGTHS = (0, 1, 3, 7, 8, 9, 15, 16, 17, 31, 33, 64, 1023, 1024, 1025, 4099)


def processor_has(feature: str | None) -> bool:
    if feature is None:
        return True
    return feature in Path("/proc/cpuinfo").read_text().split()


def built(level: str) -> ModuleType:
    """The functions as they are compiled for a level."""
    one_level = () if level == "clones" else (f"-march={level}", "-DFASTQT_CLONES=")
    sources = {BINDINGS: (*building.binding_flags(), "-Icsrc")}
    sources |= dict.fromkeys(SOURCES, (*FLAGS, *one_level))
    return building.imported(
        "vector_functions", building.build(sources, headers=HEADERS, link=building.MODULE)
    )


def mapped(module: ModuleType, name: str, x: np.ndarray) -> np.ndarray:
    x = x.copy()
    getattr(module, name)(x)
    return x


@pytest.fixture(scope="module")
def build():
    """The functions at a level; a level is built when it is first asked for."""
    if (reason := building.why_no_modules()) is not None:
        pytest.skip(reason)
    if not sys.platform.startswith("linux"):
        pytest.skip("wants Linux")

    def at(level: str) -> ModuleType:
        if not processor_has(LEVELS[level]):
            pytest.skip(f"this processor has no {LEVELS[level]}")
        return built(level)

    return at


levels = pytest.mark.parametrize("level", LEVELS)


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


@levels
@pytest.mark.parametrize("name", FUNCTIONS)
def test_errors_are_within_the_promised_ulps(build, level, name):
    function, bound, promised = FUNCTIONS[name]
    x = whole_range("float32")
    x = x[promised(x)]
    with np.errstate(over="ignore", under="ignore"):
        truth = function(x.astype(np.float64))
    if name == "exp_normal":  # which gives 0 in place of a subnormal number
        truth[x < -87] = 0
    assert ulps(mapped(build(level), name, x), truth).max() <= bound


@levels
def test_sigmoid_is_nearly_zero_where_the_true_one_is(build, level):
    x = whole_range("float32")
    x = x[x < -87]
    found = mapped(build(level), "sigmoid", x)
    assert (found >= 0).all()
    assert np.abs(found - true_sigmoid(x.astype(np.float64))).max() <= np.finfo(np.float32).tiny


@levels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["exp", "sigmoid", "tanh"])
def test_nan_stays_and_infinities_give_the_limits(build, level, dtype, name):
    limits = {"exp": (np.inf, 0), "sigmoid": (1, 0), "tanh": (1, -1)}[name]
    for length in (3, 16, 35):  # the remainder of a vector, a whole one, both
        x = np.resize(np.array([np.inf, -np.inf, np.nan], dtype), length)
        np.testing.assert_array_equal(mapped(build(level), name, x), np.resize([*limits, np.nan], length))


def row(dtype: str, length: int, seed: int = 0) -> np.ndarray:
    """Scores, one in ten of them excluded, whose address is not that of a whole vector."""
    generator = np.random.default_rng((seed, length))
    x = (10 * generator.standard_normal(length + 1)).astype(dtype)[1:]
    x[generator.random(length) < 0.1] = -np.inf
    return x


@levels
@pytest.mark.parametrize("dtype", DTYPES)
def test_row_passes_over_scores(build, level, dtype):
    module, tolerance = build(level), {"float32": FLOAT32, "float64": FLOAT64}[dtype]
    for length in LENGTHS:
        x = row(dtype, length)
        wide = x.astype(np.float64)
        largest = wide.max(initial=-np.inf)
        assert module.row_max(x) == largest
        shift = float(largest) if np.isfinite(largest) else 0.0
        e = np.exp(wide - shift)
        assert module.row_exp_sum(x, shift) == pytest.approx(e.sum(), rel=tolerance)
        kept = x.copy()
        assert module.row_exp(kept, shift) == pytest.approx(e.sum(), rel=tolerance)
        assert relative(kept, e) < tolerance
        softplus = np.logaddexp(0, wide).sum()
        assert module.row_softplus_sum(x) == pytest.approx(softplus, rel=tolerance)
        kept = x.copy()
        assert module.row_sigmoid(kept, 0.5, 0.25) == pytest.approx(softplus, rel=tolerance)
        assert np.abs(kept - (0.5 * true_sigmoid(wide) - 0.25)).max(initial=0) < tolerance
        groups = np.arange(length) % 3
        module.row_exclude_group(x, groups, 2)
        np.testing.assert_array_equal(x, np.where(groups == 2, -np.inf, wide))


@levels
@pytest.mark.parametrize("dtype", DTYPES)
def test_row_passes_that_sum_columns(build, level, dtype):
    module, tolerance = build(level), {"float32": FLOAT32, "float64": FLOAT64}[dtype]
    for length in LENGTHS:
        x, y = row(dtype, length), row(dtype, length, seed=1)
        largest = np.full(length, np.finfo(dtype).min, dtype)
        module.row_raise(largest, x)
        module.row_raise(largest, y)
        np.testing.assert_array_equal(largest, np.maximum(np.maximum(x, y), np.finfo(dtype).min))
        sums = np.ones(length, dtype)
        module.row_exp_add(sums, x, largest)
        wide = x.astype(np.float64)
        e = np.exp(wide - largest)
        assert relative(sums, 1 + e) < tolerance
        factors = np.linspace(0.5, 1, length, dtype=dtype)
        module.row_two_exps(x, 40.0, 3.0, largest, factors)
        assert relative(x, 3 * np.exp(wide - 40) + factors * e) < tolerance


@levels
@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_row_passes(build, level, dtype):
    module, tolerance = build(level), {"float32": FLOAT32, "float64": FLOAT64}[dtype]
    for length in LENGTHS:
        x, y = (np.nan_to_num(row(dtype, length, seed), neginf=0) for seed in (0, 1))
        wide_x, wide_y = x.astype(np.float64), y.astype(np.float64)
        scale = np.abs(wide_x).sum() + 1
        assert abs(module.row_sum(x) - wide_x.sum()) < FLOAT64 * scale  # summed in double
        dot = module.row_dot(x, y)
        assert abs(dot - wide_x @ wide_y) <= FLOAT64 * (np.abs(wide_x) @ np.abs(wide_y))
        for name, arguments, expected in (
            ("row_add", (y,), wide_x + wide_y),
            ("row_affine", (3.0, 0.5), 3 * wide_x - 0.5),
            ("row_scale", (y, 3.0), 3 * wide_y * wide_x),
            ("row_multiple", (y, 3.0, False), 3 * wide_y),
            ("row_multiple", (y, 3.0, True), wide_x + 3 * wide_y),
        ):
            out = x.copy()
            getattr(module, name)(out, *arguments)
            assert relative(out, expected) < tolerance, name


@levels
@pytest.mark.parametrize("dtype", DTYPES)
def test_row_passes_leave_no_subnormal_number_and_keep_nan(build, level, dtype):
    module, tiny = build(level), np.finfo(dtype).tiny
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
        total = getattr(module, name)(out, *arguments)
        assert (np.isnan(out) == given).all()
        assert total is None or np.isnan(total)
        if name != "row_exp" or dtype == "float32":  # the exp of float64 is that of the C library
            assert not ((np.abs(out) > 0) & (np.abs(out) < tiny)).any()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_all_levels_agree(build, name):
    x = whole_range("float32")
    x = x[FUNCTIONS[name][2](x)]
    found = [mapped(build(level), name, x) for level, feature in LEVELS.items() if processor_has(feature)]
    for other in found[1:]:
        assert ulps(other, found[0].astype(np.float64)).max() <= 2 * FUNCTIONS[name][1]
