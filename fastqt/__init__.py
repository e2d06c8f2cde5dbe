"""Exact contrastive losses at the speed of their matrix products, without the score matrix."""

from fastqt import nn
from fastqt.backends import show_config
from fastqt.functional import contrastive_loss, sigmoid_loss
from fastqt.losses import (
    clip_loss,
    curl_block_loss,
    curl_loss,
    gloss_bow_loss,
    gloss_pos_loss,
    info_nce_loss,
    mixcse_loss,
    siglip_loss,
    simcse_loss,
)
from fastqt.max_margin import max_margin_loss
from fastqt.negatives import Mixed
from fastqt.targets import Diagonal, Sparse, Window, smoothed

__version__ = "0.1.0"

__all__ = [
    "Diagonal",
    "Mixed",
    "Sparse",
    "Window",
    "clip_loss",
    "contrastive_loss",
    "curl_block_loss",
    "curl_loss",
    "gloss_bow_loss",
    "gloss_pos_loss",
    "info_nce_loss",
    "max_margin_loss",
    "mixcse_loss",
    "nn",
    "show_config",
    "siglip_loss",
    "sigmoid_loss",
    "simcse_loss",
    "smoothed",
]
