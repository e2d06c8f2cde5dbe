"""Losses of several prefixes of the embeddings: their sum, in the products of one loss."""

import re
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad, vmap
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fastqt
from fastqt.engines import ENGINES
from fastqt.engines.chunked import walk
from fastqt.engines.chunked.prefixes import PrefixWalk
from fastqt.engines.cpu import contrastive
from tests.shared.cases import CASES, Case
from tests.shared.tolerances import FLOAT32, FLOAT64, REORDERED, UNIT_ROUNDOFF, relative

DIMS, WEIGHTS = (1, 2, 5), (1.0, 0.5, 3.0)  # The last of the D = 6 columns is in no prefix.
OPTIONS = {"matryoshka": fastqt.Matryoshka(DIMS, WEIGHTS)}
EMBEDDINGS = ("queries", "candidates", "negatives", "row_negatives")
BACKENDS = [name for name, engine in ENGINES.items() if "matryoshka" in engine.takes]
TAKEN = [case for case in CASES if case.link != "log_sum_exp"]


def unit(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same with rows of norm 1, differentiably."""
    return {name: x / x.norm(dim=-1, keepdim=True) if name in EMBEDDINGS else x for name, x in inputs.items()}


def truth(case: Case, inputs: dict[str, Tensor], normalize: bool) -> tuple[Tensor, list[Tensor]]:
    """The weighted sum of the oracle's losses of rows, and its gradients, through each prefix's norms."""
    leaves = {name: x.detach().double().requires_grad_() for name, x in inputs.items()}
    losses, roots, gradients = 0.0, [], []
    for dim, weight in zip(DIMS, WEIGHTS, strict=True):
        prefix = {name: x[..., :dim] if name in EMBEDDINGS else x for name, x in leaves.items()}
        prefix = unit(prefix) if normalize else prefix
        result = case.expected(prefix, row_weights=np.full(len(inputs["queries"]), weight))
        losses = losses + weight * torch.from_numpy(result.loss)
        roots += prefix.values()
        gradients += [
            torch.as_tensor(getattr(result, name)).double().view(x.shape) for name, x in prefix.items()
        ]
    return losses, list(torch.autograd.grad(roots, list(leaves.values()), gradients))


@pytest.fixture(params=["whole", "a few rows"])
def rows_of_a_chunk(request, monkeypatch):
    if request.param != "whole":
        monkeypatch.setattr(walk, "ROOM", {"cpu": (2000, 2000)})
        monkeypatch.setattr(contrastive, "CHUNK_BYTES", 2000)
        monkeypatch.setattr(contrastive, "MIN_CHUNK_ROWS", 1)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("case", TAKEN, ids=lambda case: case.name)
@pytest.mark.usefixtures("rows_of_a_chunk")
@pytest.mark.thinned(3)
def test_value_and_gradients_are_the_oracles(case, normalize, backend):
    inputs = case.inputs(torch.float64)
    # Beside scores that are given they are joined to one cell, and each prefix is a loss of its own.
    alone = case.tensors.count("row_negatives") and not case.tensors.count("row_scores")
    if backend == "cpu" and alone and inputs["row_negatives"].dim() == 2:
        with pytest.raises(ValueError, match=r"^backend: 'cpu' is not available: .* beside row_negatives"):
            case.loss(inputs, backend=backend, **OPTIONS)
        return
    found = case.loss(inputs, normalize=normalize, reduction="none", backend=backend, **OPTIONS)
    losses, gradients = truth(case, inputs, normalize)
    assert relative(found, losses) < FLOAT64
    for name, a, b in zip(
        inputs, torch.autograd.grad(found.sum(), list(inputs.values())), gradients, strict=True
    ):
        assert relative(a, b) < FLOAT64, name
    total = case.loss(inputs, normalize=normalize, reduction="sum", backend=backend, **OPTIONS)
    assert relative(total, losses.sum()) < FLOAT64
    for a, b in zip(torch.autograd.grad(total, list(inputs.values())), gradients, strict=True):
        assert relative(a, b) < FLOAT64


@pytest.mark.parametrize("backend", ["cpu", "torch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("link", ["softmax", "sigmoid"])
def test_learnt_pairs_keep_their_digits(link, normalize, dtype, backend):
    """Where each prefix of a query scores high with its candidate's, the gradients are tiny, not wrong."""
    generator = torch.Generator().manual_seed(0)
    candidates = F.normalize(torch.randn(24, 32, generator=generator, dtype=torch.float64), dim=1)
    queries = candidates + 0.01 * torch.randn(24, 32, generator=generator, dtype=torch.float64)
    a, b = (x.to(dtype).requires_grad_() for x in (queries, candidates))
    function = {"softmax": fastqt.contrastive_loss, "sigmoid": fastqt.sigmoid_loss}[link]
    options = {"scale": 40.0, "normalize": normalize, "matryoshka": (8, 16, 32), "diagonal": "keep"}
    if link == "sigmoid":
        options["bias"] = -10.0
    found = function(a, b, fastqt.Diagonal(), backend=backend, **options)
    exact = [x.detach().double().requires_grad_() for x in (a, b)]
    wanted = 0.0
    for dim in (8, 16, 32):
        x, y = (F.normalize(z[:, :dim], dim=1) if normalize else z[:, :dim] for z in exact)
        S = 40 * x @ y.T + options.get("bias", 0.0)
        own = torch.eye(24, dtype=torch.float64)
        cells = F.binary_cross_entropy_with_logits(S, own, reduction="none").sum(1)
        wanted = wanted + (F.cross_entropy(S, torch.arange(24)) if link == "softmax" else cells.mean())
    error = 8 * UNIT_ROUNDOFF[torch.float32] * 40 + 2 * UNIT_ROUNDOFF[dtype] * (dtype != torch.float32)
    assert found.dtype is torch.float32
    assert relative(found, wanted) < error
    gradients = torch.autograd.grad(wanted, exact)
    for x, y in zip(torch.autograd.grad(found, (a, b)), gradients, strict=True):
        assert (x.double() - y).norm() < error * y.norm()


@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_rows_too_short_for_a_norm(backend):
    """A prefix of zeros has no direction: its scores are 0, and its gradient that of a division by 1e-12."""
    queries, candidates = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(0)).double()
    queries[1, :2] = candidates[2, :2] = 0
    options = {"normalize": True, "matryoshka": (2, 4), "diagonal": "keep"}
    both = []
    for name in (backend, "reference"):
        a, b = (x.clone().requires_grad_() for x in (queries, candidates))
        loss = fastqt.contrastive_loss(a, b, fastqt.Diagonal(), backend=name, **options)
        both.append([loss.detach(), *torch.autograd.grad(loss, (a, b))])
    for x, y in zip(*both, strict=True):
        assert relative(x, y) < FLOAT64


class Counted(TorchDispatchMode):
    """The operations of products of matrices, and the bytes of the largest tensor that is made."""

    operations = largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if function.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_):
            first, second = [x for x in args if isinstance(x, Tensor)][-2:]
            self.operations += 2 * first.numel() * second.shape[1]
        for x in tree_leaves(out):
            if isinstance(x, Tensor):
                self.largest = max(self.largest, x.untyped_storage().nbytes())
        return out


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("dims", [(192,), (96, 192), (12, 24, 48, 96, 192)], ids=len)
@pytest.mark.parametrize("function", [fastqt.contrastive_loss, fastqt.sigmoid_loss])
def test_all_prefixes_take_the_products_of_one(function, dims, normalize, monkeypatch):
    """6 N M D operations whatever their number, a little room for the scores of targets; and no (N, M)."""
    N, M, K, width = 256, 320, 64, 192
    monkeypatch.setattr(walk, "ROOM", {"cpu": (2**20, 2**20)})
    queries, candidates, negatives = (torch.randn(n, width, requires_grad=True) for n in (N, M, K))
    with Counted() as counted:
        loss = function(
            *(queries, candidates, fastqt.Diagonal()),
            **{"diagonal": "keep", "negatives": negatives, "normalize": normalize},
            **{"matryoshka": dims, "backend": "torch"},
        )
        loss.backward()
    one = 6 * N * (M + K) * width
    assert 0.98 * one < counted.operations < 1.02 * one
    assert counted.largest < 4 * N * (M + K)


@pytest.mark.parametrize("memory", ["fast", "low", 2**24])
def test_no_chunk_holds_more_than_the_memory(memory):
    N, M, width, dims = 1000, 10**5, 64, (8, 16, 32, 64)
    targets = fastqt.Diagonal().rows(N, M, torch.device("cpu"))
    stand_in = torch.empty(1, width)
    p = fastqt.problem.Problem(
        *(stand_in.expand(N, width), stand_in.expand(M, width), None, None, 1.0, targets, "keep"),
        *(None, None, None),
        **{"memory": memory, "prefix_dims": dims, "prefix_weights": (1.0,) * 4},
    )
    needs = fastqt.problem.Needs(queries=True)
    room = {"fast": walk.ROOM["cpu"][0], "low": walk.ROOM["cpu"][1]}.get(memory, memory)
    made = PrefixWalk(p, 1.0, needs)
    rooms = {x.data_ptr(): x.numel() for prefix in made.prefixes for x in (prefix.cells,)}
    assert len(rooms) == len(dims)
    assert 0 < 4 * (sum(rooms.values()) + 2 * made.height * M) <= room


WRONG = [
    ((), "want at least one number of columns"),
    ((2, 2), r"want different numbers of columns, got \(2, 2\)"),
    ((0, 2), "want at least 1, got 0"),
]
WRONG_TYPES = [
    (4, "want a sequence of integers.*, got 4"),
    ((2.0,), "want an integer, got 2.0"),
    ("24", "want a sequence of integers.*, got '24'"),
]


@pytest.mark.parametrize(
    ("dims", "message", "error"),
    [*((*wrong, ValueError) for wrong in WRONG), *((*wrong, TypeError) for wrong in WRONG_TYPES)],
    ids=str,
)
@pytest.mark.parametrize("function", [fastqt.info_nce_loss, fastqt.clip_loss, fastqt.supcon_loss])
def test_misuse_is_refused_in_words(function, dims, message, error):
    second = torch.arange(6) // 2 if function is fastqt.supcon_loss else torch.randn(6, 4)
    with pytest.raises(error, match=f"^matryoshka: {message}"):
        function(torch.randn(6, 4), second, scale=2.0, matryoshka=dims)
    with pytest.raises(error, match=f"^dims: {message}"):
        fastqt.Matryoshka(dims)
    with pytest.raises(ValueError, match=r"^matryoshka: want at most D=4, the embeddings' columns, got 9"):
        function(torch.randn(6, 4), second, scale=2.0, matryoshka=fastqt.Matryoshka((9, 2)))


@pytest.mark.parametrize(
    ("weights", "message", "error"),
    [
        ((1.0,), "want 2, one for each of dims, got 1", ValueError),
        ((0.0, 1.0), "want numbers > 0, got 0.0", ValueError),
        ((1, -1), "want numbers > 0, got -1", ValueError),
        ((np.inf, 1), "want a finite number", ValueError),
        (1.0, "want a sequence of numbers", TypeError),
        (("1", "2"), "want a number, got str", TypeError),
    ],
)
def test_wrong_weights_are_refused_in_words(weights, message, error):
    with pytest.raises(error, match=f"^weights: {message}"):
        fastqt.Matryoshka((2, 4), weights)


def test_prefixes_in_any_order_are_the_same():
    prefixes = fastqt.Matryoshka((5, 1, 2), (3.0, 1.0, 0.5))
    assert prefixes == fastqt.Matryoshka(DIMS, WEIGHTS)
    assert hash(prefixes) == hash(fastqt.Matryoshka(DIMS, WEIGHTS))
    x, y, _ = inputs_of()
    assert torch.equal(
        fastqt.info_nce_loss(x, y, matryoshka=(5, 2)), fastqt.info_nce_loss(x, y, matryoshka=[2, 5])
    )


@pytest.mark.parametrize("link", ["softmax", "sigmoid"])
def test_an_engine_without_them_computes_one_prefix_after_the_other(link):
    assert {"cpu", "torch", "reference"} <= set(BACKENDS)
    assert "triton" not in BACKENDS
    loss = fastqt.info_nce_loss if link == "softmax" else partial(fastqt.siglip_loss, bias=-1.0)
    found = []
    for name in ("triton", "reference"):
        both = torch.randn(2, 9, 8, generator=torch.Generator().manual_seed(0))
        x, y = (each.clone().requires_grad_() for each in both)
        value = loss(x, y, scale=3.0, matryoshka=(2, 5, 8), backend=name)
        found.append([value.detach(), *torch.autograd.grad(value, (x, y))])
    for one, other in zip(*found, strict=True):
        assert relative(one, other) < FLOAT32


JOINED = {
    "euclidean": {"similarity": "euclidean"},
    "mixed": {"row_negatives": fastqt.Mixed(0.3)},
    "several row negatives": {
        "row_negatives": torch.randn(9, 3, 6, generator=torch.Generator().manual_seed(1))
    },
    "row negatives and scores": {
        "row_negatives": torch.randn(9, 6, generator=torch.Generator().manual_seed(1)),
        "row_scores": torch.arange(9.0),
    },
    "mean of targets": {"reduction": "mean_of_targets"},
}


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("name", JOINED)
def test_options_that_no_walk_shares(name, normalize):
    """Each prefix is then a loss of its own, among whose cells those of its own prefix are."""
    options = {**JOINED[name], "diagonal": "keep", "normalize": normalize, "scale": 3.0}
    targets = torch.tensor([0, -100, 2, 3, 4, -100, 6, 7, 8])
    rows = options.get("row_negatives")
    inputs = torch.randn(2, 9, 6, generator=torch.Generator().manual_seed(0)).requires_grad_()
    found = fastqt.contrastive_loss(*inputs, targets, **options, matryoshka=(2, 6))
    wanted = 0.0
    for dim in (2, 6):
        if isinstance(rows, Tensor):
            options["row_negatives"] = rows[..., :dim]
        wanted = wanted + fastqt.contrastive_loss(*inputs[..., :dim], targets, **options)
    assert relative(found, wanted) < REORDERED[torch.float32]
    a, b = (torch.autograd.grad(x, inputs)[0] for x in (found, wanted))
    assert relative(a, b) < REORDERED[torch.float32]


def loss(queries: Tensor, candidates: Tensor, scale: Tensor, **more: object) -> Tensor:
    return fastqt.info_nce_loss(
        queries, candidates, scale=scale, matryoshka=fastqt.Matryoshka((2, 5), (1.0, 2.0)), **more
    )


def inputs_of(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    x, y = torch.randn(2, 9, 6, generator=torch.Generator().manual_seed(0)).to(dtype)
    return [
        x.requires_grad_(),
        y.requires_grad_(),
        torch.tensor(3.0, dtype=torch.float64, requires_grad=True),
    ]


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_compiles_into_one_graph(reduction):
    torch._dynamo.reset()
    inputs = inputs_of()
    compiled = torch.compile(
        lambda *x: loss(*x, reduction=reduction).sum(), fullgraph=True, backend="aot_eager"
    )
    a, b = compiled(*inputs), loss(*inputs, reduction=reduction).sum()
    assert relative(a, b) < FLOAT64
    for x, y in zip(torch.autograd.grad(2 * a, inputs), torch.autograd.grad(2 * b, inputs), strict=True):
        assert relative(x, y) < FLOAT64


def test_under_the_transforms_of_torch_func():
    inputs = [x.detach() for x in inputs_of()]
    leaves = inputs_of()
    wanted = torch.autograd.grad(loss(*leaves), leaves)
    for x, y in zip(grad(loss, (0, 1, 2))(*inputs), wanted, strict=True):
        assert relative(x, y) < FLOAT64
    stacked = vmap(loss, (0, 0, None))(*(torch.stack([x, -x]) for x in inputs[:2]), inputs[2])
    assert relative(stacked, torch.stack([loss(*inputs), loss(-inputs[0], -inputs[1], inputs[2])])) < FLOAT64


def test_autocast_reads_what_it_reads_without_prefixes():
    inputs = inputs_of(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        found = loss(*inputs)
        single = [fastqt.info_nce_loss(*(x[:, :dim] for x in inputs[:2]), scale=3.0) for dim in (2, 5)]
    assert found.dtype is torch.float32
    assert relative(found, single[0] + 2 * single[1]) < 2 * UNIT_ROUNDOFF[torch.bfloat16]
    rounded = [x.detach().bfloat16().float() for x in inputs[:2]]
    assert relative(found, loss(*rounded, inputs[2])) < REORDERED[torch.float32]


def test_a_second_backward_has_the_same_bits():
    inputs = inputs_of(torch.float32)
    value = loss(*inputs)
    first, again = (torch.autograd.grad(value, inputs, retain_graph=True) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))


def test_a_module_holds_them():
    criterion = fastqt.nn.InfoNCELoss(matryoshka=fastqt.Matryoshka((2, 5), (1.0, 2.0)), learn_scale=True)
    x, y, _ = inputs_of()
    assert relative(criterion(x, y), loss(x, y, criterion.scale.detach())) < FLOAT64
    assert re.search(r"matryoshka=Matryoshka\(dims=\(2, 5\)", repr(criterion))
    with pytest.raises(ValueError, match=r"^matryoshka: want different numbers"):
        fastqt.nn.SimCSELoss(matryoshka=(5, 5))


@pytest.mark.parametrize("backend", ["cpu", "torch", "reference"])
def test_each_prefix_has_false_negatives_of_its_own(backend):
    """A margin is compared with the similarities of the prefix."""
    generator = torch.Generator().manual_seed(0)
    queries, candidates = (
        torch.randn(12, 8, generator=generator, dtype=torch.float64, requires_grad=True) for _ in range(2)
    )
    options = {"scale": 5.0, "exclude": fastqt.Margin(0.05), "backend": backend}
    loss = fastqt.info_nce_loss(queries, candidates, matryoshka=(3, 8), **options)
    prefixes = [fastqt.info_nce_loss(queries[:, :dim], candidates[:, :dim], **options) for dim in (3, 8)]
    whole = fastqt.info_nce_loss(queries, candidates, scale=5.0, matryoshka=(3, 8), backend=backend)
    assert not torch.isclose(loss, whole)
    found, wanted = (torch.autograd.grad(x, (queries, candidates)) for x in (loss, sum(prefixes)))
    for a, b in ((loss, sum(prefixes)), *zip(found, wanted, strict=True)):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
