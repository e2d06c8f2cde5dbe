"""Exact contrastive losses at the speed of their matrix products, without the score matrix."""

from fastqt import nn
from fastqt._version import __version__
from fastqt.engines import show_config
from fastqt.functional import contrastive_loss, log_sum_exp, sigmoid_loss
from fastqt.losses import (
    clip_loss,
    curl_block_loss,
    curl_loss,
    gloss_bow_loss,
    gloss_pos_loss,
    info_nce_loss,
    max_margin_loss,
    mixcse_loss,
    siglip_loss,
    simcse_loss,
)
from fastqt.negatives import Mixed
from fastqt.targets import Diagonal, Sparse, Window, smoothed

__all__ = [
    "Diagonal",
    "Mixed",
    "Sparse",
    "Window",
    "__version__",
    "clip_loss",
    "contrastive_loss",
    "curl_block_loss",
    "curl_loss",
    "gloss_bow_loss",
    "gloss_pos_loss",
    "info_nce_loss",
    "log_sum_exp",
    "max_margin_loss",
    "mixcse_loss",
    "nn",
    "show_config",
    "siglip_loss",
    "sigmoid_loss",
    "simcse_loss",
    "smoothed",
]


def __dir__() -> list[str]:
    """The public names, without the modules that importing them brings along."""
    return __all__
