"""A CPU that stands for a device without float64."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fastqt import devices


class WithoutFloat64(TorchDispatchMode):
    """An operation that makes a tensor of float64 fails."""

    def __enter__(self) -> Any:
        self._patch = mock.patch.object(devices, "NO_FLOAT64", ("cpu",))
        self._patch.start()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patch.stop()

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        found = function(*arguments, **(options or {}))
        for x in tree_leaves(found):
            assert not isinstance(x, Tensor) or x.dtype is not torch.float64, function
        return found
