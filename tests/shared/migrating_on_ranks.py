"""What pages of docs say of several processes, run by the ranks of a group."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import fastqt
from tests.shared.page_blocks import PAGES, Block, blocks

RANKS_SECTION = "Several processes"
N, D = 12, 32


def run(some: Iterable[Block], names: dict[str, object]) -> None:
    """Executes blocks, whose names are kept."""
    for block in some:
        exec(compile(block.code, f"docs: {block.section}", "exec"), names)


def trained_retriever() -> tuple[Tensor, list[Tensor]]:
    """The last loss of docs/how-to/retriever.md and the encoder's weights; ranks have inputs of their own."""
    python = blocks(PAGES["how-to/retriever.md"], "python")
    code = [block.code.replace("dist.destroy_process_group()", "") for block in python]
    code[0] = code[0].replace("manual_seed(0)", f"manual_seed({dist.get_rank()})")
    names: dict[str, object] = {}
    run([replace(block, code=text) for block, text in zip(python, code, strict=True)], names)
    return names["loss"].detach(), [x.detach() for x in names["encoder"].parameters()]


def _page() -> dict[str, object]:
    """Names after the first block of the page, and after the section's definitions."""
    names: dict[str, object] = {}
    python = blocks(PAGES["migrating.md"], "python")
    definitions = [
        replace(block, code=block.code.split("\nassert ")[0])
        for block in python
        if block.section == RANKS_SECTION and "destroy_process_group" not in block.code
    ]
    run([python[0], *definitions], names)
    return names


def _rows(near_pairs: bool) -> tuple[Tensor, Tensor]:
    """The batch of all ranks, in float32."""
    torch.manual_seed(3)
    if not near_pairs:
        return torch.randn(N, D) / D**0.5, torch.randn(N, D) / D**0.5
    return torch.eye(N, D) + 0.01 * torch.randn(N, D), torch.eye(N, D) + 0.01 * torch.randn(N, D)


class _Two(nn.Module):
    """Two linear encoders, which begin as the identity, and a learnt temperature."""

    def __init__(self, dtype: torch.dtype, temperature: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(D, D, bias=False, dtype=dtype) for _ in range(2))
        for layer in self.layers:
            nn.init.eye_(layer.weight)
        self.temperature = nn.Parameter(torch.tensor(temperature, dtype=dtype))

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return self.layers[0](a), self.layers[1](b)


Step = tuple[Tensor, Tensor, Tensor]  # the value, and the gradients of the encoders and of the temperature


def _gradients(model: _Two) -> tuple[Tensor, Tensor]:
    return torch.cat([p.grad.flatten() for p in model.layers.parameters()]), model.temperature.grad


def _step(
    loss: Callable[[Tensor, Tensor], Tensor],
    batch: tuple[Tensor, Tensor],
    names: dict[str, object],
    temperature: float,
) -> Step:
    """The mean of the ranks' losses, and the gradients that DDP leaves."""
    a, b = (x.chunk(dist.get_world_size())[dist.get_rank()] for x in batch)
    model = DistributedDataParallel(_Two(a.dtype, temperature))
    names["temperature"] = model.module.temperature  # which the functions of the page read
    value = loss(*model(a, b))
    value.backward()
    total = value.detach().clone()
    dist.all_reduce(total)
    return total / dist.get_world_size(), *_gradients(model.module)


def _apart(found: Step, wanted: Step) -> float:
    return max(
        float((a.double() - b.double()).abs().max() / b.double().abs().max())
        for a, b in zip(found, wanted, strict=True)
    )


def differences_on_ranks(near_pairs: bool) -> dict[str, float]:
    """How far after is, in either dtype, from before in float64."""
    names, batch = _page(), _rows(near_pairs)
    double = batch[0].double(), batch[1].double()
    step = partial(_step, names=names, temperature=1 / 20.5 if near_pairs else 0.1)
    truth = step(names["before"], double)
    return {
        "float64": _apart(step(names["after"], double), truth),
        "float32": _apart(step(names["after"], batch), truth),
    }


def losses_of_rows(*rows: int) -> None:
    """A loss of each number of rows of a rank, one after the other."""
    for n in rows:
        fastqt.info_nce_loss(torch.randn(n, 4), torch.randn(n, 4), group=dist.group.WORLD)
