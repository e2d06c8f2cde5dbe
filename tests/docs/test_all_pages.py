"""Blocks of Python of all pages run, and commands are those that the command line takes.

A block that cannot run with its page says why in a comment above it: <!-- not run: it needs a GPU -->
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import lzma
import re
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fastqt
from fastqt.problem import Rows
from fastqt.sentences.cli import main
from fastqt.sentences.cli.arguments import build_parser
from tests.shared.page_blocks import PAGES, ROOT, blocks, commands, headings, of_fastqt

LINES = ["the cat sat.", "a cat", "", "a mat", "the mats sat on a cat."] * 30
SMALL = ["--word-dim", "4", "--batch-size", "20", "--steps", "2"]

Names = dict[str, Any]
MonkeyPatch = pytest.MonkeyPatch


def embeddings(*names: str, D: int = 8) -> Names:
    """Leaves of 12 rows each, the same in each run."""
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(12, D, generator=generator, requires_grad=True) for name in names}


def index(folder: Path, monkeypatch: MonkeyPatch) -> Names:
    return {**embeddings("queries", "candidates"), "temperature": 0.05}


def readme(folder: Path, monkeypatch: MonkeyPatch) -> Names:
    ids = torch.arange(12)
    return {
        **embeddings("f", "g", "x", "hard", "z1", "z2", "z3", "images", "texts"),
        **embeddings("queries", "candidates", "weight"),
        **{"fastqt": fastqt, "temperature": 0.05, "log_scale": torch.zeros((), requires_grad=True)},
        **{"labels": ids, "ids": ids // 6, "document_ids": ids // 6, "vocab_size": 20},
        **{"tokens": torch.ones(12, 4, dtype=torch.long), "lengths": torch.full((12,), 4)},
    }


def architecture(folder: Path, monkeypatch: MonkeyPatch) -> Names:
    return {"Rows": Rows}


def evaluation(folder: Path, monkeypatch: MonkeyPatch) -> Names:
    for name, row in (("MR/all", "{0}\tword{0} {1}\n"), ("STSB/dev", "x\t{1}\tword{1}\tword{0}\n")):
        path = folder / f"{name}.tsv"
        path.parent.mkdir()
        path.write_text("".join(row.format(label, number) for label in (0, 1) for number in range(12)))
    (folder / "STSB" / "test.tsv").write_text((folder / "STSB" / "dev.tsv").read_text())
    return {"encode": lambda texts: np.array([[len(text), "1" in text] for text in texts]), "data": folder}


class Towers(nn.Module):
    """Two encoders, and CLIP's temperature; or, of images alone, an encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.images, self.texts = nn.Linear(6, 4), nn.Linear(5, 4)
        self.log_scale = nn.Parameter(torch.zeros(()))

    def forward(self, images: torch.Tensor, texts: torch.Tensor | None = None) -> Any:
        if texts is None:
            return self.images(images)
        return self.images(images), self.texts(texts), self.log_scale.exp()


def distributed(folder: Path, monkeypatch: MonkeyPatch) -> Names:
    """A group of one process, which is there before the page makes it."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder / 'store'}", rank=0, world_size=1
    )
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda: None)
    towers = Towers()
    return {
        **{"fastqt": fastqt, "torch": torch, "tokens": torch.randn(8, 6)},
        **embeddings("a", "b"),
        "log_scale": torch.zeros((), requires_grad=True),
        "process_group": None,
        "Towers": lambda: towers,
        "DistributedDataParallel": nn.parallel.DistributedDataParallel,
        "loader": [(torch.randn(4, 6), torch.randn(4, 5)) for _ in range(2)],
        "optimizer": torch.optim.SGD(towers.parameters(), lr=0.1),
    }


class Clip(nn.Module):
    """A model with the outputs of open_clip's, whose images and texts are embeddings already."""

    def forward(self, images: Tensor, texts: Tensor) -> dict[str, Tensor]:
        return {"image_features": images, "text_features": texts, "logit_scale": torch.tensor(10.0)}


def integrations(folder: Path, monkeypatch: MonkeyPatch) -> Names:
    """Tiny models under the names that the page downloads or reads."""
    import datasets
    import sentence_transformers
    import transformers

    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "the", "cat", "sat", "on", "a", "mat", "##s", "."]
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.BertConfig(vocab_size=len(vocabulary), max_position_embeddings=32, **sizes)
    transformers.BertModel(config).save_pretrained(folder / "bert")
    ids = {word: number for number, word in enumerate(vocabulary)}
    transformers.BertTokenizer(vocab=ids).save_pretrained(folder / "bert")
    real = sentence_transformers.SentenceTransformer
    monkeypatch.setattr(
        sentence_transformers,
        "SentenceTransformer",
        lambda *names, **options: real(str(folder / "bert")) if names else real(**options),
    )

    (folder / "train.py").write_text("import sentence_transformers\n")
    (folder / "novels.txt.xz").write_bytes(lzma.compress("\n".join(LINES).encode()))
    (folder / "novels.txt").write_text("\n".join(LINES))
    assert main(["train", "novels.txt", "--out", "MODEL", *SMALL]) == 0
    columns = {
        name: ["the cat sat.", "a mat", "a cat", "the mats"] for name in ("anchor", "positive", "negative")
    }
    open_clip = types.SimpleNamespace(create_model=lambda name, output_dict: Clip())
    return {
        **embeddings("queries", "keys", D=128),
        **{"fastqt": fastqt, "torch": torch, "triplets": datasets.Dataset.from_dict(columns)},
        **{"images": torch.randn(4, 8), "texts": torch.randn(4, 8)},
        **{"rank": 0, "world_size": 1, "open_clip": open_clip, "device": "cpu"},
    }


def static_embeddings(folder: Path, monkeypatch: MonkeyPatch) -> Names:
    texts = [line for line in LINES if line]
    pairs = itertools.pairwise(texts)
    (folder / "pairs.tsv").write_text("".join(f"{query}\t{positive}\n" for query, positive in pairs))
    return {}


NAMES: dict[str, Callable[[Path, MonkeyPatch], Names]] = {
    "README.md": readme,
    "architecture.md": architecture,
    "distributed.md": distributed,
    "evaluation.md": evaluation,
    "index.md": index,
    "integrations.md": integrations,
    "how-to/static-embeddings.md": static_embeddings,
}


ALL = {"README.md": ROOT / "README.md", **PAGES}
SLOW = {
    *("distributed.md", "evaluation.md", "integrations.md", "migrating.md"),
    *(f"how-to/{name}.md" for name in ("embed", "evaluate", "search", "export", "static-embeddings")),
}
# Libraries that a page's blocks import beside torch and fastqt.
NEEDS = {
    "migrating.md": ("sentence_transformers", "pytorch_metric_learning"),
    "how-to/evaluate.md": ("sklearn",),
    "how-to/static-embeddings.md": ("sentence_transformers", "datasets", "accelerate"),
    "how-to/export.md": ("sentence_transformers", "onnx", "onnxscript", "onnxruntime"),
}
# A page whose blocks of Python test_pages.py compares with each other.
COMPARED = "quick-start.md"

SHELLS = ("sh", "bash", "shell", "console")
MAKE = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)


def with_python() -> list:
    return [
        pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else [])
        for name, path in ALL.items()
        if name != COMPARED and any(not block.reason for block in blocks(path, "python"))
    ]


@pytest.fixture
def as_before():
    """No process group is left, and torch draws on as if nothing had been drawn."""
    before = torch.random.get_rng_state()
    yield
    torch.random.set_rng_state(before)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:.*pin_memory.*")
@pytest.mark.parametrize("name", with_python())
def test_python_runs(name, tmp_path, monkeypatch, as_before):
    for library in NEEDS.get(name, ()):
        pytest.importorskip(library, reason=f"{library} is not installed")
    monkeypatch.chdir(tmp_path)
    names = NAMES[name](tmp_path, monkeypatch) if name in NAMES else {}
    names["__name__"] = "__main__"
    for block in blocks(ALL[name], "python"):
        if not block.reason:
            exec(compile("\n" * (block.line - 1) + block.code, str(ALL[name]), "exec"), names)


def all_blocks() -> list:
    return [
        pytest.param(block, id=f"{name}-{number}")
        for name, path in ALL.items()
        for number, block in enumerate(blocks(path, *SHELLS))
    ]


@pytest.mark.parametrize("block", all_blocks())
def test_commands_are_taken(block, capsys):
    """An option that does not exist, or a value of a wrong kind, ends the parser."""
    for command in commands(block.code):
        if command[0] == "eval":  # of what a command prints
            command = command[1].removeprefix("$(").removesuffix(")").split()
        if (arguments := of_fastqt(command)) is not None:
            with contextlib.suppress(SystemExit):
                build_parser().parse_args([word for word in arguments if word != "…"])
            assert capsys.readouterr().err == "", command
        elif command[0] == "make":
            targets = [word for word in command[1:] if "=" not in word]
            assert set(targets) <= set(MAKE), command
        elif command[0] == "python":
            name = command[2] if command[1] == "-m" else command[1]
            known = importlib.util.find_spec(name) if command[1] == "-m" else (ROOT / name).exists()
            assert known, command
        else:
            assert command[0] in ("pip", "torchrun", "cd", "git", "source"), command


@pytest.mark.parametrize("name", PAGES)
def test_reasons_stand_above_blocks(name):
    """A comment that is not directly above a block would have no effect."""
    text = PAGES[name].read_text()
    reasons = [block.reason for block in blocks(PAGES[name], "python", *SHELLS) if block.reason]
    assert len(reasons) == text.count("<!-- not run: ")
    assert all(len(reason) > 10 for reason in reasons)


def test_links_lead_to_files_and_headings():
    """On GitHub too, where pages are read as they are."""
    for name, path in ALL.items():
        text = re.sub(r"^ *```.*?^ *```", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
        for target, anchor in re.findall(r"\]\((?!\w+:)([^)#\s]*)(?:#([^)\s]*))?\)", text):
            found = (path.parent / target).resolve() if target else path
            assert found.exists(), f"{name}: {target}"
            if anchor and found.suffix == ".md":
                assert anchor in headings(found), f"{name}: {target}#{anchor}"
