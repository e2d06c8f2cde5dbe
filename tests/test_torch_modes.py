"""What torch is set to is asked in the way that torch answers after any of its setters."""

import subprocess
import sys

import pytest
import torch

from fastqt.torch_modes import cpu_rounds_float32


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


@pytest.mark.parametrize(("precision", "rounds"), [("highest", False), ("high", True), ("medium", True)])
def test_a_cpu_rounds_float32_as_torch_is_set(precision, rounds):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        assert cpu_rounds_float32() is rounds
    finally:
        torch.set_float32_matmul_precision(before)
