"""Which engine computes each loss on a GPU is as docs/devices.md says."""

import pytest

from benchmarks.offline.losses_on_gpu import measured, stored
from tests.engines.triton import test_absent_gpu

pytestmark = test_absent_gpu.pytestmark
MOST = 1.25  # times the products of plain PyTorch


@pytest.fixture(scope="module")
def found():
    return measured()


def test_engines_and_products_are_the_stored_ones(found):
    """Of the launches some are operations of torch's, of which another version has others."""

    def without_launches(losses):
        return {
            name: {variant: {**x, "launches": None} for variant, x in of_loss.items()}
            for name, of_loss in losses.items()
        }

    assert without_launches(found) == without_launches(stored())


def test_16_bits_stay_16_bits_and_products_are_few(found):
    for name, of_loss in found.items():
        for variant, x in of_loss.items():
            if "products" not in x or "eager" not in of_loss or variant == "eager":
                continue
            if variant not in ("float32", "float64"):
                few = x["products"] < 1 or set(x["multiplied"]) == {"bfloat16"}
                assert few, (name, variant, x)
            most = MOST * of_loss["eager"]["products"] * (1.75 if variant == "matryoshka" else 1)
            if variant != "float64":
                assert x["products"] <= most, (name, variant, x)
