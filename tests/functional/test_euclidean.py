"""Scores of minus a squared distance, against their definition by differences."""

import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fastqt
from tests.shared import oracle
from tests.shared.tolerances import (
    EAGER_FACTOR,
    FLOAT32,
    FLOAT64,
    HALF_ULP,
    REORDERED,
    THREE_ROUNDINGS,
    relative,
)

pytestmark = pytest.mark.usefixtures("low_memory_in_tiles")
N, M, D, K = 13, 17, 6, 5
rng = np.random.default_rng(0)
GROUPS = {"query_groups": rng.integers(0, 4, N), "candidate_groups": rng.integers(0, 4, M)}
MASK = {"mask": (rng.random((N, M)) < 0.3) & (np.arange(N)[:, None] != np.arange(M))}
SMOOTHED = oracle.smoothed(np.eye(N, M), 0.2)
SHAPES = {
    "queries": (N, D),
    "candidates": (M, D),
    "negatives": (K, D),
    "row_negatives": (N, D),
    "stacked": (N, 3, D),
    "row_scores": (N,),
    "several": (N, 2),
    "scale": (),
    "bias": (M,),
}
# Of the call, of what the oracle is given beside, and the further inputs that want a gradient.
CASES = {
    "plain": ({"diagonal": "keep"}, ()),
    "exclude": ({"diagonal": "exclude"}, ("scale",)),
    "negatives": ({"diagonal": "keep"}, ("negatives", "scale", "bias")),
    "row negatives": ({"diagonal": "keep"}, ("row_negatives", "scale")),
    "row scores": ({"diagonal": "keep"}, ("row_scores", "scale")),
    "all at once": (
        {"diagonal": "keep"} | GROUPS | MASK,
        ("negatives", "stacked", "several", "scale", "bias"),
    ),
}
LINKS = {"softmax": fastqt.contrastive_loss, "log_sum_exp": fastqt.log_sum_exp}
ENGINES = [("cpu", torch.float64, FLOAT64), ("reference", torch.float64, FLOAT64)]
ENGINES += [("torch", torch.float64, FLOAT64)]
ENGINES += [("cpu", torch.float32, 5 * FLOAT32), ("triton", torch.float32, 5 * FLOAT32)]
# A CPU rounds scores of up to 16 to bfloat16.
SIXTEEN = [
    ("cpu", torch.bfloat16, 16 * 2.0**-8),
    ("triton", torch.float16, 8 * THREE_ROUNDINGS[torch.float16]),
]


def inputs_of(names: tuple[str, ...], dtype: torch.dtype, offset: float = 0.0) -> dict[str, Tensor]:
    """Leaves; the embeddings are around a point that is far from the origin."""
    generator = torch.Generator().manual_seed(1)
    arguments = {"stacked": "row_negatives", "several": "row_scores"}
    found = {}
    for name in ("queries", "candidates", *names):
        x = torch.randn(SHAPES[name], generator=generator, dtype=torch.float64)
        x = x.abs() + 0.5 if name == "scale" else x
        name = arguments.get(name, name)
        moved = x + offset if name in ("queries", "candidates", "negatives", "row_negatives") else x
        found[name] = moved.to(dtype).requires_grad_()
    return found


def definitions():
    for link, name, offset in itertools.product(LINKS, CASES, (0.0, 100.0)):
        for engine in ENGINES:
            quick = engine[0] != "triton" or (name == "all at once" and offset == 100.0)
            yield pytest.param(link, name, *engine, offset, marks=() if quick else pytest.mark.slow)


@pytest.mark.parametrize(("link", "name", "backend", "dtype", "tolerance", "offset"), list(definitions()))
def test_is_the_definition(link, name, backend, dtype, tolerance, offset):
    options, more = CASES[name]
    inputs = inputs_of(more, dtype, offset)
    check(link, options, inputs, tolerance, backend=backend)


@pytest.mark.parametrize(("backend", "dtype", "tolerance"), SIXTEEN, ids=str)
@pytest.mark.parametrize("offset", [0.0, 8.0])
@pytest.mark.parametrize("link", LINKS)
@pytest.mark.thinned(2)
def test_in_16_bits(link, backend, dtype, tolerance, offset):
    inputs = inputs_of(CASES["all at once"][1], dtype, offset)
    check(link, CASES["all at once"][0], inputs, tolerance, backend=backend)


@pytest.mark.parametrize("memory", ["low", 2**25])
@pytest.mark.parametrize("link", LINKS)
def test_with_little_memory(link, memory):
    options, more = CASES["all at once"]
    check(link, options, inputs_of(more, torch.float64), FLOAT64, memory=memory, backend="cpu")


def check(link: str, options: dict, inputs: dict[str, Tensor], tolerance: float, **how: object) -> None:
    dtype = inputs["queries"].dtype
    given = {name: x.detach().double().numpy() for name, x in inputs.items()}
    replaced = options["diagonal"] == "exclude"
    targets = oracle.window(N, M, [1]) if replaced else np.eye(N, M)
    if link == "log_sum_exp":
        targets = np.zeros((N, M))
    weights = np.linspace(0.5, 2, N)  # of one sign, so that the parts of the scale's gradient do not cancel
    truth = oracle.contrastive(
        given.pop("queries"),
        given.pop("candidates"),
        targets,
        **{**options, **given},
        **{"link": link, "similarity": "euclidean", "row_weights": weights},
    )
    tensors = {key: torch.as_tensor(x) if key != "diagonal" else x for key, x in options.items()}
    if link == "softmax":
        tensors |= {
            "reduction": "none",
            "targets": fastqt.Window(offsets=[1]) if replaced else fastqt.Diagonal(),
        }
    found = LINKS[link](**inputs, **tensors, similarity="euclidean", **how)
    assert found.dtype is torch.promote_types(dtype, torch.float32)
    assert relative(found, truth.loss) < tolerance
    gradients = torch.autograd.grad(found, list(inputs.values()), torch.from_numpy(weights).to(found.dtype))
    for name, gradient in zip(inputs, gradients, strict=True):
        assert relative(gradient, getattr(truth, name)) < tolerance, name


@pytest.mark.parametrize("offset", [0.0, 100.0])
@pytest.mark.parametrize("wide", [2.0, 3.0])
@pytest.mark.parametrize("backend", ["cpu", pytest.param("triton", marks=pytest.mark.slow)])
def test_error_of_converged_rows_is_at_most_eagers(backend, wide, offset):
    """Each query is near its own candidate, whose probability is over 0.999.

    Eager PyTorch adds norms to products too, and is given embeddings that are around the origin. Where they
    are far from it, it has lost every digit.
    """
    generator = torch.Generator().manual_seed(0)
    errors = {"ours": [], "eager": []}
    for _ in range(5):
        candidates = wide * F.normalize(torch.randn(32, 24, generator=generator), dim=1) + offset
        queries = candidates + 0.02 * torch.randn(32, 24, generator=generator)
        negatives = wide * F.normalize(torch.randn(16, 24, generator=generator), dim=1) + offset
        leaves = [x.requires_grad_() for x in (queries.detach(), candidates, negatives)]
        exact = [x.detach().double().requires_grad_() for x in leaves]
        scores = distances(*exact, 0.0)
        truth = joined(scores)
        assert truth.mean() < 1e-3
        found = fastqt.info_nce_loss(
            *leaves[:2],
            **{"negatives": leaves[2], "scale": 2.0, "normalize": False, "similarity": "euclidean"},
            reduction="none",
            backend=backend,
        )
        plain = joined(distances(*leaves, offset))
        wanted = [truth, *torch.autograd.grad(truth.sum(), exact)]
        for name, loss in (("ours", found), ("eager", plain)):
            values = [loss, *torch.autograd.grad(loss.sum(), leaves)]
            errors[name].append(
                [
                    float((a.detach().double() - b.detach()).norm() / b.detach().norm())
                    for a, b in zip(values, wanted, strict=True)
                ]
            )
    ours, eager = (np.mean(errors[name], 0) for name in ("ours", "eager"))
    assert (ours <= EAGER_FACTOR * eager + HALF_ULP[torch.float32]).all(), (ours, eager)


def distances(queries: Tensor, candidates: Tensor, negatives: Tensor, origin: float) -> Tensor:
    x, y = queries - origin, torch.cat([candidates, negatives]) - origin
    return -2.0 * (x.square().sum(1)[:, None] + y.square().sum(1) - 2 * x @ y.T)


def joined(scores: Tensor) -> Tensor:
    """The cross-entropy with the diagonal, which keeps its digits."""
    own = torch.eye(*scores.shape, dtype=torch.bool)
    return F.softplus(scores.masked_fill(own, -torch.inf).logsumexp(1) - scores.diagonal())


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("backend", ["cpu", "torch", "reference"])
def test_of_rows_of_norm_1(backend, link):
    """The distances of normalised rows; a row of zeros stays at the origin."""
    inputs = inputs_of(("negatives", "stacked", "scale"), torch.float64)
    with torch.no_grad():
        inputs["candidates"][3] = inputs["negatives"][0] = inputs["row_negatives"][2, 0] = 0
    options = {"similarity": "euclidean", "diagonal": "keep", "backend": backend}
    options |= {"targets": fastqt.Diagonal(), "reduction": "none"} if link == "softmax" else {}
    unit = {name: x if name == "scale" else F.normalize(x, dim=-1) for name, x in inputs.items()}
    found = LINKS[link](**inputs, normalize=True, **options)
    wanted = LINKS[link](**unit, **options)
    assert relative(found, wanted) < FLOAT64
    leaves = [x for name, x in inputs.items() if name != "scale"]
    pairs = zip(*(torch.autograd.grad(loss.sum(), leaves) for loss in (found, wanted)), strict=True)
    for a, b in pairs:
        keep = b.abs() < 1e6  # not of zeros, whose derivative has no limit
        assert relative(a[keep], b[keep]) < 10 * FLOAT64


@pytest.mark.parametrize("backend", ["cpu", "torch", "reference"])
def test_smoothed_targets_are_not_of_negatives(backend):
    inputs = inputs_of(("negatives", "bias"), torch.float64)
    given = {name: x.detach().numpy() for name, x in inputs.items()}
    truth = oracle.contrastive(
        given["queries"],
        given["candidates"],
        SMOOTHED,
        **{name: given[name] for name in ("negatives", "bias")},
        **{"diagonal": "keep", "similarity": "euclidean"},
    )
    targets = fastqt.smoothed(fastqt.Diagonal(), 0.2)
    found = fastqt.contrastive_loss(
        **inputs, targets=targets, diagonal="keep", similarity="euclidean", backend=backend
    )
    assert relative(found, truth.loss.mean()) < FLOAT64
    for name, gradient in zip(inputs, torch.autograd.grad(found, list(inputs.values())), strict=True):
        assert relative(gradient, getattr(truth, name)) < FLOAT64, name


@pytest.mark.slow
@pytest.mark.parametrize("link", LINKS)
def test_compiles_into_one_graph(link):
    inputs = inputs_of(("negatives", "row_negatives", "row_scores"), torch.float64, 100.0)
    fixed = {"targets": fastqt.Diagonal()} if link == "softmax" else {}

    def loss(*given: Tensor) -> Tensor:
        named = dict(zip(inputs, given, strict=True))
        return LINKS[link](**named, **fixed, diagonal="keep", similarity="euclidean").sum()

    leaves = list(inputs.values())
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    wanted = torch.autograd.grad(loss(*leaves), leaves)
    for a, b in zip(torch.autograd.grad(compiled(*leaves), leaves), wanted, strict=True):
        assert relative(a, b) < 10 * REORDERED[torch.float64]
    of_transform = torch.func.grad(loss, argnums=tuple(range(len(leaves))))(*(x.detach() for x in leaves))
    for a, b in zip(of_transform, wanted, strict=True):
        assert relative(a, b) < 10 * REORDERED[torch.float64]


@pytest.mark.slow
def test_second_derivatives_are_the_references():
    inputs = inputs_of(("negatives", "row_negatives", "scale"), torch.float64)

    def loss(*given: Tensor) -> Tensor:
        options = {"targets": fastqt.Diagonal(), "diagonal": "keep", "backend": "reference"}
        return fastqt.contrastive_loss(
            **dict(zip(inputs, given, strict=True)), **options, similarity="euclidean"
        )

    assert torch.autograd.gradgradcheck(loss, tuple(inputs.values()), fast_mode=True)


REFUSED = {
    "zero": ({}, "diagonal: want 'keep' or 'exclude' with similarity='euclidean'"),
    "mixed": ({"diagonal": "keep", "row_negatives": fastqt.Mixed()}, "row_negatives: want a tensor or None"),
    "unknown": ({"similarity": "manhattan"}, "similarity: want one of 'dot', 'euclidean', got 'manhattan'"),
    "a bias of another length": ({"diagonal": "keep", "bias": torch.zeros(3)}, "bias: want"),
    "no scale": ({"diagonal": "keep", "scale": 0.0}, "scale: want a positive number"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_name_the_argument(case):
    changes, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        fastqt.contrastive_loss(
            torch.zeros(N, D), torch.zeros(N, D), **{"similarity": "euclidean", **changes}
        )


@pytest.mark.parametrize("backend", ["cpu", "torch", "reference"])
def test_a_row_without_candidates_has_no_gradient(backend):
    generator = torch.Generator().manual_seed(0)
    queries, candidates = (torch.randn(n, 5, generator=generator, requires_grad=True) for n in (3, 4))
    scale = torch.tensor(2.0, requires_grad=True)
    mask = torch.zeros(3, 4, dtype=torch.bool)
    mask[1] = True
    rows = fastqt.log_sum_exp(
        queries, candidates, scale=scale, mask=mask, similarity="euclidean", backend=backend
    )
    assert rows.isneginf().tolist() == [False, True, False]
    of_queries, of_candidates, of_scale = torch.autograd.grad(rows[1], (queries, candidates, scale))
    assert not of_queries.any()
    assert not of_candidates.any()
    assert of_scale == 0
