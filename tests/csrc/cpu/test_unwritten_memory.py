"""What nobody has written reaches no result; no product is given what lies between the rows of an operand.

torch's products of bfloat16 read it on processors with AMX, where NaN times 0 is NaN.
"""

import os
import subprocess
import sys
from functools import cache
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from fastqt.engines import ops
from fastqt.engines.products import multiply
from tests.csrc import building
from tests.shared.gaps import NoGaps

ROOT = Path(__file__).parents[3]

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="memory is filled by what glibc loads first"),
    pytest.mark.skipif(building.compiler() is None, reason="no C++ compiler"),
    pytest.mark.skipif(ops.native_error is not None, reason="the extension is not built"),
]


@cache
def preloaded() -> Path:
    include = Path(torch.__file__).parent / "include"
    flags = ["-O1", "-std=c++20", "-fPIC", f"-isystem{include}"]
    source = "tests/csrc/cpu/unwritten_memory.cpp"
    return building.build(
        {source: flags}, headers=[], link=["-shared", "-Wl,-z,lazy", "-ldl"], versions=[version("torch")]
    )


def run(*arguments: str, products: str) -> None:
    environment = {"LD_PRELOAD": str(preloaded()), "FASTQT_CPU_PRODUCTS": products, "OMP_NUM_THREADS": "2"}
    command = [sys.executable, "-m", "tests.csrc.cpu.unwritten_memory", *arguments]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]


DTYPES = ("bfloat16", "float16", "float32", "float64")


@pytest.mark.parametrize("count", [60, pytest.param(1500, marks=pytest.mark.slow)])
@pytest.mark.parametrize("products", ["own", "torch"])
def test_random_problems_in_bfloat16(products, count):
    run("problems", "cpu", "bfloat16", "0", str(count), products=products)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["cpu", "torch", "reference"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_random_problems(dtype, backend):
    run("problems", backend, dtype, "5000", "500", products="own" if backend == "cpu" else "torch")


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.slow)])
def test_every_loss(dtype):
    run("losses", dtype, products="torch")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_products_of_the_emulated_engine(dtype):
    """A GPU's engine, whose E has columns that nobody writes, multiplies on a CPU where it is emulated."""
    E = torch.full((6, 16), torch.nan, dtype=dtype)
    E[:, :9] = torch.randn(6, 9)
    matrix, out = torch.randn(9, 5).to(dtype), torch.zeros(6, 5, dtype=dtype)
    with NoGaps():
        multiply(out, E[:, :9], matrix, add=False)
        multiply(torch.zeros(9, 5, dtype=dtype), E[:, :9].T, torch.ones(6, 5, dtype=dtype), add=True)
        with pytest.raises(AssertionError, match="mm"):
            torch.mm(E[:, :9], matrix)
    assert torch.equal(out, E[:, :9].contiguous() @ matrix)
