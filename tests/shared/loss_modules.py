"""Each loss module with its function, options, and a batch to call both with."""

import pytest
import torch

import fastqt
from fastqt import nn

N, D = 9, 4
GENERATOR = torch.Generator().manual_seed(0)
QUERIES, CANDIDATES, OTHERS = (torch.randn(N, D, generator=GENERATOR) for _ in range(3))
BIAS = torch.randn(N, generator=GENERATOR)
IDS = torch.arange(N) // 5
TOKENS = torch.randint(N, (N, 3), generator=GENERATOR)

# Module, function, options, positional and keyword arguments of a batch.
MODULES = {
    "contrastive": (
        nn.ContrastiveLoss,
        fastqt.contrastive_loss,
        {"context_size": 2, "scale": 3.0, "normalize": True, "reduction": "none"},
        (QUERIES, CANDIDATES),
        {"document_ids": IDS, "negatives": OTHERS, "bias": BIAS},
    ),
    "sigmoid": (
        nn.SigmoidLoss,
        fastqt.sigmoid_loss,
        {"scale": 3.0, "diagonal": "exclude", "memory": "low"},
        (QUERIES, CANDIDATES),
        {"exclude": torch.eye(N).roll(4, 0).bool(), "bias": -1.0},
    ),
    "info_nce": (
        nn.InfoNCELoss,
        fastqt.info_nce_loss,
        {"normalize": False, "scale": 2.0, "label_smoothing": 0.2},
        (QUERIES, CANDIDATES),
        {"negatives": OTHERS},
    ),
    "simcse": (
        nn.SimCSELoss,
        fastqt.simcse_loss,
        {"hard_negative_weight": 1.5},
        (QUERIES, CANDIDATES, OTHERS),
        {},
    ),
    "ranking": (
        nn.MultipleNegativesRankingLoss,
        fastqt.multiple_negatives_ranking_loss,
        {
            **{"directions": ("query_to_doc", "doc_to_query"), "partition_mode": "per_direction"},
            **{"hardness_mode": "all_negatives", "hardness_strength": 3.0},
        },
        (QUERIES, CANDIDATES),
        {},
    ),
    "mixcse": (
        nn.MixCSELoss,
        fastqt.mixcse_loss,
        {"form": "released", "mix": 0.4, "reduction": "sum"},
        (QUERIES, CANDIDATES),
        {},
    ),
    "clip": (nn.CLIPLoss, fastqt.clip_loss, {"scale": 5.0, "normalize": False}, (QUERIES, CANDIDATES), {}),
    "siglip": (
        nn.SigLIPLoss,
        fastqt.siglip_loss,
        {"scale": 5.0, "bias": -2.0, "reduction": "none"},
        (QUERIES, CANDIDATES),
        {},
    ),
    "max_margin": (
        nn.MaxMarginLoss,
        fastqt.max_margin_loss,
        {"margin": 0.5, "reduction": "sum"},
        (QUERIES, CANDIDATES),
        {"document_ids": torch.arange(len(QUERIES)) // 3},
    ),
    "binary_window": (
        nn.BinaryWindowLoss,
        fastqt.binary_window_loss,
        {"context_size": 2, "reduction": "none"},
        (QUERIES, CANDIDATES),
        {"document_ids": IDS},
    ),
    "negative_sampling": (
        nn.NegativeSamplingLoss,
        fastqt.negative_sampling_loss,
        {"scale": 2.0, "reduction": "sum"},
        (QUERIES, CANDIDATES, TOKENS[:, 0], TOKENS),
        {},
    ),
    "dcl": (nn.DCLLoss, fastqt.dcl_loss, {"sigma": 0.5}, (QUERIES, CANDIDATES), {}),
    "hcl": (nn.HCLLoss, fastqt.hcl_loss, {"beta": 0.5, "tau_plus": 0.0}, (QUERIES, CANDIDATES), {}),
    "distillation": (
        nn.DistillationLoss,
        fastqt.distillation_loss,
        {"teacher_scale": 5.0},
        (QUERIES, CANDIDATES, CANDIDATES, QUERIES),
        {},
    ),
    "maxsim": (
        nn.MaxSimLoss,
        fastqt.maxsim_loss,
        {"normalize": False, "scale": 0.5},
        (QUERIES[:, None], torch.stack([CANDIDATES, OTHERS], 1)),
        {"document_mask": BIAS[:, None].expand(N, 2) > torch.tensor([-9.0, 0.0])},
    ),
    "cosface": (nn.CosFaceLoss, fastqt.cosface_loss, {"margin": 0.2}, (QUERIES, CANDIDATES, IDS), {}),
    "arcface": (nn.ArcFaceLoss, fastqt.arcface_loss, {"margin": 0.3}, (QUERIES, CANDIDATES, IDS), {}),
    "curl": (nn.CURLLoss, fastqt.curl_loss, {"reduction": "sum"}, (QUERIES, CANDIDATES, OTHERS), {}),
    "curl_block": (
        nn.CURLBlockLoss,
        fastqt.curl_block_loss,
        {"negatives": "complement", "context_size": 2},
        (QUERIES, CANDIDATES),
        {"document_ids": IDS},
    ),
    "gloss_bow": (
        nn.GlossBagOfWordsLoss,
        fastqt.gloss_bow_loss,
        {"reduction": "sum"},
        (QUERIES, CANDIDATES, BIAS, TOKENS.flatten(), torch.arange(0, 3 * N, 3)),
        {},
    ),
    "gloss_pos": (
        nn.GlossPositionalLoss,
        fastqt.gloss_pos_loss,
        {"reduction": "none"},
        (QUERIES, OTHERS[:3], CANDIDATES, BIAS, TOKENS),
        {"lengths": torch.arange(N) % 4},
    ),
    "supcon": (
        nn.SupConLoss,
        fastqt.supcon_loss,
        {"scale": 5.0, "reduction": "none"},
        (QUERIES, IDS),
        {"candidates": CANDIDATES, "candidate_labels": IDS.flip(0)},
    ),
    "lsep": (nn.LSEPLoss, fastqt.lsep_loss, {"scale": 3.0}, (BIAS, IDS), {}),
    "cosent": (nn.CoSENTLoss, fastqt.cosent_loss, {"scale": 5.0}, (QUERIES, CANDIDATES, BIAS), {}),
    "angle": (nn.AnglELoss, fastqt.angle_loss, {"scale": 5.0}, (QUERIES, CANDIDATES, IDS), {}),
    "spread_out": (nn.SpreadOutLoss, fastqt.spread_out_loss, {"mean_weight": 0.5}, (QUERIES,), {}),
    "similarity_distillation": (
        nn.SimilarityDistillationLoss,
        fastqt.similarity_distillation_loss,
        {"normalize": False},
        (QUERIES, CANDIDATES),
        {"candidates": OTHERS[:5], "teacher_candidates": CANDIDATES[:5]},
    ),
    "ntxent": (nn.NTXentLoss, fastqt.ntxent_loss, {"normalize": False, "memory": "low"}, (QUERIES, IDS), {}),
}
each = pytest.mark.parametrize("name", MODULES)
