"""SimCSE on text with DistributedDataParallel: every sentence is told from those of all ranks.

    torchrun --nproc-per-node 2 examples/ddp_simcse.py
    torchrun --nproc-per-node 8 examples/ddp_simcse.py --data corpus.txt --batch-size 8192 --chunk-size 256

The differences from training on one device are `DistributedDataParallel(...)` and `group=`. The batch size is
that of all ranks, and so is the loss.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from toy_data import Text, start_process_group

import fastqt


def options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", help="a text with a sentence on each line")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=128, help="of all ranks together")
    parser.add_argument("--chunk-size", type=int, help="of so many sentences are activations kept at a time")
    parser.add_argument("--dropout", type=float, default=0.1, help="what makes two views of a sentence")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> tuple[nn.Module, list[float]]:
    """Trains an encoder; returns it and the loss of each step."""
    settings, device = options(arguments), start_process_group()
    rank, size = dist.get_rank(), dist.get_world_size()
    text = Text(settings.data)

    torch.manual_seed(0)  # DDP gives all ranks the parameters of the first anyway.
    encoder = fastqt.nn.Transformer(len(text.vocabulary), 64, layers=2, heads=4, dropout=settings.dropout)
    model = DistributedDataParallel(encoder.to(device))
    loss_of_views = fastqt.nn.SimCSELoss(scale=20.0, group=dist.group.WORLD)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    torch.manual_seed(1 + rank)  # Each rank draws its own dropout, and all ranks the same batches.
    order, losses = torch.Generator().manual_seed(0), []
    for step in range(settings.steps):
        rows = torch.randperm(len(text), generator=order)[: settings.batch_size]
        tokens, lengths = text.batch(rows.view(size, -1)[rank], device)
        optimizer.zero_grad()
        if settings.chunk_size is None:
            loss = loss_of_views(*model(tokens.repeat(2, 1), lengths.repeat(2)).chunk(2))
            loss.backward()
        else:  # The same gradients, with the activations of a chunk in memory.
            views = [(tokens, lengths)] * 2
            loss = fastqt.cached_backward(
                [model, model], views, loss_of_views, chunk_size=settings.chunk_size, ddp=model
            )
        optimizer.step()
        losses.append(loss.item())
        if rank == 0 and step % 5 == 0:
            print(f"step {step:4d}   loss {losses[-1]:.4f}", flush=True)
    return model, losses


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
