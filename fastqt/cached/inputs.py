"""What the encoders are given: what they are called with, and how a batch is cut into chunks of rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fastqt.checks import shown

Encoder = Callable[..., Tensor]
Inputs = Tensor | tuple[Any, ...] | Mapping[str, Any]  # of one encoder


def pair(encoders: Encoder | Sequence[Encoder], inputs: Any) -> list[tuple[str, Encoder, str, Inputs]]:
    """Each encoder, which has to be callable, and its inputs, with the names that errors use."""
    pairs: list[tuple[str, Any, str, Any]]
    if not isinstance(encoders, list | tuple | nn.ModuleList):
        pairs = [("encoders", encoders, "inputs", inputs)]
    else:
        if not isinstance(inputs, list | tuple) or len(inputs) != len(encoders):
            part = f"{len(inputs)}" if isinstance(inputs, list | tuple) else type(inputs).__name__
            raise ValueError(f"inputs: want a list of {len(encoders)}, one for each encoder, got {part}")
        pairs = [
            (f"encoders[{i}]", encoder, f"inputs[{i}]", part)
            for i, (encoder, part) in enumerate(zip(encoders, inputs, strict=True))
        ]
    if not pairs:
        raise ValueError("encoders: want at least one, got none")
    for name, encoder, _, _ in pairs:
        if not callable(encoder):
            raise TypeError(f"{name}: want a module or a function, got {type(encoder).__name__}")
    return pairs


def check_no_batch_norm(name: str, modules: Iterable[nn.Module]) -> None:
    """Raises ValueError for a batch normalisation in training mode, whose batch would be a chunk."""
    for module in modules:
        for path, part in module.named_modules():
            if isinstance(part, _BatchNorm) and part.training:
                where = f"{name}.{path}" if path else name
                raise ValueError(
                    f"{where}: want no {type(part).__name__} in training mode, which would normalise each "
                    "chunk by itself and count it twice; call its eval(), or use a LayerNorm or GroupNorm; "
                    "where the encoder does not use it, give modules= without it"
                )


def tensors_of(name: str, inputs: Inputs) -> dict[str, Tensor]:
    """The tensors among the inputs of an encoder that have rows, by the names that errors use.

    ValueError for a tensor that another computation made, whose graph each chunk would need again.
    """
    if isinstance(inputs, Tensor):
        parts: dict[str, Any] = {name: inputs}
    elif isinstance(inputs, tuple):
        parts = {f"{name}[{i}]": part for i, part in enumerate(inputs)}
    elif isinstance(inputs, Mapping):
        parts = {f"{name}[{key!r}]": part for key, part in inputs.items()}
    else:
        raise TypeError(f"{name}: want a tensor, or a tuple or dict of tensors, got {shown(inputs)}")

    tensors = {part: x for part, x in parts.items() if isinstance(x, Tensor) and x.dim() > 0}
    for part, x in tensors.items():
        if x.requires_grad and not x.is_leaf:
            raise ValueError(
                f"{part}: want a tensor without a history of autograd, got one with {x.grad_fn}; "
                "let the encoder compute it, or detach it"
            )
    return tensors


def row_count(name: str, tensors: Mapping[str, Tensor]) -> int:
    """The number of rows, which all tensors of an encoder's inputs share."""
    if not tensors:
        raise ValueError(f"{name}: want at least one tensor with rows, got none")
    (first, x), *others = tensors.items()
    for part, other in others:
        if len(other) != len(x):
            raise ValueError(
                f"{part}: want {len(x)} rows as {first} has, got {len(other)}; what has no row for each "
                "input belongs into the encoder, by functools.partial for instance"
            )
    return len(x)


def spans(rows: int, chunk_size: int, count: int | None = None) -> list[tuple[int, int]]:
    """Cuts rows into chunks; no rows are one empty chunk.

    They are as few as possible, or `count`, of which some may be empty.
    """
    fewest = max(1, -(-rows // chunk_size))
    if count is None or count == fewest:
        return [(k * chunk_size, min((k + 1) * chunk_size, rows)) for k in range(fewest)]
    return [(rows * k // count, rows * (k + 1) // count) for k in range(count)]


def call(encoder: Encoder, inputs: Inputs, begin: int, end: int) -> tuple[Tensor, bool]:
    """Calls an encoder with some rows of its inputs: what it returns, and whether it has changed the rows."""
    parts: list[Tensor] = []

    def part(x: Any) -> Any:
        if not isinstance(x, Tensor) or x.dim() == 0:
            return x
        if x.requires_grad:
            return x[begin:end]
        # With a count of changes of its own: the graph of a chunk need not mind what happens to others.
        parts.append(x.data[begin:end])
        return parts[-1]

    if isinstance(inputs, Tensor):
        output = encoder(part(inputs))
    elif isinstance(inputs, tuple):
        output = encoder(*map(part, inputs))
    else:
        output = encoder(**{key: part(x) for key, x in inputs.items()})
    return output, any(x._version > 0 for x in parts if not x.is_inference())
