"""The engine "torch": a loss and its gradients in torch's own operations, on any device and in any dtype.

It is for whatever the kernels do not take: other devices, float64 on a GPU, an installation without the
compiled extension. `walk` explains how it computes, `prefixes` is that of several prefixes of the embeddings,
and `clip` is CLIP's softmax of rows and columns. Nothing
here waits for a device. MixCSE's three blocks are composed of losses of one block.
"""

from __future__ import annotations

from typing import Any

import torch

from fastqt.devices import product_dtype
from fastqt.engines.chunked import clip, contrastive
from fastqt.engines.engine import Engine
from fastqt.engines.features import FEATURES, LEAVING, MIXED, MULTIPLES
from fastqt.problem import AnyProblem, ClipProblem, Problem

_MODULES: dict[type[AnyProblem], Any] = {Problem: contrastive, ClipProblem: clip}


def dtype_for(p: AnyProblem, dtype: torch.dtype) -> torch.dtype:
    """What inputs of a dtype are computed in: those of 16 bits in float32, unless the device does better.

    The walk over several prefixes has scores that are sums of products, in float32.
    """
    if isinstance(p, Problem) and p.prefix_dims:
        return torch.promote_types(dtype, torch.float32)
    return product_dtype(p.queries.device, dtype)


ENGINE = Engine(
    "torch",
    takes=FEATURES - {MIXED, MULTIPLES, LEAVING},
    of_kind=lambda p: _MODULES.get(type(p)),
    dtype_for=dtype_for,
    # It rounds probabilities times inverse norms, which float16 has too little range for.
    normalizes=lambda p, dtype: dtype is not torch.float16,
)
