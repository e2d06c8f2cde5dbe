"""Distillation of similarities is the mean over all pairs of rows, also of a student that has learnt them."""

import pytest
import torch
import torch.nn.functional as F

import fastqt
from fastqt import devices
from tests.shared.tolerances import EAGER_FACTOR, FLOAT32, FLOAT64, HALF_ULP, relative

LOSS = fastqt.similarity_distillation_loss
# Numbers of rows and columns, D and E: by the first scores are computed, by the others sums over columns.
SHAPES = {
    "few rows": (6, 8, 8),
    "narrow teacher": (7, 5, 3),
    "many rows": (31, 5, 5),
    "many rows, wide teacher": (31, 4, 7),
    "many rows, narrow teacher": (31, 7, 4),
    "one column": (9, 1, 1),
}
# How far a student is from its teacher.
LEARNT = {"random": None, "learning": 0.1, "learnt": 1e-3, "converged": 1e-5}


def by_pairs(x, t, y=None, u=None, normalize=True):
    """The definition, pair by pair."""
    y, u = (x, t) if y is None else (y, u)
    unit = (lambda row: row / row.norm()) if normalize else (lambda row: row)
    scores = [
        (unit(a) @ unit(b), unit(c) @ unit(d))
        for a, c in zip(x, t, strict=True)
        for b, d in zip(y, u, strict=True)
    ]
    return torch.stack([(s - r) ** 2 for s, r in scores]).mean()


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


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("candidates", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_it_is_the_mean_over_pairs(shape, candidates, normalize):
    N, D, E = SHAPES[shape]
    for apart in (None, 0.1):
        inputs = [*pupil((N, D, E), apart)]
        if candidates:
            inputs += [x[: N // 2 + 1] for x in pupil((N, D, E), apart, seed=1)]
        found = with_gradients(loss, inputs, normalize=normalize)
        wanted = with_gradients(by_pairs, inputs, normalize=normalize)
        for a, b in zip(found, wanted, strict=True):
            # A difference of 0.1 leaves 0.01 of the squares.
            assert (a - b).abs().max() <= 1e2 * FLOAT64 * max(b.abs().max(), 1e-3)


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


@pytest.mark.parametrize("shape", [(20, 16, 16), (150, 16, 16)])
def test_float64_keeps_digits_of_the_squares(shape):
    """What is left of float64 after squares have cancelled each other is that part of the mean square."""
    x, t = pupil(shape, 1e-4)
    found, wanted = (with_gradients(f, [x, t]) for f in (loss, eager))
    assert relative(found[0], wanted[0]) < 1e-6  # 1e-16 of a square, which is 1e8 times the loss
    assert relative(found[1], wanted[1]) < 1e-10


def test_a_student_of_equal_scores_has_a_loss_of_0():
    for seed in range(12):  # Rounding may leave a sum above 0 or below.
        x, t = pupil((150, 16, 24), 0.0, seed)
        value, gradient = with_gradients(loss, [x, t])
        assert 0 <= value < 1e-15
        assert gradient.abs().max() < 1e-8


def test_devices_without_float64_keep_a_millionth_of_the_squares(monkeypatch):
    monkeypatch.setattr(devices, "NO_FLOAT64", ("cpu",))
    for apart in (0.1, 1e-2, 1e-3):
        x, t = pupil((400, 16, 24), apart)
        unit = F.normalize(t, dim=1)
        squares = (unit @ unit.T).square().mean()
        exact = loss(x, t)
        assert abs(loss(x.float(), t.float()) - exact) < 1e-6 * squares


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


@pytest.mark.parametrize("shape", [(4, 5, 3), (12, 2, 3)])
def test_derivatives(shape):
    x, t = pupil(shape, None)
    y, u = pupil(shape, None, seed=1)
    inputs = [z.requires_grad_() for z in (x, y)]
    assert torch.autograd.gradcheck(lambda a, b: loss(a, t, b, u), inputs)
    assert torch.autograd.gradgradcheck(lambda a: loss(a, t), x)


@pytest.mark.parametrize("shape", [(4, 5, 3), (12, 2, 3)])
def test_transforms_of_functions(shape):
    pairs = [pupil(shape, None, seed) for seed in range(2)]
    x, t = (torch.stack(z) for z in zip(*pairs, strict=True))
    gradients = torch.func.vmap(torch.func.grad(loss))(x, t)
    for one, gradient in zip(pairs, gradients, strict=True):
        assert relative(gradient, with_gradients(loss, one)[1]) < FLOAT64


@pytest.mark.parametrize("candidates", [False, True])
@pytest.mark.parametrize("shape", [(4, 5, 3), (1500, 5, 3)])
def test_autocast_changes_nothing(shape, candidates):
    inputs = [x.float() for x in pupil(shape, None)] * (1 + candidates)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = with_gradients(loss, inputs)
    for a, b in zip(rounded, with_gradients(loss, inputs), strict=True):
        assert a.dtype is b.dtype
        assert relative(a, b) < FLOAT32


X, T = torch.randn(4, 3), torch.randn(4, 5)
REFUSED = {
    "other rows": (
        (X, T[:3]),
        {},
        "teacher_embeddings: want a row for each of the 4 rows of embeddings, got 3",
    ),
    "candidates alone": ((X, T), {"candidates": X}, "teacher_candidates: want it together with candidates"),
    "their teacher alone": ((X, T), {"teacher_candidates": T}, "candidates: want it together with teacher_c"),
    "another width": (
        (X, T),
        {"candidates": T, "teacher_candidates": T},
        "candidates: want D=3 columns as embeddings has, got 5",
    ),
    "another width of the teacher": (
        (X, T),
        {"candidates": X, "teacher_candidates": X},
        "teacher_candidates: want D=5 columns as teacher_embeddings has, got 3",
    ),
    "other candidates": (
        (X, T),
        {"candidates": X, "teacher_candidates": T[:2]},
        "teacher_candidates: want a row for each of the 4 rows of candidates, got 2",
    ),
    "scores": ((X, T[:, 0]), {}, r"teacher_embeddings: want shape \(rows, D\), got \(4,\)"),
    "flag": ((X, T), {"normalize": 1}, "normalize: want True or False"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_in_words(name):
    arguments, options, message = REFUSED[name]
    with pytest.raises((ValueError, TypeError), match=f"^{message}"):
        LOSS(*arguments, **options)
