"""The divergence from a teacher's softmax equals its definition with both whole matrices of scores."""

import pytest
import torch
import torch.nn.functional as F

import fastqt
from fastqt.losses import distillation
from tests.shared.every_loss import cosines
from tests.shared.loss_views import check
from tests.shared.ring_memory import Live
from tests.shared.tolerances import relative

N, M, D, WIDTH = 9, 13, 5, 7


def inputs(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    sides = [torch.randn(n, D, generator=generator, dtype=dtype, requires_grad=True) for n in (N, M)]
    scale = torch.tensor(3.0, dtype=dtype, requires_grad=True)
    return [*sides, scale], [torch.randn(n, WIDTH, generator=generator, dtype=dtype) for n in (N, M)]


def products(a, b):
    return a @ b.T


def expected(queries, candidates, scale, teacher, teacher_scale, score=cosines):
    T = (teacher_scale * score(*teacher)).softmax(1)
    return F.kl_div((scale * score(queries, candidates)).log_softmax(1), T, reduction="none").sum(1)


@pytest.mark.parametrize("scores_at_once", [1, 3 * M, 2**21])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize(("normalize", "score"), [(True, cosines), (False, products)])
def test_is_the_definition(normalize, score, reduction, scores_at_once, monkeypatch):
    monkeypatch.setattr(distillation.DistillationProblem, "cpu_scores_at_once", scores_at_once)
    leaves, teacher = inputs()
    queries, candidates, scale = leaves
    options = {"scale": scale, "teacher_scale": 0.5, "reduction": reduction, "normalize": normalize}
    loss = fastqt.distillation_loss(queries, candidates, *teacher, **options)
    rows = expected(*leaves, teacher, 0.5, score)
    check(loss, {"mean": rows.mean(), "sum": rows.sum(), "none": rows}[reduction], leaves)


@pytest.mark.parametrize(("distance", "times"), [(1e-2, 4), (1e-3, 20), (1e-4, 100)])
def test_digits_are_kept_near_the_teacher(distance, times):
    """In float32 the value, of the second order in the distance, has `times` smaller errors than eager's.

    The gradients are of the first order, and have the errors of the scores.
    """
    ours, eagers = [], []
    for seed in range(5):
        leaves, _ = inputs(torch.float32)
        generator = torch.Generator().manual_seed(seed)
        teacher = [(x + distance * torch.randn(x.shape, generator=generator)).detach() for x in leaves[:2]]
        exact = [x.detach().double().requires_grad_() for x in leaves]
        truth = expected(*exact, [x.double() for x in teacher], 3.0, products).mean()
        options = {"scale": leaves[2], "teacher_scale": 3.0, "normalize": False}
        for errors, loss in (
            (ours, fastqt.distillation_loss(*leaves[:2], *teacher, **options)),
            (eagers, expected(*leaves, teacher, 3.0, products).mean()),
        ):
            found = [loss, *torch.autograd.grad(loss, leaves)]
            wanted = [truth, *torch.autograd.grad(truth, exact, retain_graph=True)]
            errors.append([float(relative(x, y)) for x, y in zip(found, wanted, strict=True)])
    (value, *gradients), (of_eager, *eager_gradients) = (torch.tensor(x).mean(0) for x in (ours, eagers))
    assert times * value < of_eager
    assert all(x < 2 * y for x, y in zip(gradients[:2], eager_gradients[:2], strict=True))


def test_a_teacher_that_is_certain_and_a_student_that_is_certain_of_another():
    """Probabilities of 0 in float32, in both softmaxes, give no NaN and the gradient P - T."""
    eye = torch.eye(4)
    queries, candidates = (x.clone().requires_grad_() for x in (eye, eye.roll(1, 0)))
    options = {"scale": 500.0, "teacher_scale": 500.0, "reduction": "none"}
    loss = fastqt.distillation_loss(queries, candidates, eye, eye, **options)
    assert torch.equal(loss, torch.full((4,), 500.0))
    gradients = torch.autograd.grad(loss.sum(), (queries, candidates))
    assert all(g.isfinite().all() for g in gradients)


def test_no_matrix_of_all_scores_is_made():
    sides = [torch.randn(4096, 8, requires_grad=True) for _ in range(2)]
    teacher = torch.randn(2, 4096, 8)
    with Live(*sides, teacher) as live:
        fastqt.distillation_loss(*sides, *teacher).backward()
    assert live.most < 0.7 * 4 * 4096**2


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"teacher_scale": torch.tensor(2.0)}, ValueError, "teacher_scale: want a number"),
        ({"teacher_queries": torch.zeros(N - 1, WIDTH)}, ValueError, "teacher_queries: want a row for each"),
        ({"teacher_candidates": torch.zeros(M, 2)}, ValueError, "teacher_candidates: want D=7 columns"),
        ({"candidates": torch.zeros(M, D).double()}, TypeError, "candidates: want"),
    ],
)
def test_refuses_nonsense(changed, error, message):
    leaves, teacher = inputs(torch.float32)
    given = {
        "queries": leaves[0],
        "candidates": leaves[1],
        "teacher_queries": teacher[0],
        "teacher_candidates": teacher[1],
    }
    with pytest.raises(error, match=message):
        fastqt.distillation_loss(**{**given, **changed})


@pytest.mark.parametrize("autocast", [False, True])
def test_a_teacher_of_another_dtype(autocast):
    """Such as one in float32 beside a student under autocast to bfloat16."""
    leaves, teacher = inputs(torch.float32)
    student = [x.bfloat16() for x in leaves[:2]]
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        found = fastqt.distillation_loss(*student, *teacher)
    torch.testing.assert_close(found, fastqt.distillation_loss(*(x.float() for x in student), *teacher))
