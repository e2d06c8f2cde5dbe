"""The C++ engine gives the same results for any chunks and tiles, layouts and numbers of threads."""

from dataclasses import replace

import pytest
import torch

import fastqt
from fastqt.engines import ops
from fastqt.engines.cpu import contrastive as schedule
from fastqt.fields import places_of
from fastqt.functional import computed
from fastqt.problem import Problem
from tests.shared.cases import CASES, Case
from tests.shared.draws import Seeded
from tests.shared.excluding import excluding
from tests.shared.problem_check import check
from tests.shared.problems import Maker
from tests.shared.tolerances import REORDERED, relative

pytestmark = pytest.mark.usefixtures("low_memory_in_tiles")
DTYPES = (torch.float32, torch.float64)


def value_and_gradients(case: Case, inputs: dict[str, torch.Tensor], **more) -> list[torch.Tensor]:
    loss = case.loss(inputs, **more)
    return [loss.detach(), *torch.autograd.grad(loss, list(inputs.values()))]


def assert_same(a: list[torch.Tensor], b: list[torch.Tensor], tolerance: float) -> None:
    for x, y in zip(a, b, strict=True):
        assert relative(x, y) < tolerance


# Chunks of few rows, and tiles of few cells: of whole rows in the fast mode, and of any size in the low one.
TILES = (
    {"CHUNK_BYTES": 1, "MIN_CHUNK_ROWS": 1, "TILE_ROWS": 1, "TILE_COLUMNS": 1, "TILE_BYTES": 8},
    {"CHUNK_BYTES": 1, "MIN_CHUNK_ROWS": 3, "TILE_ROWS": 3, "TILE_COLUMNS": 5, "TILE_BYTES": 120},
    {"CHUNK_BYTES": 1, "MIN_CHUNK_ROWS": 12, "TILE_ROWS": 4, "TILE_COLUMNS": 100, "TILE_BYTES": 3200},
)


@pytest.mark.parametrize("tiles", TILES)
@pytest.mark.parametrize("first", [0, pytest.param(1000, marks=pytest.mark.slow)])
def test_chunks_and_tiles_do_not_change_the_result(tiles, first, monkeypatch):
    """It is the oracle's, of random problems, as that of all rows at once is in other tests."""
    for name, value in tiles.items():
        monkeypatch.setattr(schedule, name, value)
    problems = [Maker(Seeded(first + number), DTYPES).problem for number in range(50 + first // 4)]
    assert sum(check(problem, "cpu") for problem in problems) > len(problems) // 2


@pytest.mark.parametrize("link", ["softmax", "sigmoid", "log_sum_exp"])
def test_bytes_choose_between_whole_rows_and_tiles(link, monkeypatch):
    """A softmax has its gradients from chunks of whole rows where enough of these fit."""
    case = next(c for c in CASES if c.name == "all at once")
    problems = []
    monkeypatch.setattr(computed, "computed_loss", lambda p, *_: problems.append(p) or p.queries.sum())
    case.loss(case.inputs(torch.float32), memory=2**24)
    p = replace(problems[0], link=link)
    row = 4 * (len(p.candidates) + len(p.negatives) + 1)
    monkeypatch.setattr(schedule, "MIN_CHUNK_ROWS", 5)
    for memory, in_forward in ((5 * row, True), (5 * row - 1, link == "sigmoid"), ("fast", True)):
        assert schedule.gradients_in_forward(replace(p, memory=memory)) == in_forward
    monkeypatch.setattr(schedule, "LOW_BYTES", 5 * row)
    assert schedule.gradients_in_forward(replace(p, memory="low"))
    monkeypatch.setattr(schedule, "LOW_BYTES", 5 * row - 1)
    assert schedule.gradients_in_forward(replace(p, memory="low")) == (link == "sigmoid")
    if link != "sigmoid":
        assert schedule._gradient_tile(replace(p, memory=6 * row)) == (5, None)  # of 13 rows
        monkeypatch.setattr(schedule, "CHUNK_BYTES", 5 * row)  # more is no faster
        assert schedule._gradient_tile(replace(p, memory=2**30)) == (5, None)


@pytest.mark.parametrize("memory", ["fast", "low"])
def test_threads_agree_and_runs_repeat(memory):
    case = CASES[0]
    generator = torch.Generator().manual_seed(0)
    inputs = {
        name: torch.randn(600, 64, generator=generator).requires_grad_() for name in ("queries", "candidates")
    }
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        two = value_and_gradients(case, inputs, memory=memory)
        again = value_and_gradients(case, inputs, memory=memory)
        torch.set_num_threads(1)
        one = value_and_gradients(case, inputs, memory=memory)
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(two, again, strict=True))
    assert_same(one, two, REORDERED[torch.float32])


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("loss", [fastqt.log_sum_exp, fastqt.info_nce_loss, fastqt.dcl_loss, fastqt.hcl_loss])
def test_kept_scores_change_no_bit_and_serve_every_backward_pass(loss, normalize, monkeypatch):
    """The backward pass has the same scores as where it computes them once more."""
    inputs = torch.randn(2, 70, 9, dtype=torch.float64, requires_grad=True)
    of_views = loss in (fastqt.dcl_loss, fastqt.hcl_loss)
    how = {"scale": 2.0} if of_views else {"reduction": "none", "normalize": normalize}
    how = how if loss is not fastqt.log_sum_exp else {"normalize": normalize}

    def gradients() -> list[torch.Tensor]:
        rows = loss(*inputs, **how, backend="cpu")
        weights = torch.linspace(1, 2, rows.numel(), dtype=rows.dtype).view_as(rows)
        return [torch.autograd.grad(rows, inputs, weights, retain_graph=True)[0] for _ in range(2)]

    assert schedule.KEPT_BYTES >= 70 * 70 * 8
    monkeypatch.setattr(schedule, "TILE_ROWS", 16)
    monkeypatch.setattr(schedule, "CHUNK_BYTES", 16 * 70 * 8)  # of several tiles in CLIP's walk
    all_kept, again = gradients()
    assert torch.equal(all_kept, again)
    for rows in (0, 15, 40, 69):
        monkeypatch.setattr(schedule, "KEPT_BYTES", rows * 70 * 8)
        for some_kept in gradients():
            assert torch.equal(some_kept, all_kept), rows


@pytest.mark.parametrize("memory", ["fast", "low", 2**24, 2**25])
def test_scores_are_kept_where_the_memory_holds_them(memory, monkeypatch):
    """As many whole tiles as it holds, but none for a loss without gradients, or with memory="low"."""
    monkeypatch.setattr(schedule, "LOW_BYTES", 2**24)
    scores = []
    compute = torch.ops.fastqt.contrastive_loss_rows.default
    monkeypatch.setattr(
        torch.ops.fastqt.contrastive_loss_rows, "default", lambda *x: scores.append(x[-1]) or compute(*x)
    )
    queries, candidates = torch.randn(2, 70, 9, dtype=torch.float64)
    for leaf, exclude in ((False, None), (True, None), (True, fastqt.Within(torch.arange(70) // 2))):
        x = queries.clone().requires_grad_(leaf)
        fastqt.log_sum_exp(x, candidates, memory=memory, exclude=exclude, backend="cpu")
    monkeypatch.setattr(schedule, "TILE_ROWS", 16)
    monkeypatch.setattr(schedule, "KEPT_BYTES", 40 * 70 * 8)
    fastqt.log_sum_exp(queries.clone().requires_grad_(), candidates, memory=memory, backend="cpu")
    alone, followed, filtered, few = (0 if x is None else len(x) for x in scores)
    assert not alone
    assert (followed, filtered, few) == ((70, 70, 32) if memory in ("fast", 2**25) else (0, 0, 0))


def test_strided_targets_and_masks_are_read_in_place():
    case = next(c for c in CASES if c.name == "all at once")
    inputs = case.inputs(torch.float64)
    mask, targets = case.arguments["mask"], torch.from_numpy(case.targets)
    for memory in ("fast", "low"):
        arguments = {**case.arguments, "targets": targets, "mask": mask}
        strided = {**arguments, "targets": targets.T.contiguous().T, "mask": mask.T.contiguous().T}
        expected = fastqt.contrastive_loss(**inputs, **excluding(arguments), memory=memory)
        found = fastqt.contrastive_loss(**inputs, **excluding(strided), memory=memory)
        assert relative(found, expected) < REORDERED[torch.float64]


@pytest.mark.skipif(ops.native_error is not None, reason=str(ops.native_error))
def test_operators_take_every_field_of_a_problem():
    """A field that csrc/cpu/problem.h does not list would have no effect, without a word."""
    # Which this engine reads, or never gets; prefixes have an operator of their own.
    of_python = {"memory", "partners", "mix", "offsets", "cached", "prefix_dims", "prefix_weights"}
    fields = {place.name for place in places_of(Problem)}
    assert fields - of_python == set(ops.PROBLEM_ARGUMENTS)
