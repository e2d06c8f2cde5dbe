"""The Python of the GPU path, run on fake CUDA tensors, mixes no devices and never waits for the GPU."""

import json

import pytest

from tests.engines.triton import absent_library
from tests.engines.triton.absent_gpu import problems

pytestmark = absent_library.marks


@pytest.fixture(scope="module")
def errors(request):
    """The error of each problem that is tested by its name, or None. A process of its own finds them."""
    tests = [item for item in request.session.items if item.path == request.path]
    names = [item.callspec.params["name"] for item in tests]
    found = json.loads(absent_library.printed_by("tests.engines.triton.absent_gpu", json.dumps(names)))
    assert list(found) == names
    return found


@pytest.mark.parametrize("name", problems())
@pytest.mark.thinned(8)
def test_nothing_mixes_devices_or_waits(errors, name):
    assert errors[name] is None, errors[name]
