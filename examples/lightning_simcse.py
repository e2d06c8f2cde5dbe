"""SimCSE as a LightningModule: a group for the loss, and Lightning does the rest.

    pip install lightning
    torchrun --nproc-per-node 2 examples/lightning_simcse.py
    python examples/lightning_simcse.py --devices 8 --data corpus.txt --batch-size 512

Lightning's strategy "ddp" averages gradients over the ranks, as `group=` assumes. The group exists from
`setup` on. The batch size is that of one rank.
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


class SimCSE(lightning.LightningModule):
    """An encoder, trained to tell a sentence's second view from the other sentences of all ranks."""

    def __init__(self, words: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.encoder = fastqt.nn.Transformer(words, 64, layers=2, heads=4, dropout=dropout)
        self.losses: list[float] = []

    def setup(self, stage: str) -> None:
        self.loss_of_views = fastqt.nn.SimCSELoss(scale=20.0, group=dist.group.WORLD)

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        tokens, lengths = batch
        loss = self.loss_of_views(*self.encoder(tokens.repeat(2, 1), lengths.repeat(2)).chunk(2))
        self.losses.append(loss.item())  # It is the same on all ranks: nothing is left to reduce.
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


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
    given = options(arguments)
    lightning.seed_everything(0, verbose=False)
    text = Text(given.data)
    # Lightning gives every rank its share of the rows; drop_last makes all batches equally large.
    loader = torch.utils.data.DataLoader(
        range(len(text)), given.batch_size, shuffle=True, drop_last=True, collate_fn=text.batch
    )
    model = SimCSE(len(text.vocabulary), given.dropout)
    trainer = lightning.Trainer(
        strategy="ddp",
        devices=given.devices,
        max_steps=given.steps,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    trainer.fit(model, loader)
    return model, model.losses


if __name__ == "__main__":
    main()
    if dist.is_initialized():
        dist.destroy_process_group()
