"""Random numbers and autocast of a forward pass, for a second one that is to repeat it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor

RandomStates = list[tuple[torch.Generator, Tensor]]


def random_states() -> RandomStates:
    """The states of torch's own generators, on the CPU and on all devices that this process has used."""
    generators = (torch.default_generator, *torch.cuda.default_generators, *torch.xpu.default_generators)
    return [(generator, generator.get_state()) for generator in generators]


def set_random_states(states: RandomStates) -> None:
    """Brings generators back to the states that `random_states` found."""
    for generator, state in states:
        generator.set_state(state)


@contextmanager
def random_states_kept() -> Iterator[None]:
    """Afterwards the generators go on as if nothing had been drawn meanwhile."""
    states = random_states()
    try:
        yield
    finally:
        set_random_states(states)


class Autocast:
    """The state of autocast where this is made, on the CPU and on the accelerator."""

    def __init__(self) -> None:
        accelerator = torch.accelerator.current_accelerator()
        kinds = {"cpu"} | ({accelerator.type} if accelerator is not None else set())
        self.dtypes = {
            kind: torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
            for kind in kinds
            if torch.amp.is_autocast_available(kind)
        }
        self.cached = torch.is_autocast_cache_enabled()

    @contextmanager
    def again(self) -> Iterator[None]:
        """The same state once more, whatever it is outside."""
        with ExitStack() as stack:
            for kind, dtype in self.dtypes.items():
                enabled = dtype is not None
                stack.enter_context(torch.autocast(kind, dtype, enabled=enabled, cache_enabled=self.cached))
            yield

    @contextmanager
    def off(self) -> Iterator[None]:
        """No autocast, as PyTorch recommends for backward passes."""
        with ExitStack() as stack:
            for kind in self.dtypes:
                stack.enter_context(torch.autocast(kind, enabled=False))
            yield

    def coarsest(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype with the fewest digits among `dtype` and those that autocast rounds to."""
        dtypes = [dtype, *(d for d in self.dtypes.values() if d is not None)]
        return max(dtypes, key=lambda d: torch.finfo(d).eps)
