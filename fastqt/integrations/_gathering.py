"""The group of all processes, for the losses of libraries that gather across devices."""

from __future__ import annotations

import weakref
from typing import Any

import torch.distributed as dist

from fastqt.distributed import Group

# By the group of all processes, the `Group` that has agreed on losses with the others.
_groups: weakref.WeakKeyDictionary[Any, Group] = weakref.WeakKeyDictionary()


def group_of(loss: Any) -> Group | None:
    """All processes, if a loss gathers across devices and there are several."""
    if not loss.gather_across_devices or not (dist.is_available() and dist.is_initialized()):
        return None
    world = dist.group.WORLD
    if world not in _groups:
        # The last batch of an epoch may be shorter than the others.
        _groups[world] = Group(shards="uneven", exchange="gather")
    return _groups[world]
