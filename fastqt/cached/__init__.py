"""Large batches in little memory: the encoders run chunk by chunk, and the loss sees the whole batch.

Source: Gao, Zhang, Han and Callan, "Scaling deep contrastive learning batch size under memory limited setup"
(arXiv:2101.06983), known as GradCache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fastqt.cached.encoding import Encoding
from fastqt.cached.inputs import Encoder
from fastqt.cached.reduction import within_ddp
from fastqt.checks import check_backward
from fastqt.options import Recheck

__all__ = ["cached_backward", "cached_embeddings"]


def cached_backward(
    encoders: Encoder | Sequence[Encoder],
    inputs: Any,
    loss: Callable[..., Tensor],
    *,
    chunk_size: int = 64,
    ddp: nn.Module | Sequence[nn.Module | None] | None = None,
    modules: Sequence[nn.Module] | None = None,
    scaler: Any = None,
    check: Recheck = "first",
) -> Tensor:
    """Adds the gradients of a loss over a large batch to those of all parameters, in the memory of a chunk.

    It takes the place of `loss(*embeddings).backward()`, with the same gradients: the encoders run once
    without graph, the loss gives the gradient of every embedding, and the encoders run a second time, chunk
    by chunk, to send these to their parameters. One chunk keeps its graph from the first time, so that a
    batch of one chunk costs what a plain step does; of 16 chunks or more none does, unless ranks reduce
    gradients, so that the memory of a graph is not added to that of the loss. Dropout draws the same numbers
    both times, and autocast is as it was. Call it under autocast if the loss is to run there; the backward
    passes leave it.

    Gradients are added to `.grad` in its dtype, so several calls accumulate; many small chunks lose digits
    where weights are bfloat16, so keep these in float32 and use autocast. Under DistributedDataParallel and
    FSDP2 gradients are reduced once a call, after the last chunk of each module, or not at all if the call is
    inside the module's `no_sync()` (FSDP2: `set_requires_gradient_sync(False)`). Parameters of the loss
    belong to no such module unless the loss is one. Ranks may have different numbers of rows, also none where
    the encoder takes an empty batch.

    Args:
        encoders: a module or a function that maps inputs to embeddings (rows, ...), or a list of them.
            Several may be the same one: with dropout, each call is another view.
        inputs: of a single encoder, a tensor, or a tuple or dict of tensors, which it gets as positional or
            as keyword arguments; for a list of encoders a list of these. The first dimension of every
            tensor is cut into chunks; other values are passed on.
        loss: a function of the embeddings of each encoder that returns a scalar.
        chunk_size: the most rows that an encoder gets at once.
        ddp: the modules that reduce gradients over ranks: one that all encoders use, or one or None for
            each. By default those among the modules that the encoders use.
        modules: all modules that encoders use which are functions or objects. By default those that they
            hold: in attributes, closures and default values, as globals that they name, or as what a
            method is bound to.
        scaler: a `torch.amp.GradScaler` that scales the loss before its backward pass.
        check: "first" compares the first chunk that each encoder encodes again with what it was in the
            first pass, for which the host waits for the device once; "always" all chunks; "never" none.

    Returns:
        The loss without graph, not scaled.

    Raises:
        TypeError, ValueError: naming the argument, what is wanted and what came; so for an encoder that uses
            batch normalisation in training mode, which would see chunks in place of the batch, and for a
            function in which no module is found.
        RuntimeError: an encoder whose embeddings differ in the second pass, because it changed its inputs in
            place, drew from a generator that is not torch's own, or changes from call to call. Some
            gradients may have been added by then. Or a call within no_grad, or within DDP's forward pass.

    Example:
        >>> import torch, fastqt
        >>> encoder = torch.nn.Linear(32, 16)
        >>> queries, candidates = torch.randn(2, 256, 32)  # 256 pairs, of which 64 are encoded at once
        >>> loss = fastqt.cached_backward(
        ...     [encoder, encoder], [queries, candidates], fastqt.info_nce_loss, chunk_size=64
        ... )
        >>> loss.shape, encoder.weight.grad.shape
        (torch.Size([]), torch.Size([16, 32]))
    """
    if not callable(loss):
        raise TypeError(f"loss: want a function of embeddings, got {type(loss).__name__}")
    if scaler is not None and not callable(getattr(scaler, "scale", None)):
        raise TypeError(f"scaler: want a torch.amp.GradScaler, got {type(scaler).__name__}")

    if not torch.is_grad_enabled():
        raise RuntimeError("cached_backward: want gradients enabled, got a call within no_grad")
    if within_ddp():
        raise RuntimeError(
            "cached_backward: want a call outside of the forward pass of DistributedDataParallel, which "
            "learns of gradients in its backward pass; fastqt.nn.CachedContrastive may be inside"
        )

    encoding = Encoding(encoders, inputs, chunk_size=chunk_size, ddp=ddp, check=check, modules=modules)
    encoding.first_pass()
    # Other tensors of the same memory, so that a graph ends here.
    embeddings = [
        x.detach().requires_grad_(trainable)
        for x, trainable in zip(encoding.embeddings, encoding.trainable, strict=True)
    ]

    value = loss(*embeddings)
    if not isinstance(value, Tensor) or value.dim() != 0:
        got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"loss: want a function that returns a scalar tensor, got {got}")

    if not value.requires_grad:
        raise ValueError(
            "loss: want one that depends on a parameter of an encoder or of its own, got one without gradient"
        )

    with encoding.autocast.off():
        (value if scaler is None else scaler.scale(value)).backward()
    encoding.second_pass([x.grad for x in embeddings])
    return value.detach()


def cached_embeddings(
    encoders: Encoder | Sequence[Encoder],
    inputs: Any,
    *,
    chunk_size: int = 64,
    ddp: nn.Module | Sequence[nn.Module | None] | None = None,
    modules: Sequence[nn.Module] | None = None,
    check: Recheck = "first",
) -> tuple[Tensor, ...]:
    """The embeddings of a large batch, whose backward pass runs the encoders again, chunk by chunk.

    For a training loop that calls `loss.backward()` itself. `cached_backward` says how it works, and what
    arguments and errors there are; RuntimeError is also raised for a second backward pass. The backward pass
    adds to `.grad` of the parameters, which `torch.autograd.grad` does not see.

    Returns:
        (N, ...) of each encoder; without gradient where gradients are disabled.
    """
    encoding = Encoding(encoders, inputs, chunk_size=chunk_size, ddp=ddp, check=check, modules=modules)
    encoding.first_pass(with_graph=torch.is_grad_enabled())
    if not torch.is_grad_enabled():
        return tuple(encoding.embeddings)
    # Autograd records a function of tensors that require a gradient. DDP around all of this counts on
    # gradients that come once, through the graph. Otherwise the second pass brings them to the parameters,
    # which has no need to know them all.
    leaves = encoding.collect_gradients() if within_ddp() else []
    anchor = torch.zeros((), device="cpu", requires_grad=any(encoding.trainable))
    return tuple(_SecondPass.apply(encoding, anchor, *leaves))  # type: ignore[no-untyped-call]


class _SecondPass(torch.autograd.Function):
    """Embeddings of a first pass, with the second pass as their backward."""

    @staticmethod
    def forward(ctx: Any, encoding: Encoding, anchor: Tensor, *leaves: Tensor) -> tuple[Tensor, ...]:
        """`anchor` gets no gradient, but makes autograd record this; `leaves` get what is collected."""
        ctx.encoding = encoding
        ctx.set_materialize_grads(False)
        # Other tensors of the same memory: an output that `encoding` held would never be freed.
        outputs = tuple(x.detach() for x in encoding.embeddings)
        trainable = zip(outputs, encoding.trainable, strict=True)
        ctx.mark_non_differentiable(*(x for x, has_gradient in trainable if not has_gradient))
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        check_backward("cached_embeddings")
        return None, None, *ctx.encoding.second_pass(gradients)
