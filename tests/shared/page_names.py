"""What the blocks of each page find: names that the page leaves to its reader, and files."""

from __future__ import annotations

import lzma
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


def architecture(folder: Path, monkeypatch: MonkeyPatch) -> Names:
    return {"Rows": Rows}


def evaluation(folder: Path, monkeypatch: MonkeyPatch) -> Names:
    """Small files in the formats of MR and STS-B."""
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
    monkeypatch.setattr(sentence_transformers, "SentenceTransformer", lambda name: real(str(folder / "bert")))

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


NAMES: dict[str, Callable[[Path, MonkeyPatch], Names]] = {
    "architecture.md": architecture,
    "distributed.md": distributed,
    "evaluation.md": evaluation,
    "index.md": index,
    "integrations.md": integrations,
}
