"""The smoke steps, tiny and on a CPU: each runs to its end, and each fails where what it checks is wrong."""

from functools import partial

import pytest
import torch

from benchmarks.gpu.sections import Options
from benchmarks.gpu.smoke import losses, products, scores
from benchmarks.gpu.stages import SCORES, smoke
from fastqt.engines import products as engine_products

CPU = torch.device("cpu")
DRY = Options(dry_run=True)
STEPS = [section for wave in smoke() for section in wave]


@pytest.mark.parametrize("section", STEPS, ids=lambda section: section.name)
@pytest.mark.thinned(3)
def test_a_step_runs_to_its_end(section):
    records = list(section.records(DRY))
    failed = [record for record in records if record.get("ok") is False]
    assert records
    assert failed == []


@pytest.mark.parametrize("form", products.FORMS)
@pytest.mark.parametrize("add", [False, True])
def test_a_product_that_is_wrong_fails(form, add, monkeypatch):
    right = engine_products.multiply
    verdict = partial(products.product_verdict, form, products.DRY_SIZES, torch.bfloat16, add, CPU)

    def rounded(out, a, b, *, add):
        right(out, a, b, add=add)
        out.copy_(out.bfloat16())

    def adds_nothing(out, a, b, *, add):
        right(out, a, b, add=False)

    def always_adds(out, a, b, *, add):
        right(out, a, b, add=True)

    def writes_beyond(out, a, b, *, add):
        right(out, a, b, add=add)
        out.as_strided((out._base.numel(),), (1,), 0).add_(1)

    assert verdict().ok
    broken = [rounded, adds_nothing if add else always_adds]
    for wrong in [*broken, writes_beyond] if "slice" in form else broken:
        monkeypatch.setattr(engine_products, "multiply", wrong)
        found = verdict()
        assert not found.ok
        assert found.detail.startswith("wrong: product; product ")


@pytest.mark.parametrize("epilogue", SCORES)
def test_an_epilogue_that_leaves_something_unwritten_fails(epilogue, monkeypatch):
    right = scores.LAUNCHES[epilogue]
    wanted = scores.EXPECTED[epilogue]

    def spoilt(tile, x, out, config, name):
        right(tile, x, out, config)
        getattr(out, name)[-1, -1] = torch.nan

    checked = {"matrix", "tile_row_sums", "tile_column_sums"}
    checked -= {"ROW_MAX": {"matrix", "tile_column_sums"}, "EXP": {"tile_column_sums"}}.get(epilogue, set())
    for name in checked:
        monkeypatch.setitem(scores.LAUNCHES, epilogue, partial(spoilt, name=name))
        found = scores.scores_verdict(epilogue, scores.DRY_SIZES, torch.float16, CPU, False)
        assert not found.ok, name
    assert scores.EXPECTED[epilogue] is wanted


@pytest.mark.slow
@pytest.mark.parametrize("verdict", [losses.graph_verdict, losses.streams_verdict])
def test_a_step_that_sees_old_inputs_fails(verdict, monkeypatch):
    """As a graph that was captured on copies would, or work on a stream that does not wait."""
    asked, genuine = losses.problem(DRY, 0, 0), losses.step_of
    assert verdict(asked, torch.float16, CPU, "triton").ok

    def on_copies(leaves, backend):
        copies = [torch.randn_like(x).requires_grad_() for x in leaves]
        return genuine(copies, backend)

    monkeypatch.setattr(losses, "step_of", on_copies)
    assert not verdict(asked, torch.float16, CPU, "triton").ok
