"""A loss over a large batch in the memory of a chunk, as a module for a training loop of one's own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from fastqt.cached import cached_embeddings
from fastqt.cached.encoding import CHECKS
from fastqt.cached.inputs import Encoder
from fastqt.checks import check_option, check_size
from fastqt.nn.init import reset_children
from fastqt.options import Recheck


class CachedContrastive(nn.Module):
    """Encoders and a loss of their embeddings, which run a large batch in the memory of a chunk.

    The batch goes into the call, and `backward()` of what it returns runs the encoders a second time:

        model = fastqt.nn.CachedContrastive([encoder, encoder], fastqt.nn.SimCSELoss(), chunk_size=64)
        loss = model(tokens, tokens)
        loss.backward()
        optimizer.step()

    `fastqt.cached_backward` says how it works, and does the same in one call. DistributedDataParallel and
    FSDP2 may be around the encoders or around this module, as Lightning has it; around this module, DDP
    wants encoders that are modules, not functions. Without DDP around it, `backward()` adds to `.grad`
    what `torch.autograd.grad` does not see.

    The attribute `encoders` is a ModuleList of the modules among the encoders, each once. A module that takes
    a place in it later, such as the one before wrapped in DDP or by torch.compile, is used from then on.

    Args:
        encoders: a module or function, or a list of them; several may be the same one.
        loss: a function of the embeddings of each encoder, such as `fastqt.simcse_loss` or a loss module.
        chunk_size, ddp, modules, check: as of `fastqt.cached_backward`.

    Raises:
        TypeError: a loss that cannot be called, or a chunk_size that is no integer.
        ValueError: a chunk_size below 1, or an unknown check.

    Example:
        >>> import torch, fastqt
        >>> encoder = torch.nn.Linear(32, 16)
        >>> model = fastqt.nn.CachedContrastive([encoder, encoder], fastqt.nn.InfoNCELoss(), chunk_size=64)
        >>> model(*torch.randn(2, 256, 32)).backward()
        >>> encoder.weight.grad.shape
        torch.Size([16, 32])
    """

    def __init__(
        self,
        encoders: Encoder | Sequence[Encoder],
        loss: Callable[..., Tensor],
        *,
        chunk_size: int = 64,
        ddp: nn.Module | Sequence[nn.Module | None] | None = None,
        modules: Sequence[nn.Module] | None = None,
        check: Recheck = "first",
    ) -> None:
        super().__init__()
        if not callable(loss):
            raise TypeError(f"loss: want a function of embeddings, got {type(loss).__name__}")
        check_size("chunk_size", chunk_size)
        check_option("check", check, CHECKS)
        several = isinstance(encoders, list | tuple | nn.ModuleList)
        callables: tuple[Encoder, ...] = tuple(encoders) if several else (encoders,)  # type: ignore[arg-type, assignment]
        # Modules are registered once each, so that a state dict holds none of them twice.
        self.encoders = nn.ModuleList(dict.fromkeys(e for e in callables if isinstance(e, nn.Module)))
        self._module_count = len(self.encoders)
        # Modules by their places in `encoders`, where others may take those places later.
        self._callables = self._placed(callables)
        self.loss = loss
        self.chunk_size = chunk_size
        ddp = (ddp,) * len(callables) if isinstance(ddp, nn.Module) else ddp
        self._ddp = None if ddp is None else self._placed(ddp)
        # A tuple, which registers none of them a second time.
        self._used = None if modules is None else tuple(modules)
        self.check = check

    reset_parameters = reset_children

    def forward(self, *inputs: Any, **loss_arguments: Any) -> Tensor:
        """What the loss returns for a batch.

        Args:
            *inputs: for each encoder a tensor, or a tuple or dict of tensors.
            **loss_arguments: further keyword arguments of the loss.

        Raises:
            TypeError, ValueError, RuntimeError: as in `fastqt.cached_backward`, or where `encoders` has
                another number of modules than at first, or for a second backward pass.
        """
        wanted, count = self._module_count, len(self.encoders)
        if count != wanted:
            raise ValueError(f"encoders: want {wanted} modules, as when this was made, got {count}")
        encoders = self._current(self._callables)
        ddp = None if self._ddp is None else self._current(self._ddp)
        embeddings = cached_embeddings(
            encoders, inputs, chunk_size=self.chunk_size, ddp=ddp, modules=self._used, check=self.check
        )
        return self.loss(*embeddings, **loss_arguments)

    def _placed(self, values: Iterable[Any]) -> tuple[Any, ...]:
        """Values, where those that are in `encoders` are replaced by their places there."""
        places = {id(module): place for place, module in enumerate(self.encoders)}
        return tuple(places.get(id(value), value) for value in values)

    def _current(self, values: Iterable[Any]) -> tuple[Any, ...]:
        """What `_placed` was given, with the modules that are in `encoders` now."""
        return tuple(self.encoders[value] if isinstance(value, int) else value for value in values)

    def extra_repr(self) -> str:
        return f"chunk_size={self.chunk_size}, check={self.check!r}"
