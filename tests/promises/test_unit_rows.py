"""Rows that a program brings to norm 1 are read by losses of cosines, and are its own where it wants them."""

import copy
import io
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import fastqt
from fastqt.promises.promise import Promise
from tests.promises.test_directions import Doubled, close

N, D = 24, 96  # More columns than rows: a copy of rows is larger than the scores.
ROWS = torch.arange(N)
fused = fastqt.fused(least_cells=1)

SPELLINGS: dict[str, Callable[[Tensor], Tensor]] = {
    "normalize": F.normalize,
    "normalize by names": lambda x: F.normalize(input=x, p=2, dim=-1),
    "norm": lambda x: x / x.norm(dim=-1, keepdim=True),
    "torch.norm": lambda x: torch.div(x, torch.norm(x, 2, 1, True)),
    "torch.norm by names": lambda x: torch.norm(x, p=2, dim=1, keepdim=True).reciprocal() * x,
    "linalg.norm": lambda x: x / torch.linalg.norm(x, dim=1, keepdim=True),
    "vector_norm": lambda x: x.div(torch.linalg.vector_norm(x, ord=2, dim=-1, keepdim=True)),
}
PROMISED = [name for name in SPELLINGS if name != "torch.norm by names"]


def info_nce(q: Tensor, c: Tensor) -> Tensor:
    return F.cross_entropy(q @ c.T / 0.1, ROWS)


def clip(q: Tensor, c: Tensor) -> Tensor:
    scores = torch.tensor(8.0, dtype=q.dtype) * q @ c.T
    return F.cross_entropy(scores, ROWS) + F.cross_entropy(scores.T, ROWS)


def of_itself(q: Tensor, c: Tensor) -> Tensor:
    return torch.einsum("nd,md->nm", q, q).logsumexp(1).mean() + 0 * c.sum()


def sigmoids(q: Tensor, c: Tensor) -> Tensor:
    scores = F.linear(q, 2 * c)
    return F.binary_cross_entropy_with_logits(scores, torch.eye(N, dtype=q.dtype), reduction="sum")


def walk(q: Tensor, c: Tensor) -> Tensor:
    return (q @ c.T).sigmoid().sum()


def inputs(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(N, D, generator=generator, dtype=torch.float64)
    c = q + torch.randn(N, D, generator=generator, dtype=torch.float64)
    return [(3 * x).to(dtype).requires_grad_() for x in (q, c)]


def results(loss: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    rows = inputs(dtype)
    value = loss(*rows)
    return [value.detach(), *torch.autograd.grad(value, rows)]


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("loss", [info_nce, clip, of_itself, sigmoids, walk])
def test_values_and_gradients_are_those_of_the_program(spelling, loss):
    def program(q: Tensor, c: Tensor) -> Tensor:
        return loss(SPELLINGS[spelling](q), SPELLINGS[spelling](c))

    with fastqt.fused(strict=True, least_cells=1) as report:
        found = results(program)
    close(found, results(program))
    assert report.fused


class LargeTensors(TorchDispatchMode):
    """The functions that make a tensor as large as the rows."""

    def __init__(self) -> None:
        super().__init__()
        self.functions: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if isinstance(made, Tensor) and made.numel() >= N * D:
            self.functions.add(func.__name__.split(".")[0])
        return made


@pytest.mark.parametrize("spelling", PROMISED)
@pytest.mark.parametrize("loss", [info_nce, clip])
def test_no_copy_of_rows_is_made(spelling, loss):
    """But for the gradients."""
    unit = SPELLINGS[spelling]

    def large(block: bool) -> set[str]:
        rows = inputs()
        with LargeTensors() as tensors, fused if block else torch.enable_grad():
            loss(unit(rows[0]), unit(rows[1])).backward()
        return tensors.functions

    assert {"div", "mul"} <= large(block=False)
    # Gradients are made, and multiplied by that of the loss in place.
    assert large(block=True) <= {"new_empty", "detach"} | ({"mul"} if loss is info_nce else set())


@pytest.mark.parametrize("loss", [info_nce, clip, of_itself, sigmoids, walk])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_as_exact_as_the_program(loss, dtype):
    def program(q: Tensor, c: Tensor) -> Tensor:
        return loss(F.normalize(q), F.normalize(c))

    plain = results(program, dtype)
    exact = results(lambda q, c: program(q.to(dtype).double(), c.to(dtype).double()))
    with fused:
        found = results(program, dtype)
    largest = max(float(x.abs().max()) for x in exact)
    for x, y, wanted in zip(found, plain, exact, strict=True):
        assert x.dtype is y.dtype
        ours, theirs = (float((z.double() - wanted).abs().max()) for z in (x, y))
        assert ours <= 2 * theirs + (1e-6 if dtype is torch.float32 else 1e-2) * largest


def seen_by_hook(q: Tensor) -> Tensor:
    seen = torch.zeros_like(q.detach())
    q.register_hook(seen.add_)
    return seen


def kept_gradient(q: Tensor) -> Tensor:
    q.retain_grad()
    return q


def changed(q: Tensor) -> Tensor:
    turned = q.T
    q.mul_(1.5)
    turned[0] = 0.5
    return q.detach().clone()


def saved(q: Tensor) -> Tensor:
    file = io.BytesIO()
    torch.save(q.detach(), file)
    file.seek(0)
    return torch.load(file)


USES: dict[str, Callable[[Tensor], object]] = {
    "nothing": lambda q: 0,
    "its form": lambda q: (q.shape, len(q), q.dtype, q.dim(), q.requires_grad, q.is_leaf, q.is_contiguous()),
    "its bits": lambda q: q.detach() + 0,
    "numpy": lambda q: q.detach().numpy().tolist(),
    "item": lambda q: q[0, 0].item(),
    "repr": lambda q: repr(q.detach()),
    "data": lambda q: q.data.square(),
    "grad_fn": lambda q: type(q.grad_fn).__name__,
    "hook": seen_by_hook,
    "retain_grad": kept_gradient,
    "changed": changed,
    "turned": lambda q: q.T.contiguous().detach(),
    "copied": lambda q: copy.copy(q).detach(),
    "saved": saved,
    "view": lambda q: q.view(-1)[:5].detach(),
    "of autograd": lambda q: Doubled.apply(q).sum().backward(retain_graph=True),
    "of autograd, turned": lambda q: Doubled.apply(q.T).square().sum().backward(retain_graph=True),
    "backward": lambda q: q.square().sum().backward(retain_graph=True),
    "others": lambda q: (q * q.roll(1, 0)).sum(1).sigmoid().sum().backward(retain_graph=True),
    "stored": lambda q: torch.zeros(2, N, D, dtype=q.dtype).index_copy_(
        0, torch.tensor([1]), q.detach()[None]
    ),
    "out": lambda q: torch.add(q.detach(), 1, out=torch.empty(N, D, dtype=q.dtype)),
}


@pytest.mark.parametrize("loss", [info_nce, of_itself, walk])
@pytest.mark.parametrize("name", USES)
def test_rows_answer_as_their_tensor(name, loss):
    """Before they are multiplied, and between two products."""

    def graphs(block: bool) -> list[object]:
        x, y = inputs()
        with fused if block else torch.enable_grad():
            q, c = F.normalize(x), F.normalize(y)
            first = USES[name](q)
            total = loss(q, c)
            # What is saved for a gradient may not change any more.
            second = USES[name](c) if name != "changed" else 0
            (total + 2 * loss(c, q)).backward()
        return [first, second, x.grad, y.grad, total.detach()]

    for found, wanted in zip(graphs(True), graphs(False), strict=True):
        if isinstance(wanted, Tensor):
            torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-14)
            assert found.requires_grad == wanted.requires_grad
            if wanted.retains_grad:
                torch.testing.assert_close(found.grad, wanted.grad, rtol=1e-12, atol=1e-14)
        else:
            assert found == wanted


def test_rows_that_leave_the_block_are_tensors():
    x, y = inputs()
    with fused:
        q, turned, same = F.normalize(x), F.normalize(y).T, x / x.norm(dim=1, keepdim=True)
        assert type(q) is type(turned) is type(same) is Promise
    wanted = F.normalize(x), F.normalize(y).T, x / x.norm(dim=1, keepdim=True)
    with torch.no_grad():
        x.zero_()
    for found, plain in zip((q, turned, same), wanted, strict=True):
        assert type(found) is Tensor
        assert torch.equal(found, plain)


def test_rows_of_one_matrix_share_their_memory_after_the_block():
    with fused:
        q = F.normalize(inputs()[0].detach())
        turned, constant = q.T, q.detach()
    q.fill_(3.0)
    assert (turned == 3).all()
    assert (constant == 3).all()


def test_small_matrices_and_other_norms_are_computed():
    """Such as those of an encoder's layers."""
    x = torch.randn(255, 4)
    columns, most, guarded = torch.randn(3, 300, 4)
    with fastqt.fused():
        made = (
            F.normalize(x),
            F.normalize(columns, dim=0),
            F.normalize(columns, p=1),
            F.normalize(guarded, eps=1e-6),
            most / most.norm(dim=0, keepdim=True),
            most / most.norm(p=1, dim=1, keepdim=True),
            most / columns.norm(dim=1, keepdim=True),
            most.norm(dim=1, keepdim=True) / most,
            F.normalize(most[:, None], dim=2),
        )
        assert {type(x) for x in made} == {Tensor}
        assert type(F.normalize(columns)) is Promise


def test_rows_of_zeros():
    """`F.normalize` keeps them, and dividing by their norms makes NaN."""
    x, y = inputs()
    with torch.no_grad():
        x[3] = 0
    wanted = info_nce(F.normalize(x), F.normalize(y))
    plain = torch.autograd.grad(wanted, (x, y))
    with fused:
        found = info_nce(F.normalize(x), F.normalize(y))
        assert info_nce(x / x.norm(dim=1, keepdim=True), F.normalize(y)).isnan()
    close([found.detach(), *torch.autograd.grad(found, (x, y))], [wanted.detach(), *plain])


def test_norms_that_change_are_other_norms():
    def program(x: Tensor, y: Tensor) -> Tensor:
        norms = x.detach().norm(dim=1, keepdim=True)
        norms.add_(1)
        constant = x.detach().norm(dim=1, keepdim=True)  # through which no gradient flows
        return info_nce(x / norms, F.normalize(y)) + info_nce(x / constant, y / y.norm(dim=1, keepdim=True))

    with fused:
        found = results(program)
    close(found, results(program))


def test_second_derivatives_of_rows():
    def program(x: Tensor, y: Tensor) -> Tensor:
        q, c = F.normalize(x), F.normalize(y)
        gradients = torch.autograd.grad((q * c).sum(1).exp().sum(), (x, y), create_graph=True)
        return sum(g.square().sum() for g in gradients)

    with fused:
        found = results(program)
    close(found, results(program))


@pytest.mark.parametrize("which", ["one", "both", "of a detached matrix"])
def test_without_gradient(which):
    def program(x: Tensor, y: Tensor) -> Tensor:
        with torch.set_grad_enabled(which != "both"):
            q = F.normalize(x)
        with torch.no_grad():
            c = F.normalize(y)
        if which == "of a detached matrix":
            q, c = F.normalize(x), F.normalize(y).detach()
        assert q.requires_grad is (which != "both")
        assert not c.requires_grad
        return info_nce(q, c) + 0 * (x + y).sum()

    with fused:
        found = results(program)
    close(found, results(program))


def test_autocast_rounds_the_rows_themselves():
    def program(x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return info_nce(F.normalize(x), F.normalize(y))

    plain = results(program, torch.float32)
    with fused:
        found = results(program, torch.float32)
    exact = results(lambda x, y: info_nce(F.normalize(x), F.normalize(y)))
    for x, y, wanted in zip(found, plain, exact, strict=True):
        assert x.dtype is y.dtype
        assert (x - wanted).abs().max() <= (y - wanted).abs().max() + 1e-2 * wanted.abs().max()


def test_a_centre_that_is_a_parameter():
    """As ArcFace has it: the scores of embeddings with classes that are brought to norm 1."""
    centres = torch.nn.Parameter(torch.randn(40, D, dtype=torch.float64))
    x, _ = inputs()

    def gradients() -> tuple[Tensor, ...]:
        loss = F.cross_entropy(10 * F.linear(F.normalize(x), F.normalize(centres)), ROWS)
        return torch.autograd.grad(loss, (x, centres))

    wanted = gradients()
    with fused:
        close(list(gradients()), list(wanted))


@pytest.mark.parametrize("end", [info_nce, walk])
@pytest.mark.parametrize("use", [kept_gradient, lambda q: Doubled.apply(q).square().sum()])
def test_rows_that_are_asked_for_after_their_product(use, end):
    """Gradients of scores that are computed then go through the rows."""

    def program(block: bool) -> list[Tensor]:
        x, y = inputs()
        with fused if block else torch.enable_grad():
            q, c = F.normalize(x), F.normalize(y)
            scores = q @ c.T
            more = use(q)
            losses = scores.sigmoid().sum() if end is walk else F.cross_entropy(scores / 0.1, ROWS)
            (losses + more.sum()).backward()
        return [x.grad, y.grad, *([q.grad] if q.retains_grad else [])]

    torch.testing.assert_close(program(True), program(False), rtol=1e-12, atol=1e-14)
