"""A plain loss in the block has its own values and gradients, with and without cells of its score matrix."""

import copy
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import fastqt
from fastqt.engines.cpu import contrastive
from fastqt.promises import walk
from tests.shared.score_programs import Program
from tests.shared.tolerances import relative

N, D = 64, 6
ROWS, EYE = torch.arange(N), torch.eye(N, dtype=torch.bool)


def unit(x: Tensor) -> Tensor:
    return F.normalize(x, dim=1)


def simclr(z: Tensor) -> Tensor:
    scores = (unit(z) @ unit(z).T / 0.5).masked_fill(EYE, -math.inf)
    return F.cross_entropy(scores, (ROWS + N // 2) % N)


def clip(a: Tensor, b: Tensor, log_scale: Tensor) -> Tensor:
    scores = log_scale.exp() * unit(a) @ unit(b).t()
    return (F.cross_entropy(scores, ROWS) + F.cross_entropy(scores.t(), ROWS)) / 2


def quickthoughts(q: Tensor, c: Tensor) -> Tensor:
    scores = torch.matmul(q, c.t())
    scores.fill_diagonal_(0)
    targets = ((ROWS[:, None] - ROWS).abs() == 1).to(q.dtype)
    return F.kl_div(
        F.log_softmax(scores, dim=1), targets / targets.sum(1, keepdim=True), reduction="batchmean"
    )


def moco(q: Tensor, k: Tensor, queue: Tensor) -> Tensor:
    q, k = unit(q), unit(k)
    positive = torch.einsum("nc,nc->n", [q, k]).unsqueeze(-1)
    negative = torch.einsum("nc,ck->nk", [q, queue.T])
    return F.cross_entropy(torch.cat([positive, negative], 1) / 0.07, torch.zeros(N, dtype=torch.long))


def hard_negatives(q: Tensor, c: Tensor, h: Tensor) -> Tensor:
    q, c, h = map(unit, (q, c, h))
    return F.cross_entropy(torch.cat([q @ c.T, q @ h.T], dim=1) / 0.05, ROWS)


def logsumexp(q: Tensor, c: Tensor) -> Tensor:
    scores = q @ c.T / 5
    return (scores.logsumexp(1) - scores.diag()).mean()


def exponentials(q: Tensor, c: Tensor) -> Tensor:
    scores = unit(q) @ unit(c).T / 0.1
    return (torch.log(torch.exp(scores).sum(dim=-1)) - scores.diagonal()).mean()


def siglip(a: Tensor, b: Tensor) -> Tensor:
    scores = unit(a) @ unit(b).T * 10 - 10
    return F.binary_cross_entropy_with_logits(scores, torch.eye(N, dtype=a.dtype), reduction="sum") / N


def log_probabilities(q: Tensor, c: Tensor) -> Tensor:
    log_p = F.log_softmax(q @ c.T / 8, dim=-1)
    return -log_p[ROWS, ROWS].mean() - torch.diag(log_p).mean() + F.nll_loss(log_p, ROWS)


def soft_targets(q: Tensor, c: Tensor) -> Tensor:
    targets = torch.rand(N, N, generator=torch.Generator().manual_seed(3), dtype=q.dtype).softmax(1)
    return -(targets * (q @ c.T / 8).log_softmax(dim=1)).sum(dim=1).mean()


def masked(q: Tensor, c: Tensor) -> Tensor:
    scores = q @ c.T / 8
    scores[EYE.roll(1, 1)] = -1e9
    return F.cross_entropy(torch.where(EYE.roll(2, 1), torch.full((), -math.inf), scores), ROWS)


def masked_both_ways(a: Tensor, b: Tensor) -> Tensor:
    """A mask that is not symmetric, and a diagonal, of both sides."""
    scores = (a @ b.T / 4).masked_fill(EYE.roll(1, 1), -math.inf)
    views = a @ b.T
    views.fill_diagonal_(0)
    targets = ROWS.roll(2)
    return (
        F.cross_entropy(scores, ROWS) + F.cross_entropy(scores.T, ROWS) + F.cross_entropy(views.t(), targets)
    )


def less_the_maxima(q: Tensor, c: Tensor) -> Tensor:
    scores = q @ c.T
    offsets = torch.linspace(-1, 1, N, dtype=q.dtype)[:, None]
    return F.cross_entropy(scores - offsets + offsets.T, ROWS, ignore_index=3)


def supervised(q: Tensor, c: Tensor) -> Tensor:
    """Less the maxima, exponentials times zeros and ones, and a mean of several positives."""
    positives = (ROWS[:, None] // 4 == ROWS // 4).to(q.dtype) - EYE.to(q.dtype)
    scores = torch.div(torch.matmul(unit(q), unit(c).T), 0.2)
    logits = scores - torch.max(scores, dim=1, keepdim=True)[0].detach()
    sums = (torch.exp(logits) * (1 - EYE.to(q.dtype))).sum(1, keepdim=True)
    log_p = logits - torch.log(sums)
    return -((positives * log_p).sum(1) / positives.sum(1)).mean()


def signed_sigmoids(a: Tensor, b: Tensor) -> Tensor:
    labels = 2 * torch.eye(N, dtype=a.dtype) - torch.ones(N, N, dtype=a.dtype)
    return -F.logsigmoid(labels * (unit(a) @ unit(b).T * 10 - 10)).sum() / N


def shaped(q: Tensor, c: Tensor) -> Tensor:
    """Functions that change nothing."""
    scores = (q @ c.T / 8).to_dense().view(N, -1)
    return F.nll_loss(F.log_softmax(scores.reshape(-1, N), dim=1), ROWS)


def maxima(q: Tensor, c: Tensor) -> Tensor:
    scores = q @ c.T
    return F.cross_entropy(scores - torch.max(scores, 1)[0][:, None], ROWS) + scores.max(dim=1).values.mean()


def weighted_scores(q: Tensor, c: Tensor) -> Tensor:
    """With weights of both signs, a bias of columns and a number of each row."""
    weights = torch.linspace(-1, 1, N * N, dtype=q.dtype).reshape(N, N)
    scores = q @ c.T / 3 + c[:, 0] - q[:, :1]
    return ((weights * scores).sum(dim=1)).square().mean()


def exponentials_of_pairs(a: Tensor, b: Tensor) -> Tensor:
    """The losses of graphs."""
    within, between = (torch.exp(unit(a) @ unit(x).t() / 0.5) for x in (a, b))
    others = within.sum(1) + between.sum(1) - within.diag()
    return -torch.log(between.diag() / others).mean() - torch.log(between[range(N), range(N)]).mean()


def numbers_like(q: Tensor, c: Tensor) -> Tensor:
    scores = q @ c.T
    positives = torch.zeros_like(scores)
    positives.fill_diagonal_(1)
    return -(F.log_softmax(scores + scores.new_ones(N), dim=1) * positives).sum(1).mean()


def simclr_by_masks(z: Tensor) -> Tensor:
    """The positives, and all other cells but the diagonal."""
    scores = unit(z) @ unit(z).T
    labels = ((ROWS + N // 2) % N)[:, None] == ROWS
    labels, scores = labels[~EYE].view(N, -1), scores[~EYE].view(N, -1)
    logits = torch.cat([scores[labels].view(N, -1), scores[~labels].view(N, -1)], dim=1)
    return torch.nn.CrossEntropyLoss()(logits / 0.5, torch.zeros(N, dtype=torch.long))


def nt_xent(z: Tensor) -> Tensor:
    """Cosines by broadcasting, and two diagonals."""
    scores = torch.nn.CosineSimilarity(dim=2)(z.unsqueeze(1), z.unsqueeze(0)) / 0.5
    half = N // 2
    others = ~(EYE | EYE.roll(half, 1))
    positives = torch.cat([torch.diag(scores, half), torch.diag(scores, -half)]).reshape(N, 1)
    logits = torch.cat([positives, scores[others].reshape(N, -1)], dim=1)
    return F.cross_entropy(logits, torch.zeros(N, dtype=torch.long), reduction="sum") / N


def views_below_views(a: Tensor, b: Tensor) -> Tensor:
    a, b = unit(a), unit(b)
    within = [torch.einsum("nc,mc->nm", x, x)[~EYE].view(N, -1) for x in (a, b)]
    between = torch.einsum("nc,mc->nm", a, b), torch.einsum("nc,mc->nm", b, a)
    logits = torch.cat([torch.cat(pair, dim=1) for pair in zip(between, within, strict=True)], dim=0)
    return F.cross_entropy(logits / 0.1, ROWS.repeat(2))


def large_mask(a: Tensor, b: Tensor) -> Tensor:
    """A mask that is subtracted, and a small number that is added where exp of it is 0."""
    eye = EYE.to(a.dtype)
    logits = torch.cat([a @ b.T, a @ a.T - eye * 1e4], dim=1) / 4
    decoupled = torch.logsumexp(a @ b.T / 4 + eye * -103.0, dim=1)
    return F.cross_entropy(logits, ROWS) + decoupled.mean()


def hinge(q: Tensor, c: Tensor) -> Tensor:
    """Against all others, and against the hardest one."""
    scores = unit(q) @ unit(c).T
    margins = (0.2 + scores - scores.diag().view(-1, 1)).clamp(min=0).masked_fill(EYE, 0)
    hardest = scores.clone()
    hardest[ROWS, ROWS] = -torch.inf
    return margins.sum() / N + (hardest.max(dim=1)[0] - scores[ROWS, ROWS]).relu().mean()


def hardest_distances(z: Tensor) -> Tensor:
    """Triplets of Euclid's distances, which are exactly 0 on the diagonal."""
    same = (ROWS[:, None] // 4 == ROWS // 4) & ~EYE
    products = z @ z.t()
    squares = torch.diag(products)
    distances = squares.unsqueeze(0) - 2.0 * products + squares.unsqueeze(1)
    distances[distances < 0] = 0
    zeros = distances.eq(0).to(z.dtype)
    distances = (1.0 - zeros) * torch.sqrt(distances + zeros * 1e-16)
    positive = (distances * same).max(1, keepdim=True).values
    largest = distances.max(1, keepdim=True).values
    negative = (distances + largest * (same | EYE)).min(1, keepdim=True).values
    return F.relu(positive - negative + 5).mean()


def distilled(q: Tensor, c: Tensor) -> Tensor:
    """The softmax of one matrix is the target of the other's."""
    teacher = ((2 * q).detach() @ c.detach().T / 4).softmax(dim=1)
    student = q @ c.T / 4
    loss = -(teacher * student.log_softmax(dim=1)).sum(dim=1).mean(dim=0)
    return loss + F.kl_div(F.log_softmax(student, 1), teacher, reduction="batchmean")


def hard_weighted(a: Tensor, b: Tensor) -> Tensor:
    """Negatives that weigh more, the harder they are."""
    both = torch.cat([unit(a), unit(b)])[::2]
    negatives = torch.exp(both @ both.t().contiguous() / 0.5)
    negatives = negatives.clone().masked_select(~EYE).view(N, -1)
    importance = (0.7 * negatives.log()).exp()
    weighted = (importance * negatives).sum(dim=-1) / importance.mean(dim=-1)
    return torch.log1p(torch.clamp(weighted, min=0.1)).mean()


def over_norms(a: Tensor, b: Tensor) -> Tensor:
    scores = torch.einsum("ik,jk->ij", a, b) / torch.einsum("i,j->ij", a.norm(dim=1), b.norm(dim=1))
    scores = torch.exp(scores / 0.5)
    pairs = scores[range(N), range(N)]
    return -torch.log(pairs / (scores.sum(dim=1) - pairs)).mean()


def smoothed(q: Tensor, c: Tensor) -> Tensor:
    scores = q @ c.T / 8
    both = F.cross_entropy(scores, ROWS, label_smoothing=0.1) + F.cross_entropy(
        scores.T, ROWS, label_smoothing=0.1, ignore_index=2
    )
    return both - scores.softmax(1).log()[ROWS, ROWS].mean()


def nearest_negatives(q: Tensor, c: Tensor) -> Tensor:
    scores = torch.einsum("bd,cd->bc", q, c)
    pairs = scores.diagonal()
    best = scores.topk(2, dim=1).values
    return F.softplus((torch.where(best[:, 0] == pairs, best[:, 1], best[:, 0]) - pairs) / 2).mean()


def orthogonal(z: Tensor) -> Tensor:
    scores = unit(z) @ unit(z).T
    scores.fill_diagonal_(0.0)
    return (scores.sum() / N).pow(2) + torch.relu(scores.pow(2).sum() / N - 0.1)


def centres(q: Tensor, c: Tensor) -> Tensor:
    """Several of each class."""
    scores = (unit(q) @ unit(c).T).view(-1, N // 4, 4)
    scores = torch.sum(F.softmax(scores * 5, dim=2) * scores, dim=2)
    return F.cross_entropy(scores * 10, ROWS // 4)


def false_negatives(q: Tensor, c: Tensor) -> Tensor:
    """Of both sides, by a threshold of each row and one of each column."""
    scores = q @ c.T / 4
    pairs = scores.diag().detach()
    rows = scores.masked_fill(scores > pairs[:, None] + 0.1, -math.inf)
    columns = torch.where(scores.t() > (pairs + 0.1)[:, None], -math.inf, scores.t())
    return F.cross_entropy(rows, ROWS) + columns.logsumexp(1).mean() + scores.logsumexp(0, keepdim=True).sum()


LOSSES: dict[str, tuple[Callable[..., Tensor], int]] = {
    x.__name__: (x, count)
    for x, count in (
        *((simclr, 1), (clip, 3), (quickthoughts, 2), (moco, 3), (hard_negatives, 3), (logsumexp, 2)),
        *((exponentials, 2), (siglip, 2), (log_probabilities, 2), (soft_targets, 2), (masked, 2)),
        *((less_the_maxima, 2), (masked_both_ways, 2), (supervised, 2), (signed_sigmoids, 2)),
        *((shaped, 2), (maxima, 2), (weighted_scores, 2), (exponentials_of_pairs, 2), (numbers_like, 2)),
        *((simclr_by_masks, 1), (nt_xent, 1), (views_below_views, 2), (large_mask, 2), (hinge, 2)),
        *((hardest_distances, 1), (distilled, 2), (hard_weighted, 2), (over_norms, 2), (smoothed, 2)),
        *((nearest_negatives, 2), (orthogonal, 1), (centres, 2), (false_negatives, 2)),
    )
}
HAVE_TARGETS = (
    *("quickthoughts", "siglip", "soft_targets", "supervised", "signed_sigmoids", "weighted_scores"),
    *("numbers_like", "large_mask", "hardest_distances"),
)
each = pytest.mark.parametrize("name", LOSSES)


def inputs(name: str, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    found = [torch.randn(N, D, generator=generator, dtype=dtype) for _ in range(LOSSES[name][1])]
    if name == "clip":
        found[2] = torch.tensor(1.7, dtype=dtype)
    return found


def with_gradients(loss: Callable[..., Tensor], rows: list[Tensor]) -> list[Tensor]:
    leaves = [x.clone().requires_grad_() for x in rows]
    value = loss(*leaves)
    return [value.detach(), *torch.autograd.grad(value, leaves, allow_unused=True, materialize_grads=True)]


def close(found: list[Tensor], wanted: list[Tensor], tolerance: float) -> None:
    largest = max(x.abs().max() for x in wanted)
    for a, b in zip(found, wanted, strict=True):
        assert a.dtype == b.dtype
        assert (a - b).abs().max() <= tolerance * largest


class LargestTensor(TorchDispatchMode):
    """How many numbers of floating point the largest tensor has that a function of torch makes."""

    most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for x in made if isinstance(made, tuple | list) else (made,):
            if isinstance(x, Tensor) and x.is_floating_point() and "fastqt" not in str(func):
                self.most = max(self.most, x.numel())
        return made


@each
def test_a_loss_has_its_own_values_and_no_cells(name):
    loss, _ = LOSSES[name]
    wanted = with_gradients(loss, inputs(name))
    with fastqt.fused(strict=True, least_cells=1) as report:
        found = with_gradients(loss, inputs(name))
    close(found, wanted, 1e-12)
    assert report.fused
    assert not report.computed


@each
def test_no_matrix_is_made(name, monkeypatch):
    """Beside the targets that a program makes itself, and the few scores that an engine may keep."""
    monkeypatch.setattr(walk, "CELLS_AT_ONCE", N * N // 4)
    monkeypatch.setattr(contrastive, "KEPT_BYTES", 0)
    loss, _ = LOSSES[name]
    with LargestTensor() as plain:
        with_gradients(loss, inputs(name))
    with LargestTensor() as tensors, fastqt.fused(least_cells=1):
        with_gradients(loss, inputs(name))
    assert plain.most >= N * N
    assert tensors.most < N * N or name in HAVE_TARGETS


@each
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dtypes_are_those_of_the_program(name, dtype):
    """In 16 bits it is no farther from the truth than the program."""
    loss, _ = LOSSES[name]
    exact = with_gradients(loss, [x.to(dtype).double() for x in inputs(name)])
    plain = with_gradients(loss, inputs(name, dtype))
    with fastqt.fused(least_cells=1):
        found = with_gradients(loss, inputs(name, dtype))
    largest = max(x.abs().max() for x in exact)
    for a, b, wanted in zip(found, plain, exact, strict=True):
        assert a.dtype is b.dtype
        ours, theirs = ((x.double() - wanted).abs().max() for x in (a, b))
        assert ours <= 2 * theirs + (1e-5 if dtype is torch.float32 else 1e-2) * largest


def check_program(seed: int) -> bool:
    """Whether a random program has the same results in the block; False where plain PyTorch has none."""
    program = Program(seed)

    def run(noise: float = 0.0) -> list[Tensor]:
        leaves = [(x + noise * x.sin()).requires_grad_() for x in program.inputs(torch.float64)]
        value = program(*leaves)
        return [
            value.detach(),
            *torch.autograd.grad(value, leaves, allow_unused=True, materialize_grads=True),
        ]

    try:
        wanted = run()
    except RuntimeError:  # a gradient of what was changed in place
        return False
    with fastqt.fused(least_cells=1):
        found = run()
    if not all(x.isfinite().all() for x in wanted):
        return False
    largest = max(float(x.abs().max()) for x in wanted)

    def is_other(results: list[Tensor]) -> bool:
        difference = max(float((a - b).abs().max()) for a, b in zip(results, wanted, strict=True))
        return not difference <= 1e-9 * max(largest, 1e-3)

    if not is_other(found):
        return True
    # Among cells that are equal but for their rounding, plain PyTorch has no largest one either.
    assert any(is_other(run(noise)) for noise in (1e-15, -1e-15, 3e-15)), (seed, program.lines)
    return False


@pytest.mark.parametrize("seeds", [range(600), pytest.param(range(600, 8000), marks=pytest.mark.slow)])
def test_random_programs(seeds, monkeypatch):
    """With three rows of a matrix at a time."""
    monkeypatch.setattr(walk, "CELLS_AT_ONCE", 40)
    assert sum(map(check_program, seeds)) > 0.75 * len(seeds)


def test_what_has_no_rule_gets_the_programs_own_cells():
    """To the bit, and the report says which line wanted them."""
    q, c = torch.randn(2, N, D)
    wanted = (q @ c.T).cumsum(0).sum()
    with fastqt.fused(least_cells=1) as report:
        found = (q @ c.T).cumsum(0).sum()
    assert torch.equal(found, wanted)
    assert (report.fused, report.computed) == (0, 1)
    assert str(report) == f"test_fused.py:{LINE_OF_CUMSUM}: cumsum wanted the score matrix, 0.0 MiB"


LINE_OF_CUMSUM = test_what_has_no_rule_gets_the_programs_own_cells.__code__.co_firstlineno + 5


def test_a_diagonal_is_of_the_matrix_that_is_there():
    """Programs ask by == which of the largest cells is the pair's own."""

    def nearest(q: Tensor, c: Tensor) -> Tensor:
        scores = unit(q) @ unit(c).T
        pairs = scores.diagonal()
        best = scores.topk(2, dim=1).values
        return torch.where(best[:, 0] == pairs, best[:, 1], best[:, 0]) - pairs

    q, noise = inputs("logsumexp")
    wanted = nearest(q, q + 0.01 * noise)
    for function in (nearest, lambda q, c: nearest(q, c) + 0 * (q @ c.T).cumsum(0)[0]):
        with fastqt.fused(least_cells=1):
            found = function(q, q + 0.01 * noise)
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-14)


def test_exponentials_times_other_weights_than_zeros_and_ones():
    q, c = inputs("logsumexp")
    weights = torch.full((N, N), 0.5, dtype=q.dtype)
    with fastqt.fused(least_cells=1):
        found = ((q @ c.T / 5).exp() * weights).sum(dim=1)
    torch.testing.assert_close(found, ((q @ c.T / 5).exp() * weights).sum(dim=1))


def test_strict_raises_where_cells_are_wanted():
    q, c = torch.randn(2, N, D)
    with (
        fastqt.fused(strict=True, least_cells=1),
        pytest.raises(RuntimeError, match="cumsum wants the cells"),
    ):
        (q @ c.T).cumsum(0)


def test_the_report_names_what_was_fused():
    q, c = torch.randn(2, N, D)
    with fastqt.fused(least_cells=1) as report:
        for _ in range(2):
            F.cross_entropy(q @ c.T, ROWS)
    text = str(report)
    assert text.startswith("test_fused.py:")
    assert text.endswith(": cross_entropy fused into fastqt.contrastive_loss, 2 times")


def test_it_is_a_decorator():
    q, c = inputs("logsumexp")
    assert torch.allclose(fastqt.fused(least_cells=1)(logsumexp)(q, c), logsumexp(q, c))


def test_a_change_in_the_block_comes_after_the_product():
    q, c = torch.randn(2, N, D)
    wanted = (q @ c.T).logsumexp(1)
    with fastqt.fused(least_cells=1):
        scores = q @ c.T
        q.mul_(2)
        assert relative(scores.logsumexp(1), wanted) < 1e-6


def walked(q: Tensor, c: Tensor, more: Tensor) -> Tensor:
    scores = (q @ c.T).sigmoid() + more
    return (scores * scores.softmax(1)).square().sum(dim=1).sum()


def test_a_walk_has_second_derivatives(monkeypatch):
    monkeypatch.setattr(walk, "CELLS_AT_ONCE", 5 * N)
    rows = [*inputs("logsumexp"), torch.zeros(N, N, dtype=torch.float64)]

    def penalty(q: Tensor, c: Tensor, more: Tensor) -> Tensor:
        gradients = torch.autograd.grad(walked(q, c, more), (q, c), create_graph=True)
        return sum(x.square().sum() for x in gradients)

    wanted = with_gradients(penalty, rows)
    close(with_gradients(fastqt.fused(least_cells=1, strict=True)(penalty), rows), wanted, 1e-12)


def test_a_change_before_the_gradient_of_a_walk_is_refused():
    """It would be computed of the numbers that are there now."""
    q, c = (x.requires_grad_() for x in inputs("logsumexp"))
    more = torch.zeros(N, N, dtype=q.dtype)
    with fastqt.fused(least_cells=1, strict=True):
        loss = walked(q, c, more)
        more.add_(1)
    with pytest.raises(RuntimeError, match="changed in place before its gradient"):
        loss.backward()


def test_cells_that_a_program_has_are_those_of_the_matrix():
    """Of a walk, and of the matrix that is computed afterwards."""
    q, c = inputs("logsumexp")
    with fastqt.fused(least_cells=1):
        scores = q @ c.T / 0.3
        pairs, best = scores.diag(), scores.max(dim=1, keepdim=True).values
        log_p = scores.log_softmax(dim=1)
        own = log_p[ROWS, ROWS]
        assert (scores == pairs[:, None]).sum() == (scores == best).sum() == N
        assert (log_p == own[:, None]).sum() == N
        assert (scores.cumsum(0)[0] - scores[0]).abs().max() == 0  # cumsum computes the matrix
        assert torch.equal(scores.relu().diag(), pairs.relu())
        assert not (scores > best).any(dim=1).sum()


def test_masks_of_scores_have_no_gradient():
    q, c = (x.requires_grad_() for x in inputs("logsumexp"))
    with fastqt.fused(least_cells=1):
        above = q @ c.T > 0
        assert above.dtype is torch.bool
        assert not above.requires_grad
        assert not above.to(q.dtype).requires_grad
        assert (above.to(q.dtype) * 2).sum().requires_grad is False


def test_a_row_is_a_view():
    def loss(q: Tensor, c: Tensor) -> Tensor:
        scores = q @ c.T
        scores[3].mul_(0.5)
        scores[:, 2].add_(1.0)
        scores[1:5, 4:].fill_(0.25)
        return scores.logsumexp(1).sum()

    rows = inputs("logsumexp")
    close(with_gradients(fastqt.fused(least_cells=1)(loss), rows), with_gradients(loss, rows), 1e-12)


def test_cells_of_a_block():
    q, c = inputs("logsumexp")
    with fastqt.fused(least_cells=1, strict=True):
        found = (q @ c.T)[4:, 1:].diag() + 0
    torch.testing.assert_close(found, (q @ c.T)[4:, 1:].diag())


def test_selected_cells_of_uneven_rows_are_no_matrix(monkeypatch):
    monkeypatch.setattr(walk, "CELLS_AT_ONCE", 5 * N)
    q, c = inputs("logsumexp")
    uneven = EYE.clone()
    uneven[0, :3], uneven[-1, -1] = True, False
    uneven[-2, -2] = False
    for mask in (uneven, ~uneven):
        with fastqt.fused(least_cells=1):
            found = (q @ c.T)[mask].view(N, -1).logsumexp(1)
        torch.testing.assert_close(found, (q @ c.T)[mask].view(N, -1).logsumexp(1))


def test_a_column_that_waits_is_told_where_it_is_used():
    q, c = inputs("logsumexp")
    with fastqt.fused(least_cells=1, strict=True) as report:
        found = (q @ c.T).softmax(dim=1)[:, 0]
        torch.testing.assert_close(found.log(), (q @ c.T).softmax(dim=1)[:, 0].log())
    assert "log fused into a walk over rows" in str(report)


def test_cells_of_rows_in_any_order():
    q, c = inputs("logsumexp")
    where = ROWS.roll(5).flip(0), ROWS
    with fastqt.fused(least_cells=1, strict=True):
        found = (q @ c.T).softmax(dim=1)[where]
    torch.testing.assert_close(found, (q @ c.T).softmax(dim=1)[where])


def test_views_of_one_matrix_share_their_gradients():
    """A detached matrix, a view of it that is divided, and its diagonal that is filled then."""

    def loss(q: Tensor, c: Tensor) -> Tensor:
        scores = (q @ c.T).detach()
        views = scores.contiguous().view(N, -1)
        views /= q.square().mean()
        scores.fill_diagonal_(0.0)
        return views.logsumexp(1).sum()

    rows = inputs("logsumexp")
    close(with_gradients(fastqt.fused(least_cells=1)(loss), rows), with_gradients(loss, rows), 1e-12)


def test_a_detached_view_shares_its_cells():
    def loss(q: Tensor, c: Tensor) -> Tensor:
        scores = q @ c.T
        scores.t().detach().fill_diagonal_(0.5)
        return (2 * scores).logsumexp(1).sum()

    q, c = inputs("logsumexp")
    with fastqt.fused(least_cells=1):
        found = loss(q, c)
    torch.testing.assert_close(found, loss(q, c))


def test_a_view_of_a_forgotten_matrix_is_changed_without_cells():
    """Nobody can see the change through the matrix. Through other views of it, they can."""

    def forgotten(q: Tensor, c: Tensor) -> Tensor:
        turned = (q @ c.T).T
        turned.masked_fill_(EYE.roll(1, 1), -math.inf)
        turned *= 2
        return turned.logsumexp(1).sum() + turned.T.logsumexp(1).square().sum()

    def seen(q: Tensor, c: Tensor) -> Tensor:
        scores = q @ c.T
        half, turned, constant = scores / 2, scores.T, scores.detach()
        del scores
        turned.masked_fill_(EYE.roll(1, 1), 0.5)
        return half.logsumexp(1).sum() + turned.logsumexp(1).sum() + (constant * q[:, :1]).logsumexp(1).sum()

    def kept(q: Tensor, c: Tensor) -> Tensor:
        scores = q @ c.T
        scores.T.masked_fill_(EYE.roll(1, 1), 0.5)
        return scores.logsumexp(1).sum()

    rows = inputs("logsumexp")
    for program, is_strict in ((forgotten, True), (seen, False), (kept, False)):
        wanted = with_gradients(program, rows)
        close(with_gradients(fastqt.fused(least_cells=1, strict=is_strict)(program), rows), wanted, 1e-12)


def test_what_is_ignored_is_not_counted():
    q, c = inputs("logsumexp")
    targets = ROWS.where(ROWS % 3 > 0, -100)
    wanted = F.cross_entropy(q @ c.T, targets, label_smoothing=0.2)
    with fastqt.fused(least_cells=1, strict=True):
        torch.testing.assert_close(F.cross_entropy(q @ c.T, targets, label_smoothing=0.2), wanted)


def test_a_change_outside_is_refused():
    q, c = torch.randn(2, N, D)
    with fastqt.fused(least_cells=1):
        scores = q @ c.T
    q.mul_(2)
    with pytest.raises(RuntimeError, match=r"changed in place outside of fastqt\.fused"):
        scores.logsumexp(1)


def test_a_promise_that_leaves_the_block_stays_right():
    q, c = torch.randn(2, N, D)
    with fastqt.fused(least_cells=1):
        scores = q @ c.T
    assert torch.equal(copy.deepcopy(scores), q @ c.T)
    assert scores.tolist() == (q @ c.T).tolist()
    assert repr(scores) == repr(q @ c.T)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, upstream):
        return 2 * upstream


def test_functions_of_autograd_get_cells_and_pass_gradients():
    q, c = torch.randn(2, N, D)
    close(
        with_gradients(
            fastqt.fused(least_cells=1)(lambda q, c: Doubled.apply(q @ c.T).square().sum()), [q, c]
        ),
        with_gradients(lambda q, c: Doubled.apply(q @ c.T).square().sum(), [q, c]),
        1e-6,
    )


def test_hooks_see_the_gradient_of_the_matrix():
    seen = []

    def loss(q, c):
        scores = q @ c.T
        scores.register_hook(lambda gradient: seen.append(gradient.shape))
        return F.cross_entropy(scores / 3, ROWS)

    rows = inputs("logsumexp")
    wanted = with_gradients(loss, rows)
    close(with_gradients(fastqt.fused(least_cells=1)(loss), rows), wanted, 1e-12)
    assert seen == [(N, N)] * 2


def test_hooks_see_what_was_made_before_of_the_matrix():
    seen = []

    def loss(q, c):
        scores = q @ c.T
        scaled = scores / 3
        scores.register_hook(lambda gradient: seen.append(gradient.shape))
        return F.cross_entropy(scaled, ROWS)

    rows = inputs("logsumexp")
    wanted = with_gradients(loss, rows)
    close(with_gradients(fastqt.fused(least_cells=1)(loss), rows), wanted, 1e-12)
    assert seen == [(N, N)] * 2


def test_a_clone_is_a_copy():
    def loss(q, c):
        scores = q @ c.T
        copied = scores.clone()
        copied[3] = 0.5
        same = scores.contiguous()
        same[4] = 0.25
        return scores.logsumexp(1).sum() + copied.logsumexp(1).mean()

    rows = inputs("logsumexp")
    close(with_gradients(fastqt.fused(least_cells=1)(loss), rows), with_gradients(loss, rows), 1e-12)


@pytest.mark.parametrize("value", [-2e4, -1e9, -math.inf])
def test_a_mask_stands_for_minus_infinity_where_nothing_is_seen_of_it(value):
    """Beside scores of a million a number of minus twenty thousand is one among others."""

    def loss(q, c):
        scores = (1000 * q @ c.T).masked_fill(EYE.roll(1, 1), value)
        return scores.logsumexp(1).mean() + F.cross_entropy(-3000 - (q.abs() * 9000) @ c.abs().T, ROWS)

    def alone(q, c):
        scores = -(100 * q.abs()) @ (100 * c.abs()).T
        return F.cross_entropy(scores.masked_fill(EYE.roll(1, 1), value), ROWS)

    rows = inputs("logsumexp")
    for each_loss in (loss, alone):
        wanted = with_gradients(each_loss, rows)
        close(with_gradients(fastqt.fused(least_cells=1)(each_loss), rows), wanted, 1e-12)


def test_infinity_in_a_row_is_no_number():
    """Though it changes no softmax otherwise."""
    q, c = inputs("logsumexp")
    offsets = torch.zeros(N, 1, dtype=q.dtype)
    offsets[2] = math.inf
    with fastqt.fused(least_cells=1, strict=True):
        assert F.cross_entropy(q @ c.T - offsets, ROWS).isnan()


def test_an_encoder_in_the_block_has_the_same_bits():
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    encoder = torch.nn.Sequential(torch.nn.TransformerEncoder(layer, 2), torch.nn.Linear(16, 16))
    texts = torch.randn(N, 5, 16)
    wanted = encoder(texts)
    with fastqt.fused(least_cells=1) as report:
        found = encoder(texts)
        F.cross_entropy(found[:, 0] @ found[:, 1].T, ROWS).backward()
    assert torch.equal(found, wanted)
    assert (report.fused, report.computed) == (1, 0)
    assert all(p.grad is not None for p in encoder.parameters())


def test_without_gradient():
    q, c = inputs("logsumexp")
    q.requires_grad_()
    with fastqt.fused(least_cells=1), torch.no_grad():
        scores = q @ c.T
        value = scores.logsumexp(1)
    assert not value.requires_grad
    assert not scores.requires_grad
    assert not (scores * 2).logsumexp(1).requires_grad
    with fastqt.fused(least_cells=1):
        scores = q @ c.T
        assert scores.requires_grad
        assert not scores.detach().requires_grad
        assert not (2 * scores.detach()).requires_grad


def test_autocast_multiplies_in_16_bits():
    q, c = (unit(x) for x in torch.randn(2, N, D))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        wanted = F.cross_entropy(q @ c.T * 20, ROWS)
        with fastqt.fused(least_cells=1, strict=True):
            scores = q @ c.T
            found = F.cross_entropy(scores * 20, ROWS)
    assert scores.dtype is torch.bfloat16
    assert found.dtype is wanted.dtype
    exact = F.cross_entropy(q.double() @ c.double().T * 20, ROWS)
    assert abs(found - exact) <= abs(wanted - exact) + 1e-2


@pytest.mark.slow
def test_a_compiled_encoder_may_be_called_in_the_block():
    encoder = torch.compile(torch.nn.Linear(D, D))
    x, y = torch.randn(2, N, D)
    wanted = F.cross_entropy(encoder(x) @ encoder(y).T, ROWS)
    with fastqt.fused(least_cells=1) as report:
        found = F.cross_entropy(encoder(x) @ encoder(y).T, ROWS)
    torch.testing.assert_close(found, wanted)
    assert report.fused == 1


def test_results_that_are_written_to_a_tensor():
    """The function returns it; and a matrix that is written to is another one, as its views are."""

    def program(q: Tensor, c: Tensor) -> list[Tensor]:
        scores, written = q @ c.T, torch.empty(N, N, dtype=q.dtype)
        turned = scores.T
        result = torch.add(scores, 1, out=written)
        assert result is written
        before = scores.logsumexp(1)
        assert torch.mul(written, 2, out=scores) is scores
        return [written, before, scores + 0, turned + 0]

    q, c = inputs("logsumexp")
    with torch.no_grad(), fastqt.fused(least_cells=1):
        found = program(q, c)
    close(found, program(q, c), 1e-12)


def test_targets_of_another_dtype_give_the_dtype_of_the_program():
    """Of binary cross-entropies that of the targets."""
    q, c = inputs("logsumexp")
    for targets in (EYE.float(), 1 - EYE.float()):
        wanted = F.binary_cross_entropy_with_logits(q @ c.T, targets)
        with fastqt.fused(least_cells=1):
            found = F.binary_cross_entropy_with_logits(q @ c.T, targets)
        assert found.dtype is wanted.dtype is torch.float32
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("is_detached", [False, True])
def test_a_matrix_that_changes_before_a_gradient_that_does_not_need_it(is_detached):
    """A cross-entropy keeps its probabilities, so that plain PyTorch lets the matrix change."""

    def loss(q: Tensor, c: Tensor) -> Tensor:
        scores = q @ c.T
        halves = (scores.detach() if is_detached else scores) * 0.5 + c[:, 0]
        alias = scores.T.detach()  # The matrix is there from now on, which the halves are made of.
        first = F.cross_entropy(halves, ROWS, label_smoothing=0.1)
        alias.mul_(1.5)
        return first + (scores * 2).logsumexp(1).sum() * q.square().mean()

    rows = inputs("logsumexp")
    wanted = with_gradients(loss, rows)
    close(with_gradients(fastqt.fused(least_cells=1)(loss), rows), wanted, 1e-12)
