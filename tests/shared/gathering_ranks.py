"""Gradients of sentence-transformers' losses that gather across devices, as DDP averages them.

The functions here run on every rank; see ranks.py.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
import torch.distributed as dist
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedTokenizerFast

WIDTH, ROWS = 6, 5  # rows of each rank
DIRECTIONS = ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "all": {"directions": DIRECTIONS, "hardness_mode": "hard_negatives", "hardness_strength": 2.0},
    "in batch": {"directions": DIRECTIONS, "hardness_mode": "in_batch_negatives", "hardness_strength": 2.0},
    "each": {"directions": DIRECTIONS[::2], "partition_mode": "per_direction"},
}
OF_GIST: dict[str, dict[str, Any]] = {
    "default": {},
    "other": {"margin": 0.1, "contrast_positives": False},
}


class Embedding(nn.Module):
    """A model as the library's losses see it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 4))
        self.max_seq_length = 8
        self.tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel()))

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"sentence_embedding": self.linear(features["input_ids"])}

    def __getitem__(self, index: int) -> nn.Module:
        return self.linear


def gradients(module: str, name: str, options: dict[str, Any], columns: int) -> tuple[float, list[Tensor]]:
    """The loss of a rank and its averaged gradients, in float64."""
    torch.manual_seed(3)
    model, *guide = (Embedding().double() for _ in range(1 + ("GIST" in name)))
    loss = getattr(importlib.import_module(module), name)(
        model, *guide, gather_across_devices=True, **options
    )
    loss.model = DistributedDataParallel(model)  # as the trainer does
    generator = torch.Generator().manual_seed(dist.get_rank())
    features = [
        {"input_ids": torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)}
        for _ in range(columns)
    ]
    value = loss(features, torch.zeros(ROWS))
    value.backward()
    return float(value.detach()), [p.grad for p in model.parameters()]


def differences(name: str, columns: int) -> dict[str, float]:
    """How far ours are from the library's, of each option: the loss, and all gradients.

    A loss is the mean of the ranks', and each rank's own with GISTEmbed.
    """
    theirs = "sentence_transformers.sentence_transformer.losses"
    ours = "fastqt.integrations.sentence_transformers"
    found = {}
    for key, options in (OF_GIST if "GIST" in name else OPTIONS).items():
        options = options | ({"mini_batch_size": 2} if name.startswith("Cached") else {})
        (wanted, expected), (value, gradient) = (gradients(x, name, options, columns) for x in (theirs, ours))
        mean = torch.tensor(wanted, dtype=torch.float64)
        if "GIST" not in name:
            dist.all_reduce(mean)
            mean /= dist.get_world_size()
        largest = max(float(x.abs().max()) for x in expected)
        errors = [float((a - b).abs().max()) / largest for a, b in zip(gradient, expected, strict=True)]
        found[key] = max(*errors, abs(value - float(mean)))
    return found
