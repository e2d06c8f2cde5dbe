"""The losses of the literature. Each is a choice of targets, negatives or link of the two general losses.

Those that are sums over rows take `reduction`: "mean" over the rows, "sum", or "none" for the losses of the
rows (N,). Those that are computed by `contrastive_loss` or `sigmoid_loss` also take their `memory` and
`backend`. None forms the score matrix.
"""

from fastqt.losses.binary_window import binary_window_loss
from fastqt.losses.clip import clip_loss
from fastqt.losses.cosent import angle_loss, cosent_loss
from fastqt.losses.curl import curl_block_loss, curl_loss
from fastqt.losses.dcl import dcl_loss
from fastqt.losses.distillation import distillation_loss
from fastqt.losses.flops import flops_loss
from fastqt.losses.gist_embed import gist_embed_loss
from fastqt.losses.gloss import gloss_bow_loss, gloss_pos_loss
from fastqt.losses.hcl import hcl_loss
from fastqt.losses.info_nce import info_nce_loss
from fastqt.losses.lsep import lsep_loss
from fastqt.losses.margin_softmax import arcface_loss, cosface_loss
from fastqt.losses.max_margin import max_margin_loss
from fastqt.losses.maxsim import maxsim_loss
from fastqt.losses.mixcse import mixcse_loss
from fastqt.losses.negative_sampling import negative_sampling_loss
from fastqt.losses.ntxent import ntxent_loss
from fastqt.losses.ranking import multiple_negatives_ranking_loss
from fastqt.losses.siglip import siglip_loss
from fastqt.losses.simcse import simcse_loss
from fastqt.losses.similarity_distillation import similarity_distillation_loss
from fastqt.losses.spread_out import spread_out_loss
from fastqt.losses.supcon import supcon_loss
from fastqt.losses.teacher_scores import margin_mse_loss, score_distillation_loss
from fastqt.losses.token_scores import maxsim_scores

__all__ = [
    "angle_loss",
    "arcface_loss",
    "binary_window_loss",
    "clip_loss",
    "cosent_loss",
    "cosface_loss",
    "curl_block_loss",
    "curl_loss",
    "dcl_loss",
    "distillation_loss",
    "flops_loss",
    "gist_embed_loss",
    "gloss_bow_loss",
    "gloss_pos_loss",
    "hcl_loss",
    "info_nce_loss",
    "lsep_loss",
    "margin_mse_loss",
    "max_margin_loss",
    "maxsim_loss",
    "maxsim_scores",
    "mixcse_loss",
    "multiple_negatives_ranking_loss",
    "negative_sampling_loss",
    "ntxent_loss",
    "score_distillation_loss",
    "siglip_loss",
    "simcse_loss",
    "similarity_distillation_loss",
    "spread_out_loss",
    "supcon_loss",
]
