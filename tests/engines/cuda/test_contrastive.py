"""The engine of the one-launch CUDA kernel, which is compiled for the CPU here."""

import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from unittest import mock

import pytest
import torch

import fastqt
from fastqt import devices
from fastqt.engines import ENGINES, cuda, plans
from tests.csrc.building import compiler
from tests.csrc.cuda.on_a_cpu import kernel_on_a_cpu
from tests.shared.cases import CASES, Case
from tests.shared.tolerances import CUDA_ROUNDINGS, FLOAT32, REORDERED, relative

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
UNKNOWN = {"negatives", "bias", "row_scores", "query_groups", "mask"}
TAKEN = [
    case
    for case in CASES
    if case.link == "softmax"
    and not UNKNOWN & {*case.tensors, *case.arguments}
    and "dense" not in case.name
    and "smoothed" not in case.name
]
by_case = pytest.mark.parametrize("case", TAKEN, ids=lambda case: case.name)


@pytest.fixture(scope="module", autouse=True)
def on_a_cpu() -> Iterator[None]:
    with kernel_on_a_cpu():
        yield


def value_and_gradients(case: Case, inputs: dict[str, torch.Tensor], **more) -> list[torch.Tensor]:
    loss = case.loss(inputs, backend="cuda", **more)
    return [loss.detach(), *torch.autograd.grad(loss, list(inputs.values()))]


@by_case
@pytest.mark.parametrize("dtype", CUDA_ROUNDINGS, ids=str)
def test_is_the_oracles(case, dtype):
    inputs = case.inputs(dtype)
    exact = case.expected(inputs)
    loss, *gradients = value_and_gradients(case, inputs)
    assert loss.dtype is torch.float32
    assert relative(loss, exact.loss.mean()) < FLOAT32
    for name, gradient in zip(inputs, gradients, strict=True):
        assert gradient.dtype is inputs[name].dtype
        assert relative(gradient, getattr(exact, name)) < FLOAT32 + CUDA_ROUNDINGS[dtype], name


def test_rows_weighted_by_an_upstream_gradient():
    case = next(c for c in TAKEN if c.name == "row negatives")
    inputs = case.inputs(torch.float32)
    upstream = torch.tensor([1.0, -2.0, 0.0, 1e-3, 0.5, 3.0, -1e-2, 1.0, 0.0, 2.0, -1.0, 1e-4, 1.0])
    loss = case.loss(inputs, backend="cuda", reduction="none")
    exact = case.expected(inputs, row_weights=upstream.double().numpy())
    assert relative(loss, exact.loss) < FLOAT32
    for name, gradient in zip(
        inputs, torch.autograd.grad(loss, list(inputs.values()), upstream), strict=True
    ):
        assert relative(gradient, getattr(exact, name)) < FLOAT32, name


def test_mixes_in_the_kernel():
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(20, 12, generator=generator).requires_grad_() for _ in range(2)]
    options = {"targets": fastqt.Diagonal(), "diagonal": "keep", "row_negatives": fastqt.Mixed(0.3)}
    found, wanted = (
        fastqt.contrastive_loss(*inputs, **options, backend=backend) for backend in ("cuda", "reference")
    )
    assert relative(found, wanted) < FLOAT32
    for a, b in zip(torch.autograd.grad(found, inputs), torch.autograd.grad(wanted, inputs), strict=True):
        assert relative(a, b) < FLOAT32


def test_strides_do_not_change_the_result():
    case = next(c for c in TAKEN if c.name == "row negatives")
    inputs = case.inputs(torch.float32)
    laid_out = {name: x.detach().T.contiguous().T.requires_grad_() for name, x in inputs.items()}
    pairs = zip(value_and_gradients(case, laid_out), value_and_gradients(case, inputs), strict=True)
    assert all(relative(a, b) < REORDERED[torch.float32] for a, b in pairs)


def test_float32_is_computed_as_torch_is_set():
    case = TAKEN[0]
    inputs = case.inputs(torch.float32)
    full = value_and_gradients(case, inputs)
    set_to = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        rounded = value_and_gradients(case, inputs)
    finally:
        torch.set_float32_matmul_precision(set_to)
    assert 1e-5 < relative(rounded[1], full[1]) < 5e-3


# In a process of its own: torch's older getters raise from then on, and so would tests that use them.
NEW_SETTINGS = """
from types import SimpleNamespace
from unittest import mock
import torch, fastqt
from fastqt.engines.cuda import contrastive as cuda
from fastqt.problem import Problem
from fastqt.targets import Window

def fail():
    raise AssertionError("asked for 16-bit elements")

def tf32(dtype):
    arguments = []
    operator = SimpleNamespace(default=lambda *given: arguments.extend(given))
    x, targets = torch.zeros(5, 4, dtype=dtype), Window(1).rows(5, 5, torch.device("cpu"))
    with mock.patch.object(torch.ops.fastqt, "small_contrastive_", operator, create=True):
        cuda.forward(Problem(x, x, None, None, 1.0, targets, "zero", None, None, None))
    return arguments[13]

for setting in ("tf32", "ieee", "tf32"):
    torch.backends.cuda.matmul.fp32_precision = setting
    assert tf32(torch.float32) is (setting == "tf32")
    with mock.patch.object(cuda, "tf32_allowed", fail):
        assert tf32(torch.bfloat16) is tf32(torch.float16) is False
"""


def test_the_new_setting_of_float32_is_read_for_float32_alone():
    subprocess.run([sys.executable, "-c", NEW_SETTINGS], check=True)


@pytest.mark.parametrize(
    ("sizes", "options", "reason"),
    [
        ((1025, 1025, 2), {}, "N, M <= 1024 and D <= 4800, got N=1025, M=1025, D=2"),
        ((4, 4, 4801), {}, "got N=4, M=4, D=4801"),
        ((4, 4, 2), {"negatives": torch.ones(3, 2)}, "does not know negatives"),
        (
            (4, 4, 2),
            {"bias": 1.0, "exclude": torch.zeros(4, 4, dtype=torch.bool)},
            "does not know bias, mask",
        ),
        ((4, 4, 2), {"row_scores": torch.ones(4)}, "does not know row_scores"),
        ((4, 4, 2), {"targets": fastqt.smoothed(fastqt.Window())}, "does not know smoothed targets"),
    ],
)
def test_what_it_does_not_take_is_refused_or_left_to_triton(sizes, options, reason, monkeypatch):
    N, M, D = sizes
    inputs = torch.ones(N, D), torch.ones(M, D)
    with pytest.raises(ValueError, match=f"'cuda' is not available: .*{re.escape(reason)}"):
        fastqt.contrastive_loss(*inputs, **options, backend="cuda")
    # Without a request a problem goes to the kernel where it takes it, and to Triton otherwise.
    elsewhere = replace(ENGINES["cpu"], why_not_here=lambda *_: "not asked here")
    monkeypatch.setitem(ENGINES, "cpu", elsewhere)
    monkeypatch.setattr(plans, "known", {})
    chosen = []
    monkeypatch.setattr(
        fastqt.autograd, "loss_of", lambda p, reduction, engine, name: chosen.append(engine.name)
    )
    fastqt.contrastive_loss(*inputs, **options)
    fastqt.contrastive_loss(torch.ones(4, 2), torch.ones(4, 2))
    fastqt.contrastive_loss(torch.ones(4, 2), torch.ones(4, 2), backend="triton")
    monkeypatch.setenv("FASTQT_BACKEND", "triton")
    fastqt.contrastive_loss(torch.ones(4, 2), torch.ones(4, 2))
    assert chosen == ["triton", "cuda", "triton", "triton"]


@pytest.mark.parametrize(
    ("major", "minor", "shared", "reason"),
    [
        (7, 5, 65_536, "compute capability 7.5, want 8.0"),
        (8, 6, 101_376, "a block takes 162256 bytes of shared memory, .* has 101376"),
        (9, 0, 232_448, None),
    ],
)
def test_gpus_that_cannot_run_it(major, minor, shared, reason, monkeypatch, request):
    class Properties:
        name = "a GPU"
        shared_memory_per_block_optin = shared

    Properties.major, Properties.minor = major, minor
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for known in (devices.known_properties, devices.why_too_old):
        known.cache_clear()
        request.addfinalizer(known.cache_clear)

    device = torch.device("cuda")
    found = cuda.why_not_on(device, torch.bfloat16)
    assert found is None if reason is None else re.search(reason, found)
    of_triton = ENGINES["triton"].why_not(None, device, torch.float16)
    assert of_triton == (f"a GPU has {reason}" if major < 8 else None)
    # On all of them the engine of torch's operations has matrix instructions for float16.
    has_kernel = mock.patch.object(devices, "has_kernel", return_value=True)
    with has_kernel:
        assert devices.product_dtype(device, torch.float16) is torch.float16


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_without_gradients(reduction):
    case = TAKEN[0]
    inputs = {name: x.detach() for name, x in case.inputs(torch.float32).items()}
    wanted = case.expected(inputs).loss
    found = case.loss(inputs, backend="cuda", reduction=reduction)
    assert relative(found, wanted if reduction == "none" else wanted.sum()) < FLOAT32
