"""Tables of the README and the documents show stored runs, examples run, and links lead to files."""

import re

import numpy as np
import pytest
import torch

import fastqt
from benchmarks.measure.render import PAGES, README, rendered
from fastqt.nn import GRUEncoder, QuickThoughts

TEXT = README.read_text()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tables_show_stored_runs(page):
    text = page.read_text()
    assert rendered(text) == text, "run `python -m benchmarks.measure.render`"


def write_benchmarks(folder):
    """Writes small files in the formats of MR and STS-B."""
    for name, line in (("MR/all", "{0}\tsentence {1}"), ("STSB/dev", "g\t{1}\ta {1}\tb {0}")):
        path = folder / f"{name}.tsv"
        path.parent.mkdir(parents=True)
        path.write_text("".join(line.format(number % 2, number) + "\n" for number in range(40)))
    (folder / "STSB/test.tsv").write_text((folder / "STSB/dev.tsv").read_text())


def test_python_examples_run(tmp_path, monkeypatch):
    write_benchmarks(tmp_path / "eval")
    monkeypatch.chdir(tmp_path)
    generator = torch.Generator().manual_seed(0)
    f, g, x, hard = (torch.randn(n, 8, generator=generator, requires_grad=True) for n in (12, 12, 12, 5))
    names = {
        **{name: getattr(fastqt, name) for name in fastqt.__all__},
        **{"f": f, "g": g, "x": x, "hard": hard, "fastqt": fastqt},
        **{"GRUEncoder": GRUEncoder, "QuickThoughts": QuickThoughts, "vocab_size": 20},
        "ids": torch.arange(12) // 6,
        "document_ids": torch.arange(12) // 6,
        "csr": torch.eye(12).roll(1, 1).to_sparse_csr(),
        "q": torch.arange(12),
        "c": torch.arange(12),
        **dict.fromkeys(("queries", "z1", "images", "latents"), f),
        **dict.fromkeys(("candidates", "z2", "texts"), g),
        **{"others": x, "u1": f.detach(), "u2": g.detach()},
        **{"z3": x, "log_scale": torch.zeros(()), "b": torch.zeros(()), "bias": torch.zeros(30)},
        **{"token_ids": torch.arange(24), "offsets": torch.arange(0, 24, 2)},
        "weight": torch.randn(30, 8),
        "labels": torch.arange(12),
        "tokens": torch.ones(12, 4, dtype=torch.long),
        "lengths": torch.full((12,), 4),
        "encode": lambda texts: np.array([[len(text), sum(map(ord, text)) % 97, 1.0] for text in texts]),
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
