"""Loads the native extension, which registers `torch.ops.fastqt.*`, and gives its operators fakes."""

from __future__ import annotations

import os
import struct
from importlib import import_module
from importlib.util import find_spec
from itertools import compress
from typing import Any

import torch
from torch import Tensor

from fastqt.problem import Inputs

ELF_HEADER, ELF_SEGMENT = 64, 56  # bytes of the structures of a 64-bit library


def check_whole(path: str) -> None:
    """Raises ImportError for a Linux library that is cut short.

    The loader does not: it maps what the headers name, and the process dies of SIGBUS beyond the file's end.
    """
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        header = file.read(ELF_HEADER)
        if header[:4] != b"\x7fELF":
            return  # The loader says what is wrong.
        if size < ELF_HEADER:
            raise ImportError(f"{path} is cut short: its header wants {ELF_HEADER} bytes, got {size}")
        order = ">" if header[5] == 2 else "<"
        segments_at, sections_at = struct.unpack_from(f"{order}QQ", header, 32)
        segments, section_size, sections = struct.unpack_from(f"{order}HHH", header, 56)
        file.seek(min(segments_at, size))
        table = file.read(segments * ELF_SEGMENT)
    ends = [sections_at + sections * section_size, segments_at + segments * ELF_SEGMENT]
    for at in range(0, len(table) - ELF_SEGMENT + 1, ELF_SEGMENT):
        offset, _, _, length = struct.unpack_from(f"{order}QQQQ", table, at + 8)
        ends.append(offset + length)
    if size < max(ends):
        raise ImportError(f"{path} is cut short: its headers want {max(ends)} bytes, got {size}")


EXTENSION = f"{__name__.partition('.')[0]}._C"  # a copy of the package under another name has one of its own

try:
    if (spec := find_spec(EXTENSION)) is not None and spec.origin is not None:
        check_whole(spec.origin)
    import_module(EXTENSION)  # Not an import statement: that would import the whole package from here.
except (ImportError, OSError) as error:
    native_error: str | None = f"the extension fastqt._C is not built or does not load: {error}"
else:
    native_error = None

    # A fake tells shapes and dtypes without computing. Status, row and column are 0: no target is at fault.
    def _fake_loss_rows(queries: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor, int, int, int]:
        logsumexp, mass, loss = (queries.new_empty(queries.shape[0], dtype=torch.float64) for _ in range(3))
        return logsumexp, mass, loss, 0, 0, 0

    # The operators of csrc/cpu/contrastive.cpp take a problem's fields by their names, and then others.
    _schema = torch.ops.fastqt.contrastive_loss_rows.default._schema
    PROBLEM_ARGUMENTS = [argument.name for argument in _schema.arguments][:-3]

    def _fake_gradients(arguments: tuple[Any, ...]) -> list[Tensor]:
        given, needs = dict(zip(PROBLEM_ARGUMENTS, arguments, strict=False)), arguments[-1]
        given["scale"] = arguments[0].new_empty((), dtype=torch.float64)
        return [given[name].new_empty(given[name].shape) for name in compress(Inputs._fields, needs)]

    def _fake_loss_with_gradients(*arguments: Any) -> tuple[Tensor, list[Tensor], int, int, int]:
        dtype = torch.promote_types(arguments[0].dtype, torch.float32)
        return arguments[0].new_empty((), dtype=dtype), _fake_gradients(arguments), 0, 0, 0

    def _fake_loss_backward(*arguments: Any) -> tuple[list[Tensor], int, int, int]:
        return _fake_gradients(arguments), 0, 0, 0

    def _fake_row_similarities(queries: Tensor, candidates: Tensor, rows: Tensor, *_: Any) -> Tensor:
        return queries.new_empty(rows.shape, dtype=torch.promote_types(queries.dtype, torch.float32))

    def _fake_in_place(*_: Any) -> None:
        pass

    torch.library.register_fake("fastqt::row_similarities", _fake_row_similarities)
    torch.library.register_fake("fastqt::above_thresholds_", _fake_in_place)
    torch.library.register_fake("fastqt::own_product_", _fake_in_place)
    torch.library.register_fake("fastqt::contrastive_loss_rows", _fake_loss_rows)
    torch.library.register_fake("fastqt::contrastive_loss_with_gradients", _fake_loss_with_gradients)
    torch.library.register_fake("fastqt::contrastive_loss_backward", _fake_loss_backward)

    # Only an extension that was built with nvcc has the kernels for GPUs.
    if hasattr(torch.ops.fastqt, "small_contrastive_"):
        torch.library.register_fake("fastqt::small_contrastive_", lambda *args: None)

cuda_error = native_error
if native_error is None and not hasattr(torch.ops.fastqt, "small_contrastive_"):
    cuda_error = "fastqt was built without CUDA: its build found no nvcc, or was to use none"
