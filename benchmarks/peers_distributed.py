"""By how much the gradients of a loss over several processes differ from those of one process, after DDP.

pip install --no-deps open_clip_torch pytorch-metric-learning
python -m benchmarks.peers_distributed            # measures, and prints the table
python -m benchmarks.peers_distributed --write    # stores benchmarks/results/peers-distributed.json as well

Four processes each encode a quarter of the same batch with two linear encoders under DistributedDataParallel,
and learn a temperature. The factor of a gradient g to that of one process on the whole batch, r, is the one
that fits best, ⟨g, r⟩ / ⟨r, r⟩. Beside it stands the part of g that no factor explains, ‖g - factor r‖ / ‖g‖.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# Imported later, it would keep the group's threads alive (see fastqt/sentences/train/ranks.py).
import torch.distributed.nn.functional
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from benchmarks.conventions import Convention, Loss, conventions
from benchmarks.measure.machine import processor_and_versions
from benchmarks.measure.tables import table
from benchmarks.paths import RESULTS

STORED = RESULTS / "peers-distributed.json"
PROCESSES, N, INPUT, D = 4, 64, 24, 16
PATIENCE = timedelta(seconds=120)

Found = dict[str, Any]


class Towers(nn.Module):
    """Two linear encoders to the unit sphere, and the temperature and bias of a loss."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.encoders = nn.ModuleList([nn.Linear(INPUT, D, bias=False) for _ in range(2)])
        for encoder in self.encoders:
            nn.init.normal_(encoder.weight, std=INPUT**-0.5, generator=generator)
        self.log_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))  # with which CLIP begins
        self.bias = nn.Parameter(torch.tensor(-10.0))  # and SigLIP

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        a, b = (F.normalize(encoder(rows)) for encoder, rows in zip(self.encoders, (x, y), strict=True))
        return a, b, self.log_scale.exp(), self.bias + 0.0


def batch() -> tuple[Tensor, Tensor]:
    """Inputs (N, INPUT) of both sides; all rows are somewhat alike, and those of equal index are more so."""
    generator = torch.Generator().manual_seed(0)
    mean = torch.randn(INPUT, generator=generator)
    common, x, y = (torch.randn(N, INPUT, generator=generator) for _ in range(3))
    return mean + common + 0.5 * x, mean + common + 0.5 * y


def gradients(module: nn.Module, towers: Towers, x: Tensor, y: Tensor, loss: Loss) -> dict[str, Any]:
    """The loss, and the gradients of the encoders, the temperature and the bias; None where it has none."""
    a, b, scale, bias = module(x, y)
    # DDP waits for every parameter, and not every loss has a bias.
    value = loss(a, b, scale, bias)
    (value + 0.0 * bias).backward()
    weights = [encoder.weight.grad.flatten() for encoder in towers.encoders]
    return {
        "loss": value.item(),
        "encoder": torch.cat(weights),
        "temperature": towers.log_scale.grad.reshape(1),
        "bias": towers.bias.grad.reshape(1),
    }


def factor(gradient: Tensor, reference: Tensor) -> tuple[float, float]:
    """The factor that fits best, and the part of the gradient that it leaves."""
    gradient, reference = gradient.double(), reference.double()
    multiple = float(gradient @ reference / (reference @ reference))
    return multiple, float((gradient - multiple * reference).norm() / gradient.norm())


def compared(of_ranks: dict[str, Any], of_batch: dict[str, Any]) -> Found:
    """What is stored of a convention."""
    encoder, residual = factor(of_ranks["encoder"], of_batch["encoder"])
    factors = {"encoder": encoder, "residual": residual}
    for name in ("temperature", "bias"):
        if of_batch[name].abs() > 0:
            factors[name] = factor(of_ranks[name], of_batch[name])[0]
    return {**factors, "loss_of_rank_0": of_ranks["loss"], "loss_of_batch": of_batch["loss"]}


def found_by(convention: Convention, rank: int, x: Tensor, y: Tensor) -> Found:
    """In one of the processes: what is stored of a convention.

    No DistributedDataParallel remains of it: where the last reference to a group is that of such a module,
    Gloo's threads are waited for under Python's lock, which they may be waiting for.
    """
    shard = slice(rank * N // PROCESSES, (rank + 1) * N // PROCESSES)
    towers, alone = Towers(), Towers()
    module = DistributedDataParallel(towers)
    of_ranks = gradients(module, towers, x[shard], y[shard], convention.of_rank)
    of_batch = gradients(alone, alone, x, y, convention.of_batch)
    return {"convention": convention.name, "source": convention.source, **compared(of_ranks, of_batch)}


def measure(rank: int, folder: str) -> None:
    """In one of the processes: measures every convention; rank 0 writes what was found into the folder."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", PROCESSES)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=PROCESSES, timeout=PATIENCE)
    rows = [found_by(convention, rank, *batch()) for convention in conventions()]
    if rank == 0:
        Path(folder, "found.json").write_text(json.dumps(rows))
    dist.destroy_process_group()


def measured() -> list[Found]:
    """The figures of all conventions that are installed."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(measure, (folder,), nprocs=PROCESSES)
        return json.loads(Path(folder, "found.json").read_text())


def stored_peers() -> Found:
    return json.loads(STORED.read_text())


def conventions_machine(run: Found) -> str:
    m = run["machine_info"]
    return (
        f"{run['processes']} processes with one thread each, N = {run['N']}, D = {run['D']}, {m['cpu']}, "
        f"{m['system']}, Python {m['python_version']}, torch {m['torch_version']}, {m['date']}"
    )


def conventions_table(rows: Iterable[Found]) -> str:
    header = (
        "loss",
        "source",
        "encoder",
        "not along the gradient",
        "temperature",
        "bias",
        "loss of rank 0 / loss of the batch",
    )

    return table(
        header,
        (
            (
                f"`{r['convention']}`" if "(" in r["convention"] else r["convention"],
                r["source"],
                f"{r['encoder']:.3f}",
                f"{r['residual']:.0%}",
                f"{r['temperature']:.3f}",
                f"{r['bias']:.3f}" if "bias" in r else "–",
                f"{r['loss_of_rank_0'] / r['loss_of_batch']:.3f}",
            )
            for r in rows
        ),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures the gradients of losses over several processes.")
    parser.add_argument("--write", action="store_true", help=f"store {STORED.name}")
    write = parser.parse_args().write
    rows = measured()
    if write:
        run = {"machine_info": processor_and_versions(), "processes": PROCESSES, "N": N, "D": D}
        STORED.write_text(json.dumps({**run, "found": rows}, indent=1) + "\n")
    print(conventions_table(rows))


if __name__ == "__main__":
    main()
