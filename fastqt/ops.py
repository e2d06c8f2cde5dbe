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
