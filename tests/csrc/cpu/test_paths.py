"""The vectorised functions of csrc/cpu at every x86 level that this machine has, against float64 numpy."""

import ctypes
import subprocess
import sys
from pathlib import Path
from shutil import which

import numpy as np
import pytest
from tolerances import FLOAT32, FLOAT64, relative

ROOT = Path(__file__).parents[3]
FLAGS = ("-O3", "-std=c++20", "-fopenmp-simd", "-fno-trapping-math", "-fno-math-errno")
# What each level asks of the processor, beside the build that chooses by itself as the package does.
LEVELS = {"x86-64": "sse2", "x86-64-v3": "avx2", "x86-64-v4": "avx512vl", "clones": None}
DTYPES = {"float32": ctypes.c_float, "float64": ctypes.c_double}
RETURNS_DOUBLE = ("row_sum", "row_exp_sum", "row_exp", "row_softplus_sum", "row_sigmoid", "row_dot")
LENGTHS = (0, 1, 3, 7, 8, 9, 15, 16, 17, 31, 33, 64, 1023, 1024, 1025, 4099)


def processor_has(feature: str | None) -> bool:
    if feature is None:
        return True
    return feature in Path("/proc/cpuinfo").read_text().split()


class Library:
    """One build of the functions, called on numpy arrays."""

    def __init__(self, path: Path) -> None:
        self.library = ctypes.CDLL(str(path))

    def __call__(self, name: str, *arguments: object) -> float:
        dtype = arguments[0].dtype.name
        function = self.library[f"{name}_{dtype}"]
        number = DTYPES[dtype]
        function.restype = (
            ctypes.c_double if name in RETURNS_DOUBLE else number if name == "row_max" else None
        )
        return function(*(as_c(x, number) for x in arguments))

    def mapped(self, name: str, x: np.ndarray) -> np.ndarray:
        x = x.copy()
        self(name, x, len(x))
        return x


def as_c(x: object, number: type) -> object:
    if isinstance(x, np.ndarray):
        return ctypes.c_void_p(x.ctypes.data)
    if isinstance(x, bool):
        return ctypes.c_bool(x)
    return ctypes.c_int64(x) if isinstance(x, int) else number(x)


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    """The functions at a level; a level is built when it is first asked for."""
    if which("g++") is None or not sys.platform.startswith("linux"):
        pytest.skip("wants g++ on Linux")
    folder, built = tmp_path_factory.mktemp("paths"), {}

    def at(level: str) -> Library:
        if not processor_has(LEVELS[level]):
            pytest.skip(f"this processor has no {LEVELS[level]}")
        if level not in built:
            one_level = () if level == "clones" else (f"-march={level}", "-DFASTQT_CLONES=")
            sources = (ROOT / "tests/csrc/cpu/paths.cpp", ROOT / "csrc/cpu/row_passes.cpp")
            path = folder / f"{level}.so"
            command = (
                "g++",
                "-shared",
                "-fPIC",
                *FLAGS,
                *one_level,
                f"-I{ROOT / 'csrc'}",
                *sources,
                "-o",
                path,
            )
            subprocess.run(command, check=True)
            built[level] = Library(path)
        return built[level]

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


# Bounds in units in the last place, as csrc/cpu/vector_math.h promises them; where each is promised.
FUNCTIONS = {
    "exp": (np.exp, 1.5, lambda x: x == x),
    "exp_normal": (np.exp, 1.5, lambda x: x <= 88),
    "sigmoid": (true_sigmoid, 3, lambda x: x >= -87),
    "tanh": (np.tanh, 3, lambda x: x == x),
    "log1p_unit": (np.log1p, 3, lambda x: (x >= 0) & (x <= 1)),
}


def ulps(got: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """Distance in units of the last place that float32 has at the truth."""
    with np.errstate(over="ignore"):
        rounded = truth.astype(np.float32)
    # The largest number has no successor to tell its unit by.
    unit = np.spacing(np.minimum(np.abs(rounded), np.float32(2.0**127))).astype(np.float64)
    both = np.isinf(got) & np.isinf(rounded) & (np.sign(got) == np.sign(truth))
    with np.errstate(invalid="ignore"):
        return np.where(both, 0, np.abs(got.astype(np.float64) - truth) / unit)


@levels
@pytest.mark.parametrize("name", FUNCTIONS)
def test_within_their_ulps(build, level, name):
    function, bound, promised = FUNCTIONS[name]
    x = whole_range("float32")
    x = x[promised(x)]
    with np.errstate(over="ignore", under="ignore"):
        truth = function(x.astype(np.float64))
    if name == "exp_normal":  # 0 for what is no normal number
        truth[x < -87] = 0
    assert ulps(build(level).mapped(name, x), truth).max() <= bound


@levels
def test_sigmoid_of_where_it_vanishes(build, level):
    x = whole_range("float32")
    x = x[x < -87]
    found = build(level).mapped("sigmoid", x)
    assert (found >= 0).all()
    assert np.abs(found - true_sigmoid(x.astype(np.float64))).max() <= np.finfo(np.float32).tiny


@levels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["exp", "sigmoid", "tanh"])
def test_nan_and_infinities(build, level, dtype, name):
    limits = {"exp": (np.inf, 0), "sigmoid": (1, 0), "tanh": (1, -1)}[name]
    for length in (3, 16, 35):  # a vector's remainder, a vector, both
        x = np.resize(np.array([np.inf, -np.inf, np.nan], dtype), length)
        np.testing.assert_array_equal(build(level).mapped(name, x), np.resize([*limits, np.nan], length))


def row(dtype: str, length: int, seed: int = 0) -> np.ndarray:
    """Scores, one in ten of them excluded, not aligned to a vector."""
    generator = np.random.default_rng((seed, length))
    x = (10 * generator.standard_normal(length + 1)).astype(dtype)[1:]
    x[generator.random(length) < 0.1] = -np.inf
    return x


@levels
@pytest.mark.parametrize("dtype", DTYPES)
def test_passes_over_scores(build, level, dtype):
    call, tolerance = build(level), {"float32": FLOAT32, "float64": FLOAT64}[dtype]
    for length in LENGTHS:
        x = row(dtype, length)
        wide = x.astype(np.float64)
        largest = wide.max(initial=-np.inf)
        assert call("row_max", x, length) == largest
        reference = float(largest) if np.isfinite(largest) else 0.0
        e = np.exp(wide - reference)
        assert call("row_exp_sum", x, length, reference) == pytest.approx(e.sum(), rel=tolerance)
        kept = x.copy()
        assert call("row_exp", kept, length, reference) == pytest.approx(e.sum(), rel=tolerance)
        assert relative(kept, e) < tolerance
        softplus = np.logaddexp(0, wide).sum()
        assert call("row_softplus_sum", x, length) == pytest.approx(softplus, rel=tolerance)
        kept = x.copy()
        assert call("row_sigmoid", kept, length, 0.5, 0.25) == pytest.approx(softplus, rel=tolerance)
        assert np.abs(kept - (0.5 * true_sigmoid(wide) - 0.25)).max(initial=0) < tolerance
        groups = np.arange(length) % 3
        call("row_exclude_group", x, groups, length, 2)
        np.testing.assert_array_equal(x, np.where(groups == 2, -np.inf, wide))


@levels
@pytest.mark.parametrize("dtype", DTYPES)
def test_passes_over_rows_and_columns(build, level, dtype):
    call, tolerance = build(level), {"float32": FLOAT32, "float64": FLOAT64}[dtype]
    for length in LENGTHS:
        x, y = row(dtype, length), row(dtype, length, seed=1)
        largest = np.full(length, np.finfo(dtype).min, dtype)
        call("row_raise", largest, x, length)
        call("row_raise", largest, y, length)
        np.testing.assert_array_equal(largest, np.maximum(np.maximum(x, y), np.finfo(dtype).min))
        sums = np.ones(length, dtype)
        call("row_exp_add", sums, x, largest, length)
        wide = x.astype(np.float64)
        e = np.exp(wide - largest)
        assert relative(sums, 1 + e) < tolerance
        factors = np.linspace(0.5, 1, length, dtype=dtype)
        call("row_two_exps", x, largest, factors, length, 40.0, 3.0)
        assert relative(x, 3 * np.exp(wide - 40) + factors * e) < tolerance


@levels
@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_passes(build, level, dtype):
    call, tolerance = build(level), {"float32": FLOAT32, "float64": FLOAT64}[dtype]
    for length in LENGTHS:
        x, y = (np.nan_to_num(row(dtype, length, seed), neginf=0) for seed in (0, 1))
        wide_x, wide_y = x.astype(np.float64), y.astype(np.float64)
        scale = np.abs(wide_x).sum() + 1
        assert abs(call("row_sum", x, length) - wide_x.sum()) < FLOAT64 * scale  # summed in double
        dot = call("row_dot", x, y, length)
        assert abs(dot - wide_x @ wide_y) <= FLOAT64 * (np.abs(wide_x) @ np.abs(wide_y))
        for name, arguments, expected in (
            ("row_add", (y, length), wide_x + wide_y),
            ("row_affine", (length, 3.0, 0.5), 3 * wide_x - 0.5),
            ("row_multiple", (y, length, 3.0, False), 3 * wide_y),
            ("row_multiple", (y, length, 3.0, True), wide_x + 3 * wide_y),
        ):
            out = x.copy()
            call(name, out, *arguments)
            assert relative(out, expected) < tolerance, name


@levels
@pytest.mark.parametrize("dtype", DTYPES)
def test_passes_leave_no_subnormal_number_and_lose_no_nan(build, level, dtype):
    call, tiny = build(level), np.finfo(dtype).tiny
    x = np.array([-745.0, -104.0, -88.0, -87.0, 0.0, np.nan, -np.inf] * 5, dtype)
    for name, arguments in (
        ("row_exp", (0.0,)),
        ("row_sigmoid", (1e-30, 0.0)),
        ("row_affine", (float(tiny), 0.0)),
    ):
        out = x.copy() if name != "row_affine" else np.array([0.5, np.nan] * 9, dtype)
        given = np.isnan(out)
        total = call(name, out, len(out), *arguments)
        assert (np.isnan(out) == given).all()
        assert total is None or np.isnan(total)
        if name != "row_exp" or dtype == "float32":  # float64 takes the C library's exp as it is
            assert not ((np.abs(out) > 0) & (np.abs(out) < tiny)).any()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_levels_agree(build, name):
    x = whole_range("float32")
    x = x[FUNCTIONS[name][2](x)]
    found = [build(level).mapped(name, x) for level, feature in LEVELS.items() if processor_has(feature)]
    for other in found[1:]:
        assert ulps(other, found[0].astype(np.float64)).max() <= 2 * FUNCTIONS[name][1]
