"""What the examples read: a file of your own, or toy data that is made here."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from fastqt.text import Vocabulary, pad
from fastqt.tools.demo import read_topics


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
        path: a text with a sentence on each line; by default the prose of Python's language reference.
        words: the size of the vocabulary that is made of it.
    """

    def __init__(self, path: str | None = None, words: int = 5_000) -> None:
        if path is None:
            self.sentences = [sentence for topic in read_topics() for sentence in topic]
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
