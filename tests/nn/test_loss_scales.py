"""The scales of loss modules: their defaults, their gradients, and how they are learnt and bounded."""

import copy
import math

import pytest
import torch

import fastqt
from fastqt import nn
from fastqt.nn import ContrastiveLoss
from tests.shared.loss_modules import (
    BIAS,
    CANDIDATES,
    MODULES,
    OTHERS,
    QUERIES,
    D,
    N,
)


@pytest.mark.parametrize("name", ["curl", "curl_block", "gloss_bow", "gloss_pos"])
def test_losses_of_unscaled_scores_take_no_scale(name):
    with pytest.raises(TypeError, match=r"^learn_scale, scale: no option of"):
        MODULES[name][0](scale=2.0, learn_scale=True)


@pytest.mark.parametrize(
    "name", ["contrastive", "sigmoid", "info_nce", "simcse", "mixcse", "clip", "siglip", "ranking"]
)
def test_gradient_of_log_scale_equals_finite_difference(name):
    """d loss / d log scale = scale * d loss / d scale, compared with a central difference of the function."""
    make, function, options, data, named = MODULES[name]
    options = {**options, "reduction": "sum"}
    data = [x.double() for x in data]
    named = {k: x.double() if x is OTHERS or x is BIAS else x for k, x in named.items()}
    module = make(**{**options, "scale": 2.0}, learn_scale=True).double()
    module(*data, **named).backward()
    up, down = (
        function(*data, **named, **{**options, "scale": 2.0 * math.exp(step)}) for step in (1e-5, -1e-5)
    )
    assert module.log_scale.grad.item() == pytest.approx((up - down).item() / 2e-5, rel=1e-6)


@pytest.mark.parametrize(
    ("make", "scale"),
    [
        (nn.ContrastiveLoss, 1.0),
        (nn.SigmoidLoss, 1.0),
        (nn.InfoNCELoss, 20.0),
        (nn.SimCSELoss, 20.0),
        (nn.MultipleNegativesRankingLoss, 20.0),
        (nn.MixCSELoss, 20.0),
        (nn.CLIPLoss, 1 / 0.07),
        (nn.SigLIPLoss, 10.0),
    ],
)
def test_default_scale(make, scale):
    assert torch.as_tensor(make().scale).item() == pytest.approx(scale)


def test_repr_shows_the_options():
    module = ContrastiveLoss(context_size=2, scale=3.0, normalize=True, reduction="none")
    assert repr(module) == "ContrastiveLoss(scale=3.0, context_size=2, normalize=True, reduction='none')"
    assert repr(nn.SigLIPLoss(learn_bias=False)) == "SigLIPLoss(scale=10.0, learn_scale=True, bias=-10.0)"
    assert repr(nn.CURLLoss()) == "CURLLoss()"


def test_learnt_scale_grows_when_queries_equal_their_candidates():
    """If queries equal their candidates, only a larger scale lowers the loss."""
    module = ContrastiveLoss(scale=2.0, learn_scale=True, diagonal="keep", normalize=True)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = module(QUERIES, QUERIES, fastqt.Diagonal())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses == sorted(losses, reverse=True)
    assert module.scale > 2.5
    assert list(module.state_dict()) == ["log_scale"]


def test_siglip_bias_is_learnt_and_restored_from_a_state_dict():
    """If all embeddings are equal, all scores are, and the optimal probability of a pair is 1 / N."""
    module = nn.SigLIPLoss(scale=1.0, learn_scale=False)
    ones = torch.ones(N, D)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    for _ in range(200):
        optimizer.zero_grad()
        module(ones, ones).backward()
        optimizer.step()
    assert torch.sigmoid(1 + module.bias).item() == pytest.approx(1 / N, abs=1e-3)
    fresh = nn.SigLIPLoss(scale=1.0, learn_scale=False)
    fresh.load_state_dict(module.state_dict())
    assert torch.equal(fresh(QUERIES, CANDIDATES), module(QUERIES, CANDIDATES))


def test_a_state_with_numbers_of_no_dimension_is_read():
    """Earlier versions stored them so. The state itself stays as it was."""
    state = {"0.log_scale": torch.tensor(1.5), "0.bias": torch.tensor(-3.0)}
    outer = torch.nn.Sequential(nn.SigLIPLoss())
    outer.load_state_dict(state)
    assert (outer[0].log_scale.shape, outer[0].scale.shape) == ((1,), ())
    assert (outer[0].log_scale.item(), outer[0].bias.item()) == (1.5, -3.0)
    assert all(x.dim() == 0 for x in state.values())


@pytest.mark.parametrize("rate", [0.1, 2.0])
def test_learnt_scale_is_clamped_as_clip_does_it(rate):
    """The steps of an optimiser with momentum are those of a parameter that is clamped after each step."""
    module = nn.InfoNCELoss(scale=4.0, learn_scale=True, max_scale=5.0)
    clamped = torch.nn.Parameter(torch.tensor(math.log(4.0)))
    optimizer = torch.optim.SGD([module.log_scale], lr=rate, momentum=0.9)
    of_clamped = torch.optim.SGD([clamped], lr=rate, momentum=0.9)
    found = []
    for step in range(12):
        candidates = QUERIES if step < 6 else -QUERIES  # The scale first wants to grow, and then to shrink.
        optimizer.zero_grad()
        of_clamped.zero_grad()
        penalty = module.log_scale**2  # whose graph has saved the parameter
        (module(QUERIES, candidates) + 0 * penalty).backward()
        fastqt.info_nce_loss(QUERIES, candidates, scale=clamped.exp()).backward()
        optimizer.step()
        of_clamped.step()
        with torch.no_grad():
            clamped.clamp_(max=math.log(5.0))
        found.append(module.scale.item())
        assert torch.equal(module.scale, clamped.exp())
        assert torch.equal(module.log_scale[0], clamped)
    assert max(found) == pytest.approx(5.0)
    assert found[-1] < 4.9


def test_max_scale_of_modules():
    assert nn.CLIPLoss().max_scale == 100.0
    assert nn.InfoNCELoss(learn_scale=True).max_scale is None
    assert repr(nn.SimCSELoss(learn_scale=True, max_scale=30.0)) == (
        "SimCSELoss(scale=20.0, learn_scale=True, max_scale=30.0)"
    )
    with pytest.raises(ValueError, match=r"scale: want at most max_scale=100\.0, got 200"):
        nn.CLIPLoss(scale=200)
    with pytest.raises(ValueError, match="max_scale: want a positive number, got 0"):
        nn.InfoNCELoss(learn_scale=True, max_scale=0)
    with pytest.raises(TypeError, match="max_scale: want a number, got str"):
        nn.InfoNCELoss(learn_scale=True, max_scale="100")


@pytest.mark.slow
def test_a_clamped_scale_compiles_into_one_graph():
    module = nn.CLIPLoss(scale=4.0)
    with torch.no_grad():
        module.log_scale.fill_(math.log(500.0))
    twin = copy.deepcopy(module)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    compiled(QUERIES, CANDIDATES).backward()
    twin(QUERIES, CANDIDATES).backward()
    assert module.scale.item() == pytest.approx(100.0)
    torch.testing.assert_close(module.log_scale.grad, twin.log_scale.grad)


@pytest.mark.parametrize("kind", [torch.Tensor.requires_grad_, torch.nn.Parameter])
def test_functional_call_leaves_the_scale_that_it_is_given(kind):
    """Beyond max_scale, too: value and gradient are those of the module's own parameter, which is clamped."""
    own, other, (a, b) = nn.CLIPLoss(), nn.CLIPLoss(), torch.randn(2, 6, 4)
    given = kind(torch.full((1,), 9.0))
    loss = torch.func.functional_call(other, {"log_scale": given}, (a, b))
    own.log_scale.data.fill_(9.0)
    torch.testing.assert_close(loss, own(a, b))
    loss.backward()
    own(a, b).backward()
    torch.testing.assert_close(given.grad, own.log_scale.grad)
    assert given.item() == 9.0
    assert own.log_scale.item() == pytest.approx(math.log(100.0))


@pytest.mark.parametrize(
    "replace",
    [
        lambda module: module.load_state_dict({"log_scale": torch.tensor(9.0)}, assign=True),
        lambda module: module.to("meta").to_empty(device="cpu"),
        lambda module: setattr(module, "log_scale", torch.nn.Parameter(torch.full((1,), 9.0))),
    ],
)
def test_another_parameter_in_its_place_is_clamped(replace):
    for module in (nn.CLIPLoss(), copy.deepcopy(nn.CLIPLoss())):
        replace(module)
        module.log_scale.data.fill_(9.0)
        assert module.scale.item() == pytest.approx(100.0)
        assert module.log_scale.item() == pytest.approx(math.log(100.0))
