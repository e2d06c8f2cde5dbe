"""Mistakes that users make: mypy refuses each line that ends with "# E:" for the reason it names.

`tests/test_types.py` runs mypy on this file, which nothing imports.
"""

import numpy as np
import torch

import fastqt
from fastqt import nn
from fastqt.distributed import Group
from fastqt.sentences.evaluation import load_encoder

f, g = torch.randn(8, 16), torch.randn(8, 16)
labels = torch.arange(8)
array = np.zeros((8, 16))

# Options that have a fixed set of values.
fastqt.info_nce_loss(f, g, exclude="margin")  # E: arg-type
fastqt.contrastive_loss(f, g, reduction="avg")  # E: arg-type
fastqt.contrastive_loss(f, g, diagonal="ones")  # E: arg-type
fastqt.contrastive_loss(f, g, memory="tiny")  # E: arg-type
fastqt.contrastive_loss(f, g, backend="cudnn")  # E: arg-type
fastqt.contrastive_loss(f, g, similarity="cosine")  # E: arg-type
fastqt.simcse_loss(f, g, reduction="mean_of_targets")  # E: arg-type
fastqt.max_margin_loss(f, g, diagonal="zero")  # E: arg-type
fastqt.mixcse_loss(f, g, form="paper")  # E: arg-type
fastqt.curl_block_loss(f, g, negatives="hard")  # E: arg-type
fastqt.multiple_negatives_ranking_loss(f, g, directions=["query_to_documents"])  # E: list-item
fastqt.Guide(f, g, margin_strategy="percent")  # E: arg-type
fastqt.cached_backward([f.sin], [f], fastqt.clip_loss, check="once")  # E: arg-type
Group(exchange="all")  # E: arg-type
nn.Transformer(100, pooling="cls")  # E: arg-type
load_encoder("run", device="gpu")  # E: arg-type

# Names that are not there, of functions and of modules.
fastqt.info_nce_loss(f, g, temperature=0.05)  # E: call-arg
fastqt.contrastive_los(f, g)  # E: attr-defined
nn.CLIPLoss(temprature=3)  # E: call-arg
nn.ContrastiveLoss(document_ids=labels)  # E: call-arg
nn.SimCSE(nn.BagOfWords(100), mix=0.2)  # E: call-arg
nn.MaxMarginLoss(scale=20.0)  # E: call-arg
nn.SimCSELoss(reduction="avg")  # E: arg-type
nn.MixCSELoss(memory="tiny")  # E: arg-type

# Values of other types.
fastqt.info_nce_loss(f, g, scale="20")  # E: arg-type
fastqt.info_nce_loss(f, g, group="world")  # E: arg-type
fastqt.Window("3")  # E: arg-type
fastqt.contrastive_loss(f, g, context_size=1.5)  # E: arg-type
fastqt.contrastive_loss(array, array)  # E: arg-type
fastqt.contrastive_loss(f, g, document_ids=[0, 0, 1, 1])  # E: arg-type
fastqt.supcon_loss(f, fastqt.Diagonal())  # E: arg-type
fastqt.ntxent_loss(f, [0, 1, 2])  # E: arg-type
fastqt.contrastive_loss(f, g, row_negatives=0.2)  # E: arg-type

# Arguments that are missing, or in the wrong place.
fastqt.contrastive_loss(f)  # E: call-arg
fastqt.clip_loss(f, g)  # E: call-arg
fastqt.siglip_loss(f, g, scale=10.0)  # E: call-arg
fastqt.info_nce_loss(f, g, 20.0)  # E: call-arg
fastqt.contrastive_loss(f, g, "mean")  # E: arg-type
nn.CLIPLoss(14.3)  # E: call-arg
