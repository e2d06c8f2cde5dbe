"""Loads the native extension, which registers `torch.ops.fastqt.*`, and gives its operators fakes."""

from __future__ import annotations

import torch

try:
    import fastqt._C  # noqa: F401
except ImportError as error:
    native_error: str | None = f"the extension fastqt._C is not built or does not load: {error}"
else:
    native_error = None

    def _works_in_place(*args: object) -> tuple[int, int, int]:
        return 0, 0, 0

    torch.library.register_fake("fastqt::contrastive_walk_", _works_in_place)

    # Only an extension that was built with nvcc has the kernels for GPUs.
    if hasattr(torch.ops.fastqt, "small_contrastive_"):
        torch.library.register_fake("fastqt::small_contrastive_", lambda *args: None)

cuda_error = native_error
if native_error is None and not hasattr(torch.ops.fastqt, "small_contrastive_"):
    cuda_error = "fastqt was built without CUDA: its build found no nvcc"
