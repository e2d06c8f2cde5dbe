"""The engine `cuda` on a CPU: its operator is the one-launch kernel, built by a C++ compiler."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch

from fastqt.engines import ENGINES, cuda, ops
from tests.csrc.building import ROOT
from tests.csrc.cuda.host_execution import DIAGONALS, HostKernels, Small, build


def array(x: torch.Tensor | None) -> np.ndarray | None:
    if x is None:
        return None
    x = x.detach()
    return x.view(torch.int16).numpy().view(np.uint16) if x.dtype is torch.bfloat16 else x.numpy()


def schema() -> str:
    """What csrc/cuda/small_contrastive.cu declares."""
    text = (ROOT / "csrc" / "cuda" / "small_contrastive.cu").read_text()
    found = re.search(r"m\.def\((.*?)\);", text, re.DOTALL)
    assert found is not None
    return "".join(re.findall(r'"(.*?)"', found[1]))


@contextmanager
def kernel_on_a_cpu() -> Iterator[None]:
    kernels = HostKernels(build())

    def small_contrastive(*arguments):
        queries, candidates, row_negatives, partners, mix, scale, scale_value, diagonal = arguments[:8]
        starts, columns, weights, row_weights, row_weight, tf32, *results = arguments[8:]
        names = ("logsumexp", "mass", "loss", "total", "queries", "candidates", "row_negatives", "scale")
        given = {name: out for name, out in zip(names, results, strict=True) if out is not None}
        dtype = queries.dtype
        p = Small(
            "tf32" if tf32 and dtype is torch.float32 else str(dtype).removeprefix("torch."),
            *map(array, (queries, candidates, starts, columns, weights)),
            DIAGONALS[diagonal],
            scale=scale_value if scale is None else array(scale),
            row_negatives=array(row_negatives),
            partners=array(partners),
            mix=mix,
            row_weights=row_weight if row_weights is None else array(row_weights),
            wanted=tuple(name for name in given if name in names[4:]),
        )
        found = kernels.run(p, blocks=2, seed=1)
        for name, out in given.items():
            out.copy_(torch.from_numpy(found[name]))

    library = torch.library.Library("fastqt", "FRAGMENT")
    if ops.cuda_error is not None:
        library.define(schema())
    library.impl("small_contrastive_", small_contrastive, "CPU")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "cuda_error", None)
        # The registry asks for a GPU; everything after it works on the CPU's tensors.
        on_a_cpu = replace(
            ENGINES["cuda"],
            devices=None,
            why_not_here=lambda p, *_: None if p is None else cuda.why_too_large(p),
        )
        patch.setitem(ENGINES, "cuda", on_a_cpu)
        yield
    library._destroy()
