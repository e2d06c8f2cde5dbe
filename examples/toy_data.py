"""What the examples read: a file of your own, or toy data that is made here."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from library_text import folders, read_library
from torch import Tensor

from fastqt.sentences.text import Vocabulary, pad


def start_process_group() -> torch.device:
    """Joins the processes that torchrun has started, or makes a group of one; returns this one's device."""
    for name, value in (
        ("RANK", "0"),
        ("WORLD_SIZE", "1"),
        ("MASTER_ADDR", "127.0.0.1"),
        ("MASTER_PORT", "0"),
    ):
        os.environ.setdefault(name, value)
    if not torch.cuda.is_available():
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    return device


class Text:
    """Sentences as token ids, in the order in which they were written.

    Args:
        path: a text with a sentence on each line; by default 2,000 from docstrings of Python's library.
        words: the size of the vocabulary that is made of it.
    """

    def __init__(self, path: str | None = None, words: int = 5_000) -> None:
        if path is None:
            modules = read_library(folders()[:1])
            self.sentences = [sentence for module in modules for sentence in module][:2000]
        else:
            with open(path, encoding="utf-8") as file:
                self.sentences = [line.strip() for line in file if line.strip()]
        self.vocabulary = Vocabulary.build(self.sentences, words, max_length=32)

    def __len__(self) -> int:
        return len(self.sentences)

    def batch(
        self, rows: Sequence[int] | Tensor, device: torch.device | str = "cpu"
    ) -> tuple[Tensor, Tensor]:
        """The token ids (B, L) and the lengths (B,) of some sentences."""
        tokens, lengths = pad(self.vocabulary.encode([self.sentences[int(row)] for row in rows]))
        return tokens.to(device), lengths.to(device)


def write_library(folder: Path) -> list[str]:
    """Writes three corpora: the prose in the docstrings of Python's library, of NumPy and of PyTorch."""
    corpora = []
    for name, root in zip(("python", "numpy", "pytorch"), folders(), strict=True):
        documents = read_library([root])
        corpora.append(str(folder / f"{name}.txt"))
        Path(corpora[-1]).write_text("\n\n".join("\n".join(sentences) for sentences in documents))
    return corpora


def pictures_and_captions(path: str | None = None) -> tuple[Tensor, Tensor]:
    """Pictures (N, channels, height, width) and their captions (N, words), as token ids.

    Args:
        path: an .npz file with arrays `pictures` (N, channels, height, width) and `captions` (N, words); by
            default 1,024 pictures of a bright spot, whose captions say where it is.
    """
    if path is not None:
        arrays = np.load(path)
        return torch.from_numpy(arrays["pictures"]).float(), torch.from_numpy(arrays["captions"]).long()
    generator = torch.Generator().manual_seed(0)
    places = torch.rand(1024, 2, generator=generator)
    cells = torch.arange(16) / 15
    distance = (cells[:, None] - places[:, 0, None, None]) ** 2 + (cells - places[:, 1, None, None]) ** 2
    noise = torch.rand(1024, 16, 16, generator=generator)
    pictures = (torch.exp(-20 * distance) + noise / 4).unsqueeze(1)
    captions = (places * 16).long() + torch.tensor([1, 17])  # 16 words for the row, 16 others for the column
    return pictures, captions
