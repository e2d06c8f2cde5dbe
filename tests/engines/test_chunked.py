"""The engine "torch": random problems in chunks of any height, and devices of other types."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import fastqt
from fastqt import devices, engines
from fastqt.engines import plans
from fastqt.engines.chunked import cells, contrastive, embeddings, walk
from fastqt.problem import ClipProblem, Needs, Problem
from fastqt.targets import TargetRows
from tests.shared.draws import Seeded
from tests.shared.problem_check import check
from tests.shared.problems import ALL_DTYPES, Maker
from tests.shared.wide_products import SIXTEEN_BITS, products_into_float32

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


@pytest.fixture
def in_16_bits():
    """A CPU that multiplies 16 bits as GPUs do, and the dtypes of what it multiplies."""
    with products_into_float32("CPU") as multiplied:
        yield multiplied


def compared(numbers, dtypes):
    return sum(check(Maker(Seeded(number), dtypes).problem, "torch") for number in numbers)


def test_random_problems(dtypes):
    assert compared(range(50), dtypes) > 25


@pytest.mark.slow
def test_more_random_problems(dtypes):
    assert compared(range(1000, 1700), dtypes) > 400


def test_random_problems_in_products_of_16_bits(dtypes, in_16_bits):
    assert compared(range(60), SIXTEEN_BITS) > 25
    assert len(in_16_bits) > 100


@pytest.mark.slow
def test_more_random_problems_in_products_of_16_bits(dtypes, in_16_bits):
    assert compared(range(1000, 1700), SIXTEEN_BITS) > 400


@pytest.mark.slow
def test_on_another_device_nothing_waits():
    """In a process of its own, to which torch has added a device."""
    script = Path(__file__).with_name("other_device.py")
    command = [sys.executable, "-m", "pytest", "-n", "0", "-p", "no:cacheprovider", "-q", str(script)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout


@pytest.mark.parametrize(
    ("kind", "dtype", "name"),
    [
        ("cpu", torch.float32, "cpu"),
        ("cpu", torch.float64, "cpu"),
        ("cuda", torch.float64, "torch"),
        ("mps", torch.float16, "torch"),
        ("xpu", torch.bfloat16, "torch"),
        ("hip", torch.float32, "torch"),
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
    not_built = replace(engines.ENGINES["cpu"], why_not_here=lambda *_: "not built")
    monkeypatch.setitem(engines.ENGINES, "cpu", not_built)
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


@pytest.mark.parametrize("above", [0.0, 1.0, 40.0, 300.0])
def test_columns_of_rows_whose_other_columns_are_larger(above):
    """Also where the probabilities of all columns that are there vanish."""
    f, g = torch.randn(2, 6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    targets = fastqt.Diagonal().rows(6, 6, f.device)
    p = Problem(f, g, None, None, 1.0, targets, "keep", None, None, None)
    logsumexp = (f @ g.T).logsumexp(1) + above
    mass, weights = torch.full((6,), 2.0).double(), torch.arange(6).double()
    found = contrastive.backward_of_columns(p, logsumexp, mass, weights, Needs(queries=True, candidates=True))

    probabilities = (f @ g.T - logsumexp[:, None]).exp()
    dS = weights[:, None] * (mass[:, None] * probabilities - torch.eye(6))
    torch.testing.assert_close(found.queries, dS @ g, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(found.candidates, dS.T @ f, rtol=1e-12, atol=1e-14)
