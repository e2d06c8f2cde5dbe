"""Encoders as computations that ONNX has operators for: of padded token ids, without lengths on the host.

Encoders compute with the words of a batch alone, which ONNX cannot express. The graphs of their forms compute
the same vectors from the padded batch. Padding may be any ids: it is replaced by 0 before tables are read.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastqt.nn import Encoder
from fastqt.sentences.runs.encoders.forms import form_of


class Graph(nn.Module):
    """The vectors of a model with these encoders, as `fastqt embed` computes them.

    `normalize` scales each encoder's vectors to norm 1.
    """

    def __init__(self, halves: Sequence[Encoder], *, normalize: bool) -> None:
        super().__init__()
        self.halves = nn.ModuleList(form_of(half).graph(half) for half in halves)
        self.normalize = normalize

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """(B, E) of token ids (B, L) and a mask (B, L), both int64: 1 at words, which come first, and 0."""
        valid = attention_mask > 0
        tokens = torch.where(valid, input_ids, 0)
        vectors = [half(tokens, valid) for half in self.halves]
        return torch.cat([F.normalize(half, dim=1) if self.normalize else half for half in vectors], dim=1)
