"""The losses of the literature, each as targets, negatives or a link of the two general ones.

All take `reduction` ("mean" over rows, "sum", or "none" for (N,)), and where they rest on
`contrastive_loss` or `sigmoid_loss` also the `memory` and `backend` of these. None forms a score matrix.
"""

from fastqt.losses.clip import clip_loss
from fastqt.losses.curl import curl_block_loss, curl_loss
from fastqt.losses.gloss import gloss_bow_loss, gloss_pos_loss
from fastqt.losses.info_nce import info_nce_loss
from fastqt.losses.max_margin import max_margin_loss
from fastqt.losses.mixcse import mixcse_loss
from fastqt.losses.siglip import siglip_loss
from fastqt.losses.simcse import simcse_loss

__all__ = [
    "clip_loss",
    "curl_block_loss",
    "curl_loss",
    "gloss_bow_loss",
    "gloss_pos_loss",
    "info_nce_loss",
    "max_margin_loss",
    "mixcse_loss",
    "siglip_loss",
    "simcse_loss",
]
