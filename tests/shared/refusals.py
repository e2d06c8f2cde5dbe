"""Calls of losses that some rank of a group must refuse, as each rank makes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import fastqt
from fastqt.distributed import Group, agreement, faults

ROWS, WIDTH = 4, 6


def rows(n: int = ROWS, width: int = WIDTH, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(n, width, dtype=dtype).requires_grad_()


def said(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def refused(name: str, faulty: int) -> tuple[str, str, bool]:
    """What this rank says of a call that is wrong at one rank, twice; and whether a right one works."""
    wrong = CALLS[name]
    uneven = name in UNEVEN
    group = Group(shards="uneven" if uneven else "equal", exchange="ring" if name in RING else "gather")
    first, second = (
        said(lambda: wrong(group, dist.get_rank() == faulty, dist.get_world_size())) for _ in range(2)
    )
    right = torch.isfinite(fastqt.contrastive_loss(rows(), rows(), group=group))
    return first, second, bool(right)


def _at_one(loss: str = "contrastive_loss", /, **changed: Any) -> Callable[..., Any]:
    """A call with other options at the wrong rank."""
    return lambda group, wrong, size: getattr(fastqt, loss)(
        rows(), rows(), **(changed if wrong else {}), group=group
    )


def _rows_at_one(loss: str, *shape: Any, **options: Any) -> Callable[..., Any]:
    return lambda group, wrong, size: getattr(fastqt, loss)(
        *(rows(*shape) if wrong else rows() for _ in range(2)), **options, group=group
    )


def _other_numbers(loss: str, **numbers: float) -> Callable[..., Any]:
    """A call whose numbers are greater by 1 at the wrong rank."""
    return lambda group, wrong, size: getattr(fastqt, loss)(
        rows(), rows(), **{name: value + wrong for name, value in numbers.items()}, group=group
    )


def _scale_at_one(loss: str) -> Callable[..., Any]:
    def call(group: Group, wrong: bool, size: int) -> Tensor:
        x, y = rows(), rows()
        given = dict.fromkeys(("supcon_loss", "ntxent_loss"), (x, torch.arange(ROWS) % 2))
        options: dict[str, Any] = {"scale": 3.0 if wrong else 20.0, "group": group}
        if loss == "gist_embed_loss":
            options |= {"guide_anchors": rows().detach(), "guide_positives": rows().detach()}
        if loss == "siglip_loss":
            options["bias"] = -1.0
        if loss == "negative_sampling_loss":
            cells = torch.zeros(ROWS, dtype=torch.int64)
            return fastqt.negative_sampling_loss(x, y, cells, cells[:, None] + 1, **options)
        return getattr(fastqt, loss)(*given.get(loss, (x, y)), **options)

    return call


def _of_targets(targets: Tensor, group: Group) -> Tensor:
    return fastqt.contrastive_loss(rows(), rows(), targets, diagonal="keep", group=group)


def _placed(loss: str) -> Callable[..., Any]:
    def call(group: Group, wrong: bool, size: int) -> Tensor:
        mesh, given = init_device_mesh("cpu", (size,)), rows()
        x = DTensor.from_local(given, mesh, [Replicate()], run_check=False) if wrong else given
        options = {"scale": 1.0} if loss == "clip_loss" else {}
        return getattr(fastqt, loss)(x, rows(), **options, group=group)

    return call


OF_DTENSORS = (
    *("contrastive_loss", "clip_loss", "mixcse_loss"),
    *("curl_block_loss", "max_margin_loss", "simcse_loss", "multiple_negatives_ranking_loss"),
)
OF_SCALE = (
    *("clip_loss", "siglip_loss", "info_nce_loss", "simcse_loss", "mixcse_loss"),
    *("supcon_loss", "ntxent_loss", "gist_embed_loss", "negative_sampling_loss"),
    *("dcl_loss", "hcl_loss"),
    "multiple_negatives_ranking_loss",
)
CALLS: dict[str, Callable[..., Any]] = {
    "rows": _rows_at_one("contrastive_loss", ROWS - 1),
    "rows of clip": _rows_at_one("clip_loss", ROWS - 1, scale=1.0),
    "width": _rows_at_one("contrastive_loss", ROWS, WIDTH + 1),
    "dtype": _rows_at_one("info_nce_loss", ROWS, WIDTH, torch.float64),
    "option": _at_one(reduction="sum"),
    "number": _at_one("mixcse_loss", mix=0.3),
    "norms": _at_one("max_margin_loss", normalize=True),
    "margin": _at_one("max_margin_loss", margin=2.0),
    "option of mixcse": _at_one("mixcse_loss", partner="random"),
    "scale": _other_numbers("contrastive_loss", scale=2.0),
    "bias": _other_numbers("sigmoid_loss", bias=0.5),
    **{f"scale of {loss}": _scale_at_one(loss) for loss in OF_SCALE},
    "scale of one kind": lambda group, wrong, size: fastqt.info_nce_loss(
        rows(), rows(), scale=torch.tensor(2.0) if wrong else 2.0, group=group
    ),
    "wrong option": _at_one(diagonal="maybe"),
    "wrong number": _at_one(scale=-1.0),
    "requires_grad": lambda group, wrong, size: fastqt.contrastive_loss(
        rows(), rows().requires_grad_(not wrong), group=group
    ),
    "group's option": lambda group, wrong, size: fastqt.contrastive_loss(
        rows(), rows(), group=Group(gradients="sum" if wrong else "average")
    ),
    "group's check": lambda group, wrong, size: fastqt.contrastive_loss(
        rows(), rows(), group=Group(check="always" if wrong else "first")
    ),
    "function": lambda group, wrong, size: (fastqt.sigmoid_loss if wrong else fastqt.contrastive_loss)(
        rows(), rows(), group=group
    ),
    "class": lambda group, wrong, size: _of_targets(torch.full((ROWS,), size * ROWS - (not wrong)), group),
    "sparse": lambda group, wrong, size: _of_targets(
        torch.eye(ROWS, size * ROWS + wrong).to_sparse_csr(), group
    ),
    "no rows": lambda group, wrong, size: fastqt.clip_loss(rows(0), rows(0), scale=1.0, group=group),
    "no candidates": lambda group, wrong, size: fastqt.log_sum_exp(rows(), rows(0), group=group),
    "negatives alone": lambda group, wrong, size: fastqt.log_sum_exp(
        rows(), rows(0 if wrong else ROWS), negatives=rows(1), group=group
    ),
    "few candidates": lambda group, wrong, size: fastqt.log_sum_exp(
        rows(), rows(ROWS - 1), diagonal="exclude", group=group
    ),
    **{f"placement of {loss}": _placed(loss) for loss in OF_DTENSORS},
}
UNEVEN = ("no rows", "no candidates", "negatives alone")
RING = ("negatives alone",)


def of_another_group() -> list[str]:
    """What this rank says of groups that cannot be."""
    size = dist.get_world_size()
    part = dist.new_group([0])  # which every process makes
    mesh = init_device_mesh("cpu", (1, size), mesh_dim_names=("a", "b"))
    losses = [
        said(lambda group=group: fastqt.contrastive_loss(rows(), rows(), group=group))
        for group in (mesh, "all", 7)
    ]
    of_part = said(lambda: fastqt.contrastive_loss(rows(), rows(), group=part))
    dist.barrier()
    return [of_part, *losses, said(lambda: Group(mesh)), said(lambda: Group(part))]


def dtensors_of_classes() -> list[str]:
    """What this rank says of classes in a DTensor: in a group, by rows and copied, and alone."""
    mesh, labels = init_device_mesh("cpu", (dist.get_world_size(),)), torch.zeros(ROWS, dtype=torch.int64)
    found = []
    for loss in (fastqt.cosface_loss, fastqt.arcface_loss):
        for placement, group in (
            (Shard(0), mesh),
            (Replicate(), mesh),
            (Shard(0), None),
            (Replicate(), None),
        ):
            weight = DTensor.from_local(rows().detach(), mesh, [placement], run_check=False)
            found.append(said(lambda: loss(rows(), weight, labels, scale=8.0, margin=0.1, group=group)))  # noqa: B023
    return found


def changed_later(uneven: bool) -> tuple[str, str, bool, bool | None]:
    """What this rank says when rank 1 alone has other options, or rows, than in the call before.

    And whether a right call works afterwards, and word of an error is left for ranks that wait in vain.
    """
    group = Group(shards="uneven" if uneven else "equal")
    changed = dist.get_rank() == 1
    fastqt.contrastive_loss(rows(), rows(), group=group)
    n = ROWS - changed
    other_rows = "nothing"
    if uneven or changed:  # the others would wait for the rank that refuses
        other_rows = said(lambda: fastqt.contrastive_loss(rows(n), rows(n), group=group))
    other_option = ""
    if uneven:
        reduction = "sum" if changed else "mean"
        other_option = said(lambda: fastqt.contrastive_loss(rows(), rows(), reduction=reduction, group=group))
    right = torch.isfinite(fastqt.contrastive_loss(rows(), rows(), group=group))
    left = faults._asked(group, lambda store: store.check(["raised"]))
    return other_rows, other_option, bool(right), left


# Losses that take a bool tensor, each with the rows that it is called with.
OF_MASKS: dict[str, Callable[[int], tuple[Tensor, Tensor]]] = {
    "contrastive_loss": lambda n: (rows(n), rows(n)),
    "info_nce_loss": lambda n: (rows(n), rows(n)),
    "mixcse_loss": lambda n: (rows(n), rows(n)),
    "maxsim_loss": lambda n: (rows(n)[:, None], rows(n)[:, None]),
}


def masks_that_change(loss: str, check: str, wrong: list[int]) -> list[str]:
    """What this rank says of calls with uneven shards, in some of which its bool tensor is of other columns.

    Args:
        loss: of `OF_MASKS`.
        check: of the group.
        wrong: how many columns there are too many, in each call, on rank 1.
    """
    group, rank = Group(shards="uneven", check=check), dist.get_rank()
    n = ROWS + rank
    N = sum(ROWS + each for each in range(dist.get_world_size()))
    words = []
    for more in wrong:
        mask = torch.zeros(n, N + more * (rank == 1), dtype=torch.bool)
        words.append(
            said(lambda mask=mask: getattr(fastqt, loss)(*OF_MASKS[loss](n), exclude=mask, group=group))
        )
    return words


def nothing_excluded_in_two_words() -> list[str]:
    """What this rank says where it excludes an empty list, and others None."""
    group = Group()
    exclude = [] if dist.get_rank() == 1 else None
    call = lambda: fastqt.contrastive_loss(rows(), rows(), exclude=exclude, group=group)  # noqa: E731
    return [said(call), said(call)]


def agreements(steps: int) -> tuple[int, int]:
    """How many agreements a group keeps after numbers that change at each step, and after options that do."""
    group = Group()
    z1, z2, z3 = rows(), rows(), rows()
    for step in range(steps):
        fastqt.simcse_loss(z1, z2, z3, hard_negative_weight=0.5 + step, group=group)
        fastqt.mixcse_loss(z1, z2, mix=0.1 + 0.001 * step, group=group)
    scheduled, most = len(group.agreed), agreement.AGREEMENTS
    agreement.AGREEMENTS = 8
    try:
        for width in range(1, 2 * 8):
            fastqt.contrastive_loss(rows(ROWS, width), rows(ROWS, width), group=group)
    finally:
        agreement.AGREEMENTS = most
    return scheduled, len(group.agreed)
