"""A model of one encoder and a loss, for kinds whose texts need no views."""

from __future__ import annotations

from fastqt.nn import Encoder, SimCSE
from fastqt.nn.losses import Loss


class OneEncoder(SimCSE):
    """One encoder for all texts, without dropout of its own, and the module of the loss."""

    def __init__(self, encoder: Encoder, loss: Loss) -> None:
        self._set_up(encoder, 0.0, None, loss)
