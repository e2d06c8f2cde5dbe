"""Losses of a teacher's scores: digits, what a mask leaves out, what they do not depend on, and refusals.

Their formulas are compared with the table of all losses (tests/losses/test_every_loss.py, and over ranks
tests/distributed/test_every_loss.py).
"""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import fastqt
from tests.losses.test_every_loss import made, with_gradients
from tests.shared.tolerances import FLOAT32, FLOAT64, HALF_ULP, UNIT_ROUNDOFF, relative

N, K, D = 7, 5, 6
LOSSES = [fastqt.score_distillation_loss, fastqt.margin_mse_loss]
each_loss = pytest.mark.parametrize("loss", LOSSES)


def drawn(dtype=torch.float64, shape=(N, K), seed=0):
    generator = torch.Generator().manual_seed(seed)
    scores, teacher = 3 * torch.randn(2, *shape, generator=generator, dtype=torch.float64).to(dtype)
    return scores.requires_grad_(), teacher


def outcome(loss, scores, teacher, **options):
    scale = torch.tensor(1.5, dtype=scores.dtype, requires_grad=True)
    value = loss(scores, teacher, scale=scale, **options)
    return [value.detach(), *torch.autograd.grad(value.sum(), (scores, scale))]


@pytest.mark.parametrize("distance", [1e-1, 1e-3, 1e-5])
@each_loss
def test_float32_scores_near_the_teacher_lose_no_digit(loss, distance):
    """The value, of the second order in the distance, and the gradients are those of the given scores."""
    _, teacher = drawn(torch.float32)
    scores = (teacher + distance * drawn(torch.float32, seed=1)[1]).requires_grad_()
    found = loss(scores, teacher)
    (gradient,) = torch.autograd.grad(found, scores)
    value, of_scores = EXACT[loss](*(x.detach().numpy().astype(np.longdouble) for x in (scores, teacher)))
    assert found.dtype is torch.float32
    assert relative(found, float(value)) <= 2 * HALF_ULP[torch.float32]
    assert relative(gradient, of_scores.astype(np.float64)) <= 2 * HALF_ULP[torch.float32]


def divergence(S, R):
    """The value and its gradient in long doubles."""
    P, T = (np.exp(x - x.max(1, keepdims=True)) for x in (S, R))
    P, T = (x / x.sum(1, keepdims=True) for x in (P, T))
    return (T * (np.log(T) - np.log(P))).sum(1).mean(), (P - T) / len(S)


def squares(S, R):
    errors = (S[:, :1] - S[:, 1:]) - (R[:, :1] - R[:, 1:])
    of_errors = 2 * errors / errors.size
    return (errors**2).mean(), np.concatenate([of_errors.sum(1, keepdims=True), -of_errors], 1)


EXACT = {fastqt.score_distillation_loss: divergence, fastqt.margin_mse_loss: squares}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e300])
@each_loss
def test_what_is_left_out_has_no_influence(loss, value):
    """Whatever is there, in either matrix: the losses are those of the rows without it."""
    scores, teacher = drawn()
    mask = torch.arange(K) < torch.tensor([5, 4, 3, 2, 5, 2, 3])[:, None]
    found = outcome(
        loss,
        scores.detach().masked_fill(~mask, value).requires_grad_(),
        teacher.masked_fill(~mask, value),
        mask=mask,
        reduction="none",
    )
    assert (found[1][~mask] == 0).all()
    of_scale = 0.0
    for row in range(N):
        there = slice(row, row + 1), mask[row]
        wanted = outcome(loss, scores[there].detach().requires_grad_(), teacher[there], reduction="none")
        assert relative(found[0][row], wanted[0][0]) < FLOAT64
        assert relative(found[1][there], wanted[1][0]) < FLOAT64
        of_scale += wanted[2]
    assert relative(found[2], of_scale) < FLOAT64


NOTHING_TO_COMPARE = [
    (fastqt.margin_mse_loss, {}),
    (fastqt.score_distillation_loss, {}),
    (fastqt.score_distillation_loss, {"cross_entropy": True}),
]


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize(("loss", "options"), NOTHING_TO_COMPARE)
def test_a_row_with_nothing_to_compare_adds_nothing(loss, options, reduction):
    """It counts among the rows of a mean, as a row without targets does elsewhere; no gradient is NaN."""
    scores, teacher = drawn()
    mask = torch.ones(N, K, dtype=torch.bool)
    mask[2, 1:] = mask[4, 1:] = False
    if loss is fastqt.score_distillation_loss:
        mask[4] = False
    rest = torch.tensor([0, 1, 3, 5, 6])
    with torch.autograd.set_detect_anomaly(True):
        found = outcome(loss, scores, teacher, mask=mask, reduction=reduction, **options)
    wanted = outcome(loss, scores[rest].detach().requires_grad_(), teacher[rest], reduction="sum", **options)
    count = N if reduction == "mean" else 1
    assert relative(found[0], wanted[0] / count) < FLOAT64
    assert relative(found[1][rest], wanted[1] / count) < FLOAT64
    assert (found[1][[2, 4]] == 0).all()


@each_loss
def test_a_number_added_to_all_scores_of_a_row_changes_nothing(loss):
    """Of float32 scores near 16384, whose differences are exact."""
    scores, teacher = drawn(torch.float32)
    near = [(x.detach() * 64).round() / 64 for x in (scores, teacher)]
    far = [x + 16384.0 * torch.arange(-3, 4)[:, None] for x in near]
    of_near, of_far = (outcome(loss, x.requires_grad_(), y)[:2] for x, y in (near, far))
    for a, b in zip(of_far, of_near, strict=True):
        assert relative(a, b) <= 2 * HALF_ULP[torch.float32]


def test_without_the_entropy_the_gradients_are_the_same():
    scores, teacher = drawn()
    mask = torch.ones(N, K, dtype=torch.bool)
    mask[1, 2:] = False
    options = {"mask": mask, "reduction": "none", "teacher_scale": 0.5}
    divergence = outcome(fastqt.score_distillation_loss, scores, teacher, **options)
    crossed = outcome(fastqt.score_distillation_loss, scores, teacher, cross_entropy=True, **options)
    T = (0.5 * teacher).masked_fill(~mask, -math.inf).softmax(1)
    entropy = -torch.xlogy(T, T).sum(1)
    assert relative(crossed[0], divergence[0] + entropy) < FLOAT64
    for a, b in zip(crossed[1:], divergence[1:], strict=True):
        assert relative(a, b) < FLOAT64


def test_a_teacher_that_is_certain_and_a_student_that_is_certain_of_another():
    """Probabilities of 0 in float64, in both softmaxes, give no NaN and the gradient P - T."""
    eye = 2000 * torch.eye(3)
    scores = eye.roll(1, 0).requires_grad_()
    loss = fastqt.score_distillation_loss(scores, eye, reduction="none")
    assert torch.equal(loss, torch.full((3,), 2000.0))
    (gradient,) = torch.autograd.grad(loss.sum(), scores)
    assert torch.equal(gradient, (eye.roll(1, 0) - eye) / 2000)


@pytest.mark.parametrize("of_teacher", [torch.float64, torch.bfloat16])
@each_loss
def test_a_teacher_of_another_dtype(loss, of_teacher):
    scores, teacher = drawn(torch.float32)
    teacher = teacher.to(of_teacher)
    assert relative(loss(scores, teacher), loss(scores.double(), teacher.double())) < FLOAT32


@each_loss
def test_no_gradient_flows_to_the_teacher(loss):
    scores, teacher = drawn()
    loss(scores, teacher.requires_grad_()).backward()
    assert teacher.grad is None


@each_loss
def test_the_scale_of_an_ensemble(loss):
    """Several scales at once, under torch.func.vmap."""
    scores, teacher = drawn()
    scales = torch.tensor([0.5, 2.0], dtype=torch.float64)
    found = torch.func.vmap(lambda s: loss(scores.detach(), teacher, scale=s))(scales)
    assert relative(found, torch.stack([loss(scores.detach(), teacher, scale=s) for s in scales])) < FLOAT64


S, R, M = torch.randn(3, 4), torch.randn(3, 4), torch.ones(3, 4, dtype=torch.bool)
REFUSED = {
    "one candidate": ((S[:, :1], R[:, :1]), {}, "scores: want at least K=2 candidates of each row"),
    "a vector": ((S[0], R[0]), {}, r"scores: want shape \(N, K\), .* got \(4,\)"),
    "vectors of candidates": (
        (S, R[:, None]),
        {},
        r"teacher_scores: want shape \(N, K\), .* got \(3, 1, 4\)",
    ),
    "fewer columns": ((S, R[:, :3]), {}, r"teacher_scores: want shape \(3, 4\) as scores, got \(3, 3\)"),
    "fewer rows": ((S, R[:2]), {}, "teacher_scores: want a row for each of the 3 rows of scores, got 2"),
    "integers": ((S, R.long()), {}, "teacher_scores: want a floating-point dtype"),
    "a list": ((S, R.tolist()), {}, "teacher_scores: want a tensor, got list"),
    "a mask of numbers": ((S, R), {"mask": M.long()}, r"mask: want dtype torch.bool \(True = a candidate\)"),
    "a mask of rows": ((S, R), {"mask": M[:, 0]}, r"mask: want shape \(3, 4\) as scores, got \(3,\)"),
    "another device": ((S, R), {"mask": M.to("meta")}, "mask: want a tensor with values"),
    "a scale that is infinite": ((S, R), {"scale": torch.tensor(math.inf)}, "scale: want a finite number"),
    "a scale below 0": ((S, R), {"scale": -1.0}, "scale: want a positive number"),
}


@pytest.mark.parametrize("name", REFUSED)
@each_loss
def test_refused_in_words(loss, name):
    arguments, options, message = REFUSED[name]
    with pytest.raises((ValueError, TypeError), match=f"^{message}"):
        loss(*arguments, **options)


def test_refused_by_one_of_them():
    with pytest.raises(ValueError, match=r"^mask: want True in its first column, that of the positives"):
        fastqt.margin_mse_loss(S, R, mask=M ^ F.one_hot(torch.tensor([0, 1, 2]), 4).bool())
    with pytest.raises(ValueError, match=r"^teacher_scale: want a number > 0, got 0"):
        fastqt.score_distillation_loss(S, R, teacher_scale=0.0)


@pytest.mark.parametrize("name", ["score_distillation_loss", "margin_mse_loss"])
def test_16_bit_scores_are_read_as_they_are(name):
    """The result is that of the given numbers in float64, rounded once."""
    for dtype in (torch.bfloat16, torch.float16):
        loss, inputs = made(name, dtype)
        exact = {
            key: x.detach().double().requires_grad_(x.requires_grad) if x.is_floating_point() else x
            for key, x in inputs.items()
        }
        found = with_gradients(loss.function, inputs, **loss.options)
        wanted = with_gradients(loss.function, exact, **loss.options)
        for a, b in zip(found, wanted, strict=True):
            assert relative(a, b) <= UNIT_ROUNDOFF[a.dtype]


def candidates_of_rows(dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    queries = torch.randn(N, D, generator=generator, dtype=torch.float64).to(dtype)
    rows = torch.randn(K, N, D, generator=generator, dtype=torch.float64).to(dtype).transpose(0, 1)
    return queries.requires_grad_(), rows.requires_grad_()


def by_einsum(queries, rows, normalize):
    if normalize:
        queries, rows = F.normalize(queries, dim=-1), F.normalize(rows, dim=-1)
    return torch.einsum("nd,nkd->nk", queries, rows)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_scores_of_rows_are_einsums_in_more_digits(dtype, normalize):
    leaves = candidates_of_rows(dtype)
    exact = [x.detach().double().requires_grad_() for x in leaves]
    upstream = torch.randn(N, K, dtype=torch.float64)
    found = fastqt.candidate_scores(*leaves, normalize=normalize)
    wanted = by_einsum(*exact, normalize)
    assert found.dtype is torch.promote_types(dtype, torch.float32)
    assert relative(found, wanted) <= 4 * UNIT_ROUNDOFF[found.dtype]
    gradients = torch.autograd.grad(found, leaves, upstream.to(found.dtype))
    for a, b, x in zip(gradients, torch.autograd.grad(wanted, exact, upstream), leaves, strict=True):
        assert (a.dtype, a.shape) == (x.dtype, x.shape)
        assert relative(a, b) <= UNIT_ROUNDOFF[dtype] + 8 * UNIT_ROUNDOFF[found.dtype]


def test_scores_of_rows_are_one_graph():
    leaves = candidates_of_rows()

    teacher = drawn()[1]

    def loss(queries, rows):
        scores = fastqt.candidate_scores(queries, rows, normalize=True)
        return fastqt.score_distillation_loss(scores, teacher, scale=9.0)

    whole = torch.compile(loss, fullgraph=True, backend="aot_eager")
    results = [(x := f(*leaves), *torch.autograd.grad(x, leaves)) for f in (whole, loss)]
    for a, b in zip(*results, strict=True):
        assert relative(a, b) < FLOAT64


Q, C = torch.randn(3, 6), torch.randn(3, 4, 6)
OF_ROWS_REFUSED = {
    "a matrix": ((Q, C[0]), r"candidates: want shape \(N, K, D\), .* got \(4, 6\)"),
    "none": ((Q, C[:, :0]), r"candidates: want shape \(N, K, D\), K >= 1 candidates .* got \(3, 0, 6\)"),
    "other columns": ((Q, C[..., :5]), "candidates: want D=6 columns as queries has, got 5"),
    "other rows": ((Q, C[:2]), "candidates: want a row for each of the 3 rows of queries, got 2"),
    "another dtype": ((Q, C.double()), "candidates: want dtype torch.float32 as queries"),
}


@pytest.mark.parametrize("name", OF_ROWS_REFUSED)
def test_scores_of_rows_are_refused_in_words(name):
    arguments, message = OF_ROWS_REFUSED[name]
    with pytest.raises((ValueError, TypeError), match=f"^{message}"):
        fastqt.candidate_scores(*arguments)
