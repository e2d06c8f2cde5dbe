"""The engines are there, and say why not, where Triton is not installed."""

import subprocess
import sys

RUN = """
import sys
from importlib import util

genuine = util.find_spec
util.find_spec = lambda name, *more: None if name == "triton" else genuine(name, *more)
sys.modules["triton"] = None  # whoever imports it gets an ImportError
sys.modules["fastqt._C"] = None  # as on a system without a C++ compiler

import torch
import fastqt

x = torch.randn(4, 8)
released = fastqt.mixcse_loss(x, x, form="released")
print((fastqt.contrastive_loss(x, x) + released).isfinite().item())
try:
    fastqt.contrastive_loss(x, x, backend="triton")
except ValueError as error:
    print("triton is not installed" in str(error))
"""


def test_losses_work_without_triton():
    done = subprocess.run([sys.executable, "-c", RUN], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["True", "True"]
