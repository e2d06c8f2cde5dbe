"""The native operators of the GRU: whether they can be used, their fakes, and products that use them."""

import torch
from torch import Tensor

from fastqt.engines import ops
from fastqt.engines.own_products import multiply

NATIVE = ops.native_error is None  # whether the extension was built and could be loaded


def _fake_in_place(*args: object) -> None:
    return None


def _fake_pack(matrix: Tensor, rows: int, bfloat16: bool = False) -> Tensor:
    return matrix.new_empty(torch.library.get_ctx().new_dynamic_size())


if NATIVE:
    for name in (
        "gru_reset_after_",
        "gru_reset_after_backward_",
        "gru_reset_before_",
        "gru_reset_before_candidate_",
        "gru_reset_before_backward_",
        "gru_reset_before_backward_reset_",
        "packed_product_",
    ):
        torch.library.register_fake(f"fastqt::{name}", _fake_in_place)
    torch.library.register_fake("fastqt::pack_matrix", _fake_pack)


def supports_native(tensor: Tensor) -> bool:
    """Whether the native operators exist and support the tensor's device and dtype."""
    return NATIVE and tensor.device.type == "cpu" and tensor.dtype in (torch.float32, torch.float64)


def in_large_pages(tensor: Tensor) -> Tensor:
    """The tensor itself, of new memory that is not yet touched: its first touch takes fewer page faults."""
    if supports_native(tensor):
        torch.ops.fastqt.ask_for_large_pages_(tensor)
    return tensor


class PackedProduct:
    """Many products with the same right-hand matrix, which is packed once into the GEMM's own layout.

    Packing needs the extension, and products of its own or a GEMM library that packs. Without them, torch
    multiplies. The matrix (K, N) is contiguous or the transpose of a contiguous one, and must not change
    during the life of this object. The packing is tuned for left-hand matrices of about `rows` rows. With
    `bfloat16`, both factors are rounded to it as in `multiply`.
    """

    def __init__(self, matrix: Tensor, rows: int, *, bfloat16: bool = False) -> None:
        self.matrix = matrix
        self.bfloat16 = bfloat16
        self.packed: Tensor | None = None
        if supports_native(matrix) and matrix.numel() > 0:
            packed = torch.ops.fastqt.pack_matrix(matrix, rows, bfloat16)
            self.packed = packed if packed.numel() > 0 else None

    def __call__(
        self,
        left: Tensor,  # (b, K), columns of stride 1
        out: Tensor,  # (b, N), columns of stride 1
        *,
        accumulate: bool = False,
    ) -> None:
        """Writes left · matrix to `out`, or adds it if `accumulate`."""
        if len(left) == 0:
            return
        if self.packed is not None:
            torch.ops.fastqt.packed_product_(out, left, self.matrix, self.packed, accumulate, self.bfloat16)
        else:
            multiply(out, left, self.matrix, add=accumulate, bfloat16=self.bfloat16)
