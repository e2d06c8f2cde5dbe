"""A `transformers.Trainer` on every rank, beside one process with the whole batch. See ranks.py."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import SequentialSampler
from transformers import AutoModel, AutoTokenizer, Trainer, TrainingArguments

from fastqt.integrations.huggingface import ContrastiveCollator, ContrastiveModel, HuggingFaceEncoder
from fastqt.nn import SimCSELoss

BATCH = 3  # rows of each rank
WORDS = ["the", "cat", "sat", "on", "a", "mat"]
ROWS = [{"anchor": f"{a} {b}", "positive": f"{b} sat {a} ."} for a in WORDS[:4] for b in WORDS[:3]]
ARGUMENTS = {
    "learning_rate": 0.05,
    "lr_scheduler_type": "constant",
    "optim": "sgd",
    "max_grad_norm": 0.0,
    "use_cpu": True,
    "report_to": [],
    "save_strategy": "no",
    "disable_tqdm": True,
    "remove_unused_columns": False,
}


class InOrder(Trainer):
    """A Trainer of a ContrastiveModel that takes the data in their order."""

    def __init__(self, model: ContrastiveModel, folder: str, data: Any, **arguments: Any) -> None:
        args = TrainingArguments(output_dir=folder, **{**ARGUMENTS, **arguments})
        collator = ContrastiveCollator(model.encoder.tokenizer)
        super().__init__(model, args, train_dataset=data, eval_dataset=data, data_collator=collator)

    def _get_train_sampler(self, dataset: Any = None) -> SequentialSampler[Any]:
        return SequentialSampler(self.train_dataset)


def trained(checkpoint: str, folder: str, batch_size: int, **arguments: Any) -> dict[str, torch.Tensor]:
    """The parameters after two steps on ROWS, and the loss of an evaluation as "eval_loss".

    The model has a learnt scale and no dropout, in float64.
    """
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = AutoModel.from_pretrained(checkpoint, **off)
    encoder = HuggingFaceEncoder(model, AutoTokenizer.from_pretrained(checkpoint), pooling="mean")
    contrastive = ContrastiveModel(encoder, SimCSELoss(learn_scale=True)).double()
    sizes = {"per_device_train_batch_size": batch_size, "per_device_eval_batch_size": batch_size}
    trainer = InOrder(contrastive, folder, ROWS, **sizes, num_train_epochs=1, **arguments)
    trainer.train()
    found = {name: tensor.detach() for name, tensor in contrastive.state_dict().items()}
    return found | {"eval_loss": torch.tensor(trainer.evaluate()["eval_loss"])}


def trained_on_ranks(checkpoint: str, folder: str, arguments: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The same on each rank, as torchrun starts it."""
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    os.environ.update(names, MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")
    return trained(checkpoint, folder, BATCH, ddp_backend="gloo", **arguments)
