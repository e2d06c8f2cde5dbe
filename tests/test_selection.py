"""What the conftest.py at the root selects: tests of speed, one in n parametrisations, or pairs of values."""

import os
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from itertools import combinations, product
from math import prod
from types import SimpleNamespace

import pytest

from tests.csrc.building import ROOT

CALL = "benchmarks/bench_call.py"


@pytest.mark.slow
def test_benchmarks_are_selected():
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "--benchmark", "--collect-only"]
    # A process of pytest-xdist would have pytest-benchmark warn.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    found = subprocess.run(
        [*command, CALL, "tests/test_errors.py"], capture_output=True, text=True, cwd=ROOT, env=environment
    )
    assert found.returncode == 0, found.stdout
    assert f"{CALL}::" in found.stdout
    assert "test_errors.py" not in found.stdout


class Item(SimpleNamespace):
    """What a test with parameters tells the conftest.py of itself."""

    def get_closest_marker(self, name):
        return next((mark for mark in self.marks if mark.name == name), None)

    def iter_markers(self, name):
        return (mark for mark in self.marks if mark.name == name)

    def add_marker(self, mark):
        self.marks = [*self.marks, mark]


@pytest.fixture
def conftest():
    spec = spec_from_file_location("conftest_of_the_root", ROOT / "conftest.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("quick", [set(), {(0, 0, 0), (2, 1, 1)}], ids=["all are slow", "two are not"])
@pytest.mark.parametrize("sizes", [(3,), (4, 2), (3, 2, 2), (4, 3, 2), (9, 3, 2)], ids=str)
def test_pairwise_keeps_each_pair_of_values_in_as_few_items_as_there_have_to_be(conftest, sizes, quick):
    """As many as the product of the two longest lists, and all that are not slow."""
    values = {f"p{place}": [object() for _ in range(size)] for place, size in enumerate(sizes)}
    marks = [pytest.mark.parametrize(name, each).mark for name, each in values.items()]
    places = list(product(*map(range, sizes)))
    quick = quick.intersection(places)
    items = [
        Item(
            path=path,
            originalname="test",
            place=place,
            marks=[
                *([pytest.mark.pairwise.mark] if path == "pairwise" else []),
                *([] if place in quick else [pytest.mark.slow.mark]),
                *marks,
            ],
            callspec=SimpleNamespace(params={f"p{k}": values[f"p{k}"][at] for k, at in enumerate(place)}),
        )
        for path in ("pairwise", "whole")
        for place in places
    ]
    left_out = conftest.beyond_pairs(items)
    assert {item.path for item in left_out} <= {"pairwise"}
    kept = set(places) - {item.place for item in left_out}
    assert kept >= quick
    for a, b in combinations(range(len(sizes)), 2):
        assert {(place[a], place[b]) for place in kept} == set(product(range(sizes[a]), range(sizes[b])))
    least = prod(sorted(sizes)[-2:])
    assert least <= len(kept) <= least + len(quick)


@pytest.mark.parametrize(("n", "kept"), [(2, 9), (3, 6)])
def test_one_in_n_parametrisations_is_kept_with_each_value(conftest, n, kept):
    dtypes, modes, pairs = ["a", "b", "c"], ["x", "y"], [(1, 5), (1, 6), (2, 6)]
    parameters = (
        pytest.mark.parametrize("dtype", dtypes).mark,
        pytest.mark.parametrize("mode", modes).mark,
        pytest.mark.parametrize(("one", "two"), pairs).mark,
    )
    items = [
        Item(
            path=path,
            originalname="test",
            marks=[pytest.mark.thinned(n).mark, *parameters] if path == "thinned" else [*parameters],
            callspec=SimpleNamespace(params={"dtype": dtype, "mode": mode, "one": one, "two": two}),
        )
        for path in ("thinned", "whole")
        for dtype, mode, (one, two) in product(dtypes, modes, pairs)
    ]
    conftest.mark_what_is_thinned_out(items)
    quick = [item for item in items if item.get_closest_marker("slow") is None]
    found = [item.callspec.params for item in quick if item.path == "thinned"]
    assert len(quick) - len(found) == 18
    assert len(found) == kept
    assert {each["dtype"] for each in found} == {*dtypes}
    assert {each["mode"] for each in found} == {*modes}
    assert {(each["one"], each["two"]) for each in found} == {*pairs}
