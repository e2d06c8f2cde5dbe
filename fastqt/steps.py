"""How many rows or columns a loop takes at a time."""

from __future__ import annotations

import math


def even_step(length: int, most: int, multiple: int = 1) -> int:
    """The least multiple that covers `length` in as few steps as `most` would, so that the steps are even."""
    steps = math.ceil(length / most)
    return math.ceil(length / steps / multiple) * multiple
