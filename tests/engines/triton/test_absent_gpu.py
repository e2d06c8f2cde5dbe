"""The Python of the GPU path, run on fake CUDA tensors, mixes no devices and never waits for the GPU."""

import json

import pytest

from tests.engines.triton import absent_library
from tests.engines.triton.absent_gpu import problems

pytestmark = absent_library.marks


@pytest.fixture(scope="module")
def errors(tmp_path_factory):
    """The error of each problem by its name, or None. A process of its own finds them."""
    folder = tmp_path_factory.mktemp("absent_gpu")
    found = json.loads(absent_library.printed_by("tests.engines.triton.absent_gpu", folder))
    assert list(found) == list(problems())
    return found


@pytest.mark.parametrize("name", problems())
def test_nothing_mixes_devices_or_waits(errors, name):
    assert errors[name] is None, errors[name]
