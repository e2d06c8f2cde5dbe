"""Masks that a program makes in the block are never there, and are its own where it wants them."""

import io
import math
import random
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import fastqt
from fastqt.engines.cpu import contrastive
from fastqt.promises import walk
from fastqt.promises.ends import weights
from fastqt.promises.patterns import Equality, Pattern
from fastqt.promises.promise import Promise
from tests.promises.test_directions import Doubled, close
from tests.promises.test_fused import LargestTensor
from tests.shared.score_programs import made_mask

N, D = 64, 6
LABELS = torch.arange(N // 2) // 4
fused = fastqt.fused(least_cells=1)


def supcon(features: Tensor, labels: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
    """As SupContrast's losses.py computes it, line by line; features are (B, views, D)."""
    batch_size, contrast_count = features.shape[:2]
    if labels is not None:
        labels = labels.contiguous().view(-1, 1)
        mask = torch.eq(labels, labels.T).float().to(features.device)
    elif mask is None:
        mask = torch.eye(batch_size, dtype=torch.float32).to(features.device)
    contrast_feature = torch.cat(torch.unbind(features, dim=1), dim=0)
    anchor_dot_contrast = torch.div(torch.matmul(contrast_feature, contrast_feature.T), 0.07)
    logits_max, _ = torch.max(anchor_dot_contrast, dim=1, keepdim=True)
    logits = anchor_dot_contrast - logits_max.detach()
    mask = mask.repeat(contrast_count, contrast_count)
    logits_mask = torch.scatter(
        torch.ones_like(mask), 1, torch.arange(batch_size * contrast_count).view(-1, 1), 0
    )
    mask = mask * logits_mask
    exp_logits = torch.exp(logits) * logits_mask
    log_prob = logits - torch.log(exp_logits.sum(1, keepdim=True))
    mask_pos_pairs = mask.sum(1)
    mask_pos_pairs = torch.where(mask_pos_pairs < 1e-6, 1, mask_pos_pairs)
    mean_log_prob_pos = (mask * log_prob).sum(1) / mask_pos_pairs
    return -mean_log_prob_pos.view(contrast_count, batch_size).mean()


def of_labels(z: Tensor) -> Tensor:
    return supcon(F.normalize(z.view(N // 2, 2, D), dim=2), LABELS)


def of_views(z: Tensor) -> Tensor:
    return supcon(F.normalize(z.view(N // 2, 2, D), dim=2))


def of_two_classes(z: Tensor) -> Tensor:
    return supcon(z.view(N // 2, 2, D) / 3, torch.arange(N // 2) % 2)


def by_subtraction(z: Tensor) -> Tensor:
    z, labels, eye = F.normalize(z), torch.arange(N) // 4, torch.eye(N)
    positives = (labels[:, None] == labels[None, :]).float() - eye
    scores = torch.div(z @ z.T, 0.1)
    logits = scores - scores.max(dim=1, keepdim=True)[0].detach()
    sums = (torch.exp(logits) * (1 - eye)).sum(1, keepdim=True)
    return (-(positives * (logits - torch.log(sums))).sum(1) / positives.sum(1)).mean()


def simclr(z: Tensor) -> Tensor:
    scores = F.normalize(z) @ F.normalize(z).T / 0.5
    scores = scores.masked_fill(torch.eye(N, dtype=torch.bool), -math.inf)
    return F.cross_entropy(scores, (torch.arange(N) + N // 2) % N)


def simclr_in_place(z: Tensor) -> Tensor:
    scores = z @ z.T / 2
    scores.masked_fill_(torch.eye(N).bool(), -9e15)
    return F.cross_entropy(scores, (torch.arange(N) + N // 2) % N)


def simclr_chosen(z: Tensor) -> Tensor:
    scores = z @ z.T / 2
    scores[torch.eye(N, dtype=torch.bool)] = -1e9
    others = torch.where(~torch.eye(N, dtype=torch.bool), z @ z.T, -math.inf)
    return F.cross_entropy(scores, (torch.arange(N) + N // 2) % N) + others.logsumexp(1).mean()


def soft_targets(z: Tensor) -> Tensor:
    labels = torch.arange(N) // 4
    weights = torch.eq(labels[:, None], labels).to(z.dtype)
    log_p = (z @ z.T / 8).log_softmax(dim=1)
    return -(weights * log_p).sum(dim=1).mean() - (log_p * torch.eye(N)).sum()


def weighted_scores(z: Tensor) -> Tensor:
    """Of means of classes, with weights of both signs."""
    labels = torch.arange(N) // 4
    weights = (labels[:, None] == labels).float() / 4 - 0.5 * torch.eye(N) + 0.25
    scores = z @ z.T / 3 + z[:, 0]
    return (scores * weights).sum(1).square().mean()


def sigmoids(z: Tensor) -> Tensor:
    """With labels of 1 and -1, and of 1 and 0."""
    eye, labels = torch.eye(N), torch.arange(N) // 4
    scores = F.normalize(z) @ F.normalize(z).T * 10 - 10
    same = (labels[:, None] == labels).to(z.dtype)
    losses = F.binary_cross_entropy_with_logits(scores, same) + F.binary_cross_entropy_with_logits(
        scores, eye.to(z.dtype), reduction="sum"
    )
    return losses - F.logsigmoid((2 * eye - torch.ones_like(eye)) * scores).sum() / N


def probabilities(z: Tensor) -> Tensor:
    labels = torch.arange(N) // 4
    same = (labels[:, None] == labels).to(z.dtype)
    scores = z @ z.T / 4
    loss = (
        F.cross_entropy(scores, same / 4)
        + F.cross_entropy(scores, same * 0.5, reduction="none").square().mean()
    )
    log_p = scores.log_softmax(1)
    return (
        loss
        + F.kl_div(log_p, same * 0.25, reduction="batchmean")
        + F.kl_div(log_p, torch.eye(N).to(z.dtype), reduction="sum")
    )


ONE_CALL = (of_labels, of_views, of_two_classes, by_subtraction)
LOSSES = (
    *(*ONE_CALL, simclr, simclr_in_place, simclr_chosen, soft_targets, weighted_scores, sigmoids),
    probabilities,
)
each = pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)


def rows(noise: float = 1.0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Embeddings; with little noise those of a trained model, in which views and labels are alike."""
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(N // 8, D, generator=generator, dtype=torch.float64).repeat_interleave(8, 0)
    return (centres + noise * torch.randn(N, D, generator=generator, dtype=torch.float64)).to(dtype)


def results(loss: Callable[[Tensor], Tensor], z: Tensor) -> list[Tensor]:
    z = z.clone().requires_grad_()
    value = loss(z)
    return [value.detach(), *torch.autograd.grad(value, [z])]


class Matrices(TorchDispatchMode):
    """The functions that make a tensor of N x N cells, of any dtype, and the operators of fastqt."""

    def __init__(self) -> None:
        super().__init__()
        self.functions: set[str] = set()
        self.calls: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if "fastqt" in str(func):
            self.calls.add(str(func))
        elif isinstance(made, Tensor) and made.numel() >= N * N:
            self.functions.add(str(func))
        return made


@each
@pytest.mark.parametrize("noise", [1.0, 1e-3])
def test_a_loss_has_its_own_values_and_no_matrix_of_any_kind(loss, noise, monkeypatch):
    """Also of a trained model."""
    monkeypatch.setattr(contrastive, "KEPT_BYTES", 0)
    wanted = results(loss, rows(noise))
    with Matrices() as matrices, fastqt.fused(strict=True, least_cells=1) as report:
        found = results(loss, rows(noise))
    close(found, wanted, 1e-11)
    assert not matrices.functions
    assert report.fused


@pytest.mark.parametrize("loss", ONE_CALL, ids=lambda loss: loss.__name__)
def test_weighted_log_probabilities_are_one_loss(loss):
    """Neither the largest score of a row nor its logsumexp is computed by itself, and no gradient later."""
    with Matrices() as matrices, fastqt.fused(strict=True, least_cells=1) as report:
        results(loss, rows())
    assert str(report).endswith(": mean fused into fastqt.contrastive_loss")
    assert report.fused == 1
    assert matrices.calls == {"fastqt.contrastive_loss_with_gradients.default"}


def sums_that_are_used(z: Tensor) -> Tensor:
    """By number, by shape, through a view, and with factors that are of both signs or learnt."""
    weights = (torch.arange(N)[:, None] // 4 == torch.arange(N) // 4).to(z.dtype) - torch.eye(N)
    log_p = (z @ z.T / 4).log_softmax(dim=1)
    counts = weights.sum(1)
    sums = (weights * log_p).sum(1) / counts
    with torch.no_grad():
        assert float(sums.mean()) < 0
    signs = torch.linspace(-1, 1, N, dtype=z.dtype)
    of_both = ((weights * log_p).sum(1) * signs).sum()
    learnt = (z[:, 0] * (weights * log_p).sum(1)).mean()
    view = -(log_p * weights).sum(1, keepdim=True).view(2, -1) / 3
    columns = (weights * log_p).mean(1) * 2
    columns += 1
    others = sums.view(-1, 2)[1].sum() + sums.square().sum()
    return of_both + learnt + view.sum() + columns.mean(dim=0) + others


def test_sums_of_rows_that_a_program_looks_at():
    wanted = results(sums_that_are_used, rows())
    with fastqt.fused(strict=True, least_cells=1):
        close(results(sums_that_are_used, rows()), wanted, 1e-11)


def test_sums_of_rows_that_leave_the_block_are_tensors():
    z, mask = rows(), torch.arange(N)[:, None] // 4 == torch.arange(N) // 4
    with fused:
        made = torch.arange(N)[:, None] // 4 == torch.arange(N) // 4
        sums = ((z @ z.T).log_softmax(1) * made).sum(1)
        assert type(sums) is Promise
        infinite = (sums / torch.zeros(N, dtype=z.dtype)).sum()
    assert type(sums) is Tensor
    torch.testing.assert_close(sums, ((z @ z.T).log_softmax(1) * mask).sum(1))
    assert infinite == -math.inf


def test_a_mask_that_is_looked_at_is_made_once():
    """By its integers. What it was made of is never there."""
    same = torch.arange(N)[:, None] // 4 == torch.arange(N) // 4
    with Matrices() as matrices, fused:
        labels = torch.arange(N) // 4
        others = ((1 - torch.eye(N)) * (labels[:, None] == labels)).bool()
        assert not matrices.functions
        looked_at = others.numpy()
    assert matrices.functions <= {"aten.eq.Tensor", "aten.where.self", "aten.detach.default"}
    assert (torch.from_numpy(looked_at) == same & ~torch.eye(N).bool()).all()


@each
def test_classes_of_which_no_list_fits(loss, monkeypatch):
    monkeypatch.setattr(contrastive, "KEPT_BYTES", 0)
    monkeypatch.setattr(weights, "MOST_ENTRIES", N // 2)
    wanted = results(loss, rows())
    with Matrices() as matrices, fused:
        close(results(loss, rows()), wanted, 1e-11)
    # The sigmoid loss has targets as a list or as a matrix.
    assert loss is sigmoids or not matrices.functions


@each
@pytest.mark.parametrize("noise", [1.0, 1e-3])
def test_in_float32_it_is_as_exact_as_the_program(loss, noise):
    exact = results(loss, rows(noise))
    plain = results(loss, rows(noise, torch.float32))
    with fused:
        found = results(loss, rows(noise, torch.float32))
    largest = max(float(x.abs().max()) for x in exact)
    for x, y, wanted in zip(found, plain, exact, strict=True):
        assert x.dtype is y.dtype
        ours, theirs = (float((a.double() - wanted).abs().max()) for a in (x, y))
        assert ours <= theirs + 1e-6 * largest


def test_largest_scores_that_a_program_looks_at():
    """They are computed once, and taken off as the numbers that they are."""

    def loss(z: Tensor) -> Tensor:
        scores = z @ z.T
        largest, places = scores.max(dim=1, keepdim=True)
        log_p = (scores - largest.detach()).log_softmax(dim=1)
        assert (scores == largest).sum() >= N
        return log_p.gather(1, places).sum() + (largest * z[:, :1]).sum() + (scores - largest).exp().mean()

    wanted = results(loss, rows())
    with fused:
        close(results(loss, rows()), wanted, 1e-11)


def test_sums_of_exponentials_that_a_program_looks_at():
    def loss(z: Tensor) -> Tensor:
        exponentials = (z @ z.T / 4).exp()
        sums = exponentials.sum(1, keepdim=True)
        with torch.no_grad():
            assert (sums.log() > 0).all()
        shares = exponentials / sums
        return sums.log().square().mean() + (1 / sums).sum() + shares.square().sum() + sums.detach().sum()

    wanted = results(loss, rows())
    with fused:
        close(results(loss, rows()), wanted, 1e-11)


def test_numbers_of_other_scores_do_not_cancel():
    """The largest ones taken off twice, those of another matrix, and logarithms of another matrix's sums."""

    def loss(z: Tensor) -> Tensor:
        eye = torch.eye(N, dtype=z.dtype)
        scores, others = z @ z.T / 4, 2 * z @ z.T / 4
        largest = scores.max(dim=1, keepdim=True).values.detach()
        twice = ((scores - largest - largest).exp() * (1 - eye)).sum(1, keepdim=True)
        logits = scores - others.amax(1, keepdim=True).detach() - others.max(1, keepdim=True)[0].detach()
        sums = (others.exp() * (1 - eye)).sum(1, keepdim=True)
        shares = [
            scores - sums.log(),
            scores - twice.log(),
            logits - (logits.exp() * (1 - eye)).sum(1, True).log(),
        ]
        weights = (torch.arange(N)[:, None] // 4 == torch.arange(N) // 4).to(z.dtype) - eye
        return sum((weights * x).sum(1).square().mean() for x in shares)

    wanted = results(loss, rows())
    with fused:
        close(results(loss, rows()), wanted, 1e-11)


def test_logarithms_that_are_read_without_gradients_have_them():
    def loss(z: Tensor) -> Tensor:
        exponentials = (z @ z.T / 4).exp()
        sums = exponentials.sum(1, keepdim=True)
        log_p = z @ z.T / 4 - sums.log()
        with torch.no_grad():
            (torch.eye(N, dtype=z.dtype) * log_p).sum(1).mean().item()
            assert float(sums.log().sum()) > 0
        return -(torch.eye(N, dtype=z.dtype) * log_p).sum(1).mean() + sums.log().square().sum()

    wanted = results(loss, rows())
    with fused:
        close(results(loss, rows()), wanted, 1e-11)


def test_weights_of_cells_that_have_left_the_sum():
    def loss(z: Tensor) -> Tensor:
        scores, eye = z @ z.T / 4, torch.eye(N, dtype=z.dtype)
        log_p = scores - (scores.exp() * (1 - eye)).sum(1, keepdim=True).log()
        same = (torch.arange(N)[:, None] // 4 == torch.arange(N) // 4).to(z.dtype)
        return -(same * log_p).sum(1).square().mean()

    wanted = results(loss, rows())
    with fused:
        close(results(loss, rows()), wanted, 1e-11)


def test_walks_over_scores_less_numbers_that_wait():
    def loss(z: Tensor) -> Tensor:
        scores = z @ z.T / 4
        log_p = scores - scores.exp().sum(1, keepdim=True).log()
        return log_p.sigmoid().sum() + (scores - scores.max(1, True)[0].detach()).tanh().square().mean()

    wanted = results(loss, rows())
    with fastqt.fused(strict=True, least_cells=1):
        close(results(loss, rows()), wanted, 1e-11)


def test_a_number_on_the_diagonal_that_is_seen():
    """Beside scores of a million a number of minus twenty thousand is one among others."""

    def loss(z: Tensor) -> Tensor:
        scores = -(100 * z.abs()) @ (100 * z.abs()).T
        eye = torch.eye(N, dtype=torch.bool)
        seen = scores.masked_fill(eye, -2e4).logsumexp(1).mean()
        return seen + torch.where(eye, -2e4, scores).logsumexp(1).square().mean()

    wanted = results(loss, rows())
    with fused:
        close(results(loss, rows()), wanted, 1e-11)


def test_a_change_that_needs_another_dtype_is_refused_as_outside():
    with fused:
        mask = torch.eye(N, dtype=torch.bool)
        with pytest.raises(RuntimeError, match="can't be cast"):
            mask.mul_(2.0)
        assert torch.equal(mask, torch.eye(N).bool())


def test_scores_that_a_function_of_autograd_has():
    """Their gradients go through it, also where a mask is applied to them afterwards."""

    def loss(z: Tensor) -> Tensor:
        scores, eye = z @ z.T / 4, torch.eye(N, dtype=torch.bool)
        doubled = Doubled.apply(scores)
        masked = doubled.masked_fill(eye, -math.inf).logsumexp(1) + scores.masked_fill(
            eye, -math.inf
        ).logsumexp(1)
        return masked.square().mean() + (doubled * eye).sum()

    wanted = results(loss, rows())
    with fused:
        close(results(loss, rows()), wanted, 1e-11)


def changed(mask: Tensor) -> Tensor:
    turned = mask.T
    mask.fill_diagonal_(0)
    turned[0] = 1
    return mask.clone()


def saved(mask: Tensor) -> Tensor:
    file = io.BytesIO()
    torch.save(mask, file)
    file.seek(0)
    return torch.load(file)


USES: dict[str, Callable[[Tensor], object]] = {
    "its form": lambda m: (m.shape, len(m), m.dtype, m.dim(), m.requires_grad, m.is_leaf, m.stride()),
    "numpy": lambda m: m.numpy().tolist(),
    "repr": repr,
    "nonzero": lambda m: (m.nonzero(), *torch.where(m)),
    "selects": lambda m: torch.arange(N * N).view(N, N)[m.bool()],
    "sums": lambda m: (m.sum(), m.sum(0), m.sum(1), m.sum(dim=-1, keepdim=True), m.float().mean(1)),
    "any": lambda m: (m.any(1), m.all(0), bool((m == m.T).all())),
    "set by one": lambda m: (m.__setitem__((3, 4), 1), m.clone())[1],
    "changed": changed,
    "saved": saved,
    "out": lambda m: torch.logical_not(m, out=torch.empty(N, N, dtype=torch.bool)),
    "into": lambda m: torch.zeros(N, N).masked_fill_(m.bool(), 2.0),
    "view": lambda m: m.view(-1)[1:].view(N - 1, N + 1)[:, :-1],
    "times rows": lambda m: m.double() @ torch.ones(N, 2, dtype=torch.float64),
    "with a gradient": lambda m: torch.autograd.grad(
        (m.double() * (x := torch.ones(N, N, dtype=torch.float64, requires_grad=True))).sum(), x
    )[0],
    "as a parameter": lambda m: m.double().requires_grad_().square().sum().backward(),
    "stacked": lambda m: torch.stack([m, m]).sum(0),
    "data": lambda m: m.data.clone(),
    "cpu": lambda m: m.cpu().to("cpu").to(torch.device("cpu"), torch.float64),
    "added rows": lambda m: m + torch.arange(N),
    "divided": lambda m: (m.float() / 3, 1 / (1 + m.float()), m.double() / m.sum(1, keepdim=True)),
}
MASKS: dict[str, Callable[[], Tensor]] = {
    "eye": lambda: torch.eye(N, dtype=torch.bool),
    "equal labels": lambda: torch.eq((torch.arange(N) // 4)[:, None], torch.arange(N) // 4),
    "numbers": lambda: (torch.arange(N)[:, None] % 3 != torch.arange(N) % 3).float() * 2 - torch.eye(N),
    "wide": lambda: torch.eye(N, N + 3, dtype=torch.int64)[:, :N].contiguous(),
}


def alike(found: object, wanted: object) -> None:
    if isinstance(wanted, tuple):
        for x, y in zip(found, wanted, strict=True):
            alike(x, y)
    elif isinstance(wanted, Tensor):
        assert found.dtype == wanted.dtype
        assert torch.equal(found, wanted)
    else:
        assert found == wanted


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("name", MASKS)
def test_masks_answer_as_their_tensors(name, use):
    """To the bit, in the block and after it."""
    wanted = USES[use](MASKS[name]())
    with fused:
        kept, mask = MASKS[name](), MASKS[name]()
        alike(USES[use](mask), wanted)
    alike(USES[use](kept), wanted)


def test_labels_that_change_afterwards_are_those_of_before():
    """In the block and outside of it: a mask is of the labels that there were."""
    labels, later = torch.arange(N) // 4, torch.arange(N) // 4
    wanted = labels[:, None] == labels
    with fused:
        mask, other = labels[:, None] == labels, later[:, None] != later
        labels.zero_()
        assert torch.equal(mask, wanted)
    later.fill_(3)
    assert type(other) is Promise
    assert torch.equal(other, ~wanted)


def test_small_masks_and_numbers_are_computed():
    floats = torch.arange(300.0)
    with fastqt.fused():
        made = (torch.eye(255), floats[:, None] == floats, torch.eye(300, 300).requires_grad_(), floats == 3)
        assert {type(x) for x in made} == {Tensor}
        assert type(torch.eye(300)) is Promise


def test_random_masks():
    """Of up to three equalities, to the bit; and sums over what they weigh."""
    for seed in range(400):
        wanted = made_mask(random.Random(seed), N, torch.float64)
        with fused:
            choices = random.Random(seed)
            mask = made_mask(choices, N, torch.float64)
            if choices.random() < 0.5:
                mask.is_contiguous()  # makes it a tensor
            other = torch.where(torch.eye(N, dtype=torch.bool), 2, 0) - mask.double()
            assert torch.equal(other.sum(1), torch.eye(N).mul(2).sub(wanted.double()).sum(1).double()), seed
        assert torch.equal(mask, wanted), seed


@pytest.mark.parametrize("ends_in", ["log_softmax", "scores"])
def test_random_weights(ends_in):
    """Also below 0, of lists and of sums of classes."""
    z = rows()[:, :3] / 2
    for seed in range(60):

        def loss(z: Tensor, seed: int = seed) -> Tensor:
            choices = random.Random(seed)
            masks = [made_mask(choices, N, z.dtype).to(z.dtype) for _ in range(2)]
            weights = masks[0] * choices.choice((1.0, -0.5)) + masks[1] - 1 * torch.eye(N, dtype=z.dtype)
            cells = (z @ z.T).log_softmax(1) if ends_in == "log_softmax" else z @ z.T
            return (weights * cells).sum(dim=1).square().mean()

        wanted = results(loss, z)
        with fused:
            close(results(loss, z), wanted, 1e-11)


def test_equalities_that_broadcast_otherwise():
    """Rows that columns repeat, and columns that rows repeat."""
    ids = torch.arange(N) % 5
    pairs = (
        (ids[:, None], ids[:1]),
        (ids[:1, None], ids.expand(3, N)),
        (ids[:, None].expand(N, 3), ids[:3]),
        (ids[:, None].expand(N, 3), ids[:1, None]),
        (ids[:, None].int(), ids.int()),
        (ids, ids[:, None]),
        (ids.expand(N, N), ids[:7, None].expand(7, N).repeat_interleave(10, 0)[:N]),
    )
    for a, b in pairs:
        wanted = a == b, torch.ne(a, b)
        with fused:
            found = a == b, torch.ne(a, b)
            assert [x.shape for x in found] == [x.shape for x in wanted]
        for x, y in zip(found, wanted, strict=True):
            assert torch.equal(x, y)


def test_lists_of_cells_are_those_of_the_matrix():
    """Of all equalities that weights may be of, where other cells than those of one of them are 0, too."""
    ids = [torch.arange(N), torch.arange(N) // 4, torch.arange(N) % 3]
    generator = torch.Generator().manual_seed(0)
    for seed in range(60):
        count = seed % 4
        equalities = tuple(Equality(x, x, is_diagonal=x is ids[0]) for x in ids[:count])
        numbers = torch.randint(-1, 2, (2,) * count or (1,), generator=generator).double()
        numbers.view(-1)[0] = 0
        mask = Pattern((N, N), equalities, numbers, torch.device("cpu"))
        cells = mask.cells()

        places = cells.nonzero(as_tuple=True)
        entries = mask.entries(N * N)
        assert entries is not None
        for x, y in zip(entries, (*places, cells[places]), strict=True):
            assert torch.equal(x, y), (count, numbers)
        torch.testing.assert_close(mask.sums(), cells.sum(1))
        assert not mask.is_zero_on_diagonal or not cells.diagonal().any()


def hardest_in_batch(z: Tensor) -> Tensor:
    """As sentence-transformers keeps positives from being the hardest negatives, and a matrix of its own."""
    scores, labels = z @ z.T, torch.arange(N) // 4
    same = (labels[:, None] == labels).to(z.dtype)
    largest, _ = scores.max(1, keepdim=True)
    hardest, _ = (scores + largest * same).min(1, keepdim=True)
    of_rows = z[:, :1] * same
    return (hardest + of_rows.exp().logsumexp(1, keepdim=True)).square().mean() + of_rows.sin().sum()


def test_numbers_of_rows_times_a_mask_are_no_matrix(monkeypatch):
    monkeypatch.setattr(walk, "CELLS_AT_ONCE", N * N // 4)
    z = rows()[:, :3] / 2
    wanted = results(hardest_in_batch, z)
    with LargestTensor() as tensors, fastqt.fused(strict=True, least_cells=1):
        close(results(hardest_in_batch, z), wanted, 1e-12)
    assert tensors.most < N * N
    with fused:
        kept = z[:, :1] * (LABELS[:, None] == LABELS).repeat(2, 2)
    assert torch.equal(kept, z[:, :1] * (LABELS[:, None] == LABELS).repeat(2, 2))
