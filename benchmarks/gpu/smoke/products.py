"""The vendor's products of 16-bit operands into float32, as the Triton engine asks for them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu.recorder import recorded_check
from benchmarks.gpu.sections import Options, Record, Verdict
from benchmarks.gpu.smoke.compare import near

MOST_ERROR = 1e-4  # far above float32's sums, far below one rounding of a sum to 16 bits
SIZES, DRY_SIZES = (512, 700, 256), (6, 9, 8)  # rows of E, its columns, D


def products(options: Options) -> Iterator[Record]:
    """Each dtype, with and without adding to what is there, in each form in which the engine multiplies."""
    sizes = DRY_SIZES if options.dry_run else SIZES
    for dtype in (torch.bfloat16, torch.float16):
        for add in (False, True):
            for form in FORMS:
                name = f"{str(dtype).removeprefix('torch.')}, beta={int(add)}, {form}"
                test = partial(product_verdict, form, sizes, dtype, add, options.device)
                yield recorded_check(name, test, operators=True)


def times_candidates(E: Tensor, F: Tensor, G: Tensor) -> tuple[tuple[int, int], slice, Tensor, Tensor]:
    """dF = E G: the shape of what is allocated, the rows that are written, and the two factors."""
    return (len(E), G.shape[1]), slice(None), E, G


def transposed_on_a_slice(E: Tensor, F: Tensor, G: Tensor) -> tuple[tuple[int, int], slice, Tensor, Tensor]:
    """A part of dG, Eᵀ F."""
    columns = slice(2, E.shape[1] - 3)
    return (E.shape[1], F.shape[1]), columns, E[:, columns].T, F


def one_row(E: Tensor, F: Tensor, G: Tensor) -> tuple[tuple[int, int], slice, Tensor, Tensor]:
    """The sums of E's columns with weights, (1, M): the gradient of a bias."""
    return (1, E.shape[1]), slice(None), F[:, 0].contiguous()[None], E


def last_chunk_of_one(E: Tensor, F: Tensor, G: Tensor) -> tuple[tuple[int, int], slice, Tensor, Tensor]:
    """dF of a chunk that has one row."""
    return (1, G.shape[1]), slice(None), E[:1], G


def one_candidate(E: Tensor, F: Tensor, G: Tensor) -> tuple[tuple[int, int], slice, Tensor, Tensor]:
    """dG of a single candidate."""
    return (1, F.shape[1]), slice(None), E[:, :1].T, F


FORMS = {
    "E·G": times_candidates,
    "Eᵀ·F on a slice": transposed_on_a_slice,
    "1×M": one_row,
    "E·G of one row": last_chunk_of_one,
    "Eᵀ·F of one column": one_candidate,
}


def product_verdict(
    form: str, sizes: tuple[int, int, int], dtype: torch.dtype, add: bool, device: torch.device
) -> Verdict:
    """Whether a product is exact to float32, adds to what is there if asked to, and writes nothing else."""
    from fastqt.engines.products import multiply
    from fastqt.engines.triton.operands import aligned

    N, M, D = sizes
    generator = torch.Generator().manual_seed(0)
    E = torch.rand(N, aligned(M), generator=generator).to(device, dtype)[:, :M]  # rows as in the engine's E
    F, G = (torch.randn(rows, D, generator=generator).to(device, dtype) for rows in (N, M))
    shape, rows, a, b = FORMS[form](E, F, G)
    before = torch.randn(shape, generator=generator).to(device)
    out = before.clone()
    if not add:
        out[rows] = math.nan
    multiply(out[rows], a, b, add=add)
    exact = before.double()
    exact[rows] = a.double() @ b.double() + (before[rows].double() if add else 0)
    return near({"product": (out, exact, MOST_ERROR)})
