"""Process groups end when torch.distributed is told to end them, also where a `Group` of them is kept."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

import fastqt


@pytest.fixture
def world() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def losses():
    """Modules and losses of groups that are named in each way, which a script keeps, and calls to repeat."""
    group = fastqt.distributed.Group(shards="uneven", exchange="ring")
    modules = [fastqt.nn.CLIPLoss(group=given) for given in (dist.group.WORLD, group)]
    a, b = torch.randn(2, 8, 16, requires_grad=True)
    labels = torch.arange(8) // 2
    found = [module(a, b) for module in modules]
    found += [fastqt.info_nce_loss(a, b, group=given) for given in (dist.group.WORLD, group)]
    found += [fastqt.supcon_loss(a, labels, group=given) for given in (dist.group.WORLD, group)]
    torch.stack(found).sum().backward()
    return modules, found, [lambda: fastqt.clip_loss(a, b, scale=20.0, group=group), lambda: modules[0](a, b)]


def test_a_process_group_is_freed_when_it_is_destroyed(world):
    """Otherwise Gloo's threads live until Python ends, and then abort the process if they need Python."""
    kept = losses()
    alive = weakref.ref(dist.group.WORLD)
    dist.destroy_process_group()
    assert alive() is None
    del kept  # which lived until here


def test_a_group_whose_processes_are_gone_says_so(world):
    *_, calls = losses()
    dist.destroy_process_group()
    for call in calls:
        with pytest.raises(RuntimeError, match=r"group: want one that exists, got one that destroy_"):
            call()
