"""CosFace and ArcFace without a margin, at angles of 0 and pi, and with what they refuse."""

import math

import pytest
import torch
import torch.nn.functional as F

import fastqt
from tests.shared.every_loss import arcface, cosface
from tests.shared.loss_views import D, N, check, views

C = 13
LABELS = torch.tensor([3, 3, 0, 12, 5, 7, 7, 1, 9])
FUNCTIONS = {"cosface": (fastqt.cosface_loss, cosface, 0.35), "arcface": (fastqt.arcface_loss, arcface, 0.5)}
each = pytest.mark.parametrize("name", FUNCTIONS)


@each
def test_without_a_margin_it_is_the_cross_entropy_of_cosines(name):
    rows, weight = inputs = views(N, C)
    loss = FUNCTIONS[name][0](rows, weight, LABELS, scale=9.0, margin=0.0)
    scores = 9 * F.normalize(rows, dim=1) @ F.normalize(weight, dim=1).T
    check(loss, F.cross_entropy(scores, LABELS), inputs)


def test_the_target_of_arcface_falls_with_the_angle_up_to_pi():
    """Beyond pi - margin the cosine of the sum of angles would rise again."""
    angles = torch.linspace(0, math.pi, 50, dtype=torch.float64)
    rows = torch.stack([angles.cos(), angles.sin()], 1)
    weight = torch.tensor([[1.0, 0.0], [0.0, -1.0]], dtype=torch.float64)
    labels = torch.zeros(50, dtype=torch.int64)
    losses = fastqt.arcface_loss(rows, weight, labels, scale=1.0, margin=1.0, reduction="none")
    targets = rows @ weight[1] - losses.expm1().log()  # the loss is log(1 + exp(other - target))
    assert (targets.diff() < 0).all()


@each
@pytest.mark.parametrize("sign", [1, -1])
def test_rows_that_are_their_class_have_finite_gradients(name, sign):
    weight = torch.eye(4).requires_grad_()
    rows = (sign * torch.eye(4)).requires_grad_()
    FUNCTIONS[name][0](rows, weight, torch.arange(4)).backward()
    assert rows.grad.isfinite().all()
    assert weight.grad.isfinite().all()


@pytest.mark.parametrize(
    ("function", "changed", "message"),
    [
        (fastqt.cosface_loss, {"labels": LABELS + 5}, r"labels: want integers in 0\.\.12"),
        (fastqt.cosface_loss, {"labels": LABELS - 1}, r"labels: want integers in 0\.\.12"),
        (
            fastqt.cosface_loss,
            {"labels": LABELS[1:]},
            "labels: want one for each of the 9 rows of embeddings, got 8",
        ),
        (fastqt.arcface_loss, {"margin": 28.6}, "margin: want radians from 0 to pi, got 28.6"),
        (fastqt.arcface_loss, {"margin": -0.1}, "margin: want radians from 0 to pi"),
        (fastqt.arcface_loss, {"weight": torch.zeros(C, D + 1).double()}, "weight: want D=5 columns"),
    ],
)
def test_refuses_nonsense(function, changed, message):
    rows, weight = views(N, C)
    with pytest.raises(ValueError, match=message):
        function(**{"embeddings": rows, "weight": weight, "labels": LABELS, **changed})
