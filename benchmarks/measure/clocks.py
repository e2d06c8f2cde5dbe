"""The clock and the power of a GPU while it works: a slow contestant may only have had a slow clock."""

from __future__ import annotations

import statistics

import torch

from benchmarks.measure.errors import words


class Meter:
    """Readings of a GPU's clock and power, by NVIDIA's management library.

    Attributes:
        reason: why there are no readings, if there are none.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.reason = None if device.type == "cuda" else f"{device} has no such readings"
        self.clocks: list[float] = []
        self.powers: list[float] = []

    def read(self) -> None:
        """Takes a reading; after one that fails there are no others."""
        if self.reason is not None:
            return
        try:
            clock, power = torch.cuda.clock_rate(self.device), torch.cuda.power_draw(self.device)
        except Exception as error:  # no such library, or a machine that does not let its GPU be asked
            self.reason = words(error)
            return
        self.clocks.append(float(clock))
        self.powers.append(power / 1e3)

    def medians(self) -> tuple[float | None, float | None]:
        """The clock of the multiprocessors in MHz, and the power in watts; None where they are not known."""
        clock = statistics.median(self.clocks) if self.clocks else None
        return clock, statistics.median(self.powers) if self.powers else None
