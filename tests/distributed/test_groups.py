"""Groups end with their processes, and a pickled module has the group of all processes where it is loaded."""

from __future__ import annotations

import io
import pickle
import weakref
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

import fastqt


def start() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


@pytest.fixture
def world() -> Iterator[None]:
    """A process group of this process alone."""
    start()
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def saved(module: torch.nn.Module) -> torch.nn.Module:
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


OPTIONS = {
    "shards": "uneven",
    "edges": "cut",
    "gradients": "sum",
    "exchange": "ring",
    "return_dtype": torch.bfloat16,
}


@pytest.mark.parametrize("again", [saved, lambda module: pickle.loads(pickle.dumps(module))])
@pytest.mark.parametrize("given", ["Group", "ProcessGroup", "DeviceMesh"])
def test_a_module_has_the_group_of_all_processes_where_it_is_loaded(world, given, again):
    group = {
        "Group": lambda: fastqt.distributed.Group(**OPTIONS),
        "ProcessGroup": lambda: dist.group.WORLD,
        "DeviceMesh": lambda: dist.init_device_mesh("cpu", (1,)),
    }[given]()
    module = fastqt.nn.CLIPLoss(group=group, scale=3.0)
    a, b = torch.randn(2, 6, 4)
    twin = again(torch.nn.ModuleList([module, module]))
    assert twin[0].options["group"] is twin[1].options["group"]
    assert twin[0].options["group"].process_group is dist.group.WORLD
    assert repr(twin[0]) == repr(module)
    assert torch.equal(twin[0](a, b), module(a, b))


def test_it_can_be_saved_when_the_processes_have_parted(world):
    """As at the end of a script; another one loads it among its own processes."""
    module = fastqt.nn.InfoNCELoss(group=fastqt.distributed.Group(shards="uneven"))
    dist.destroy_process_group()
    stored = pickle.dumps(module)
    with pytest.raises(
        RuntimeError, match=r"want torch.distributed initialised first, by init_process_group"
    ):
        pickle.loads(stored)
    start()
    assert pickle.loads(stored)(*torch.randn(2, 6, 4)).isfinite()


def test_a_group_of_some_processes_is_not_pickled(world):
    module = fastqt.nn.InfoNCELoss(group=dist.new_group([0]))
    for call in (pickle.dumps, saved):
        with pytest.raises(
            TypeError, match=r"group: want one of all processes to pickle, .*; save the module's s"
        ):
            call(module)
    other = fastqt.nn.InfoNCELoss(group=dist.group.WORLD)
    other.load_state_dict(module.state_dict())


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
