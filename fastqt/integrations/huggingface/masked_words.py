"""The head of a checkpoint that predicts masked words, if its files have one."""

from __future__ import annotations

from pathlib import Path

import torch

from fastqt.integrations.huggingface.loading import tensors_of
from fastqt.nn.masked_words import MaskedWordHead

# By the prefix in a checkpoint's files, what the parameters of the head are called there: BERT's, RoBERTa's.
NAMES = {
    "cls.predictions.": ("transform.dense", "transform.LayerNorm", "bias"),
    "lm_head.": ("dense", "layer_norm", "bias"),
}


def load_masked_word_head(head: MaskedWordHead, directory: str | Path) -> bool:
    """Gives a head the weights of a checkpoint's own one, and says whether there is one of these shapes.

    A checkpoint that was saved as a model without a head has none, and the fresh weights stay.
    """
    for prefix, (dense, norm, bias) in NAMES.items():
        tensors = tensors_of(Path(directory), prefix)
        named = {
            **{f"dense.{each}": tensors.get(f"{dense}.{each}") for each in ("weight", "bias")},
            **{f"norm.{each}": tensors.get(f"{norm}.{each}") for each in ("weight", "bias")},
            "bias": tensors.get(bias),
        }
        weights = head.state_dict()
        if all(tensor is not None and tensor.shape == weights[name].shape for name, tensor in named.items()):
            with torch.no_grad():
                for name, tensor in named.items():
                    weights[name].copy_(tensor)
            return True
    return False
