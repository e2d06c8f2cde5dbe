"""Which engine computes each loss on a GPU, with how many products and launches, without a GPU.

python -m benchmarks.offline.losses_on_gpu      # a minute, writes results/losses-on-gpu.json

The losses run forward and backward on tensors that hold nothing, of a CUDA device that is not there: what
they would launch is noted and not made. Products are counted in those of all rows with as many, 2 N N D
operations, and so are those of the same loss in plain PyTorch, which has all scores in memory.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._python_dispatch import TorchDispatchMode

import fastqt
from benchmarks.measure.tables import table
from fastqt import devices
from tests.engines.triton import test_absent_gpu
from tests.engines.triton.test_absent_gpu import Problem, absent_gpu, printed_by
from tests.shared.every_loss import EVERY_LOSS
from tests.shared.launches import Launch
from tests.shared.loss_options import LOSSES, parameters

RESULTS = Path(__file__).parents[1] / "results" / "losses-on-gpu.json"
N, D = 4096, 768
PREFIXES = (192, 384, 768)
TOKENS = {"quer": 32, "docu": 180}  # of MaxSim's texts, by how its tensors' names begin
# Their columns are the few words or classes of the table of all losses, less than a tile's.
OF_A_DECODER = ("arcface_loss", "cosface_loss", "gloss_bow_loss", "gloss_pos_loss")
SCORES = ("scores_kernel", "maxima_kernel")
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")


def on_gpu(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda")


def ids(count: int) -> Tensor:
    return on_gpu(count, dtype=torch.int64)


# Made where tensors are on the GPU, for n queries and m candidates.
VARIANTS: dict[str, Callable[[int, int], dict[str, Any]]] = {
    "16 bits": lambda n, m: {},
    "float32": lambda n, m: {},
    "float64": lambda n, m: {},
    "matryoshka": lambda n, m: {"matryoshka": PREFIXES},
    "Margin": lambda n, m: {"exclude": fastqt.Margin(0.1)},
    "Same": lambda n, m: {"exclude": fastqt.Same(ids(n), ids(m))},
    "Within": lambda n, m: {"exclude": fastqt.Within(ids(n), ids(m))},
    "Guide": lambda n, m: {"exclude": fastqt.Guide(on_gpu(n, 384), on_gpu(m, 384))},
    "mask": lambda n, m: {"exclude": on_gpu(n, m, dtype=torch.bool)},
}


def variants(name: str) -> Iterator[str]:
    """Those that a loss has, by its options."""
    taken = parameters(name)
    yield from ("16 bits", "float32", "float64")
    if "matryoshka" in taken:
        yield "matryoshka"
    if "exclude" in taken:
        yield from ("Margin", "Same", "Within", "Guide", "mask")


def rows_of(name: str) -> int:
    """MaxSim of many texts takes too many launches to be looked at."""
    return N // 16 if name == "maxsim_loss" else N


def unit_of(name: str) -> int:
    """The multiplications of one product of all rows with as many, of MaxSim of all tokens."""
    N = rows_of(name)
    if name == "maxsim_loss":  # It has a hard negative for each query, too.
        return N * TOKENS["quer"] * 2 * N * TOKENS["docu"] * D
    return N**2 * D


def inputs(name: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """A loss's tensors of D columns, random or without values; what is a number stays one of float32."""
    tensors, loss = {}, EVERY_LOSS[name]
    for key, x in loss.inputs(rows_of(name), torch.Generator().manual_seed(0), False).items():
        if name == "maxsim_loss" and x.dim() > 1:
            x = x.new_empty(len(x), TOKENS[key[:4]], *x.shape[2:])
        if x.is_floating_point():
            shape = [*x.shape[:-1], D] if x.dim() > 1 else x.shape
            kind = dtype if x.dim() else torch.promote_types(dtype, torch.float32)
            x = torch.empty(shape, dtype=kind).requires_grad_(key not in loss.constant)
        tensors[key] = x
    return tensors


def differentiate(loss: Callable[..., Tensor], tensors: dict[str, Tensor], options: dict[str, Any]) -> None:
    value = loss(**tensors, **options)
    leaves = [x for x in tensors.values() if x.requires_grad]
    torch.autograd.grad(value.sum(), leaves, allow_unused=True)


class Operations(TorchDispatchMode):
    """Counts the operations that compute something, and the multiplications of their matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.multiplications = 0, 0
        self.multiplied: set[torch.dtype] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        aliases = [x.alias_info for x in function._schema.returns if x.alias_info is not None]
        is_view = any(not alias.is_write for alias in aliases)
        self.count += not is_view and not name.startswith(("empty", "new_empty", "detach"))
        if name.rstrip("_") in PRODUCTS:
            a, b = [x for x in args if isinstance(x, Tensor)][-2:]
            self.multiplications += a.numel() * b.shape[-1]
            self.multiplied.add(b.dtype)
        return function(*args, **(kwargs or {}))


def on_absent_gpu(name: str, variant: str) -> dict[str, Any]:
    """What a loss launches, or why it refuses; an operation of torch's counts as a launch."""
    dtype = {"float32": torch.float32, "float64": torch.float64}.get(variant, torch.bfloat16)
    launches: list[Launch] = []
    drawn = inputs(name, dtype)

    with (
        absent_gpu(Problem(differentiate, N, torch.float32, descriptors=None), launches.append),
        # This torch has no kernels for CUDA, which another one has.
        mock.patch.object(devices, "has_kernel", return_value=True),
        mock.patch.object(devices, "_has_matrix_unit", return_value=True),
        mock.patch.object(test_absent_gpu, "FREE_MEMORY", 40 * 2**30),
    ):
        tensors = {
            key: torch.empty(x.shape, dtype=x.dtype, device="cuda").requires_grad_(x.requires_grad)
            for key, x in drawn.items()
        }
        M = len(tensors["documents"]) if name == "maxsim_loss" else rows_of(name)
        try:
            with Operations() as operations:
                options = VARIANTS[variant](rows_of(name), M)
                differentiate(getattr(fastqt, name), tensors, {**EVERY_LOSS[name].options, **options})
        except ValueError as error:
            return {"refused": str(error)}
        except (DataDependentOutputException, DynamicOutputShapeException):
            return {"waits": True}

    unit = unit_of(name)
    of_scores = [x.arguments["queries"] for x in launches if x.kernel.__name__ in SCORES]
    multiplied = {getattr(x, "base", x).dtype for x in of_scores}  # of a tensor descriptor its tensor's
    return {
        "engine": "triton" if launches else "torch",
        "multiplied": sorted(str(x).removeprefix("torch.") for x in multiplied | operations.multiplied),
        "products": round((operations.multiplications + sum(map(multiplications, launches))) / unit, 2),
        "launches": len(launches) + operations.count,
    }


def multiplications(launch: Launch) -> int:
    """Those of the scores that a launch makes in tiles; of MaxSim, those of tokens."""
    if launch.kernel.__name__ not in SCORES:
        return 0
    arguments, constants = launch.arguments, launch.constants
    sizes, matrices = (("N", "BLOCK_N"), ("M", "BLOCK_M")), 1
    width: int = arguments.get("D", 0) * constants["UNIT"]
    if launch.kernel.__name__ == "maxima_kernel":
        sizes, matrices = (("R", "BLOCK_R"), ("U", "BLOCK_U")), arguments["M"]
        width = arguments["units"] * constants["UNIT"]
    rows, columns = (-(-arguments[size] // constants[block]) * constants[block] for size, block in sizes)
    return matrices * rows * columns * width


def eager_products(name: str) -> float:
    """The products of plain PyTorch's own formula."""
    # Cells that a formula picks are as many as there may be; they are in no product.
    with FakeTensorMode(shape_env=ShapeEnv()), Operations() as operations:
        differentiate(EVERY_LOSS[name].eager, inputs(name, torch.float32), {})
    return round(operations.multiplications / unit_of(name), 2)


def main() -> None:
    """In a process that has the device: prints the counts of all losses."""
    torch.autograd.set_multithreading_enabled(False)
    counts = {
        name: {variant: on_absent_gpu(name, variant) for variant in variants(name)}
        for name in LOSSES
        if name not in OF_A_DECODER
    }
    print(json.dumps(counts))


def measured() -> dict[str, Any]:
    counts: dict[str, Any] = json.loads(printed_by("benchmarks.offline.losses_on_gpu"))
    for name, of_loss in counts.items():
        if of_loss["16 bits"].get("products"):
            of_loss["eager"] = {"products": eager_products(name)}
    return counts


def stored() -> dict[str, Any]:
    counts: dict[str, Any] = json.loads(RESULTS.read_text())
    return counts


def stored_table() -> str:
    """A row for each loss that has products and asks for no values."""
    header = ["loss", "plain PyTorch", *VARIANTS]
    rows = [
        [f"`{name}`", f"{of_loss['eager']['products']:g}", *(_cell(of_loss.get(x)) for x in VARIANTS)]
        for name, of_loss in stored().items()
        if "eager" in of_loss
    ]
    return table(header, rows)


def _cell(counts: dict[str, Any] | None) -> str:
    if counts is None or "refused" in counts:
        return "–"
    return f"{counts['products']:.1f} {counts['engine']}, {counts['launches']}"


if __name__ == "__main__":
    RESULTS.write_text(json.dumps(measured(), indent=1) + "\n")
