"""Uses that mypy accepts: the mistakes of `mistakes.py`, corrected. `tests/test_types.py` runs mypy on it."""

import numpy as np
import torch

import fastqt
from fastqt import nn
from fastqt.distributed import Group
from fastqt.options import Memory, Reduction
from fastqt.sentences.evaluation import load_encoder

f, g = torch.randn(8, 16), torch.randn(8, 16)
labels = torch.arange(8)
array = np.zeros((8, 16))
log_scale = torch.tensor(2.66, requires_grad=True)

fastqt.contrastive_loss(f, g, reduction="mean_of_targets", diagonal="exclude", memory=2**28)
fastqt.contrastive_loss(f, g, diagonal="keep", similarity="euclidean", backend="reference", memory="low")
fastqt.contrastive_loss(f, g, labels, diagonal="keep", bias=log_scale)
fastqt.contrastive_loss(f, g, context_size=2, document_ids=torch.tensor([0, 0, 1, 1]))
fastqt.contrastive_loss(torch.from_numpy(array), torch.from_numpy(array))
fastqt.contrastive_loss(f, g, fastqt.Diagonal(), diagonal="keep", row_negatives=fastqt.Mixed(0.2))
fastqt.simcse_loss(f, g, f, hard_negative_weight=1.0, reduction="none")
fastqt.max_margin_loss(f, g, fastqt.Window(3), diagonal="exclude")
fastqt.mixcse_loss(f, g, form="released", blocks="candidates", masked_cell="exclude")
fastqt.curl_block_loss(f, g, negatives="complement")
fastqt.multiple_negatives_ranking_loss(f, [g, f], directions=("query_to_doc", "doc_to_query"))
fastqt.cached_backward([f.sin], [f], fastqt.clip_loss, check="always")
fastqt.info_nce_loss(f, g, scale=1 / 0.05, exclude=fastqt.Guide(f, g, margin_strategy="relative"))
fastqt.clip_loss(f, g, scale=log_scale.exp())
fastqt.siglip_loss(f, g, scale=10, bias=-10)
fastqt.supcon_loss(f, labels)
fastqt.ntxent_loss(f, labels, group=Group(shards="uneven", edges="cut", exchange="ring"))
nn.CLIPLoss(scale=14.3, max_scale=None)
nn.ContrastiveLoss(context_size=1)(f, g, document_ids=labels)
nn.SimCSE(nn.Transformer(100, pooling="first"), scale=1 / 0.05, group=torch.distributed.group.WORLD)
load_encoder("run", device="cpu")


def training_loss(reduction: Reduction, memory: Memory) -> torch.Tensor:
    """What a user's own function passes on has the types of `fastqt.options`."""
    return fastqt.info_nce_loss(f, g, reduction=reduction, memory=memory)


class Frozen(nn.CLIPLoss):
    """A class of the user's own."""

    def __init__(self, name: str) -> None:
        super().__init__(learn_scale=False)
        self.name = name
