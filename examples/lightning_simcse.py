"""SimCSE with Lightning: an encoder, a loss, and Lightning does the rest.

    pip install lightning
    torchrun --nproc-per-node 2 examples/lightning_simcse.py
    python examples/lightning_simcse.py --devices 8 --data corpus.txt --batch-size 512

Lightning's strategy "ddp" averages gradients over the ranks, as the loss assumes, whose candidates are the
sentences of all ranks. The batch size is that of one rank.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

import lightning
import torch
import torch.distributed as dist
from torch import Tensor, nn
from toy_data import Text

import fastqt
from fastqt.integrations.lightning import ContrastiveModule


class Losses(lightning.Callback):
    """Keeps the loss of each step, which is the same on all ranks."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(
        self,
        trainer: lightning.Trainer,
        module: lightning.LightningModule,
        outputs: dict[str, Tensor],
        batch: object,
        index: int,
    ) -> None:
        self.losses.append(outputs["loss"].item())


def options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", help="a text with a sentence on each line")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=64, help="of each rank")
    parser.add_argument("--devices", type=int, default=int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    parser.add_argument("--dropout", type=float, default=0.1, help="what makes two views of a sentence")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> tuple[nn.Module, list[float]]:
    """Trains an encoder; returns it and the loss of each step."""
    settings = options(arguments)
    lightning.seed_everything(0, verbose=False)
    text = Text(settings.data)

    # Lightning gives every rank its share of the rows; drop_last makes all batches equally large.
    loader = torch.utils.data.DataLoader(
        range(len(text)),
        settings.batch_size,
        shuffle=True,
        drop_last=True,
        collate_fn=lambda rows: [text.batch(rows)] * 2,  # two views, of which dropout makes two
    )

    encoder = fastqt.nn.Transformer(len(text.vocabulary), 64, layers=2, heads=4, dropout=settings.dropout)
    model = ContrastiveModule(encoder, fastqt.nn.SimCSELoss(scale=20.0))
    losses = Losses()

    trainer = lightning.Trainer(
        strategy="ddp",
        devices=settings.devices,
        max_steps=settings.steps,
        callbacks=[losses],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )

    trainer.fit(model, loader)
    return model, losses.losses


if __name__ == "__main__":
    main()
    if dist.is_initialized():
        dist.destroy_process_group()
