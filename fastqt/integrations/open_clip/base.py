"""What both losses share: the processes, and numbers as open_clip's models give them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fastqt.checks import check_flag, check_option, check_size
from fastqt.distributed import collectives
from fastqt.distributed.agreement import agree_on_rows
from fastqt.distributed.batch import Batch
from fastqt.distributed.group import Group
from fastqt.engines import ENGINES
from fastqt.options import Backend, Memory
from fastqt.problem import check_memory
from fastqt.torch_modes import input_dtype


class LossOfRanks(nn.Module):
    """What both losses have: this process's place among others, and arguments that change nothing."""

    def __init__(
        self,
        cache_labels: bool,
        rank: int,
        world_size: int,
        use_horovod: bool,
        memory: Memory,
        backend: Backend | None,
        **group_options: Any,
    ) -> None:
        super().__init__()

        check_flag("cache_labels", cache_labels)
        check_flag("use_horovod", use_horovod)
        check_memory(memory)
        if backend is not None:
            check_option("backend", backend, tuple(ENGINES))

        if use_horovod:
            raise ValueError(
                "use_horovod: want False, as the ranks talk through torch.distributed here, got True"
            )

        check_size("world_size", world_size, least=0)  # open_clip takes 0 for one process, too.
        check_size("rank", rank, least=0)
        if rank >= world_size > 1:
            raise ValueError(f"rank: want 0..{world_size - 1}, got {rank}")

        self.cache_labels, self.rank, self.world_size = cache_labels, rank, world_size
        self.options: dict[str, Any] = {"normalize": False, "memory": memory, "backend": backend}
        self.group_options = group_options
        self._made: Group | None = None
        self.prev_num_logits = 0
        self.labels: dict[Any, Tensor] = {}

        if world_size > 1 and dist.is_available() and dist.is_initialized():
            self.group()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_made": None}  # A process group cannot be pickled.

    def group(self) -> Group:
        """All processes, which are to be as many as `world_size` says."""
        if self._made is None:
            group = Group(**self.group_options)
            for name, actual in (("world_size", group.size), ("rank", group.rank)):
                if getattr(self, name) != actual:
                    raise ValueError(
                        f"{name}: want {actual}, as torch.distributed has it, got {getattr(self, name)}"
                    )
            self._made = group
        return self._made

    def agreed(self, image_features: Tensor, text_features: Tensor, **leaves: object) -> Batch:
        """That all ranks have as many pairs of the same kind."""
        features = {"image_features": image_features, "text_features": text_features}
        name = f"fastqt.integrations.open_clip.{type(self).__name__}"
        return agree_on_rows(self.group(), name, lambda n: {}, leaves, **features)[0]

    def gathered(self, features: Tensor, with_grad: bool = True) -> Tensor:
        """All ranks' rows."""
        counts = (len(features),) * self.world_size
        if with_grad:
            return collectives.gather(features, counts, self.group(), input_dtype(features))
        return collectives.gather_constant(features, counts, self.group())


def number(x: Tensor | float) -> Tensor | float:
    """A tensor of one number as a 0-d tensor: open_clip's models may have parameters of shape (1,)."""
    return x.reshape(()) if isinstance(x, Tensor) and x.numel() == 1 else x


def scaled(features: Tensor, logit_scale: Tensor | float) -> tuple[Tensor, Tensor | float]:
    """Features and a scale for them, of which the features have a scale that is not finite.

    fastqt's losses refuse such a scale, and open_clip's are NaN then, which a training may skip.
    """
    scale = number(logit_scale)
    if not isinstance(scale, Tensor) or not scale.is_cpu or torch.compiler.is_compiling():
        return features, scale
    return (features, scale) if bool(scale.isfinite().all()) else (features * scale, 1.0)


def bias_of(x: Tensor | float | None) -> Tensor | float:
    return 0.0 if x is None else number(x)
