"""How much of a GPU's memory may be taken: half of what is free, which is asked as rarely as that is safe.

The driver's answer and the allocator's figures take the host as long as all launches of a loss. They are
asked for before the first call on a device whose scores take so many bytes, rounded up to a power of two, and
before every `CALLS`-th one after it. In between the last answer holds, although less may be free by then.

No loss fails for that. Where an allocation of torch's fails after such an answer, the answers are dropped and
the loss is computed from its beginning, in what is free now. What a loss has taken is torch's to use again
once it is done. Only a library that allocates beside torch may find less than half free, until the next
question.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch

from fastqt.devices import is_capturing

CALLS = 256  # for which an answer holds

_Computing = TypeVar("_Computing", bound=Callable[..., Any])


@dataclass
class _Answer:
    bytes: int
    uses: int = 0


_answers: dict[tuple[torch.device, int], _Answer] = {}


def room_within(room: int, device: torch.device, size: int) -> int:
    """What of a room may be taken: at most half of the free memory of a GPU.

    Args:
        room: bytes that may be taken at all.
        device: a GPU.
        size: bytes of what would be kept there if the room were large enough.

    Returns:
        bytes. All of the room while a CUDA graph is captured, which is not to depend on the free memory.
    """
    key = device, min(size, room).bit_length()
    answer = _answers.get(key)

    if answer is None or answer.uses >= CALLS:
        if is_capturing(device):
            return room
        answer = _answers[key] = _Answer(_free_bytes(device) // 2)
    answer.uses += 1

    if answer.bytes >= room or is_capturing(device):
        return room
    return answer.bytes


def asked_again_if_none_is_left(compute: _Computing) -> _Computing:
    """Decorates a function of a problem. It is called once more if an old answer was too much."""

    @functools.wraps(compute)
    def computed(p: Any, *arguments: Any, **named: Any) -> Any:
        try:
            return compute(p, *arguments, **named)
        except torch.OutOfMemoryError:
            if not _drop_answers(p.queries.device):
                raise
        # The tensors of the first attempt are gone with its error.
        return compute(p, *arguments, **named)

    return cast(_Computing, computed)


def _free_bytes(device: torch.device) -> int:
    """What is free, or kept by torch's allocator for what is allocated next."""
    free, _ = torch.cuda.mem_get_info(device)
    reusable = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(free + reusable)


def _drop_answers(device: torch.device) -> bool:
    """Forgets what is known of a device. Returns whether any of it was asked for by an earlier call."""
    of_device = [key for key in _answers if key[0] == device]
    old = [_answers.pop(key).uses > 1 for key in of_device]
    return any(old)
