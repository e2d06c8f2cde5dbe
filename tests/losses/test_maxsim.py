"""MaxSim equals its definition, token by token, in value and in every gradient."""

import math

import pytest
import torch
import torch.nn.functional as F

import fastqt
from fastqt.losses import maxsim
from tests.shared.every_loss import maxsim as with_a_matrix
from tests.shared.loss_views import check
from tests.shared.ring_memory import Live
from tests.shared.tolerances import FLOAT32, FLOAT64, REORDERED_FLOAT32, relative

N, M, TQ, TD, D = 7, 11, 5, 6, 4
SMALL = [maxsim.Room(1, 1, 1), maxsim.Room(3 * TD, 2 * TQ * M, 2 * TD * D), maxsim.CPU_ROOM]


def inputs(dtype=torch.float64, seed=0):
    """The leaves, and masks with one query and two hard negatives that have no token."""
    generator = torch.Generator().manual_seed(seed)
    queries = torch.randn(N, TQ, D, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    documents = torch.randn(M, TD, D, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    scale = torch.tensor(2.3, dtype=torch.promote_types(dtype, torch.float32), requires_grad=True)
    query_mask = torch.rand(N, TQ, generator=generator) < 0.7
    document_mask = torch.rand(M, TD, generator=generator) < 0.7
    document_mask[:N, -1] = True
    query_mask[2], document_mask[-2:] = False, False
    return [queries, documents, scale], {"query_mask": query_mask, "document_mask": document_mask}


@pytest.mark.parametrize("room", SMALL, ids=["single", "few", "all"])
@pytest.mark.parametrize("masked", [True, False])
def test_is_the_definition(masked, room, monkeypatch):
    monkeypatch.setattr(maxsim, "CPU_ROOM", room)
    leaves, masks = inputs()
    if not masked:
        masks = {name: torch.ones_like(mask) for name, mask in masks.items()}
    queries, documents, scale = leaves
    kept = masks["document_mask"].any(1)  # a document without tokens is no candidate
    rows = with_a_matrix(queries, documents[kept], masks["query_mask"], masks["document_mask"][kept], scale)
    options = {"scale": scale, **(masks if masked else {})}
    for reduction, wanted in (("none", rows), ("sum", rows.sum()), ("mean", rows.mean())):
        check(fastqt.maxsim_loss(queries, documents, reduction=reduction, **options), wanted, leaves)
    unit = [F.normalize(x, dim=2) for x in (queries, documents)]
    check(fastqt.maxsim_loss(*unit, normalize=False, **options), rows.mean(), leaves)


@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("places", [2 * TQ * M, 2**19], ids=["two queries at a time", "all"])
def test_kernels_are_the_definition(places, masked, reduction, monkeypatch):
    """Interpreted, of float32, beside the same operations in float64."""
    leaves, masks = inputs(torch.float32)
    masks = masks if masked else {}
    exact = [x.detach().double().requires_grad_() for x in leaves]
    found = []
    for backend, of_backend in (("torch", exact), ("triton", leaves)):
        monkeypatch.setenv("FASTQT_BACKEND", backend)
        monkeypatch.setattr(maxsim, "CPU_ROOM", maxsim.CPU_ROOM._replace(places=places))
        loss = fastqt.maxsim_loss(*of_backend[:2], scale=of_backend[2], reduction=reduction, **masks)
        weights = torch.arange(1.0, 1.0 + loss.numel()).view(loss.shape).to(loss.dtype)
        found.append([loss, *torch.autograd.grad(loss, of_backend, weights)])
    for wanted, x in zip(*found, strict=True):
        assert relative(x, wanted) < FLOAT32


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("part", ["queries", "documents", "scale"])
def test_one_gradient_alone(part, backend, monkeypatch):
    monkeypatch.setenv("FASTQT_BACKEND", backend)
    leaves, masks = inputs(torch.float32)
    named = dict(zip(("queries", "documents", "scale"), leaves, strict=True))
    loss = fastqt.maxsim_loss(**named, **masks)
    (wanted,) = torch.autograd.grad(loss, named[part])
    alone = {name: x if name == part else x.detach() for name, x in named.items()}
    (found,) = torch.autograd.grad(fastqt.maxsim_loss(**alone, **masks), alone[part])
    assert relative(found, wanted) < REORDERED_FLOAT32


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e30])
def test_what_is_in_the_padding_does_not_count(value):
    leaves, masks = inputs(torch.float32)
    queries, documents, _ = leaves
    wanted = fastqt.maxsim_loss(queries, documents, **masks)
    gradients = torch.autograd.grad(wanted, leaves[:2])
    filled = [
        x.detach().masked_fill(~mask[:, :, None], value).requires_grad_()
        for x, mask in zip(leaves[:2], masks.values(), strict=True)
    ]
    found = fastqt.maxsim_loss(*filled, **masks)
    assert torch.equal(found, wanted)
    for a, b in zip(torch.autograd.grad(found, filled), gradients, strict=True):
        assert torch.equal(a, b)


def test_the_first_of_equal_tokens_has_the_gradient():
    # Products of small integers are exact in whatever order they are added up.
    documents = torch.randint(-3, 4, (4, 1, D)).float().repeat(1, 3, 1).requires_grad_()
    queries = torch.randint(-3, 4, (4, 2, D)).float()
    mask = torch.tensor([False, True, True]).expand(4, 3)
    for given, first in (({}, 0), ({"document_mask": mask}, 1)):
        (gradient,) = torch.autograd.grad(
            fastqt.maxsim_loss(queries, documents, scale=0.1, normalize=False, **given), documents
        )
        has_one = gradient.abs().sum((0, 2)) > 0
        assert has_one.tolist() == [u == first for u in range(3)]


def test_under_autocast_it_is_computed_in_float32():
    leaves, masks = inputs(torch.float32)
    wanted = fastqt.maxsim_loss(*leaves[:2], **masks)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = fastqt.maxsim_loss(*leaves[:2], **masks)
    assert torch.equal(found, wanted)


def test_no_tensor_is_larger_than_a_tile(monkeypatch):
    """Of tiles of 2**10 numbers, as the inputs are; all scores of tokens are 2**16."""
    monkeypatch.setattr(maxsim, "CPU_ROOM", maxsim.Room(2**10, 2**10, 2**10))
    queries, documents = (torch.randn(32, 8, 4, requires_grad=True) for _ in range(2))
    with Live(queries, documents) as live:
        fastqt.maxsim_loss(queries, documents).backward()
    assert live.most < 4 * 2**15


def mask(*shape, dtype=torch.bool):
    return torch.ones(*shape, dtype=dtype)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"queries": torch.ones(3, 4)}, ValueError, r"queries: want shape \(rows, tokens, D\), got \(3, 4\)"),
        ({"documents": torch.ones(4)}, ValueError, r"documents: want shape \(rows, tokens, D\), got \(4,\)$"),
        ({"documents": torch.ones(3, 0, 4)}, ValueError, "documents: want at least one token"),
        ({"documents": torch.ones(2, 5, 4)}, ValueError, "documents: want at least N=3 rows"),
        ({"documents": torch.ones(3, 5, 2)}, ValueError, "documents: want D=4 columns as queries has, got 2"),
        ({"documents": torch.ones(3, 5, 4).double()}, TypeError, "documents: want dtype torch.float32"),
        ({"query_mask": mask(3, 5)}, ValueError, r"query_mask: want shape \(3, 2\), one for each token, got"),
        ({"document_mask": mask(3, 5, 1)}, ValueError, r"document_mask: want shape \(3, 5\)"),
        ({"document_mask": mask(3, 5, dtype=torch.int64)}, TypeError, "document_mask: want dtype"),
        ({"document_mask": ~mask(3, 5)}, ValueError, "document_mask: want at least one token of the"),
    ],
)
def test_refuses_nonsense(changed, error, message):
    given = {"queries": torch.ones(3, 2, 4), "documents": torch.ones(3, 5, 4)}
    with pytest.raises(error, match=f"^{message}"):
        fastqt.maxsim_loss(**{**given, **changed})


def scores_by_tokens(queries, documents, query_mask, document_mask):
    """The definition with all scores of tokens, of norm 1."""
    queries, documents = (F.normalize(x, dim=2) for x in (queries, documents))
    cells = torch.einsum("ntd,mud->ntmu", queries, documents).masked_fill(~document_mask, -math.inf)
    return (cells.amax(3) * 1.0).masked_fill(~query_mask[:, :, None], 0).sum(1)


@pytest.mark.parametrize("room", SMALL, ids=["single", "few", "all"])
def test_scores_are_the_definition(room, monkeypatch):
    """A query without tokens scores 0, and a document without them is at minus infinity and moves nothing."""
    monkeypatch.setattr(maxsim, "CPU_ROOM", room)
    (queries, documents, _), masks = inputs()
    found = fastqt.maxsim_scores(queries, documents, **masks)
    empty = ~masks["document_mask"].any(1)
    with_tokens = {**masks, "document_mask": masks["document_mask"] | empty[:, None]}
    wanted = scores_by_tokens(queries, documents, **with_tokens)
    assert found[:, empty].isneginf().all()
    assert found[2, ~empty].eq(0).all()
    assert relative(found[:, ~empty], wanted[:, ~empty]) < FLOAT64

    weights = torch.randn(N, M, dtype=torch.float64)
    of_ours = torch.autograd.grad(found, (queries, documents), weights.masked_fill(empty, torch.nan))
    of_kept = torch.autograd.grad(wanted, (queries, documents), weights.masked_fill(empty, 0))
    assert all(relative(a, b) < FLOAT64 for a, b in zip(of_ours, of_kept, strict=True))


def test_scores_give_the_loss():
    (queries, documents, scale), _ = inputs()
    scores = scale * fastqt.maxsim_scores(queries, documents)
    check(
        fastqt.maxsim_loss(queries, documents, scale=scale), F.cross_entropy(scores, torch.arange(N)), [scale]
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_scores_of_16_bits_are_added_up_in_float32(dtype):
    (queries, documents, _), masks = inputs(dtype)
    found = fastqt.maxsim_scores(queries, documents, **masks)
    exact = [x.detach().double().requires_grad_() for x in (queries, documents)]
    wanted = fastqt.maxsim_scores(*exact, **masks)
    assert found.dtype is torch.float32
    kept = wanted.isfinite()
    assert relative(found[kept], wanted[kept]) < max(FLOAT32, torch.finfo(dtype).eps)
    weights = torch.randn(N, M)
    gradients = torch.autograd.grad(found, (queries, documents), weights)
    of_exact = torch.autograd.grad(wanted, exact, weights.double())
    assert all(
        relative(a, b) < max(FLOAT32, 4 * torch.finfo(dtype).eps)
        for a, b in zip(gradients, of_exact, strict=True)
    )


def test_scores_hold_no_scores_of_tokens(monkeypatch):
    """Beside the scores of texts, gradients and their sums: those of tokens would be 16 MiB."""
    monkeypatch.setattr(maxsim, "CPU_ROOM", maxsim.Room(2**16, 2**16, 2**16))
    queries, documents = (torch.randn(64, 32, 8, requires_grad=True) for _ in range(2))
    with Live(queries, documents) as live:
        fastqt.maxsim_scores(queries, documents).sum().backward()
    assert live.most < 4 * 2**20


def test_scores_are_refused_where_they_cannot_be():
    (queries, documents, _), masks = inputs()
    with pytest.raises(ValueError, match=r"^document_mask: want shape \(11, 6\), one for each token, got"):
        fastqt.maxsim_scores(queries, documents, document_mask=masks["document_mask"][:, 1:])
    with pytest.raises(ValueError, match=r"^documents: want shape \(rows, tokens, D\), got \(11, 4\)"):
        fastqt.maxsim_scores(queries, documents[:, 0])
    with pytest.raises(RuntimeError, match=r"^fastqt.maxsim_scores is differentiable once"):
        torch.autograd.grad(fastqt.maxsim_scores(queries, documents).sum(), queries, create_graph=True)
