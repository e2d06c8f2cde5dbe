"""Distillation of similarities is the mean over all pairs of rows, also of a student that has learnt them."""

import pytest
import torch
import torch.nn.functional as F

import fastqt
from tests.shared.tolerances import EAGER_FACTOR, FLOAT32, HALF_ULP, relative

LOSS = fastqt.similarity_distillation_loss
# How far a student is from its teacher.
LEARNT = {"random": None, "learning": 0.1, "learnt": 1e-3, "converged": 1e-5}


def pupil(shape, apart, seed=0):
    """A student and its teacher, whose columns are turned against each other; float64."""
    N, D, E = shape
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *size: torch.randn(*size, generator=generator, dtype=torch.float64)  # noqa: E731
    teacher, width = draw(N, E), max(D, E)
    if apart is None:
        return draw(N, D), teacher
    teacher[:, D:] = 0  # what a narrower student can have
    turned = F.pad(teacher, (0, width - E)) @ torch.block_diag(
        torch.linalg.qr(draw(min(D, width), min(D, width)))[0], torch.eye(width - min(D, width)).double()
    )
    return turned[:, :D] + apart * draw(N, D), teacher


def with_gradients(function, inputs, **options):
    leaves = [x.clone().requires_grad_() for x in inputs[::2]]
    arguments = [y for pair in zip(leaves, inputs[1::2], strict=True) for y in pair]
    value = function(*arguments, **options)
    return [value.detach(), *torch.autograd.grad(value, leaves)]


def loss(x, t, y=None, u=None, **options):
    return LOSS(x, t, candidates=y, teacher_candidates=u, **options)


def eager(x, t):
    x, t = F.normalize(x, dim=1), F.normalize(t, dim=1)
    return (x @ x.T - t @ t.T).square().mean()


@pytest.mark.parametrize("learnt", LEARNT)
@pytest.mark.parametrize("shape", [(20, 16, 16), (150, 16, 16), (150, 16, 24), (150, 24, 16)])
def test_float32_is_as_exact_as_the_matrices(shape, learnt):
    """Also of a student that has learnt all scores, as the sums over columns nearly cancel each other."""

    errors = {loss: [], eager: []}
    for seed in range(8):
        inputs = [x.float() for x in pupil(shape, LEARNT[learnt], seed)]
        exact = with_gradients(eager, [x.double() for x in inputs])
        for function, of_function in errors.items():
            computed = with_gradients(function, inputs)
            of_function.append(
                [float((a - b).norm() / b.norm()) for a, b in zip(computed, exact, strict=True)]
            )
    a, b = (torch.tensor(x).mean(0) for x in errors.values())
    assert (a <= EAGER_FACTOR * b + HALF_ULP[torch.float32]).all(), (a, b)


def test_a_student_of_equal_scores_has_a_loss_of_0():
    for seed in range(12):  # Rounding may leave a sum above 0 or below.
        x, t = pupil((150, 16, 24), 0.0, seed)
        value, gradient = with_gradients(loss, [x, t])
        assert 0 <= value < 1e-15
        assert gradient.abs().max() < 1e-8


def test_the_teacher_has_no_gradient_and_any_dtype():
    x, t = (y.float() for y in pupil((30, 4, 6), None))
    t.requires_grad_()
    value = loss(x.requires_grad_(), t)
    value.backward()
    assert t.grad is None
    assert value.dtype is torch.float32
    rounded = loss(x, t.bfloat16())
    assert relative(rounded, loss(x, t.bfloat16().float())) < FLOAT32
    assert loss(x.bfloat16(), t.double()).dtype is torch.float32


X, T = torch.randn(4, 3), torch.randn(4, 5)
REFUSED = {
    "other rows": ((X, T[:3]), {}, "teacher_embeddings: want a row for each of the 4 rows of embeddings"),
    "candidates alone": ((X, T), {"candidates": X}, "teacher_candidates: want it together with candidates"),
    "their teacher alone": ((X, T), {"teacher_candidates": T}, "candidates: want it together with teacher_c"),
    "another width": ((X, T), {"candidates": T, "teacher_candidates": T}, "candidates: want D=3 columns as"),
    "another width of the teacher": (
        (X, T),
        {"candidates": X, "teacher_candidates": X},
        "teacher_candidates: want D=5 columns as teacher_embeddings has, got 3",
    ),
    "other candidates": ((X, T), {"candidates": X, "teacher_candidates": T[:2]}, "teacher_candidates: want"),
    "scores": ((X, T[:, 0]), {}, r"teacher_embeddings: want shape \(rows, D\), got \(4,\)"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_in_words(name):
    arguments, options, message = REFUSED[name]
    with pytest.raises((ValueError, TypeError), match=f"^{message}"):
        LOSS(*arguments, **options)
