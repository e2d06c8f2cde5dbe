"""A valid call of every public function that takes tensors, with all of its tensor arguments."""

import torch

import fastqt
from fastqt.nn import GRU, BagOfWords, Gloss, GRUEncoder, LSTMEncoder, MultiChannel, SkipThoughts, Transformer

N, D = 6, 4
F, G, H = (torch.randn(N, D, generator=torch.Generator().manual_seed(seed)) for seed in range(3))
IDS = torch.arange(N) // 2
TOKENS = torch.tensor([0, 1, 2, 3, 4, 5])
SENTENCES = torch.arange(2 * N).reshape(N, 2) % N

# Every public function and all of its tensor arguments.
OF_BOTH = {"queries": F, "candidates": G, "negatives": H, "row_negatives": H, "exclude": F @ G.T > 99}
CALLS = {
    "contrastive": (fastqt.contrastive_loss, {**OF_BOTH, "document_ids": IDS, "bias": F[:, 0]}),
    "contrastive of targets": (
        fastqt.contrastive_loss,
        {**OF_BOTH, "targets": TOKENS, "scale": F[0, 0].abs(), "diagonal": "keep"},
    ),
    "sigmoid": (fastqt.sigmoid_loss, {**OF_BOTH, "document_ids": IDS, "bias": F[:, 0]}),
    "sigmoid of targets": (fastqt.sigmoid_loss, {**OF_BOTH, "targets": (F @ G.T).abs()}),
    "info_nce": (fastqt.info_nce_loss, {"queries": F, "candidates": G, "negatives": H}),
    "simcse": (fastqt.simcse_loss, {"z1": F, "z2": G, "z3": H}),
    "ranking": (fastqt.multiple_negatives_ranking_loss, {"queries": F, "documents": G}),
    "mixcse": (fastqt.mixcse_loss, {"z1": F, "z2": G}),
    "clip": (fastqt.clip_loss, {"a": F, "b": G, "scale": 2.0}),
    "siglip": (fastqt.siglip_loss, {"a": F, "b": G, "scale": 2.0, "bias": F[0, 0]}),
    "max_margin": (fastqt.max_margin_loss, {"queries": F, "candidates": G, "document_ids": IDS}),
    "dcl": (fastqt.dcl_loss, {"z1": F, "z2": G, "scale": F[0, 0].abs()}),
    "hcl": (fastqt.hcl_loss, {"z1": F, "z2": G, "scale": F[0, 0].abs()}),
    "distillation": (
        fastqt.distillation_loss,
        {"queries": F, "candidates": G, "scale": F[0, 0].abs()}
        | {"teacher_queries": H, "teacher_candidates": F},
    ),
    "maxsim": (
        fastqt.maxsim_loss,
        {"queries": F[:, None], "documents": G[:, None], "scale": F[0, 0].abs()}
        | {"query_mask": F[:, :1] < 9, "document_mask": F[:, :1] < 9},
    ),
    "cosface": (
        fastqt.cosface_loss,
        {"embeddings": F, "weight": G, "labels": TOKENS % N, "scale": F[0, 0].abs()},
    ),
    "arcface": (
        fastqt.arcface_loss,
        {"embeddings": F, "weight": G, "labels": TOKENS % N, "scale": F[0, 0].abs()},
    ),
    "curl": (fastqt.curl_loss, {"queries": F, "positives": G, "negatives": H}),
    "curl_block": (fastqt.curl_block_loss, {"queries": F, "candidates": G, "document_ids": IDS}),
    "binary_window": (fastqt.binary_window_loss, {"queries": F, "candidates": G, "document_ids": IDS}),
    "negative_sampling": (
        fastqt.negative_sampling_loss,
        {"queries": F, "candidates": G, "positives": TOKENS, "negatives": SENTENCES, "scale": F[0, 0].abs()},
    ),
    "Noise": (fastqt.Noise, {"counts": F[:, 0].abs()}),
    "gloss_bow": (
        fastqt.gloss_bow_loss,
        {"latents": F, "weight": G, "bias": F[:, 0], "token_ids": TOKENS, "offsets": TOKENS},
    ),
    "gloss_pos": (
        fastqt.gloss_pos_loss,
        {
            **{"latents": F, "positions": H[:2], "weight": G, "bias": F[:, 0]},
            **{"token_ids": SENTENCES, "lengths": torch.full((N,), 2)},
        },
    ),
    "supcon": (
        fastqt.supcon_loss,
        {"embeddings": F, "labels": IDS, "candidates": G, "candidate_labels": IDS, "scale": F[0, 0].abs()},
    ),
    "ntxent": (
        fastqt.ntxent_loss,
        {"embeddings": F, "labels": IDS * 0, "candidates": G, "candidate_labels": IDS},
    ),
    "gist_embed": (
        fastqt.gist_embed_loss,
        {"anchors": F, "positives": G, "negatives": H}
        | {"guide_anchors": G, "guide_positives": H, "guide_negatives": F},
    ),
    "lsep": (fastqt.lsep_loss, {"scores": F[:, 0], "labels": IDS, "scale": F[0, 0].abs()}),
    "cosent": (fastqt.cosent_loss, {"a": F, "b": G, "labels": IDS, "scale": F[0, 0].abs()}),
    "angle": (fastqt.angle_loss, {"a": F, "b": G, "labels": H[:, 0]}),
    "spread_out": (fastqt.spread_out_loss, {"embeddings": F}),
    "similarity_distillation": (
        fastqt.similarity_distillation_loss,
        {"embeddings": F, "teacher_embeddings": G, "candidates": H, "teacher_candidates": G},
    ),
    "Guide": (fastqt.Guide, {"queries": F, "candidates": G, "negatives": H, "thresholds": F[:, 0]}),
    "Same": (fastqt.Same, {"query_ids": IDS, "candidate_ids": IDS, "negative_ids": IDS}),
    "Within": (fastqt.Within, {"query_ids": IDS, "candidate_ids": IDS, "negative_ids": IDS}),
    "Above": (fastqt.Above, {"thresholds": F[:, 0]}),
    "Mixed": (fastqt.Mixed, {"partners": TOKENS}),
    "Window": (fastqt.Window, {"document_ids": IDS}),
    "smoothed": (fastqt.smoothed, {"targets": TOKENS}),
    "Sparse": (fastqt.Sparse, {"csr_tensor": torch.eye(N).to_sparse_csr()}),
    "BagOfWords": (BagOfWords(N, D), {"tokens": SENTENCES, "lengths": torch.full((N,), 2)}),
    "GRUEncoder": (GRUEncoder(N, D, D), {"tokens": SENTENCES, "lengths": torch.full((N,), 2)}),
    "LSTMEncoder": (LSTMEncoder(N, D, D), {"tokens": SENTENCES, "lengths": torch.full((N,), 2)}),
    "Transformer": (
        Transformer(N, D, heads=2, layers=1, dropout=0.0),
        {"tokens": SENTENCES, "lengths": torch.full((N,), 2)},
    ),
    "MultiChannel": (MultiChannel, {"vectors": F, "hidden_size": 4}),
    "GRU": (GRU(D, D), {"input": F, "hx": G[:1]}),
    "SkipThoughts": (SkipThoughts(N, D, D).loss, {"tokens": SENTENCES, "lengths": torch.full((N,), 2)}),
    "Gloss": (
        Gloss(N, D, sentences=N),
        {"rows": TOKENS, "tokens": SENTENCES, "lengths": torch.full((N,), 2)},
    ),
}
