"""QuickThoughts with FSDP2: the parameters are sharded, and a sentence's neighbours may be another rank's.

    torchrun --nproc-per-node 2 examples/fsdp2_quickthoughts.py
    torchrun --nproc-per-node 8 examples/fsdp2_quickthoughts.py --data corpus.txt --batch-size 4096

A batch is a piece of running text. Each rank encodes a part of it, and the window of targets reaches over the
edges of the parts: `group=` takes the mesh that the parameters are sharded over.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from toy_data import Text, start_process_group

import fastqt


def options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", help="a text with a sentence on each line, in order")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=128, help="of all ranks together")
    parser.add_argument("--dropout", type=float, default=0.1)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> tuple[nn.Module, list[float]]:
    """Trains two encoders; returns them and the loss of each step."""
    settings, device = options(arguments), start_process_group()
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh(device.type, (size,))
    text = Text(settings.data)

    torch.manual_seed(0)  # FSDP2 shards what each rank has: all have to begin with the same parameters.
    encoders = [
        fastqt.nn.Transformer(len(text.vocabulary), 64, layers=1, heads=4, dropout=settings.dropout)
        for _ in range(2)
    ]
    model = fastqt.nn.QuickThoughts(*encoders).to(device)
    for encoder in encoders:
        for layer in encoder.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(encoder, mesh=mesh)
    neighbours = fastqt.nn.ContrastiveLoss(context_size=1, scale=0.1, group=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    torch.manual_seed(1 + rank)  # Each rank draws its own dropout, and all ranks the same batches.
    starts, losses = torch.Generator().manual_seed(0), []
    for step in range(settings.steps):
        start = torch.randint(len(text) - settings.batch_size + 1, (), generator=starts)
        rows = (start + torch.arange(settings.batch_size)).view(size, -1)[rank]
        optimizer.zero_grad()
        loss = neighbours(*model(*text.batch(rows, device)))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if rank == 0 and step % 10 == 0:
            print(f"step {step:4d}   loss {losses[-1]:.4f}", flush=True)
    return model, losses


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
