"""DCL and HCL equal their definitions with the whole matrix of the 2 N views' scores."""

import math

import pytest
import torch

import fastqt
from tests.shared.every_loss import dcl, hcl
from tests.shared.loss_views import N, by_backend, by_memory, check, views
from tests.shared.tolerances import FLOAT32, FLOAT64, relative

SHAPES = [
    {"beta": b, "tau_plus": t} for b, t in ((0.0, 0.0), (0.0, 0.1), (1.0, 0.0), (0.5, 0.03), (3.0, 0.6))
]


@by_backend
@by_memory
@pytest.mark.parametrize("options", SHAPES, ids=str)
def test_hcl_is_the_definition(backend, memory, options):
    z1, z2, scale = inputs = [*views(N, N), torch.tensor(3.0, dtype=torch.float64, requires_grad=True)]
    loss = fastqt.hcl_loss(z1, z2, scale=scale, memory=memory, backend=backend, **options)
    check(loss, hcl(z1, z2, scale, **options).mean(), inputs)


@by_backend
@by_memory
def test_dcl_is_the_definition(backend, memory):
    z1, z2, scale = inputs = [*views(N, N), torch.tensor(3.0, dtype=torch.float64, requires_grad=True)]
    loss = fastqt.dcl_loss(z1, z2, scale=scale, reduction="none", memory=memory, backend=backend)
    check(loss, dcl(z1, z2, scale), inputs)


def weighted(z1, z2, scale, sigma):
    """DCLW by its formula, in which no gradient flows through the weights."""
    pair = torch.cosine_similarity(z1, z2)
    shares = (pair.detach() / sigma).exp()
    return dcl(z1, z2, scale) + scale * pair - (2 - shares / shares.mean()) * scale * pair


@by_backend
@pytest.mark.parametrize("sigma", [0.1, 0.5, 20.0])
def test_far_pairs_weigh_more(backend, sigma):
    z1, z2 = inputs = views(N, N)
    loss = fastqt.dcl_loss(z1, z2, scale=5.0, sigma=sigma, reduction="sum", backend=backend)
    check(loss, weighted(z1, z2, 5.0, sigma).sum(), inputs)


def test_without_weights_it_is_the_loss_of_simclr():
    z1, z2 = inputs = views(N, N)
    loss = fastqt.hcl_loss(z1, z2, scale=4.0, beta=0.0, tau_plus=0.0)
    check(loss, fastqt.ntxent_loss(torch.cat([z1, z2]), torch.arange(N).repeat(2), scale=4.0), inputs)


def test_the_floor_of_a_scale_in_float32_has_the_digits_of_the_views():
    z1, z2 = views(2, 2)
    scale = torch.tensor(0.3)
    losses = [
        fastqt.hcl_loss(z1, z2 + 9 * z1, scale=number, beta=0.0, tau_plus=0.9)
        for number in (scale, scale.double())
    ]
    assert relative(*losses) < FLOAT64


def test_the_estimate_has_a_floor():
    """Where all negatives are taken for positives, G is its least value, and no gradient flows to them."""
    z1, z2 = inputs = views(N, N)
    loss = fastqt.hcl_loss(z1, z2 + 9 * z1, scale=2.0, beta=0.0, tau_plus=0.9, reduction="none")
    pair = torch.cosine_similarity(z1, z2 + 9 * z1)
    check(loss, torch.log1p((2 * N - 2) * torch.exp(-2 - 2 * pair)), inputs)


@by_backend
@pytest.mark.parametrize("function", [fastqt.dcl_loss, fastqt.hcl_loss])
def test_digits_are_kept_in_float32_once_the_views_agree(backend, function):
    z1, z2 = (z.detach() for z in views(N, N))
    inputs = [z.float().requires_grad_() for z in (z1, z1 + 0.05 * z2)]
    exact = [z.detach().double().requires_grad_() for z in inputs]
    options = (
        {"scale": 50.0} if function is fastqt.dcl_loss else {"scale": 50.0, "beta": 0.2, "tau_plus": 0.0}
    )
    formula = dcl if function is fastqt.dcl_loss else hcl
    loss = function(*inputs, backend=backend, **options)
    check(loss, formula(*exact, **options).mean(), inputs, FLOAT32, exact)


@pytest.mark.parametrize(
    ("function", "options", "message"),
    [
        (fastqt.dcl_loss, {"sigma": 0.0}, "sigma: want a number > 0 or None, got 0.0"),
        (fastqt.dcl_loss, {"sigma": math.nan}, "sigma: want a finite number"),
        (fastqt.hcl_loss, {"beta": -1.0}, "beta: want a number >= 0, got -1.0"),
        (fastqt.hcl_loss, {"tau_plus": 1.0}, "tau_plus: want 0 <= tau_plus < 1, got 1.0"),
        (fastqt.hcl_loss, {"tau_plus": -0.1}, "tau_plus: want 0 <= tau_plus < 1, got -0.1"),
        (fastqt.hcl_loss, {"reduction": "median"}, "reduction: want"),
    ],
)
def test_refuses_nonsense(function, options, message):
    with pytest.raises(ValueError, match=message):
        function(*views(N, N), **options)


@pytest.mark.parametrize("function", [fastqt.dcl_loss, fastqt.hcl_loss])
def test_refuses_one_sentence_and_views_of_other_sizes(function):
    with pytest.raises(ValueError, match="z2: want two views of at least 2 sentences, got 1"):
        function(*views(1, 1))
    with pytest.raises(ValueError, match="z2: want a row for each of the 9 rows of z1, got 8"):
        function(*views(N, N - 1))


@by_backend
def test_a_focal_loss_is_a_function_of_the_rows(backend):
    """As docs/losses/pairs.md has it: its gradient is that of the formula with the whole matrix of scores."""
    z1, z2 = inputs = views(N, N)
    rows = fastqt.info_nce_loss(z1, z2, scale=5.0, reduction="none", backend=backend)
    positive = (5 * torch.cosine_similarity(z1[:, None], z2, dim=2)).softmax(1).diagonal()
    expected = -((1 - positive) ** 2 * positive.log()).mean()
    check(((1 - (-rows).exp()) ** 2 * rows).mean(), expected, inputs)
