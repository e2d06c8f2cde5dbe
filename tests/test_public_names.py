"""`import fastqt` imports torch only when a public name is used, and nothing else about it is lazy."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import fastqt


def run(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_names_are_those_that_a_type_checker_sees():
    tree = ast.parse(Path(fastqt.__file__).read_text())
    imported = [
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module.startswith("fastqt")
        for alias in node.names
    ]
    assert sorted(imported) == dir(fastqt)
    assert set(dir(fastqt)) - set(fastqt.__all__) == {"integrations", "options", "sentences"}
    assert all(getattr(fastqt, name) is getattr(fastqt, name) for name in fastqt.__all__)


def test_other_names_are_errors():
    with pytest.raises(AttributeError, match="module 'fastqt' has no attribute 'contrastive_los'"):
        _ = fastqt.contrastive_los
    with pytest.raises(ImportError, match="cannot import name 'import_model' from 'fastqt'"):
        from fastqt import import_model  # noqa: F401


def test_names_are_imported_when_they_are_used_and_all_of_them_by_a_star():
    printed = run(
        "import sys, fastqt\n"
        "print(fastqt.__version__, 'torch' in sys.modules)\n"
        "fastqt.nn.GRU\n"
        "print('torch' in sys.modules, 'contrastive_loss' in vars(fastqt))\n"
        "fastqt.contrastive_loss\n"
        "print('contrastive_loss' in vars(fastqt))\n"
        "from fastqt import *\n"
        "print(set(fastqt.__all__) <= set(dir()))"
    )
    assert printed.split() == [fastqt.__version__, "False", "True", "False", "True", "True"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "use",
    [
        "fastqt.contrastive_loss(f, g)",
        "fastqt.nn.ContrastiveLoss()(f, g)",
    ],
)
def test_a_compiled_function_may_be_the_first_use(use):
    program = (
        "import torch, fastqt\n"
        "torch.manual_seed(0)\n"
        "f, g = (torch.randn(6, 4, requires_grad=True) for _ in range(2))\n"
        f"def loss(f, g): return {use}\n"
        "assert 'contrastive_loss' not in vars(fastqt)\n"
        "compiled = torch.compile(loss, fullgraph=True, backend='aot_eager')\n"
        "gradients = torch.autograd.grad(compiled(f, g), (f, g))\n"
        "eager = torch.autograd.grad(loss(f, g), (f, g))\n"
        "assert all(torch.allclose(a, b) for a, b in zip(gradients, eager))"
    )
    run(program)
