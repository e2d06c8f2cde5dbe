"""Schedules that are written down without the engine: they compute everything once, and fit their room."""

import json

import pytest

from benchmarks.predict import estimate, narrow
from benchmarks.predict.choices import FAST, LOW, LOW_ROOM, fast_steps, low_steps, tile_key
from benchmarks.predict.options import Plan, launches, seconds, sizes
from benchmarks.predict.roofline import Rates
from benchmarks.predict.schedules import device_seconds

BEFORE = json.loads(estimate.BEFORE.read_text())
STEPS = [(shape, "fast", *step) for shape in FAST for step in fast_steps(*shape)]
STEPS += [(shape, "low", *step) for shape in LOW for step in low_steps(*shape)]
by_step = pytest.mark.parametrize(
    ("shape", "memory", "plan"),
    [(shape, memory, plan) for shape, memory, _, plan in STEPS],
    ids=[f"{shape[0]}-{memory}-{name}" for shape, memory, name, _ in STEPS],
)


@by_step
def test_every_cell_is_computed_and_multiplied(shape, memory, plan):
    N, D = shape
    events = list(launches(plan))
    cells = sum(e["rows"] * e["columns"] for e in events if e["kind"] == "scores" and e["store"])
    terms = sum(e["n"] * e["m"] * e["k"] for e in events if e["kind"] == "product")
    assert cells == N * N * (1 if memory == "fast" else 2)
    assert terms == 2 * N * N * D


@by_step
def test_a_sum_is_added_to_once_it_is_begun(shape, memory, plan):
    N, D = shape
    products = [e for e in launches(plan) if e["kind"] == "product"]
    begun = sum(e["n"] * e["m"] for e in products if not e["add"])
    assert begun == 2 * N * D


@pytest.mark.parametrize("memory", ["fast", "low"])
@pytest.mark.parametrize(("N", "D"), FAST)
def test_the_schedule_as_it_was_takes_what_the_engines_launches_do(N, D, memory):
    plan = dict(fast_steps(N, D) if memory == "fast" else low_steps(N, D))["as it was"]
    noted = next(
        s
        for s in BEFORE["schedules"]
        if (s["loss"], s["N"], s["D"], s["memory"]) == ("QuickThoughts", N, D, memory)
    )
    rates = Rates()
    written_down = sum(seconds(plan, BEFORE["tiles"][tile_key(plan.tile, False)], rates).values())
    assert written_down == pytest.approx(device_seconds(noted, BEFORE["kernels"], rates), rel=0.01)


@pytest.mark.parametrize(("N", "D"), LOW)
def test_low_memory_fits_its_room(N, D):
    for name, plan in low_steps(N, D):
        blocks = sizes(N, plan.columns)
        ends = [sum(blocks[: n + 1]) for n in range(len(blocks))]
        if plan.width is not None:
            assert 2 * plan.height * plan.width <= 2 * N * D, f"{name}: dF's tiles lie in dG"
        for width, end, height in zip(blocks, ends, plan.heights, strict=True):
            fits = 2 * width * height + 4 * width * D <= LOW_ROOM
            assert fits or 2 * width * height <= 2 * (N - end) * D, f"{name}: columns up to {end}"


@pytest.mark.parametrize(("N", "D"), FAST)
def test_chunks_and_all_beside_them_take_at_most_a_gigabyte(N, D):
    for _, plan in fast_steps(N, D):
        in_e, sums, weighted = 2 * plan.height * N, 4 * D * (plan.height + N), 2 * plan.height * D
        assert in_e + sums + weighted <= 2**30


@pytest.mark.parametrize("side", narrow.SIDES)
def test_tiles_in_the_cache_compute_all_cells_and_fit_half_of_it(side):
    plan = Plan(65536, 128, 65536)
    events = list(narrow.tile_launches(plan, side))
    assert sum(e["rows"] * e["columns"] for e in events if e["kind"] == "scores") == plan.N**2
    products = [e for e in events if e["kind"] == "product"]
    assert sum(e["n"] * e["m"] * e["k"] for e in products) == 2 * plan.N**2 * plan.D
    assert sum(e["n"] * e["m"] for e in products if not e["add"]) == 2 * plan.N * plan.D
    assert 2 * side**2 <= Rates().l2_size / 2
