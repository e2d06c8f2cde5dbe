"""How contestants are measured: in turns on the same inputs; one that fails gets a reason."""

import sys
from types import SimpleNamespace

import pytest
import torch

from benchmarks.gpu import figures, peers
from benchmarks.gpu.shapes import LOW_MEMORY, SHAPES, Shape
from benchmarks.measure.timing import Clock, Effort, in_turns
from benchmarks.predict import predictions

CPU = torch.device("cpu")
NARROW = 256  # embeddings that wide, and narrower ones, are predicted and not measured


def absent(inputs):
    raise ModuleNotFoundError("No module named 'absent'")


def breaks_at(call):
    """A contestant that works until its `call`-th step."""

    def make(inputs):
        calls = iter(range(call))

        def step(i):
            if next(calls, None) is None:
                raise torch.OutOfMemoryError("out of memory\nwith details")
            return [torch.tensor(1.0)]

        return step

    return make


@pytest.mark.slow
def test_a_failing_contestant_gets_a_reason_and_the_others_go_on():
    inputs = peers.make_inputs(Shape(6, 6, 4), torch.float32, CPU)
    entrants = {"absent": absent, "at once": breaks_at(0), "later": breaks_at(4), "eager": peers.eager}
    results = in_turns(entrants, inputs, Clock(CPU), Effort(1, 5, 0.0))
    assert results["absent"].reason == "ModuleNotFoundError: No module named 'absent'"
    whole = "OutOfMemoryError: out of memory\nwith details"
    assert results["at once"].reason == results["later"].reason == whole
    assert all(results[name].seconds is None for name in ("absent", "at once", "later"))
    assert results["eager"].reason is None
    assert results["eager"].rounds == 5
    f, g = (x.detach() for x in inputs.sets[0])
    assert results["eager"].loss == pytest.approx(float(peers.cross_entropy(f, g, inputs.labels)))


def test_a_step_of_several_sets_is_divided_by_them():
    inputs = peers.make_inputs(Shape(4, 4, 4), torch.float32, CPU)
    seconds = iter([8.0, 4.0, 6.0])
    clock = SimpleNamespace(
        device=CPU,
        seconds=lambda function, lead: next(seconds),
        free=lambda: None,
        wait=lambda: None,
        launch_seconds=0.5,
    )
    entrants = {"eager": peers.in_graph(peers.eager)}
    result = in_turns(entrants, inputs, clock, Effort(1, 3, 0.0), sets_a_step=2)["eager"]
    assert (result.seconds, result.launch_seconds) == (3.0, 0.25)
    assert result.peak_bytes is None


def test_products_are_those_of_the_loss():
    inputs = peers.make_inputs(Shape(5, 7, 3), torch.float32, CPU)
    seen = []
    step = peers.products(inputs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "mm", lambda a, b, out: seen.append((*a.shape, b.shape[1])))
        step(0)
    assert seen == [(5, 3, 7), (5, 7, 3), (7, 5, 3)]


def test_every_shape_of_a_prediction_is_measured_but_those_of_narrow_embeddings():
    for shape, contestant in predictions():
        assert (shape in SHAPES) == (shape.D > NARROW)
        if shape not in SHAPES:
            continue
        if "low" not in contestant or shape in LOW_MEMORY:
            assert contestant in figures.fused_and_eager(shape)


class OfMemeff:
    """Stands for the package's loss of rows at norm 1."""

    def __init__(self, temperature, normalized_inputs, stable):
        assert normalized_inputs
        assert not stable
        self.scale = 1 / temperature

    def __call__(self, a, b):
        scores, labels = self.scale * a @ b.T, torch.arange(len(a))
        return sum(torch.nn.functional.cross_entropy(x, labels) for x in (scores, scores.T)) / 2


@pytest.mark.parametrize("present", [[], ["memeff", "quack-kernels"], ["siglip-kernel"]], ids=str)
def test_losses_of_pairs_stand_beside_those_of_the_packages_that_are_there(present, monkeypatch):
    monkeypatch.setattr(figures, "importable_peers", lambda: present)
    ours = {"fastqt SigLIP", "eager SigLIP", "fastqt CLIP", "eager CLIP"}
    assert set(figures.of_pairs(Shape(6, 6, 4))) == ours | set(present) - {"quack-kernels"}
    assert figures.of_pairs(Shape(6, 8, 4)) == {}


def test_memeff_is_asked_for_the_loss_of_the_others(monkeypatch):
    monkeypatch.setitem(sys.modules, "memeff", SimpleNamespace(MemoryEfficientCLIPLoss=OfMemeff))
    inputs = peers.make_inputs(Shape(6, 6, 4), torch.float32, CPU)
    for found, wanted in zip(peers.memeff(inputs)(0), peers.eager_clip(inputs)(0), strict=True):
        torch.testing.assert_close(found, wanted)
