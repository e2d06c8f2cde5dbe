"""The smoke steps' Python runs to its end in the sizes of a GPU, on fake CUDA tensors."""

import json

import pytest

from benchmarks.gpu.stages import SCORES, smoke
from tests.engines.triton import absent_library

pytestmark = [*absent_library.marks, pytest.mark.slow]
KERNELS = {"row_shifts_kernel", "scores_kernel", "row_stats_kernel", "gradient_kernel"}
LARGE = {*KERNELS, "a kernel with descriptors"}
LAUNCHED = {
    "16-bit products into float32": set(),
    **{f"scores {name}": {"scores_kernel", "a kernel with descriptors"} for name in SCORES},
    **dict.fromkeys(("loss fast", "loss low", "TF32 fast", "TF32 low", "graph", "side stream"), KERNELS),
    **dict.fromkeys(("large tiles fast", "large tiles low"), LARGE),
    "one launch": {"small_contrastive_"},
    "vendor's products": set(),
}


@pytest.fixture(scope="module")
def found():
    return json.loads(absent_library.printed_by("tests.benchmarks.gpu.smoke_on_absent_gpu"))


@pytest.mark.parametrize("name", LAUNCHED)
def test_a_step_runs_to_its_end(found, name):
    step = found[f"smoke, {name}"]
    assert step["failed"] == []
    assert step["passed"] + step["products"] > 0
    assert set(step["launched"]) >= LAUNCHED[name]


def test_every_step_is_run(found):
    steps = {section.name for wave in smoke() for section in wave} - {"machine"}
    assert set(found) == steps == {f"smoke, {name}" for name in LAUNCHED}
