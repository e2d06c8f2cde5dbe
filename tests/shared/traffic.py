"""What a call over a group computes and sends: operations of matrix products, collectives, messages, bytes.

The functions here run on every rank (see ranks.py). They see the operators of torch.distributed and the CPU
engine wherever these are called, in the backward pass too.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import fastqt
from fastqt.distributed import Group
from fastqt.engines import cpu
from fastqt.engines.cpu import contrastive

NAMES = {
    "_allgather_base_": "all_gather",
    "allgather_": "all_gather_list",
    "_reduce_scatter_base_": "reduce_scatter",
    "allreduce_": "all_reduce",
    "alltoall_base_": "all_to_all",
    "broadcast_": "broadcast",
    "send": "send",
}


@dataclass
class Call:
    """A loss, of which each rank has `rows` rows of `width` numbers."""

    loss: str
    exchange: str
    rows: int = 40
    width: int = 16
    dtype: torch.dtype = torch.float32
    negatives: int = 0  # rows of each rank
    gradients: bool = True
    small_chunks: bool = False  # whether the CPU engine takes few rows of scores at a time
    options: dict[str, Any] = field(default_factory=dict)
    group: dict[str, Any] = field(default_factory=dict)


class Recorder(TorchDispatchMode):
    """Counts what is called in its context.

    Attributes:
        collectives: how often each was called; a message is counted where it is sent.
        sent: the bytes that this rank sends to others, for each collective, where those of an all-reduce go
            around once and the results once.
        operations: of matrix products, that the operators of the CPU engine make of what they are given.
    """

    def __init__(self) -> None:
        super().__init__()
        self.collectives: Counter[str] = Counter()
        self.sent: Counter[str] = Counter()
        self.operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.split("::")[1]
        if func.namespace == "c10d" and name != "recv_":
            self.collectives[NAMES[name]] += 1
            self.sent[NAMES[name]] += _sent(NAMES[name], args)
        if func.namespace == "fastqt":
            self.operations += _operations(name, args)
        return func(*args, **(kwargs or {}))


def _sent(name: str, args: Any) -> int:
    size = dist.get_world_size()
    given = args[1] if name in ("all_gather", "reduce_scatter", "all_to_all") else args[0]
    # `all_gather_list` is that of objects, whose bytes are nobody's concern.
    if name == "all_gather_list":
        return 0
    tensors = given if isinstance(given, list) else [given]
    nbytes = sum(x.numel() * x.element_size() for x in tensors)
    of_all = {"all_gather": size - 1, "all_reduce": 2 * (size - 1) / size, "send": 1, "broadcast": 1}
    return round(nbytes * of_all.get(name, (size - 1) / size))


def _operations(name: str, args: Any) -> int:
    """2 n M D for scores that are not kept, and as many for the gradient of each side that is wanted."""
    if name == "product_levels":  # which computes nothing
        return 0
    queries, candidates = args[:2]
    columns = len(candidates)
    if name.startswith("contrastive"):
        negatives = args[2]
        columns += 0 if negatives is None else len(negatives)
        needs = () if name == "contrastive_loss_rows" else args[-1]
        sides = [*needs[:1], any(needs[1:3])] if needs else []
        kept = args[-2] if name == "contrastive_loss_backward" else None
    elif name.startswith("clip"):
        gradients = {"clip_sums_": (), "clip_gradients_": args[-3:-1]}[name]
        sides = [x is not None for x in gradients]
        kept = args[-5] if name == "clip_gradients_" else None
    else:
        raise KeyError(name)
    scored = len(queries) - (0 if kept is None else len(kept))
    return 2 * columns * queries.shape[1] * (scored + len(queries) * sum(sides))


def traffic(call: Call) -> tuple[Recorder, Recorder]:
    """What the first call and what a further one has counted on this rank."""
    group = Group(exchange=call.exchange, **call.group)
    generator = torch.Generator().manual_seed(dist.get_rank())

    def leaf(rows: int) -> Tensor:
        x = torch.randn(rows, call.width, generator=generator).to(call.dtype)
        return x.requires_grad_(call.gradients)

    def once() -> Recorder:
        options = dict(call.options)
        if call.negatives:
            options["negatives"] = leaf(call.negatives)
        with Recorder() as recorder:
            loss = getattr(fastqt, call.loss)(leaf(call.rows), leaf(call.rows), group=group, **options)
            if call.gradients:
                loss.sum().backward()
        return recorder

    # Whether it has the instructions or not, the CPU is to keep bfloat16 as an engine of a GPU does.
    patched: dict[str, Any] = {"CHUNK_BYTES": contrastive.CHUNK_BYTES}
    if call.small_chunks:
        patched = {"CHUNK_BYTES": 2**12, "LOW_BYTES": 2**12, "TILE_ROWS": 16, "TILE_COLUMNS": 32}
    keeps_bfloat16 = mock.patch.object(cpu, "has_bfloat16_products", return_value=True)
    with keeps_bfloat16, mock.patch.multiple(contrastive, **patched):
        return once(), once()


def traffic_of_all(calls: list[Call]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """`traffic` of each call, as what can be sent to another process."""
    kept = ("collectives", "sent", "operations")
    return [tuple({name: getattr(r, name) for name in kept} for r in traffic(call)) for call in calls]
