"""Modules that reduce their gradients over ranks, and how to hold that back: DDP, FSDP2 and their kind."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fastqt.cached.inputs import Encoder


def reducing_modules(
    names: Sequence[str],
    encoders: Sequence[Encoder],
    used: Sequence[Sequence[nn.Module]],
    ddp: nn.Module | Sequence[nn.Module | None] | None,
) -> list[list[nn.Module]]:
    """The modules of each encoder that reduce gradients over ranks.

    They are the user's: one module that all encoders use, or one for each; where none are given, they are
    looked for among the modules that each encoder uses. ValueError for a function that names several, of
    which nobody knows which it uses, and for a DDP module with a static graph.
    """
    if ddp is None:
        by_encoder = [_outermost_of_all(modules) for modules in used]
        for name, encoder, modules in zip(names, encoders, by_encoder, strict=True):
            if len(modules) > 1 and not isinstance(encoder, nn.Module):
                raise ValueError(
                    f"ddp: want it given, one for each encoder: {name} is a function that names "
                    f"{len(modules)} modules that reduce gradients"
                )
    elif isinstance(ddp, nn.Module):
        by_encoder = [_reducing("ddp", ddp) for _ in encoders]
    else:
        if len(ddp) != len(encoders):
            raise ValueError(
                f"ddp: want one module, or one for each of {len(encoders)} encoders, got {len(ddp)}"
            )
        by_encoder = [_reducing(f"ddp[{i}]", module) for i, module in enumerate(ddp)]

    for module in (module for modules in by_encoder for module in modules):
        if getattr(module, "static_graph", False):
            raise ValueError(
                "ddp: want a module without static_graph=True, which counts on one backward pass a step"
            )
    return by_encoder


def _reducing(name: str, module: nn.Module | None) -> list[nn.Module]:
    modules = [] if module is None else _outermost(module)
    if module is not None and not modules:
        raise TypeError(
            f"{name}: want a module that reduces gradients, such as DistributedDataParallel, "
            f"got {type(module).__name__}"
        )
    return modules


def _outermost(module: nn.Module) -> list[nn.Module]:
    """The modules within `module` that can hold back their reduction and that lie in no other of these."""
    if _is_sharded(module) or hasattr(type(module), "no_sync"):
        return [module]
    return [part for child in module.children() for part in _outermost(child)]


def _outermost_of_all(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """What `_outermost` finds in any of the modules, each once and none that lies in another."""
    reducing = list(dict.fromkeys(part for module in modules for part in _outermost(module)))
    inner = {part for module in reducing for part in module.modules() if part is not module}
    return [module for module in reducing if module not in inner]


def _is_sharded(module: nn.Module) -> bool:
    return hasattr(type(module), "set_requires_gradient_sync")


def within_ddp() -> bool:
    """Whether this runs in the forward pass of a DistributedDataParallel module."""
    if not dist.is_available():
        return False
    return DistributedDataParallel._get_active_ddp_module() is not None


@contextmanager
def without_reduction(modules: Iterable[Any]) -> Iterator[None]:
    """Within, gradients of these modules are summed on each rank alone."""
    with ExitStack() as stack:
        for module in modules:
            stack.enter_context(_sharded_no_sync(module) if _is_sharded(module) else module.no_sync())
        yield


@contextmanager
def _sharded_no_sync(module: nn.Module) -> Iterator[None]:
    """What `no_sync` is for DDP; FSDP2 has setters only, so that what they change is read from its state."""
    before: list[tuple[Any, bool, bool]] = []
    for part in filter(_is_sharded, module.modules()):
        state: Any = part._get_fsdp_state()  # type: ignore[operator]
        if hasattr(state, "_fsdp_param_groups"):  # since torch 2.12
            groups = state._fsdp_param_groups
        else:
            groups = [group for group in (state._fsdp_param_group,) if group is not None]
        if groups:
            reduces = all(group.reduce_grads for group in groups)
            before.append((part, reduces, all(group.all_reduce_grads for group in groups)))

    try:
        for part, *_ in before:
            part.set_requires_gradient_sync(False, recurse=False)
        yield
    finally:
        for part, reduces, reduces_replicas in before:
            part.set_requires_gradient_sync(reduces, recurse=False)
            part.set_requires_all_reduce(reduces_replicas, recurse=False)


def agreed_counts(counts: Sequence[int], modules: Sequence[Sequence[nn.Module]]) -> list[int]:
    """How many chunks each encoder is to have, where its forward pass waits for other ranks.

    A sharded module gathers its parameters in every forward pass, so that its ranks have to run as many: the
    largest count of all ranks. Other encoders keep the count that the rows of this rank make.
    """
    agreed = list(counts)
    for i, used in enumerate(modules):
        parameters = [p for module in used if _is_sharded(module) for p in module.parameters()]
        meshes = {p.device_mesh for p in parameters if hasattr(p, "device_mesh")}
        for mesh in sorted(meshes, key=repr):
            count = torch.tensor(agreed[i], device=mesh.device_type)
            for dimension in range(mesh.ndim):
                dist.all_reduce(count, dist.ReduceOp.MAX, mesh.get_group(dimension))
            agreed[i] = int(count)
    return agreed
