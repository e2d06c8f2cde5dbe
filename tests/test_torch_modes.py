"""What torch is set to is asked in the way that torch answers after any of its setters."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize("setting", ["legacy", "matmul", "all"])
@pytest.mark.thinned(2)
def test_tf32_is_allowed_as_torch_is_set(setting):
    """In a process of its own, because torch keeps that both kinds of setting have been used."""
    changes = {
        "legacy": "torch.set_float32_matmul_precision('high')",
        "matmul": "torch.backends.cuda.matmul.fp32_precision = 'tf32'",
        "all": "torch.backends.fp32_precision = 'tf32'",
    }
    script = f"""
import torch
from fastqt.torch_modes import tf32_allowed
from fastqt.kernels.launch import precision
assert not tf32_allowed() and precision(torch.float32) == "ieee"
{changes[setting]}
assert tf32_allowed() and precision(torch.float32) == "tf32"
assert precision(torch.bfloat16) == precision(torch.float16) == "ieee"
"""
    subprocess.run([sys.executable, "-c", script], check=True)
