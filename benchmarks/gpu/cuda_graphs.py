"""Capture of a whole step in a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def captured(step: Callable[[], Any], warm_ups: int = 1) -> tuple[torch.cuda.CUDAGraph, Any]:
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


class HostGraph:
    """What stands for a graph in a dry run: a replay runs the step again and writes to the same results."""

    def __init__(self, step: Callable[[], list[Tensor]]) -> None:
        self.step, self.results = step, step()

    def replay(self) -> None:
        for result, again in zip(self.results, self.step(), strict=True):
            result.copy_(again)


def host_graph(step: Callable[[], list[Tensor]], warm_ups: int = 1) -> tuple[HostGraph, list[Tensor]]:
    for _ in range(warm_ups):
        step()
    graph = HostGraph(step)
    return graph, graph.results
