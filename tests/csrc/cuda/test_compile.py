"""The one-launch kernel, compiled for GPUs without one here: no spills, and tensor cores in use."""

import json
import shutil

import pytest

from benchmarks.predict.cuda_estimate import ARCHITECTURES, ARITHMETICS, SHARED, STORED, compiled


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc")
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_fits_without_spills(architecture):
    kernel = compiled("bfloat16", architecture)
    assert kernel["spills"] == kernel["stack"] == 0
    assert kernel["registers"] * kernel["threads"] <= 2**16
    assert kernel["shared"] <= SHARED[architecture]
    assert kernel["instructions"]["HMMA"] > 0
    assert kernel["instructions"]["LDSM"] > 0
    assert kernel["instructions"]["LDGSTS"] > 0


def test_every_stored_kernel_fits_without_spills():
    stored = json.loads(STORED.read_text())["kernels"]
    assert set(stored) == {f"{x}, sm_{arch}" for x in ARITHMETICS for arch in ARCHITECTURES}
    for name, kernel in stored.items():
        assert kernel["spills"] == kernel["stack"] == 0, name
        assert kernel["registers"] <= 255, name
