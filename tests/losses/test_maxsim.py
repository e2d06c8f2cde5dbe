"""MaxSim equals its definition, token by token, in value and in every gradient."""

import math
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fastqt
from fastqt.losses import maxsim
from tests.shared.every_loss import maxsim as with_a_matrix
from tests.shared.loss_views import check
from tests.shared.tolerances import FLOAT32, FLOAT64, relative

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


def oracle(queries, documents, scale, query_mask, document_mask, normalize):
    """Losses and gradients of their sum, in numpy, a pair of texts after the other."""
    q, d = (x.detach().double().numpy() for x in (queries, documents))
    scale = scale.item()
    norms = [
        np.linalg.norm(x, axis=2, keepdims=True) if normalize else np.ones((*x.shape[:2], 1)) for x in (q, d)
    ]
    a, b = q / norms[0], d / norms[1]
    losses, da, db, d_scale = np.zeros(len(q)), np.zeros_like(a), np.zeros_like(b), 0.0
    for i in range(len(q)):
        scores, best = np.full(len(d), -np.inf), {}
        for j in range(len(d)):
            tokens = np.flatnonzero(document_mask[j])
            if len(tokens):
                scores[j] = 0
            for t in np.flatnonzero(query_mask[i]) if len(tokens) else ():
                products = b[j, tokens] @ a[i, t]
                best[t, j] = tokens[int(products.argmax())]
                scores[j] += products.max()
        logits = scale * scores
        P = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
        losses[i] = np.log(np.exp(logits - logits.max()).sum()) + logits.max() - logits[i]
        P[i] -= 1
        d_scale += (P * np.where(np.isfinite(scores), scores, 0)).sum()
        for (t, j), u in best.items():
            da[i, t] += scale * P[j] * b[j, u]
            db[j, u] += scale * P[j] * a[i, t]
    if normalize:
        da, db = (
            (g - x * (g * x).sum(2, keepdims=True)) / norm
            for g, x, norm in zip((da, db), (a, b), norms, strict=True)
        )
    return losses, [da, db, np.array(d_scale)]


@pytest.mark.parametrize("room", SMALL, ids=["single", "few", "all"])
@pytest.mark.parametrize("normalize", [True, False])
def test_is_the_definition(normalize, room, monkeypatch):
    monkeypatch.setattr(maxsim, "CPU_ROOM", room)
    leaves, masks = inputs()
    losses, gradients = oracle(*leaves, **masks, normalize=normalize)
    queries, documents, scale = leaves
    options = {"scale": scale, "normalize": normalize, **masks}

    found = fastqt.maxsim_loss(queries, documents, reduction="none", **options)
    assert relative(found, losses) < FLOAT64
    for reduction, times in (("none", 1), ("sum", 1), ("mean", N)):
        value = fastqt.maxsim_loss(queries, documents, reduction=reduction, **options).sum()
        assert relative(times * value, losses.sum()) < FLOAT64
        for g, wanted in zip(torch.autograd.grad(times * value, leaves), gradients, strict=True):
            assert relative(g, wanted) < FLOAT64


def test_all_tokens_count_without_masks():
    leaves, _ = inputs()
    queries, documents, scale = leaves
    every = [torch.ones(x.shape[:2], dtype=torch.bool) for x in (queries, documents)]
    rows = with_a_matrix(queries, documents, *every, scale)
    check(fastqt.maxsim_loss(queries, documents, scale=scale), rows.mean(), leaves)


@pytest.mark.parametrize("part", ["queries", "documents", "scale"])
def test_one_gradient_alone(part):
    leaves, masks = inputs()
    named = dict(zip(("queries", "documents", "scale"), leaves, strict=True))
    loss = fastqt.maxsim_loss(**named, **masks)
    (wanted,) = torch.autograd.grad(loss, named[part])
    alone = {name: x if name == part else x.detach() for name, x in named.items()}
    (found,) = torch.autograd.grad(fastqt.maxsim_loss(**alone, **masks), alone[part])
    assert relative(found, wanted) < FLOAT64


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
    documents = torch.randn(4, 1, D).repeat(1, 3, 1).requires_grad_()
    queries = torch.randn(4, 2, D)
    mask = torch.tensor([False, True, True]).expand(4, 3)
    for given, first in (({}, 0), ({"document_mask": mask}, 1)):
        (gradient,) = torch.autograd.grad(fastqt.maxsim_loss(queries, documents, **given), documents)
        has_one = gradient.abs().sum((0, 2)) > 0
        assert has_one.tolist() == [u == first for u in range(3)]


def test_equal_calls_have_equal_bits():
    leaves, masks = inputs(torch.float32)
    queries, documents, scale = leaves

    def call():
        loss = fastqt.maxsim_loss(queries, documents, scale=scale, **masks)
        return [loss, *torch.autograd.grad(loss, leaves)]

    assert all(torch.equal(a, b) for a, b in zip(call(), call(), strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_learnt_pairs_keep_their_digits(dtype):
    """Losses of about 1e-6, which the logsumexp of all scores in float32 would lose."""
    generator = torch.Generator().manual_seed(0)
    documents = F.normalize(torch.randn(8, 6, 16, generator=generator), dim=2).to(dtype)
    leaves = [x.clone().requires_grad_() for x in (documents[:, :4], documents)]
    every = [torch.ones(x.shape[:2], dtype=torch.bool) for x in leaves]
    exact = [x.detach().double().requires_grad_() for x in leaves]
    loss = fastqt.maxsim_loss(*leaves, scale=6.0, reduction="none")
    wanted = with_a_matrix(*exact, *every, 6.0)
    assert 0 < wanted.max() < 1e-3
    assert relative(loss, wanted) < FLOAT32
    gradients = torch.autograd.grad(loss.sum(), leaves)
    # Two roundings to 16 bits at most; the gradient of norms leaves a difference of numbers of its size.
    tolerance = 2e-4 if dtype is torch.float32 else 3 * torch.finfo(dtype).eps
    for a, b in zip(gradients, torch.autograd.grad(wanted.sum(), exact), strict=True):
        assert relative(a, b) < tolerance


def test_under_autocast_it_is_computed_in_float32():
    leaves, masks = inputs(torch.float32)
    wanted = fastqt.maxsim_loss(*leaves[:2], **masks)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = fastqt.maxsim_loss(*leaves[:2], **masks)
    assert torch.equal(found, wanted)


def test_a_second_derivative_is_refused_in_words():
    leaves, masks = inputs()
    (gradient,) = torch.autograd.grad(
        fastqt.maxsim_loss(*leaves[:2], scale=leaves[2], **masks) ** 2, leaves[2], create_graph=False
    )
    assert gradient.isfinite()
    with pytest.raises(RuntimeError, match=r"fastqt.maxsim_loss is differentiable once"):
        torch.autograd.grad(
            fastqt.maxsim_loss(*leaves[:2], scale=leaves[2], **masks), leaves[2], create_graph=True
        )


PEAK = """
import resource, torch, fastqt
def call(N):
    queries, documents = (torch.randn(N, 32, 16, requires_grad=True) for _ in range(2))
    mask = torch.arange(32).expand(N, 32) < 30
    fastqt.maxsim_loss(queries, documents, document_mask=mask).backward()
call(4)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
call({N})
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""


@pytest.mark.slow
def test_no_matrix_of_tokens():
    """At N = 256 inputs and gradients are 2 MiB, and the tokens' scores would be 256 MiB."""
    run = subprocess.run(
        [sys.executable, "-c", PEAK.format(N=256)], capture_output=True, text=True, check=True
    )
    assert float(run.stdout) < 48


class Largest(TorchDispatchMode):
    """The most elements of a tensor that an operation returns."""

    most = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        tensors = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
        self.most = max([self.most, *(x.numel() for x in tensors)])
        return out


@pytest.mark.parametrize("wants", [False, True])
def test_no_tensor_is_larger_than_a_tile(wants, monkeypatch):
    monkeypatch.setattr(maxsim, "CPU_ROOM", maxsim.Room(2**10, 2**10, 2**10))
    queries, documents = (torch.randn(32, 8, 4, requires_grad=wants) for _ in range(2))
    with Largest() as largest:
        loss = fastqt.maxsim_loss(queries, documents)
        if wants:
            loss.backward()
    assert largest.most <= 2**10  # which inputs have too; all scores of tokens are 2**16


def mask(*shape, dtype=torch.bool):
    return torch.ones(*shape, dtype=dtype)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        (
            {"queries": torch.ones(3, 4)},
            ValueError,
            r"queries: want shape \(rows, tokens, D\), got \(3, 4\); give",
        ),
        ({"documents": torch.ones(4)}, ValueError, r"documents: want shape \(rows, tokens, D\), got \(4,\)$"),
        ({"documents": torch.ones(3, 0, 4)}, ValueError, "documents: want at least one row, one token"),
        ({"documents": torch.ones(2, 5, 4)}, ValueError, "documents: want at least N=3 rows"),
        ({"documents": torch.ones(3, 5, 2)}, ValueError, "documents: want D=4 columns as queries has, got 2"),
        ({"documents": torch.ones(3, 5, 4).double()}, TypeError, "documents: want dtype torch.float32"),
        ({"queries": torch.ones(3, 2, 4).long()}, TypeError, "queries: want a floating-point dtype"),
        ({"queries": [1.0]}, TypeError, "queries: want a tensor, got list"),
        ({"query_mask": mask(3, 5)}, ValueError, r"query_mask: want shape \(3, 2\), one for each token, got"),
        ({"document_mask": mask(3, 5, 1)}, ValueError, r"document_mask: want shape \(3, 5\)"),
        (
            {"document_mask": mask(3, 5, dtype=torch.int64)},
            TypeError,
            r"document_mask: want dtype torch.bool",
        ),
        (
            {"document_mask": ~mask(3, 5)},
            ValueError,
            "document_mask: want at least one token of the document",
        ),
        ({"query_mask": "all"}, TypeError, "query_mask: want a tensor, got str"),
        ({"scale": -1.0}, ValueError, "scale: want a positive number"),
        ({"scale": math.nan}, ValueError, "scale: want a finite number"),
        ({"normalize": 1}, TypeError, "normalize: want True or False, got 1"),
        ({"reduction": "max"}, ValueError, "reduction: want one of"),
    ],
)
def test_refuses_nonsense(changed, error, message):
    given = {"queries": torch.ones(3, 2, 4), "documents": torch.ones(3, 5, 4)}
    with pytest.raises(error, match=f"^{message}"):
        fastqt.maxsim_loss(**{**given, **changed})
