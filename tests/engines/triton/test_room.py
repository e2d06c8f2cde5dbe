"""Beside gradients the engine allocates what `memory` stands for, in steps of whole waves of tiles.

A process of its own, in which Triton does not interpret, finds what the engine would allocate at a time on a
GPU that is only described, of problems without data.
"""

import json
import math
import random
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fastqt import engines
from fastqt.engines.triton.heights import best_step, side_of_tiles, within_a_wave
from tests.shared.launches import GPUS, Case, all_is_free, problem_of, standing_in
from tests.shared.processes import printed

GPU = next(gpu for gpu in GPUS if gpu.arch == 90)
OF_SIGLIP = {"targets": "own", "diagonal": "keep", "link": "sigmoid", "bias": True, "scale": True}
LOSSES = {
    "softmax": {},
    "softmax, negatives": {"negatives": 8192, "diagonal": "keep"},
    "float16": {"dtype": "float16"},
    "TF32": {"dtype": "float32"},
    "sigmoid": OF_SIGLIP,
    "CLIP": {"clip": True, "scale": True},
}
SHAPES = ((65536, 768), (16384, 1024), (8192, 2400), (16384, 300), (65536, 300), (65536, 64))
MEMORY = ("fast", "low", 128 * 2**20, 2**29)
OF_NEGATIVES = {"negatives": 2**20, "diagonal": "keep", "memory": "low", "gradients": False}
MANY_COLUMNS = Case("loss alone", N=8192, D=64, **OF_NEGATIVES)


class Peak(TorchDispatchMode):
    """The most bytes of all tensors that were made and are still there."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[StorageWeakRef, int] = {}
        self.most = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if "addmm" in function.overloadpacket.__name__:  # writes into its first argument
            return args[0]
        out = function(*args, **(kwargs or {}))
        if not function.is_view:
            for x in tree_leaves(out):
                if isinstance(x, Tensor):
                    self.alive[StorageWeakRef(x.untyped_storage())] = x.untyped_storage().nbytes()
        self.alive = {storage: size for storage, size in self.alive.items() if not storage.expired()}
        self.most = max(self.most, sum(self.alive.values()))
        return out


def peak(case: Case) -> tuple[int, int]:
    """The most bytes beside inputs, and those of the gradients."""
    with torch.device("meta"):
        problem, needs = problem_of(case)
        computation = engines.ENGINES["triton"].computation(problem)
        on_gpu = mock.patch.object(Tensor, "is_cuda", True, create=True)
        with standing_in(GPU, False, lambda _: None), all_is_free(GPU), on_gpu, Peak() as allocated:
            if not case.gradients:
                computation.forward(problem)
                return allocated.most, 0
            _, gradients = computation.forward_with_gradients(problem, 1 / case.N, needs)
    given = [g for g in gradients if g is not None]
    return allocated.most, sum(g.numel() * g.element_size() for g in given)


def name_of(loss: str, N: int, D: int, memory: str | int) -> str:
    return f"{loss}, {N} x {D}, {memory}"


def main() -> None:
    torch.set_float32_matmul_precision("high")
    found = {
        name_of(loss, N, D, memory): peak(Case(loss, N=N, D=D, memory=memory, **options))
        for loss, options in LOSSES.items()
        for N, D in SHAPES
        for memory in MEMORY
    }
    print(json.dumps({**found, MANY_COLUMNS.name: peak(MANY_COLUMNS)}))


MOST = {"fast": 10**9, "low": 64 * 10**6}


@pytest.fixture(scope="module")
def found():
    """The most bytes of each problem, and those of its gradients."""
    return json.loads(printed("-m", "tests.engines.triton.test_room"))


@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.slow
def test_peak_beside_gradients(found, loss, shape, memory):
    N, _ = shape
    most, of_gradients = found[name_of(loss, *shape, memory)]
    # Statistics of rows and lists of targets, which are a few numbers a row, come on top of the buffers.
    allowed = MOST[memory] if isinstance(memory, str) else 1.03 * memory + 150 * N
    assert most - of_gradients <= allowed


@pytest.mark.slow
def test_the_loss_alone_of_many_columns_keeps_the_sums_of_few_rows(found):
    most, _ = found[MANY_COLUMNS.name]
    assert most <= MOST["low"]


SMS, TILE = 132, (128, 256)


def tiles(rows: int, D: int) -> int:
    return math.ceil(rows / 128) * math.ceil(D / 256)


def test_steps_fit():
    assert best_step(1000, 1000, 1024, 768, SMS, 128, TILE) == 1024  # everything at once, but for a row less
    assert best_step(1000, 1000, 1023, 768, SMS, 128, TILE) <= 1023
    rng = random.Random(0)
    for _ in range(200):
        length, other = rng.randrange(1, 40_000), rng.randrange(1, 40_000)
        most, D, multiple = rng.randrange(1, 8_000), rng.randrange(1, 3_000), rng.choice((5, 128, 256))
        covering = math.ceil(length / multiple) * multiple
        for step in (
            best_step(length, other, most, D, SMS, multiple, TILE),
            side_of_tiles(length, most, other, D, SMS, multiple, TILE),
        ):
            assert step > 0
            assert step % multiple == 0
            assert step <= max(min(most, covering), multiple)
        for step in within_a_wave(length, most, D, SMS, multiple):
            assert step % multiple == 0
            assert step <= max(min(most, covering), multiple)
            assert tiles(step, D) <= max(SMS, tiles(multiple, D))


if __name__ == "__main__":
    main()
