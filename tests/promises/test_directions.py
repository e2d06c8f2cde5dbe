"""The cross-entropies of pairs in both directions of a matrix are those of the plain program, in one pass."""

import copy
import io
import math
import weakref
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fastqt

N, D = 48, 6
ROWS = torch.arange(N)
Program = Callable[[Tensor, Tensor, Tensor], Tensor]
fused = fastqt.fused(least_cells=1)


def one_matrix(a: Tensor, b: Tensor, scale: Tensor) -> Tensor:
    scores = scale * a @ b.T
    return (F.cross_entropy(scores, ROWS) + F.cross_entropy(scores.t(), ROWS)) / 2


def two_products(a: Tensor, b: Tensor, scale: Tensor) -> Tensor:
    """As open_clip's ClipLoss computes them without a group."""
    logits = {"per_image": scale * a @ b.T, "per_text": scale * b @ a.T}
    labels = torch.arange(len(a), device=a.device, dtype=torch.long)
    return sum(F.cross_entropy(x, labels) for x in logits.values()) / 2


def products_times_a_scale(a: Tensor, b: Tensor, scale: Tensor) -> Tensor:
    per_a, per_b = torch.matmul(a, b.t()) * scale, scale * torch.mm(b, a.t())
    return 0.3 * F.cross_entropy(per_a, ROWS) + 0.7 * F.cross_entropy(per_b, ROWS)


def other_weights(a: Tensor, b: Tensor, scale: Tensor) -> Tensor:
    scores = a @ b.T * scale
    first = 0.3 * F.cross_entropy(scores, ROWS)
    return first - F.cross_entropy(scores.T, ROWS, reduction="sum") / 7


def a_running_sum(a: Tensor, b: Tensor, scale: Tensor) -> Tensor:
    loss = a.square().mean()
    for scores in (scale * a @ b.T, scale * b @ a.T):
        loss = loss + 0.5 * F.nll_loss(F.log_softmax(scores, dim=1), ROWS)
    return loss


def not_linear(a: Tensor, b: Tensor, scale: Tensor) -> Tensor:
    scores = scale * a @ b.T
    losses = [torch.nn.CrossEntropyLoss()(x, ROWS) for x in (scores, scores.T)]
    return torch.stack(losses).square().sum() + losses[0] * losses[1]


def one_of_two(a: Tensor, b: Tensor, scale: Tensor) -> Tensor:
    scores = scale * a @ b.T
    losses = [F.cross_entropy(x, ROWS) for x in (scores, scores.T)]
    return losses[0] + losses[1].detach()


def of_itself(a: Tensor, b: Tensor, scale: Tensor) -> Tensor:
    scores = scale * a @ a.T
    return F.cross_entropy(scores, ROWS) + 2 * F.cross_entropy(scores.T, ROWS) + b.sum()


IN_ONE_PASS = (
    one_matrix,
    two_products,
    products_times_a_scale,
    other_weights,
    a_running_sum,
    not_linear,
    one_of_two,
    of_itself,
)
each = pytest.mark.parametrize("program", IN_ONE_PASS, ids=lambda program: program.__name__)


def inputs(noise: float = 1.0, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Embeddings and a scale; with little noise those of a trained model."""
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(N, D, generator=generator, dtype=torch.float64)
    b = a + noise * torch.randn(N, D, generator=generator, dtype=torch.float64)
    scale = torch.tensor(20.0, dtype=dtype)
    return [x.to(dtype).requires_grad_() for x in (F.normalize(a, dim=1), F.normalize(b, dim=1), scale)]


def results(program: Program, rows: list[Tensor]) -> list[Tensor]:
    loss = program(*rows)
    return [loss.detach(), *torch.autograd.grad(loss, rows)]


def close(found: list[Tensor], wanted: list[Tensor], tolerance: float = 1e-12) -> None:
    largest = max(float(x.abs().max()) for x in wanted)
    for x, y in zip(found, wanted, strict=True):
        assert x.dtype is y.dtype
        assert float((x - y).abs().max()) <= tolerance * largest


@each
@pytest.mark.parametrize("noise", [1.0, 0.01])
def test_both_directions_are_one_call(program, noise):
    """With the values and gradients of the program, also of a trained model."""
    wanted = results(program, inputs(noise))
    with fastqt.fused(strict=True, least_cells=1) as report:
        found = results(program, inputs(noise))
    close(found, wanted)
    assert report.fused == 2
    assert str(report).count("fused into") == str(report).count("fused into fastqt.clip_loss")


@each
def test_a_block_that_ends_before_the_gradients(program):
    wanted, rows = results(program, inputs()), inputs()
    with fused:
        loss = program(*rows)
    assert type(loss) is Tensor
    close([loss.detach(), *torch.autograd.grad(loss, rows)], wanted)


@each
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_dtypes(program, dtype):
    """No farther from the truth than the program."""
    exact = results(program, [x.detach().double().requires_grad_() for x in inputs(dtype=dtype)])
    plain = results(program, inputs(dtype=dtype))
    with fused:
        found = results(program, inputs(dtype=dtype))
    largest = max(float(x.abs().max()) for x in exact)
    for x, y, wanted in zip(found, plain, exact, strict=True):
        assert x.dtype is y.dtype
        ours, theirs = (float((z.double() - wanted).abs().max()) for z in (x, y))
        assert ours <= 2 * theirs + (1e-5 if dtype is torch.float32 else 1e-2) * largest


def products_apart(a: Tensor, b: Tensor, scale: Tensor) -> Tensor:
    """What is not the other direction: another scale, other rows, a bias of one of both, a part detached."""
    scores = scale * a @ b.T
    losses = [F.cross_entropy(scores, ROWS)]
    losses += [F.cross_entropy(x, ROWS) for x in (1.5 * scale * b @ a.T, scale * b @ b.T, 2 * scores.T)]
    losses += [
        F.cross_entropy(b.detach() @ (scale * a).T, ROWS),
        F.cross_entropy(scale * b @ a.T + b[:, 0], ROWS),
    ]
    weights = torch.linspace(1, 2, len(losses))
    return sum(float(w) * x for w, x in zip(weights, losses, strict=True))


def test_what_is_not_the_other_direction():
    wanted = results(products_apart, inputs())
    with fused as report:
        found = results(products_apart, inputs())
    close(found, wanted)
    assert "clip_loss" not in str(report)


def a_copy_detached(a: Tensor, b: Tensor, scale: Tensor) -> Tensor:
    scores = 20.0 * a @ b.T
    first = F.cross_entropy(scores, ROWS)
    return first + scale * F.cross_entropy(scores.T.clone().detach(), ROWS)


def one_without_gradient(a: Tensor, b: Tensor, scale: Tensor) -> Tensor:
    scores = scale * a @ b.T
    with torch.no_grad():
        first = F.cross_entropy(scores, ROWS)
    return first + F.cross_entropy(scores.T, ROWS)


def rows_are_ignored(a: Tensor, b: Tensor, scale: Tensor) -> Tensor:
    scores = scale * a @ b.T
    first = F.cross_entropy(scores, ROWS, ignore_index=3)
    return first + F.cross_entropy(scores.T, ROWS, ignore_index=3)


@pytest.mark.parametrize("program", [a_copy_detached, one_without_gradient, rows_are_ignored])
def test_a_direction_that_differs_from_the_other(program):
    wanted = results(program, inputs())
    with fused:
        close(results(program, inputs()), wanted)


def graphs(block: bool, use: Callable[[Tensor, Tensor], object]) -> list[object]:
    """What a program makes of both losses, plain or in the block."""
    a, b, scale = inputs()
    with fused if block else torch.enable_grad():
        scores = scale * a @ b.T
        first = F.cross_entropy(scores, ROWS)
        other = use(first, scores)
        second = F.cross_entropy(scores.T, ROWS)
        (first + 2 * second).backward(retain_graph=True)
        (first * second).backward()
    return [other, a.grad, b.grad, scale.grad]


def seen_by_hook(loss: Tensor, scores: Tensor) -> Tensor:
    seen = torch.zeros(1)

    def hook(gradient: Tensor) -> None:
        seen.add_(float(gradient))

    loss.register_hook(hook)
    return seen


def kept_gradient(loss: Tensor, scores: Tensor) -> Tensor:
    loss.retain_grad()
    return loss


def half_of_it_before_a_change(loss: Tensor, scores: Tensor) -> Tensor:
    half = loss / 2
    loss += 1
    return half.detach()


USES: dict[str, Callable[[Tensor, Tensor], object]] = {
    "nothing": lambda loss, scores: 0,
    "requires_grad": lambda loss, scores: (
        loss.requires_grad,
        loss.shape,
        loss.dtype,
        loss.device,
        loss.dim(),
    ),
    "item": lambda loss, scores: round(loss.item(), 10),
    "float": lambda loss, scores: round(float(loss.detach()), 10),
    "printed": lambda loss, scores: f"{loss:.6f}",
    "repr": lambda loss, scores: repr(loss.detach()),
    "numpy": lambda loss, scores: loss.detach().numpy().round(10).tolist(),
    "grad_fn": lambda loss, scores: loss.grad_fn is not None and loss.is_leaf,
    "data": lambda loss, scores: loss.data.square(),
    "compared": lambda loss, scores: bool(loss > 0) and not math.isnan(loss.detach()),
    "backward": lambda loss, scores: loss.backward(retain_graph=True),
    "backward of several": lambda loss, scores: torch.autograd.backward([loss, 2 * loss], retain_graph=True),
    "hook": seen_by_hook,
    "retain_grad": kept_gradient,
    "copied": lambda loss, scores: copy.copy(loss).detach(),
    "in place": lambda loss, scores: loss.mul_(2).detach().clone(),
    "half of it": half_of_it_before_a_change,
    "into another": lambda loss, scores: torch.zeros(3, dtype=loss.dtype).index_fill_(
        0, torch.tensor([1]), loss
    ),
    "stacked": lambda loss, scores: torch.stack([loss, loss]).sum(),
    "a weak reference": lambda loss, scores: weakref.ref(loss)() is loss,
    "without gradient": lambda loss, scores: (loss.detach() * 2).requires_grad,
}


@pytest.mark.parametrize("name", USES)
def test_a_loss_answers_as_its_tensor(name):
    found, wanted = graphs(True, USES[name]), graphs(False, USES[name])
    for x, y in zip(found, wanted, strict=True):
        if isinstance(y, Tensor):
            torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)
            assert x.requires_grad == y.requires_grad
            if y.retains_grad:
                torch.testing.assert_close(x.grad, y.grad)
        else:
            assert x == y


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, upstream):
        return upstream * 2


def by_a_function_of_autograd(a: Tensor, b: Tensor, scale: Tensor) -> Tensor:
    scores = scale * a @ b.T
    first = F.cross_entropy(scores, ROWS)
    return Doubled.apply(first) + F.cross_entropy(scores.T, ROWS) + first.square()


def test_a_function_of_autograd_passes_the_gradient():
    wanted = results(by_a_function_of_autograd, inputs())
    with fused:
        close(results(by_a_function_of_autograd, inputs()), wanted)


@pytest.mark.parametrize("when", ["inference", "no_grad"])
def test_a_loss_that_is_read_without_gradients_has_them(when):
    """It has been promised where they were enabled."""
    off = {"inference": torch.inference_mode, "no_grad": torch.no_grad}[when]

    def program(a: Tensor, b: Tensor, scale: Tensor) -> Tensor:
        loss = F.cross_entropy(scale * a @ b.T, ROWS)
        with off():
            assert loss.item() > 0
        return loss

    wanted = results(program, inputs())
    with fused:
        close(results(program, inputs()), wanted)


def test_without_gradients_too():
    a, b, scale = inputs()
    with torch.no_grad():
        wanted = one_matrix(a, b, scale)
        with fused as report:
            found = one_matrix(a, b, scale)
            a.mul_(2)
    assert not found.requires_grad
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=0)
    assert "clip_loss" in str(report)


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("changed", ["embeddings", "out", "several", "targets", "scale"])
def test_a_change_after_the_loss_comes_after_it(changed, grad):
    def program(a: Tensor, b: Tensor, scale: Tensor) -> Tensor:
        a, b, scale, rows = a * 1, b * 1, scale * 1, ROWS.clone()
        loss = F.cross_entropy(scale * a @ b.T, rows)
        kept = loss / 2
        with torch.no_grad():
            if changed == "embeddings":
                a.detach().zero_()
            elif changed == "out":
                torch.add(a.detach(), 1, out=b.detach())
            elif changed == "several":
                torch._foreach_mul_([torch.ones(1, dtype=a.dtype), b.detach()], 2)
            elif changed == "targets":
                rows.zero_()
            else:
                scale.detach().fill_(3)
        return loss.detach() + kept.detach()

    with torch.set_grad_enabled(grad):
        wanted = program(*inputs())
        with fused:
            found = program(*inputs())
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=0)


@pytest.mark.parametrize("program", [one_matrix, two_products])
def test_autocast(program):
    rows = inputs(dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plain = results(program, rows)
        with fused as report:
            found = results(program, rows)
    exact = results(program, [x.detach().double().requires_grad_() for x in rows])
    assert "contrastive_loss" not in str(report)
    for x, y, wanted in zip(found, plain, exact, strict=True):
        assert x.dtype is y.dtype
        ours, theirs = (float((z.double() - wanted).abs().max()) for z in (x, y))
        assert ours <= 2 * theirs + 1e-2 * float(wanted.abs().max())


def test_a_gradient_scaler():
    def step(block: bool) -> tuple[Tensor, ...]:
        rows = inputs(dtype=torch.float32)
        scaler, optimizer = torch.amp.GradScaler("cpu", init_scale=256.0), torch.optim.SGD(rows, lr=0.1)
        with fused if block else torch.enable_grad():
            loss = one_matrix(*rows)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        return (*(x.detach() for x in rows), loss.detach())

    torch.testing.assert_close(step(True), step(False))


def test_a_loss_is_saved_as_a_tensor():
    a, b, scale = (x.detach() for x in inputs())
    file = io.BytesIO()
    with fused:
        torch.save(F.cross_entropy(scale * a @ b.T, ROWS), file)
    file.seek(0)
    torch.testing.assert_close(torch.load(file), F.cross_entropy(scale * a @ b.T, ROWS))


def test_an_exception_leaves_losses_that_are_right():
    rows = inputs()
    losses: list[Tensor] = []

    def program() -> None:
        losses.append(F.cross_entropy(rows[2] * rows[0] @ rows[1].T, ROWS) / 2)
        raise KeyError

    with pytest.raises(KeyError):
        fused(program)()
    wanted = F.cross_entropy(rows[2] * rows[0] @ rows[1].T, ROWS) / 2
    close(torch.autograd.grad(losses[0], rows), torch.autograd.grad(wanted, rows))
    torch.testing.assert_close(losses[0], wanted)


def test_a_loss_that_nobody_keeps_is_not_computed():
    a, b, scale = inputs()
    with fused as report:
        F.cross_entropy(scale * a @ b.T, ROWS)
        assert report.fused == 1
    assert report.computed == 0


@pytest.mark.parametrize("what", ["scaled", "turned"])
@pytest.mark.parametrize("how", ["retain_grad", "hook", "no_grad"])
def test_matrices_that_a_program_asks_for_their_gradients(what, how):
    """A product is of the matrix that was multiplied or turned only where nobody sees that."""

    def gradients() -> list[Tensor]:
        a, b, scale = inputs()
        with torch.set_grad_enabled(how != "no_grad"):
            made = scale * a if what == "scaled" else b.T
        seen: list[Tensor] = []
        if how == "retain_grad":
            made.retain_grad()
        elif how == "hook":
            made.register_hook(seen.append)
        scores = made @ b.T if what == "scaled" else scale * a @ made
        (F.cross_entropy(scores, ROWS) + F.cross_entropy(scores.T, ROWS)).backward()
        found = [a.grad, b.grad, scale.grad, made.grad if how == "retain_grad" else None, *seen]
        return [torch.zeros(1) if x is None else x for x in found]

    wanted = gradients()
    with fused:
        found = gradients()
    torch.testing.assert_close(found, wanted)


def test_row_numbers_that_change_are_targets():
    """A block remembers which numbers are those of the rows."""
    a, b, scale = inputs()
    with fused:
        rows = torch.arange(N)
        first = F.cross_entropy(scale * a @ b.T, rows)
        rows.copy_(rows.flip(0))
        second = F.cross_entropy(scale * a @ b.T, rows)
    torch.testing.assert_close(first, F.cross_entropy(scale * a @ b.T, ROWS))
    torch.testing.assert_close(second, F.cross_entropy(scale * a @ b.T, ROWS.flip(0)))
