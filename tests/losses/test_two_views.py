"""What DCL and HCL are of other losses, where HCL's estimate has a floor, and what both refuse.

test_every_loss.py and test_random_losses.py compare them with their formulas.
"""

import math

import pytest
import torch

import fastqt
from tests.shared.loss_views import N, by_backend, check, views
from tests.shared.tolerances import FLOAT64, relative


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


@pytest.mark.parametrize(
    ("function", "options", "message"),
    [
        (fastqt.dcl_loss, {"sigma": math.nan}, "sigma: want a finite number"),
        (fastqt.hcl_loss, {"tau_plus": -0.1}, "tau_plus: want 0 <= tau_plus < 1, got -0.1"),
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
