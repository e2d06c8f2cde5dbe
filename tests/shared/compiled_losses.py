"""Losses of a group under torch.compile, of DTensors and in subgroups, beside those that need no such thing.

The functions here run on every rank; see ranks.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import fastqt
from fastqt.distributed import Group
from tests.shared.sharded_losses import Case, Found, compare

ROWS, WIDTH = 6, 8  # of each rank

LOSSES: dict[str, Callable[..., Tensor]] = {
    "contrastive": fastqt.contrastive_loss,
    "contrastive, all cells": lambda *x, **o: fastqt.contrastive_loss(*x, diagonal="keep", **o),
    "rows": lambda *x, **o: fastqt.contrastive_loss(*x, reduction="none", **o),
    "info_nce": fastqt.info_nce_loss,
    "siglip": lambda *x, **o: fastqt.siglip_loss(*x, bias=-1.0, **o),
    "clip": fastqt.clip_loss,
    "simcse": fastqt.simcse_loss,
    "mixcse": fastqt.mixcse_loss,
    "dcl": lambda *x, **o: fastqt.dcl_loss(*x, sigma=0.5, **o),
    "hcl": fastqt.hcl_loss,
    "distillation": lambda x, y, **o: fastqt.distillation_loss(x, y, y.detach(), x.detach(), **o),
    "maxsim": lambda a, b, **o: fastqt.maxsim_loss(a.view(len(a), 2, -1), b.view(len(b), 2, -1), **o),
    "cosent": lambda a, b, **o: fastqt.cosent_loss(a, b, torch.arange(ROWS) // 2, **o),
    "spread_out": lambda a, b, scale, **o: scale * fastqt.spread_out_loss(torch.cat([a, b]), **o),
    "few spread out": lambda a, b, scale, **o: scale * fastqt.spread_out_loss(a @ b.T @ b, **o),
    "flops": lambda a, b, scale, **o: scale * fastqt.flops_loss(torch.cat([a, b]), **o),
    "similarity distillation": lambda a, b, scale, **o: (
        scale * fastqt.similarity_distillation_loss(a + b, b, **o)
    ),
    "narrow distillation": lambda a, b, scale, **o: (
        scale
        * fastqt.similarity_distillation_loss(
            a[:, :2], a[:, 2:5], candidates=b[:, :2], teacher_candidates=b[:, 2:5], **o
        )
    ),
    "ranking": lambda *x, **o: fastqt.multiple_negatives_ranking_loss(
        *x, directions=("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc"), **o
    ),
}

# Those whose rows are made of both arguments, for which torch's own rules for DTensors would count.
OF_BOTH = {"flops", "spread_out", "few spread out", "similarity distillation", "narrow distillation"}


class Compiled(NamedTuple):
    """A compiled loss beside the same loss as it is.

    Attributes:
        errors: of the value and the gradients; of the scale's, which each rank has a part of, the sum's.
        operators: of the compiled graphs of the forward and the backward pass, how often each is there.
        graphs: how many graphs were compiled, for two calls.
    """

    errors: list[float]
    operators: dict[str, int]
    graphs: int


def compiled(name: str, options: dict[str, Any], backend: str | None = None) -> Compiled:
    """A loss whose compiler, by default, only keeps the graphs."""
    group, loss, operators, graphs = Group(**options), LOSSES[name], {}, []

    def keep(graph: torch.fx.GraphModule, inputs: object) -> torch.fx.GraphModule:
        graphs.append(graph)
        for node in graph.graph.nodes:
            if node.op == "call_function":
                operators[str(node.target)] = operators.get(str(node.target), 0) + 1
        return graph

    compiler = backend or aot_autograd(fw_compiler=keep, bw_compiler=keep)
    torch.compiler.reset()
    compiled_loss = torch.compile(
        lambda a, b, scale: loss(a, b, scale=scale, group=group), fullgraph=True, backend=compiler
    )
    errors = []
    for seed in range(2):  # The second call shows that other numbers are no other graph.
        found = _with_gradients(compiled_loss, seed)
        wanted = _with_gradients(lambda a, b, scale: loss(a, b, scale=scale, group=group), seed)
        errors += [float((x - y).abs().max() / y.abs().max()) for x, y in zip(found, wanted, strict=True)]
    return Compiled(errors, operators, len(graphs))


def _with_gradients(loss: Callable[..., Tensor], seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 * seed + dist.get_rank())
    a, b = (torch.randn(ROWS, WIDTH, generator=generator).requires_grad_() for _ in range(2))
    scale = torch.tensor(2.0, requires_grad=True)
    value = loss(a, b, scale)
    (value @ torch.linspace(0.5, 1.5, ROWS) if value.dim() else value).backward()
    dist.all_reduce(scale.grad)
    return [value.detach(), *(x.grad for x in (a, b, scale))]


def compiled_with(what: str, options: dict[str, Any]) -> None:
    """Compiles what torch.compile cannot run."""
    group = dist.group.WORLD if what == "process group" else Group(**options)
    a = torch.randn(ROWS, WIDTH)
    torch.compiler.reset()
    torch.compile(lambda: fastqt.info_nce_loss(a, a, group=group), fullgraph=True, backend="eager")()


def of_dtensors(name: str, dimensions: tuple[int, ...]) -> list[float]:
    """How far the loss and gradients of DTensors are from those of their rows.

    The rows lie on the first dimension of the mesh; ranks that differ in the others alone have the same.
    """
    names = ("data", "model")[: len(dimensions)]
    mesh = init_device_mesh("cpu", dimensions, mesh_dim_names=names)["data"]
    generator = torch.Generator().manual_seed(mesh.get_local_rank())
    rows = [torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2)]
    plain, sharded = ([x.clone().requires_grad_() for x in rows] for _ in range(2))
    wanted = LOSSES[name](*plain, scale=2.0, group=mesh)
    found = LOSSES[name](*(_as_dtensor(x, mesh) for x in sharded), scale=2.0, group=mesh)
    assert not isinstance(found, DTensor)
    pairs = [(found, wanted)]
    for x in (found, wanted):
        (x.sum() if x.dim() else x).backward()
    pairs += [(x.grad, y.grad) for x, y in zip(sharded, plain, strict=True)]
    return [float((x - y).detach().abs().max()) for x, y in pairs]


def _as_dtensor(x: Tensor, mesh: DeviceMesh) -> DTensor:
    return DTensor.from_local(x, mesh, [Shard(0)])


def of_a_column_sharded_dtensor() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    a = torch.randn(ROWS, WIDTH)
    fastqt.info_nce_loss(a, DTensor.from_local(a, mesh, [Shard(1)]), group=mesh)


def in_subgroup(members: list[int], cases: list[Case]) -> list[Found] | None:
    """Losses over some of the ranks; None at the others."""
    group = dist.new_group(members)
    if dist.get_rank() not in members:
        return None
    return [compare(case, group) for case in cases]
