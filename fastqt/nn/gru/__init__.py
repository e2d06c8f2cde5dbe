"""A GRU that is fast on CPUs and a drop-in for `torch.nn.GRU`."""

from fastqt.nn.gru.module import GRU

__all__ = ["GRU"]
