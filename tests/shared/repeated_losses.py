"""Losses that are computed again and again on a GPU that is not there, whose kernels the emulator executes.

python -m tests.shared.repeated_losses

CPU tensors are taken for a GPU's, as in `host_calls`, and the launcher of the driver gets no more than it
would there: addresses and numbers. For each loss a line of JSON says whether its last computations were
repeated, and whether value and gradients have the bits of a computation that was not.
"""

from __future__ import annotations

import functools
import gc
import json
from collections.abc import Callable
from itertools import chain
from typing import Any
from unittest import mock

# First of all: it decides that Triton does not interpret.
from tests.shared.host_calls import taken_for_a_gpu  # isort: skip

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

import fastqt
from tests.emulator.machine import Machine, packed
from tests.emulator.reports import Reports
from tests.shared.absent_driver import NotCompiled
from tests.shared.emulation import SCRATCH, compiled_source, regions
from tests.shared.launches import GPUS

N, M, D = 70, 70, 32
(HOPPER,) = (gpu for gpu in GPUS if gpu.arch == 90)
REPORTS = Reports()


def compiled(source: Any, target: Any = None, options: Any = None, **_: Any) -> NotCompiled:
    """In place of Triton's function: what it returns is launched in the emulator."""
    made = compiled_source(source, options, HOPPER)
    kinds = list(source.signature.values())

    def execute(kernel: NotCompiled, rows: int, columns: int, planes: int, *more: Any) -> None:
        arguments = more[-len(kinds) :]
        values = [
            (x.data_ptr() if isinstance(x, Tensor) else x, kind)
            for x, kind in zip(arguments, kinds, strict=True)
            if kind != "constexpr"
        ]
        values += [(0, "i")] * SCRATCH
        sizes = made.kernel.parameters.values()
        memory = [packed(x, size, kind) for (x, kind), size in zip(values, sizes, strict=True)]
        # What the emulator does with torch is none of the loss's operations.
        with _disable_current_modes():
            # A launcher is told no tensors: an address may be in any that there is.
            there = regions([x for x in gc.get_objects() if type(x) in (Tensor, torch.nn.Parameter)])
            Machine(
                *(made.kernel, (rows, columns, planes), memory, there, made.shared, REPORTS),
                *("lockstep", 0, made.code, {}),
            ).run()

    return NotCompiled(source, execute)


def multiply(out: Tensor, a: Tensor, b: Tensor, *, add: bool) -> None:
    """As the engine's, on a CPU."""
    a, b = (a, b) if a.dtype is out.dtype else (a.float(), b.float())
    out.addmm_(a, b, beta=int(add))


def embeddings(dtype: torch.dtype, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    sides = (torch.randn(rows, D, generator=generator) for rows in (N, M))
    return [x.to(dtype).requires_grad_() for x in sides]


def losses() -> dict[str, tuple[torch.dtype, int, Callable[..., Tensor]]]:
    """Each with its dtype, and how often it is repeated in four computations."""
    plain = functools.partial(fastqt.contrastive_loss, backend="triton", diagonal="keep")
    own = {"targets": fastqt.Diagonal()}
    learnt = torch.tensor(0.5, requires_grad=True)
    biases = torch.linspace(0, 1, M)
    return {
        "InfoNCE": (torch.bfloat16, 2, functools.partial(plain, scale=0.3, **own)),
        "cosines": (torch.float32, 2, functools.partial(plain, scale=learnt, normalize=True, **own)),
        # Its targets are checked by operations of torch's.
        "listed": (torch.bfloat16, 0, functools.partial(plain, scale=0.3, targets=torch.arange(N))),
        "biases": (torch.float32, 0, functools.partial(plain, bias=biases, **own)),
    }


def results(loss: Callable[..., Tensor], inputs: list[Tensor]) -> list[Tensor]:
    value = loss(*inputs)
    return [value.detach(), *torch.autograd.grad(value, inputs)]


def scaled_gradients() -> dict[str, Any]:
    """Gradients of four batches, times upstream gradients that are not 1; two launches are repeated."""
    from fastqt.kernels import upstream

    with mock.patch.object(upstream, "_repeat", side_effect=upstream._repeat) as repeat:
        equal = []
        for seed in range(4):
            gradients = [x.detach() for x in embeddings(torch.bfloat16, seed)]
            factor = torch.tensor(0.3 + seed)
            exact = [(x.float() * (factor * 2)).to(x.dtype) for x in gradients]
            upstream.scale_gradients(gradients, factor, 2.0)
            equal += map(torch.equal, gradients, exact)
    return {"name": "gradients", "repeated": repeat.call_count, "wanted": 2, "equal": all(equal)}


def main() -> None:
    from fastqt.engines.triton import loop, repeated

    repetitions = []
    repeat = repeated.Step.repeat

    def counted(step: repeated.Step, p: Any) -> dict[str, Tensor]:
        repetitions.append(step)
        return repeat(step, p)

    with (
        taken_for_a_gpu(),
        mock.patch("triton.compiler.compile", compiled),
        mock.patch.object(loop, "multiply", multiply),
        mock.patch.object(repeated.Step, "repeat", counted),
        mock.patch("fastqt.autograd.on_gpu", return_value=False),  # gradients are multiplied by torch
    ):
        for name, (dtype, wanted, loss) in losses().items():
            batches = [embeddings(dtype, seed) for seed in range(4)]
            with mock.patch.object(repeated, "kind_of", return_value=None):
                exact = [results(loss, batch) for batch in batches]
            repetitions.clear()
            again = [results(loss, batch) for batch in batches]
            equal = all(map(torch.equal, chain(*exact), chain(*again)))
            found = {"name": name, "repeated": len(repetitions), "wanted": wanted, "equal": equal}
            print(json.dumps({**found, "reports": list(map(str, REPORTS))}), flush=True)
        print(json.dumps({**scaled_gradients(), "reports": list(map(str, REPORTS))}), flush=True)


if __name__ == "__main__":
    main()
