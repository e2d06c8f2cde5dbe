"""bfloat16 on a CPU that multiplies matrices of it: the error is within that of eager PyTorch.

The products are torch's on every CPU; without instructions for them they are only slower.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import Phase, given, settings

import fastqt
from fastqt.engines import cpu
from fastqt.engines.cpu import contrastive as schedule
from fastqt.functional import computed
from tests.shared.problem_check import check
from tests.shared.problems import problems
from tests.shared.tolerances import EAGER_FACTOR, UNIT_ROUNDOFF

ROUNDING = UNIT_ROUNDOFF[torch.bfloat16]
WINDOW = (-1, 1)


@pytest.fixture(autouse=True)
def bfloat16(monkeypatch):
    """Problems of any size and with any number of targets are computed in bfloat16."""
    monkeypatch.setattr(cpu, "has_bfloat16_products", lambda: True)
    monkeypatch.setattr(cpu, "CELLS_PER_TARGET", 0)


@pytest.fixture
def lowered(monkeypatch):
    """The problems that losses are lowered to."""
    found = []
    whole = computed.computed_loss
    monkeypatch.setattr(computed, "computed_loss", lambda p, *more: found.append(p) or whole(p, *more))
    return found


def leaves(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [x.detach().clone().requires_grad_() for x in tensors]


def distance(x: torch.Tensor, truth: torch.Tensor) -> float:
    return ((x.double() - truth).norm() / truth.norm()).item()


def eager_window(q: torch.Tensor, c: torch.Tensor, scale: float) -> torch.Tensor:
    N = len(q)
    S = (scale * (q @ c.T)).masked_fill(torch.eye(N, dtype=torch.bool), 0)
    T = sum(torch.ones(N - 1, dtype=q.dtype).diag(offset) for offset in WINDOW)
    return F.kl_div(S.log_softmax(1), T / T.sum(1, keepdim=True), reduction="sum") / N


def eager_pairs(q: torch.Tensor, c: torch.Tensor, scale: float) -> torch.Tensor:
    S = scale * (F.normalize(q, dim=1) @ F.normalize(c, dim=1).T)
    return F.cross_entropy(S, torch.arange(len(q)))


def eager_sigmoid(q: torch.Tensor, c: torch.Tensor, scale: float) -> torch.Tensor:
    S = scale * (F.normalize(q, dim=1) @ F.normalize(c, dim=1).T) - 2
    return F.softplus(S).sum(1).mean() - S.diag().mean()


def eager_clip(a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    return (eager_pairs(a, b, scale) + eager_pairs(b, a, scale)) / 2


PAIRS = {"targets": fastqt.Diagonal(), "diagonal": "keep", "normalize": True}
LOSSES = {
    "window": (fastqt.contrastive_loss, {}, eager_window),
    "pairs": (fastqt.contrastive_loss, PAIRS, eager_pairs),
    "clip": (fastqt.clip_loss, {}, eager_clip),
    "sigmoid": (fastqt.sigmoid_loss, {**PAIRS, "bias": -2.0}, eager_sigmoid),
}


def embeddings(kind: str, state: str, N: int = 200, D: int = 48) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Queries, candidates and a scale; converged ones score their targets far above all others."""
    generator = torch.Generator().manual_seed(len(kind) + len(state))
    q = torch.randn(N, D, generator=generator)
    if state == "random":
        return q, torch.randn(N, D, generator=generator), 0.3 if kind == "window" else 20.0
    q = F.normalize(q, dim=1)
    if kind == "window":
        return q, 4 * (q.roll(1, 0) + q.roll(-1, 0)), 8.0
    return q, q + 0.05 * torch.randn(N, D, generator=generator), 20.0


@pytest.mark.parametrize("memory", ["fast", "chunks", "low"])
@pytest.mark.parametrize("state", ["random", "converged"])
@pytest.mark.parametrize("kind", LOSSES)
def test_the_error_is_within_that_of_eager_pytorch(kind, state, memory, monkeypatch):
    if memory != "fast":
        monkeypatch.setattr(schedule, "CHUNK_BYTES", 1)
        monkeypatch.setattr(schedule, "TILE_ROWS", 70)
        monkeypatch.setattr(schedule, "TILE_COLUMNS", 90)
        monkeypatch.setattr(schedule, "TILE_BYTES", 2 * 70 * 90)
    loss_of, options, eager = LOSSES[kind]
    *given, scale = embeddings(kind, state)
    given = [x.bfloat16() for x in given]
    truth = leaves(*(x.double() for x in given))
    eager(*truth, scale).backward()
    expected = eager(*truth, scale).detach()
    ours, theirs = leaves(*given), leaves(*given)
    loss = loss_of(*ours, **options, scale=scale, memory="low" if memory == "low" else "fast")
    assert loss.dtype is torch.float32
    their_loss = eager(*theirs, scale)
    loss.backward()
    their_loss.backward()
    assert abs(loss - expected) <= EAGER_FACTOR * abs(their_loss - expected) + 1e-6 * expected
    for x, y, t in zip(ours, theirs, truth, strict=True):
        assert x.grad.dtype is torch.bfloat16
        assert distance(x.grad, t.grad) <= EAGER_FACTOR * distance(y.grad, t.grad)


@pytest.mark.parametrize("memory", ["fast", "low"])
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("loss", ["pairs", "clip", "sigmoid"])
def test_scores_of_targets_are_not_rounded(loss, normalize, memory, monkeypatch):
    """All other scores are 0, which bfloat16 holds; 3.3 it does not."""
    monkeypatch.setattr(schedule, "LOW_BYTES", 1)
    N, scale = 48, 3.3
    rows = torch.eye(N, dtype=torch.bfloat16) * (3 if normalize else 1)
    function, options, _ = LOSSES[loss]
    options = {**options, "scale": scale, "normalize": normalize, "memory": memory}
    found = function(rows, rows, **(options | ({"bias": 0.0} if loss == "sigmoid" else {})), reduction="none")
    expected = math.log1p((N - 1) * math.exp(-scale))
    if loss == "sigmoid":
        expected = math.log1p(math.exp(-scale)) + (N - 1) * math.log(2)
    assert (found - expected).abs().max() < 2e-6 * expected


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("room", [0, 3, 1000], ids=["no tile", "some tiles", "all tiles"])
def test_clip_is_the_same_whichever_tiles_are_kept(normalize, room, monkeypatch):
    """Its scale's gradient too, and of rows of which one is 0."""
    a, b, _ = embeddings("pairs", "random", N=90)
    a[5] = 0
    given = [x.bfloat16() for x in (a / 3, b / 3)]
    scale = torch.tensor(3.0)

    def found(dtype: torch.dtype) -> list[torch.Tensor]:
        inputs = leaves(*(x.to(dtype) for x in given), scale.to(torch.promote_types(dtype, torch.float32)))
        loss = fastqt.clip_loss(*inputs[:2], scale=inputs[2], normalize=normalize)
        return [loss.detach(), *torch.autograd.grad(loss, inputs)]

    truth = found(torch.float64)
    monkeypatch.setattr(schedule, "TILE_ROWS", 20)
    monkeypatch.setattr(schedule, "TILE_COLUMNS", 30)
    monkeypatch.setattr(schedule, "CHUNK_BYTES", room * 2 * 20 * 30)
    for x, wanted in zip(found(torch.bfloat16), truth, strict=True):
        assert distance(x[:5] if x.dim() else x, wanted[:5] if x.dim() else wanted) < 4 * ROUNDING
        assert distance(x[6:] if x.dim() else x, wanted[6:] if x.dim() else wanted) < 4 * ROUNDING


@settings(derandomize=True, database=None, deadline=None, max_examples=200, phases=(Phase.generate,))
@given(problems([torch.bfloat16]))
def test_random_problems(problem):
    check(problem, "cpu")


@pytest.mark.parametrize(
    ("change", "options", "computed"),
    [
        ({}, {}, torch.bfloat16),
        ({"has_bfloat16_products": lambda: False}, {}, torch.float32),
        ({"CELLS_PER_TARGET": 8}, {}, torch.bfloat16),
        ({"CELLS_PER_TARGET": 8}, {"context_size": 4}, torch.float32),
        ({}, {"targets": torch.full((40, 40), 1 / 40), "diagonal": "keep"}, torch.float32),
    ],
    ids=["bfloat16", "no instructions", "few targets", "many targets", "dense targets"],
)
def test_what_is_computed_in_float32(change, options, computed, lowered, monkeypatch):
    for name, value in change.items():
        monkeypatch.setattr(cpu, name, value)
    fastqt.contrastive_loss(*(torch.randn(40, 8, dtype=torch.bfloat16) for _ in range(2)), **options)
    assert lowered[0].queries.dtype is computed


def test_without_onednn_there_are_no_products(monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(cpu, "_has_bfloat16_instructions", lambda: True)
    try:
        torch._C._set_mkldnn_enabled(False)  # mkldnn.flags() also sets what warns here
        assert not cpu.has_bfloat16_products()
    finally:
        torch._C._set_mkldnn_enabled(True)
    assert cpu.has_bfloat16_products()


@pytest.mark.parametrize(
    ("has_tiles", "has_vectors", "slow", "multiplied"),
    [
        (False, True, False, True),  # AMD's Zen 4
        (False, True, True, False),  # Intel's, whose tiles are kept from a virtual machine
        (True, True, True, True),
        (False, False, False, False),
        (True, False, False, True),
    ],
)
def test_slow_vectors_do_not_multiply_bfloat16(has_tiles, has_vectors, slow, multiplied, monkeypatch):
    monkeypatch.undo()
    capabilities = {"amx_bf16": has_tiles, "avx512_bf16": has_vectors}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    monkeypatch.setattr(cpu.own_products, "has_slow_bfloat16_vectors", lambda: slow)
    assert cpu._has_bfloat16_instructions.__wrapped__() is multiplied


def test_a_converged_loss_keeps_its_digits():
    """Eager PyTorch's is a difference of two numbers of the size of the scores, rounded to 8 bits."""
    q, c, scale = embeddings("pairs", "converged")
    given = [x.bfloat16() for x in (q, c)]
    loss = fastqt.contrastive_loss(*given, **PAIRS, scale=scale)
    expected = eager_pairs(*(x.double() for x in given), scale)
    assert expected < 0.02
    assert abs(loss - expected) < 4 * ROUNDING * expected
    assert abs(fastqt.clip_loss(*given, scale=scale) - expected) < 0.1 * expected
