"""A planned launch is Triton's own: the same code, arguments, stream and hooks. Nothing is compiled here."""

import random
from typing import Any

import pytest
import torch
import triton.language as tl
from torch import Tensor
from triton import knobs
from triton.runtime import jit
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from fastqt.kernels.plan import Planned
from tests.shared.absent_driver import absent_driver


def example_kernel(  # is never compiled
    x, size, stride, first, weight, FLAG: tl.constexpr, BLOCK: tl.constexpr, out=None, rows=None
):
    pass


def example() -> JITFunction:
    return JITFunction(example_kernel, do_not_specialize=["first"])


OPTIONS = {"FLAG": True, "BLOCK": 16, "enable_fp_fusion": True}


class Launches:
    """What reaches the driver, and how often Triton has looked for the code itself."""

    def __init__(self, monkeypatch) -> None:
        self.seen: list[Any] = []
        self.looked_up = 0
        genuine = jit.compute_cache_key

        def compute_cache_key(*args):
            self.looked_up += 1
            return genuine(*args)

        monkeypatch.setattr(jit, "compute_cache_key", compute_cache_key)

    def __call__(self, kernel, *given) -> None:
        x, y, z, stream, function, metadata, _, _, _, *arguments = given
        signature = kernel.src.signature
        operands = {
            name: value.data_ptr() if isinstance(value, Tensor) else value
            for (name, kind), value in zip(signature.items(), arguments, strict=True)
            if kind != "constexpr"
        }
        code = signature, kernel.src.constants, kernel.src.attrs
        self.seen.append((code, (x, y, z), stream, function, metadata, operands))


@pytest.fixture
def launches(monkeypatch):
    return Launches(monkeypatch)


@pytest.fixture
def gpu(launches):
    with absent_driver(launches) as absent:
        yield absent


INTEGERS = (0, 1, 2, 16, 17, -1, -16, 2**31 - 1, 2**31, 2**31 + 1, -(2**31), -(2**31) - 16, 2**40, 2**63 - 1)
MEMORY = {dtype: torch.zeros(256, dtype=dtype) for dtype in (torch.bfloat16, torch.float32, torch.bool)}
OPERANDS = (
    *(x[offset:] for x in MEMORY.values() for offset in (0, 1, 8)),
    torch.nn.Parameter(MEMORY[torch.float32]),
    *(
        TensorDescriptor.from_tensor(x.view(16, 16), [8, columns])
        for x in MEMORY.values()
        for columns in (8, 16)
    ),
)


CHOICES: dict[str, tuple[Any, ...]] = {
    "x": OPERANDS,
    "size": INTEGERS,
    "stride": INTEGERS,
    "first": INTEGERS,
    "weight": (0.5, 1.0, 2, True, False),
    "FLAG": (True, False),
    "BLOCK": (16, 32),
    "num_warps": (4, 8),
    "out": (None, *OPERANDS),
    "rows": (None, *OPERANDS, *INTEGERS),
}
BASE = {"x": OPERANDS[0], "size": 32, "stride": 5, "first": 7, "weight": 0.5, **OPTIONS}


def test_every_launch_is_the_one_that_triton_makes(gpu, launches):
    """Arguments vary one by one from a few calls, which would otherwise hardly have the rest in common."""
    draw, tritons, planned = random.Random(0), example(), Planned(example())
    bases = [BASE, BASE | {"out": OPERANDS[1], "rows": 16}, BASE | {"x": OPERANDS[-1], "rows": 2**40}]
    calls = [base | {name: x} for base in bases for name, values in CHOICES.items() for x in values]
    for _ in range(2):
        draw.shuffle(calls)
        for call in calls:
            positional = [call[name] for name in ("x", "size", "stride", "first")]
            named = {name: x for name, x in call.items() if name not in ("x", "size", "stride", "first")}
            gpu.device, gpu.stream = draw.choice([(0, 7), (0, 8), (1, 9)])
            grid = draw.choice([(3,), (3, 2), (3, 2, 5)])
            for kernel in (tritons, planned):
                kernel[grid](*positional, **named)
            assert launches.seen[-1] == launches.seen[-2]
    assert len(launches.seen) == 4 * len(calls)


def test_triton_is_asked_once_for_launches_that_differ_in_no_way_that_matters(gpu, launches):
    planned, x = Planned(example()), MEMORY[torch.float32]
    for i in range(5):
        planned[(i + 1,)](x[8 * i :], 32 + 16 * i, 3 + 2 * i, i, 0.5 * i, **OPTIONS, out=x[1 + i :][:3])
    assert launches.looked_up == 1 + 1  # that every fifth element but the first is not where 16 divides
    assert len(launches.seen) == 5
    gpu.device = 1
    planned[(1,)](x, 32, 3, 1, 0.5, **OPTIONS, out=x[1:])
    assert launches.looked_up == 3


@pytest.mark.parametrize("hook", ["launch_enter_hook", "launch_exit_hook", "pre_run", "debug", "run"])
def test_whoever_looks_sees_every_launch(hook, gpu, launches, monkeypatch):
    kernel = example()
    planned, seen = Planned(kernel), []
    call = (MEMORY[torch.float32], 2, 2, 2, 0.5)
    planned[(1,)](*call, **OPTIONS)
    if hook == "pre_run":
        kernel.add_pre_run_hook(lambda *args, **options: seen.append(options))
    elif hook == "debug":
        monkeypatch.setattr(knobs.runtime, "debug", True)
    elif hook == "run":
        monkeypatch.setattr(JITFunction, "run", lambda self, *args, **options: seen.append(options))
    else:
        monkeypatch.setattr(knobs.runtime, hook, lambda *args: None)
    before = launches.looked_up
    for _ in range(3):
        planned[(1,)](*call, **OPTIONS)
    if hook != "run":
        assert launches.looked_up == before + 3
    if hook in ("run", "pre_run"):
        assert len(seen) == 3


def test_a_first_launch_in_a_capture_is_refused_in_words(gpu, launches, monkeypatch):
    planned, x = Planned(example()), MEMORY[torch.float32]

    def launch(size: int, x: Tensor = x) -> None:
        planned[(1,)](x, size, 2, 2, 0.5, **OPTIONS)

    launch(32)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    launch(48)
    assert len(launches.seen) == 2
    for size, operand in ((33, x), (1, x), (32, x[1:]), (32, x.bool())):
        with pytest.raises(
            RuntimeError, match=r"example_kernel: want .* one step with .* before the capture"
        ):
            launch(size, operand)
    assert len(launches.seen) == 2
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    launch(33)
    assert len(launches.seen) == 3


def test_an_argument_of_an_unknown_kind_is_left_to_triton(gpu, launches):
    class Mine(torch.Tensor):
        pass

    planned = Planned(example())
    mine = MEMORY[torch.float32].as_subclass(Mine)
    for _ in range(2):
        planned[(1,)](mine, 2, 2, 2, 0.5, **OPTIONS)
    assert launches.looked_up == 2
    with pytest.raises(TypeError, match="stride"):
        planned[(1,)](mine, 2, first=1, weight=0.5, **OPTIONS)
