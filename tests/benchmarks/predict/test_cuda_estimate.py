"""The one-launch kernel, compiled for GPUs without one here, and the estimate that is made of its tiles.

It has no spills, and uses tensor cores.
"""

import json
import shutil

import pytest

from benchmarks.predict import cuda_phases
from benchmarks.predict.cuda_estimate import ARCHITECTURES, ARITHMETICS, SHAPES, SHARED, STORED, compiled
from tests.csrc.building import why_no_modules
from tests.csrc.cuda.host_execution import HostKernels, build


@pytest.fixture(scope="module")
def kernels() -> HostKernels:
    if (reason := why_no_modules()) is not None:
        pytest.skip(reason)
    return HostKernels(build())


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


def test_the_estimate_uses_the_tiles_of_the_kernel(kernels):
    stored = json.loads(STORED.read_text())
    for N, D in SHAPES:
        blocks = stored["rates"]["multiprocessors"]
        assert stored["tiles"][f"{N} x {D}"] == kernels.tiles("bfloat16", N, N, D, blocks)


def test_the_estimate_uses_the_shares_of_the_kernel(kernels):
    for m16_tiles in range(1, 11):
        for n8_tiles in range(1, 29):
            _, shares = kernels.areas(0, m16_tiles, 1, n8_tiles, 1)
            assert cuda_phases.shares(m16_tiles, n8_tiles) == [(int(s[1]), int(s[3])) for s in shares]
