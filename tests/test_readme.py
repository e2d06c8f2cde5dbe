"""Examples of the README run, and links of the README and the documents lead to files."""

import re
from pathlib import Path

import pytest
import torch

import fastqt
from fastqt.nn import GRUEncoder, QuickThoughts

README = Path(__file__).parents[1] / "README.md"
TEXT = README.read_text()


def test_python_examples_run():
    generator = torch.Generator().manual_seed(0)
    f, g, x, hard = (torch.randn(n, 8, generator=generator, requires_grad=True) for n in (12, 12, 12, 5))
    names = {
        **{name: getattr(fastqt, name) for name in fastqt.__all__},
        **{"f": f, "g": g, "x": x, "hard": hard, "fastqt": fastqt},
        **{"GRUEncoder": GRUEncoder, "QuickThoughts": QuickThoughts, "vocab_size": 20},
        "ids": torch.arange(12) // 6,
        "document_ids": torch.arange(12) // 6,
        "temperature": 0.05,
        **dict.fromkeys(("queries", "z1", "images"), f),
        **dict.fromkeys(("candidates", "z2", "texts"), g),
        **{"z3": x, "log_scale": torch.zeros(())},
        "weight": torch.randn(30, 8),
        "labels": torch.arange(12),
        "tokens": torch.ones(12, 4, dtype=torch.long),
        "lengths": torch.full((12,), 4),
    }
    blocks = re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL)
    assert len(blocks) >= 3
    for block in blocks:
        exec(block, names)
    assert f.grad.isfinite().all()
    assert names["vectors"].shape == (12, 2000)


@pytest.mark.parametrize("page", [README, *README.parent.glob("docs/*.md")], ids=lambda page: page.name)
def test_links_lead_to_files(page):
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", page.read_text()):
        assert (page.parent / target).exists(), target
