"""The engine "torch": random problems in chunks of any height, converged targets, and devices of other types.

The devices are fake: tensors without values, which raise as soon as something asks for one. That shows that
nothing waits for a device, copies from it, or mixes devices.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fastqt
from fastqt import devices, engines
from fastqt.engines import chunked, plans
from fastqt.engines.chunked import cells, clip, embeddings, walk
from fastqt.functional.call import Call
from fastqt.functional.lowering import problem_of
from fastqt.problem import ClipProblem, ClipSide, Inputs, Needs, Problem
from fastqt.targets import TargetRows, as_targets
from tests.shared.cases import CASES
from tests.shared.draws import Seeded
from tests.shared.problem_check import check
from tests.shared.problems import ALL_DTYPES, Maker

# What of the walk depends on sizes and devices, and that small problems on a CPU would not show.
HOW = {
    "as it is": {},
    "few rows": {(walk, "ROOM"): {"cpu": (700, 400)}},
    "a row": {(walk, "ROOM"): {"cpu": (1, 1)}, (cells, "BLOCK_BYTES"): 1, (embeddings, "BLOCK_BYTES"): 1},
    "entries unread": {(walk, "ROOM"): {"cpu": (700, 400)}, (cells, "READABLE"): ()},
    "matrices": {
        (walk, "ROOM"): {"cpu": (700, 400)},
        **{(cells, name): -1 for name in ("CELLS_PER_TARGET", "SMALL", "FEW")},
    },
    "no float64": {(devices, "NO_FLOAT64"): ("cpu",)},
}


@pytest.fixture(params=HOW)
def dtypes(request, monkeypatch):
    """The dtypes that a way of walking is for."""
    for (module, name), value in HOW[request.param].items():
        monkeypatch.setattr(module, name, value)
    return ALL_DTYPES[:-1] if request.param == "no float64" else ALL_DTYPES


def compared(numbers, dtypes):
    return sum(check(Maker(Seeded(number), dtypes).problem, "torch") for number in numbers)


def test_random_problems(dtypes):
    assert compared(range(50), dtypes) > 25


@pytest.mark.slow
def test_more_random_problems(dtypes):
    assert compared(range(1000, 3000), dtypes) > 1200


def on(device, fake, case):
    """The inputs and the arguments of a case, with fake tensors on a device."""

    def moved(x):
        if not isinstance(x, torch.Tensor):
            return x
        dtype = torch.float32 if x.is_floating_point() else x.dtype
        return fake.from_tensor(x).detach().to(device, dtype)

    inputs = {name: torch.empty(x.shape, device=device) for name, x in case.inputs(torch.float32).items()}
    return inputs, {name: moved(x) for name, x in case.arguments.items()}


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

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        options = options or {}
        found = function(*arguments, **options)
        given = [x for x in tree_leaves((arguments, options)) if isinstance(x, torch.Tensor)]
        for x in tree_leaves(found):
            if isinstance(x, torch.Tensor) and any(y.device == self.device for y in given):
                self.count += 1
                assert x.device == self.device, function
            if isinstance(x, torch.Tensor) and x.device == self.device:
                assert x.dtype is not torch.float64 or devices.has_float64(self.device), function
        return found


def call_of(case, inputs, arguments):
    """A case as the record of a call."""
    options = {
        "diagonal": "keep" if case.link != "softmax" else "zero",
        "scale": 1.0,
        "bias": 0.0,
        **arguments,
    }
    size, ids = options.pop("context_size", 1), options.pop("document_ids", None)
    window = fastqt.Window(size, normalize=case.link == "softmax", document_ids=ids)
    targets = as_targets(options.pop("targets", window))
    fixed = {"normalize": False, "reduction": "mean", "memory": "fast", "backend": None}
    return Call(link=case.link, targets=targets, **{**options, **inputs}, **fixed)


# Targets that hold tensors would need fake ones inside, and several row negatives never reach an engine.
HOLD_TENSORS = ("sparse", "at once", "smoothed", "documents, with")
FAKED = [case for case in CASES if not any(x in case.name for x in HOLD_TENSORS) and not case.shapes]


@pytest.fixture(params=["a device without float64", pytest.param("a device", marks=pytest.mark.slow)])
def device(request, monkeypatch):
    """One of a type that torch has no support for, as of MPS or XPU in a build for CPUs."""
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


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_public_functions_on_another_device(device, reduction):
    """All that surrounds the engine."""
    options = {"reduction": reduction}
    losses = {
        "window": partial(fastqt.contrastive_loss, **options),
        "cosines": partial(fastqt.info_nce_loss, scale=20.0, **options),
        "sigmoid": partial(fastqt.siglip_loss, scale=10.0, bias=-10.0, **options),
        "both ways": partial(fastqt.clip_loss, scale=20.0, **options),
        "mixed": partial(fastqt.mixcse_loss, form="released", **options),
        "distances": partial(fastqt.contrastive_loss, diagonal="keep", similarity="euclidean", **options),
        "margins": partial(fastqt.max_margin_loss, **options),
    }
    with FakeTensorMode(), OnlyOn(device):
        for loss in losses.values():
            f, g = (torch.empty(9, 4, device=device, requires_grad=True) for _ in range(2))
            assert loss(f, g).shape == ((9,) if reduction == "none" else ())


def test_a_fake_device_notices_who_waits():
    with FakeTensorMode(), pytest.raises(DataDependentOutputException):
        torch.empty(()).item()


@pytest.mark.parametrize(
    ("kind", "dtype", "name"),
    [
        ("cpu", torch.float32, "cpu"),
        ("cpu", torch.float64, "cpu"),
        ("cuda", torch.float64, "torch"),
        ("mps", torch.float16, "torch"),
        ("xpu", torch.bfloat16, "torch"),
    ],
)
def test_it_is_chosen_where_no_kernel_is(kind, dtype, name):
    with FakeTensorMode():
        x = torch.empty(4, 3, device=kind, dtype=dtype)
        targets = TargetRows(dense=torch.empty(4, 4, device=kind))
        p = Problem(x, x, None, None, 1.0, targets, "keep", None, None, None)
        assert engines.choose(None, p, dtype).name == name
        assert engines.choose(None, ClipProblem(x, x, 1.0), dtype).name == name


def test_without_the_extension_every_loss_is_the_engines(monkeypatch):
    """The three blocks of MixCSE too, which are then composed of losses that the engine has."""
    monkeypatch.setattr(plans, "known", {})
    monkeypatch.setattr(engines.ENGINES["cpu"].module, "why_not", lambda *_: "not built")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    visited = []
    run = walk.Walk.run
    monkeypatch.setattr(walk.Walk, "run", lambda self: visited.append(self.p.link) or run(self))
    z1, z2 = torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(0))
    for form in ("slides", "released"):
        visited.clear()
        loss = fastqt.mixcse_loss(z1, z2, form=form)
        assert visited
        torch.testing.assert_close(loss, fastqt.mixcse_loss(z1, z2, form=form, backend="reference"))


def test_no_chunk_holds_more_than_the_memory():
    N, M, D = 1000, 10**6, 64
    stand_in = torch.empty(1, D)
    targets = fastqt.Diagonal().rows(N, M, stand_in.device)
    for memory, room in {"low": walk.ROOM["cpu"][1], "fast": walk.ROOM["cpu"][0], 2**24: 2**24}.items():
        p = Problem(
            stand_in.expand(N, D), stand_in.expand(M, D), None, None, 1.0, targets, "keep", None, None, None
        )
        p.memory = memory
        assert 0 < 4 * walk.Walk(p, 1.0, Needs()).height * M <= room


def test_derivatives_of_the_gradient_are_refused():
    x, y = torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
    x = x.detach().requires_grad_()
    loss = fastqt.info_nce_loss(x, y.detach(), backend="torch")
    with pytest.raises(RuntimeError, match="backend='reference'"):
        torch.autograd.grad(loss, x, create_graph=True)


def test_targets_that_no_loss_has_are_named_on_a_cpu():
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    with pytest.raises(ValueError, match=r"row 2's target column 9 is outside the M=4 candidates"):
        fastqt.contrastive_loss(x, x, torch.tensor([0, 1, 9, 3]), diagonal="keep", backend="torch")


def test_one_gradient_alone_is_what_it_is_among_all():
    case = next(case for case in CASES if case.name == "all at once")
    inputs = case.inputs(torch.float64)
    p, _ = problem_of(call_of(case, {k: x.detach() for k, x in inputs.items()}, case.arguments))
    given = Needs(*(x is not None for x in p.inputs()))
    _, whole = chunked.forward_with_gradients(p, 0.1, given)
    for name in Inputs._fields:
        if getattr(given, name):
            _, found = chunked.forward_with_gradients(p, 0.1, Needs(**{name: True}))
            assert torch.equal(getattr(found, name), getattr(whole, name)), name
            assert sum(x is not None for x in found) == 1
