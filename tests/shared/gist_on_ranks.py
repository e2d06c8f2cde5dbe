"""GISTEmbed losses for sentence-transformers, whose ranks gather candidates, beside the library's.

The function here runs on every rank (see ranks.py).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

ROWS, WIDTH = 4, 6


def gathered(options: dict[str, Any]) -> dict[str, float]:
    """By class and column, how far the value and the gradients of this rank are from the library's."""
    from sentence_transformers.sentence_transformer import losses as library

    from fastqt.integrations.sentence_transformers import CachedGISTEmbedLoss, GISTEmbedLoss

    generator = torch.Generator().manual_seed(dist.get_rank())
    columns = [torch.randn(ROWS, WIDTH, generator=generator) for _ in range(3)]
    of_guide = [torch.randn(ROWS, WIDTH, generator=generator) for _ in range(3)]
    errors = {}
    for ours, theirs in (
        (GISTEmbedLoss, library.GISTEmbedLoss),
        (CachedGISTEmbedLoss, library.CachedGISTEmbedLoss),
    ):
        results = []
        for kind in (ours, theirs):
            leaves = [x.clone().requires_grad_() for x in columns]
            value = _value(_made(kind, options), leaves, of_guide)
            value.backward()
            results.append([value.detach(), *(x.grad for x in leaves)])
        for name, a, b in zip(("value", "anchors", "positives", "negatives"), *results, strict=True):
            errors[f"{ours.__name__} {name}"] = float((a - b).abs().max() / b.abs().max())
    return errors


def _made(kind: Any, options: dict[str, Any]) -> Any:
    """A loss whose models hand on the embeddings that they are given."""
    loss = kind.__new__(kind)
    torch.nn.Module.__init__(loss)
    made = {
        "model": lambda features: {"sentence_embedding": features["model"]},
        "guide": lambda features: {"sentence_embedding": features["guide"]},
        "similarity_fct": torch.nn.CosineSimilarity(dim=-1),
        "cross_entropy_loss": torch.nn.CrossEntropyLoss(),
        "temperature": 0.05,
        "margin": 0.0,
        "margin_strategy": "absolute",
        "contrast_anchors": True,
        "contrast_positives": True,
        "must_retokenize": False,
        "gather_across_devices": True,
        "mini_batch_size": 3,
        "show_progress_bar": False,
    }
    for name, value in {**made, **options}.items():
        setattr(loss, name, value)
    return loss


def _value(loss: Any, columns: list[torch.Tensor], of_guide: list[torch.Tensor]) -> torch.Tensor:
    if hasattr(loss, "calculate_loss"):
        parts = [list(x.split(3)) for x in columns]
        found: torch.Tensor = loss.calculate_loss(parts, [list(x.split(3)) for x in of_guide])
        return found
    features = [{"model": x, "guide": g} for x, g in zip(columns, of_guide, strict=True)]
    value: torch.Tensor = loss(features, None)
    return value
