"""The engine "torch" on a device of another type: what test_chunked.py runs in a process of its own.

The device is one of a type that this torch has no support for, as MPS or XPU is in a build for CPUs, and the
process cannot be rid of it. Its tensors are fake: they hold no values, and raise as soon as something asks
for one. So nothing waits for the device, copies from it, or mixes devices.
"""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fastqt
from fastqt import devices, engines
from fastqt.engines.chunked import clip
from fastqt.functional.lowering import prepare, problem_of
from fastqt.problem import ClipProblem, ClipSide, Needs
from tests.shared.case_calls import call_of
from tests.shared.cases import CASES
from tests.shared.wide_products import products_into_float32

# Targets that hold tensors would need fake ones inside, and several row negatives never reach an engine.
HOLD_TENSORS = ("sparse", "at once", "smoothed", "documents, with")
FAKED = [case for case in CASES if not any(x in case.name for x in HOLD_TENSORS) and not case.shapes]


def on(device, fake, case, embeddings=torch.float32):
    """The inputs and the arguments of a case, with fake tensors on a device."""

    def moved(x):
        if not isinstance(x, torch.Tensor):
            return x
        dtype = torch.float32 if x.is_floating_point() else x.dtype
        return fake.from_tensor(x).detach().to(device, dtype)

    inputs = {
        name: torch.empty(x.shape, device=device, dtype=embeddings if x.dim() == 2 else torch.float32)
        for name, x in case.inputs(torch.float32).items()
    }
    return inputs, {name: moved(x) for name, x in case.arguments.items()}


PRODUCTS = (torch.ops.aten.mm, torch.ops.aten.bmm, torch.ops.aten.addmm, torch.ops.aten.addmm_)


def everything(p):
    """Calls all that the engine has for a problem."""
    module = engines.ENGINES["torch"].computation(p)
    needs = Needs(*(x is not None for x in p.inputs()))
    rows = module.forward(p)
    total, gradients = module.forward_with_gradients(p, 0.1, needs)
    again = module.backward(p, rows.saved, torch.ones_like(rows.loss), needs)
    return rows, total, gradients, again


class OnlyOn(TorchDispatchMode):
    """Fails where an operation copies from the device, or makes a tensor of a dtype that the device lacks."""

    def __init__(self, device):
        super().__init__()
        self.device, self.count = device, 0
        self.asserted = False
        self.multiplied = set()  # the dtypes of the matrices of all products

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        options = options or {}
        found = function(*arguments, **options)
        self.asserted |= function is torch.ops.aten._assert_async.msg
        if function.overloadpacket in PRODUCTS:
            matrices = [x for x in arguments if isinstance(x, torch.Tensor)]
            self.multiplied |= {x.dtype for x in matrices[-2:]}
        given = [x for x in tree_leaves((arguments, options)) if isinstance(x, torch.Tensor)]
        for x in tree_leaves(found):
            if isinstance(x, torch.Tensor) and any(y.device == self.device for y in given):
                self.count += 1
                assert x.device == self.device, function
            if isinstance(x, torch.Tensor) and x.device == self.device:
                assert x.dtype is not torch.float64 or devices.has_float64(self.device), function
        return found


@pytest.fixture(params=["a device without float64", "a device"])
def device(request, monkeypatch):
    if torch._C._get_privateuse1_backend_name() != "other":
        backend_registration._setup_privateuseone_for_python_backend("other")
    if "without" in request.param:
        monkeypatch.setattr(devices, "NO_FLOAT64", ("other",))
    return torch.device("other", 0)


def test_on_another_device_nothing_waits(device):
    with FakeTensorMode() as fake:
        for number, case in enumerate(FAKED):
            with OnlyOn(device) as seen:
                p, plan = problem_of(call_of(case, *on(device, fake, case)))
                assert plan.engine.name == "torch", case.name
                p.normalize = number % 2 == 0
                if p.targets.dense is not None:
                    p.targets = replace(p.targets, dense=p.targets.dense.float())
                everything(p)
            assert seen.count > 50


class Kind(NamedTuple):
    """What fastqt asks of a type of devices. torch lets nobody index tensors of a type that it lacks support
    for, so the device "other" answers in its place."""

    has_float64: bool
    multiplies_16_bits: bool
    asserts: bool


KINDS = {"mps": Kind(False, False, False), "xpu": Kind(True, True, True), "hip": Kind(True, True, True)}


@contextmanager
def standing_for(kind, monkeypatch):
    if not kind.has_float64:
        monkeypatch.setattr(devices, "NO_FLOAT64", ("other",))
    wide = products_into_float32("PrivateUse1") if kind.multiplies_16_bits else nullcontext()
    with wide, torch.library._scoped_library("aten", "IMPL") as library:
        if kind.asserts:
            library.impl("_assert_async.msg", lambda *_: None, "PrivateUse1")
        devices.has_kernel.cache_clear()
        yield
    devices.has_kernel.cache_clear()


@pytest.mark.parametrize("name", KINDS)
def test_kinds_of_devices_reach_the_engine_and_copy_nothing(name, monkeypatch):
    if torch._C._get_privateuse1_backend_name() != "other":
        backend_registration._setup_privateuseone_for_python_backend("other")
    device, kind = torch.device("other", 0), KINDS[name]
    dtype = torch.float16 if kind.multiplies_16_bits else torch.float32
    assert devices.has_float64(torch.device(name)) == kind.has_float64
    with standing_for(kind, monkeypatch), FakeTensorMode() as fake:
        for case in FAKED[::9]:
            with OnlyOn(device) as seen:
                p, plan = problem_of(call_of(case, *on(device, fake, case, torch.float16)))
                assert plan.engine.name == "torch", case.name
                prepare(p, plan)
                everything(p)
            assert seen.count > 50
            assert seen.multiplied == {dtype}
            banded = p.targets.offsets is not None and p.mask is None
            assert seen.asserted == (kind.asserts and not banded), case.name

        with OnlyOn(device) as seen:
            for loss in public_losses("mean").values():
                f, g = (torch.empty(9, 4, device=device, requires_grad=True) for _ in range(2))
                for gradient in torch.autograd.grad(loss(f, g), (f, g)):
                    assert gradient.device == device
        assert seen.count > 100


@pytest.mark.parametrize("pairs", [None, 0, 5])
def test_clip_on_another_device(device, pairs):
    with FakeTensorMode(), OnlyOn(device):
        a, b = torch.empty(9, 4, device=device), torch.empty(9 if pairs is None else 12, 4, device=device)
        p = ClipProblem(a, b, torch.empty((), device=device), normalize=True, pairs=pairs)
        assert engines.choose(None, p, a.dtype).name == "torch"
        if pairs is None:
            everything(p)
        found = clip.sums(p)
        sides = ClipSide(found.row_others, found.row_others), ClipSide(*[found.column_others] * 2)
        clip.gradients_from(p, *sides, found.positive, Needs(True, True, scale=True))


def public_losses(reduction):
    """Functions of queries and candidates."""
    options = {"reduction": reduction}
    return {
        "window": partial(fastqt.contrastive_loss, **options),
        "cosines": partial(fastqt.info_nce_loss, scale=20.0, **options),
        "sigmoid": partial(fastqt.siglip_loss, scale=10.0, bias=-10.0, **options),
        "both ways": partial(fastqt.clip_loss, scale=20.0, **options),
        "mixed": partial(fastqt.mixcse_loss, form="released", **options),
        "distances": partial(fastqt.contrastive_loss, diagonal="keep", similarity="euclidean", **options),
        "margins": partial(fastqt.max_margin_loss, **options),
    }


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_public_functions_on_another_device(device, reduction):
    """All that surrounds the engine."""
    with FakeTensorMode(), OnlyOn(device):
        for loss in public_losses(reduction).values():
            f, g = (torch.empty(9, 4, device=device, requires_grad=True) for _ in range(2))
            assert loss(f, g).shape == ((9,) if reduction == "none" else ())


def test_a_fake_device_notices_who_waits():
    with FakeTensorMode(), pytest.raises(DataDependentOutputException):
        torch.empty(()).item()
