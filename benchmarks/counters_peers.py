"""What the Triton kernels of other libraries execute for a cell of the score matrix, beside ours.

pip install --no-deps cut-cross-entropy inf-cl liger-kernel memeff siglip-kernel
python -m benchmarks.counters_peers --out benchmarks/results/counters-peers.json

All run on the inputs of one problem. Their kernels are compiled for GPUs that are only described, and
executed by the emulator. Products that a library leaves to the vendor's are not counted, ours neither; the
table says how many there are. A count is neither a time nor of a device.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.pop("TRITON_INTERPRET", None)  # before anything imports fastqt.kernels

import torch
import torch.nn.functional as F
import triton as triton_package
from torch import Tensor

import fastqt
from benchmarks import counters_table
from benchmarks.counters import ARCHS, OF_CELLS, per_cell
from fastqt.engines import triton
from tests.shared.emulation import Emulation, emulated
from tests.shared.launches import GPUS, Gpu

D = 128
SCALE, BIAS = 20.0, -10.0  # of CLIP's and of SigLIP's scores
MOST_ERROR = 2e-2  # of a loss and of its gradients in bfloat16, relative to their norms


@dataclass(frozen=True)
class Contestant:
    """A library's function.

    Attributes:
        package: its name on PyPI.
        loss: which loss it is, a key of EXACT.
        products: of the size of the score matrix, those in its Triton kernels and those of the vendor's.
        run: the loss of two matrices, (N, D) and (M, D), whose gradients autograd takes.
        N, M: their rows. A kernel with a program for each row takes many candidates, as large batches have,
            so that its threads have more than one cell each.
    """

    package: str
    loss: str
    products: tuple[int, int]
    run: Callable[[Tensor, Tensor], Tensor]
    N: int = 512
    M: int = 512


def softmax(f: Tensor, g: Tensor) -> Tensor:
    return F.cross_entropy(f @ g.T, torch.arange(len(f)))


def clip(f: Tensor, g: Tensor) -> Tensor:
    scores, labels = SCALE * f @ g.T, torch.arange(len(f))
    return (F.cross_entropy(scores, labels) + F.cross_entropy(scores.T, labels)) / 2


def sigmoid(f: Tensor, g: Tensor) -> Tensor:
    signs = 2 * torch.eye(len(f), dtype=f.dtype) - 1
    return -F.logsigmoid(signs * (SCALE * f @ g.T + BIAS)).sum() / len(f)


EXACT = {"softmax": softmax, "CLIP": clip, "sigmoid": sigmoid}


def our_softmax(f: Tensor, g: Tensor) -> Tensor:
    return fastqt.contrastive_loss(f, g, torch.arange(len(f)), diagonal="keep", backend="triton")


def our_clip(f: Tensor, g: Tensor) -> Tensor:
    return fastqt.clip_loss(f, g, scale=SCALE, normalize=False, backend="triton")


def our_sigmoid(f: Tensor, g: Tensor) -> Tensor:
    return fastqt.sigmoid_loss(
        f,
        g,
        torch.arange(len(f)),
        scale=SCALE,
        bias=torch.full((len(f),), BIAS),
        diagonal="keep",
        backend="triton",
    )


def cut_cross_entropy(f: Tensor, g: Tensor) -> Tensor:
    """In its exact mode, which leaves out no small gradient."""
    from cut_cross_entropy import linear_cross_entropy

    return linear_cross_entropy(f, g, torch.arange(len(f)), filter_eps=None)


def inf_cl(f: Tensor, g: Tensor) -> Tensor:
    """Of float32, to which it converts embeddings."""
    from inf_cl.flash import cal_flash_loss

    return cal_flash_loss(f, g, head_dim=D).mean()


def liger(f: Tensor, g: Tensor) -> Tensor:
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    return LigerFusedLinearCrossEntropyLoss()(g, f, torch.arange(len(f)))


def memeff(f: Tensor, g: Tensor) -> Tensor:
    from memeff.clip_loss import MemoryEfficientCLIPLoss

    return MemoryEfficientCLIPLoss(temperature=1 / SCALE, normalized_inputs=True, stable=False)(f, g)


def siglip(f: Tensor, g: Tensor) -> Tensor:
    from siglip_kernel import fused_siglip_loss

    return fused_siglip_loss(f, g, torch.tensor(SCALE).log(), torch.tensor(BIAS))


CONTESTANTS = {
    "fastqt, softmax": Contestant("fastqt", "softmax", (1, 2), our_softmax),
    "cut-cross-entropy": Contestant("cut-cross-entropy", "softmax", (4, 0), cut_cross_entropy),
    "inf-cl": Contestant("inf-cl", "softmax", (5, 0), inf_cl),
    "liger-kernel": Contestant("liger-kernel", "softmax", (0, 3), liger, 32, 16_384),
    "fastqt, CLIP": Contestant("fastqt", "CLIP", (2, 2), our_clip),
    "memeff": Contestant("memeff", "CLIP", (5, 0), memeff),
    "fastqt, sigmoid": Contestant("fastqt", "sigmoid", (1, 2), our_sigmoid),
    "siglip-kernel": Contestant("siglip-kernel", "sigmoid", (0, 3), siglip, 2048, 2048),
}


def is_of_rows(kernel: str, package: str) -> bool:
    """Whether a kernel's work grows with the rows, and not with the cells."""
    if package == "fastqt":
        return not kernel.endswith(OF_CELLS)
    return kernel == "_indexed_neg_dot_forward_kernel"  # cut-cross-entropy's scores of targets


def unit_rows(N: int, M: int) -> list[Tensor]:
    """Queries and candidates of norm 1 in bfloat16; those of equal index are near each other."""
    generator = torch.Generator().manual_seed(0)
    common = torch.randn(max(N, M), D, generator=generator)
    noise = (torch.randn(rows, D, generator=generator) for rows in (N, M))
    return [F.normalize(common[: len(x)] + x, dim=1).bfloat16().requires_grad_() for x in noise]


@contextlib.contextmanager
def seems_a_gpu(gpu: Gpu, package: str) -> Iterator[Emulation]:
    """What a library launches is executed here, and it finds the GPU that it asks for."""
    capability = gpu.arch // 10, gpu.arch % 10
    with emulated(gpu) as emulation, contextlib.ExitStack() as stack:
        if package == "fastqt":
            stack.enter_context(mock.patch.object(triton, "why_not", return_value=None))
        else:
            stack.enter_context(
                mock.patch.object(torch.cuda, "get_device_capability", return_value=capability)
            )
            stack.enter_context(mock.patch.object(Tensor, "is_cuda", True, create=True))
        yield emulation


def counted(name: str, arch: int) -> dict[str, Any]:
    """The figures of each kernel of a contestant, those that visit every cell and the others together."""
    contestant = CONTESTANTS[name]
    leaves, cells = unit_rows(contestant.N, contestant.M), contestant.N * contestant.M
    with seems_a_gpu(next(gpu for gpu in GPUS if gpu.arch == arch), contestant.package) as emulation:
        value = contestant.run(*leaves)
        computed = [value.detach(), *torch.autograd.grad(value, leaves)]

    of_double = [x.detach().double().requires_grad_() for x in leaves]
    value = EXACT[contestant.loss](*of_double)
    exact = [value.detach(), *torch.autograd.grad(value, of_double)]
    errors = [((x.double() - y).norm() / y.norm()).item() for x, y in zip(computed, exact, strict=True)]
    if not max(errors) <= MOST_ERROR:
        raise SystemExit(f"{name}: want errors of at most {MOST_ERROR}, got {errors}")

    of_cells, of_rows = Counter[str](), Counter[str]()
    for kernel, counts in emulation.executed.items():
        (of_rows if is_of_rows(kernel, contestant.package) else of_cells).update(counts)
    return {
        "a cell": per_cell(of_cells, cells),
        "a row": per_cell(of_rows, contestant.N),
        "kernels": {kernel: per_cell(counts, cells) for kernel, counts in emulation.executed.items()},
        "errors": [float(f"{error:.2g}") for error in errors],
        "reports": sorted(emulation.reports.kinds()),
    }


def described(name: str) -> dict[str, Any]:
    """What does not depend on the GPU."""
    contestant = CONTESTANTS[name]
    version = fastqt.__version__ if contestant.package == "fastqt" else metadata.version(contestant.package)
    return {
        "package": contestant.package,
        "version": version,
        "loss": contestant.loss,
        "products": contestant.products,
        "N": contestant.N,
        "M": contestant.M,
    }


def every_count(names: list[str]) -> dict[str, Any]:
    of_all = {name: {**described(name), **{f"sm_{a}": counted(name, a) for a in ARCHS}} for name in names}
    problem = {"D": D, "dtype": "bfloat16"}
    return {"triton": triton_package.__version__, "problem": problem, "contestants": of_all}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="where the counts are stored as JSON")
    parser.add_argument(
        "--only", nargs=2, metavar=("NAME", "ARCH"), help="print one library's counts as JSON"
    )
    asked = parser.parse_args()
    torch.set_num_threads(1)
    if asked.only:
        print(json.dumps(counted(asked.only[0], int(asked.only[1]))))
    else:
        counts = every_count(list(CONTESTANTS))
        if asked.out is not None:
            asked.out.write_text(json.dumps(counts, indent=1) + "\n")
        print(counters_table.of_peers(counts))
