"""Loads the native extension, which registers `torch.ops.fastqt.*`, and gives its operators fakes."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

try:
    import_module("fastqt._C")  # Not an import statement: that would import the whole package from here.
except ImportError as error:
    native_error: str | None = f"the extension fastqt._C is not built or does not load: {error}"
else:
    native_error = None

    def _fake_walk(*args: Any) -> tuple[list[Tensor], int, int, int]:
        """What `schedule` says that it returns, of problems whose targets are as they should be."""
        queries, candidates, negatives, row_negatives, bias = args[:5]
        wanted, weight, row_weights = args[18:21]
        scalar = queries.new_empty((), dtype=torch.float64)
        inputs = (queries, candidates, negatives, row_negatives, scalar, bias)
        found = [torch.empty(x.shape, dtype=x.dtype) for k, x in enumerate(inputs) if wanted >> k & 1]
        if weight is not None:
            return [queries.new_empty(()), *found], 0, 0, 0
        if row_weights is not None:
            return found, 0, 0, 0
        rows = [queries.new_empty(queries.shape[0], dtype=torch.float64) for _ in range(3)]
        return rows, 0, 0, 0

    torch.library.register_fake("fastqt::contrastive_walk", _fake_walk)

    # Only an extension that was built with nvcc has the kernels for GPUs.
    if hasattr(torch.ops.fastqt, "small_contrastive_"):
        torch.library.register_fake("fastqt::small_contrastive_", lambda *args: None)

cuda_error = native_error
if native_error is None and not hasattr(torch.ops.fastqt, "small_contrastive_"):
    cuda_error = "fastqt was built without CUDA: its build found no nvcc"
