"""Capture of a whole step in a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")


def captured(step: Callable[[], T], warm_ups: int = 1) -> tuple[torch.cuda.CUDAGraph, T]:
    """The graph of a step, and the step's results; every replay writes to their memory again."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(warm_ups):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    return graph, results
