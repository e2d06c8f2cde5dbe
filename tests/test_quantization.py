"""Quantised embeddings have the values that an index stores, and the gradients of these before rounding."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import fastqt
from tests.shared.tolerances import FLOAT32, FLOAT64, relative

N, D = 40, 12
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def vectors(seed=0, dtype=torch.float32, shape=(N, D)):
    draw = np.random.default_rng(seed)
    offsets, sizes = draw.normal(size=shape[-1]), draw.uniform(0.1, 3, shape[-1])
    return torch.from_numpy(offsets + sizes * draw.normal(size=shape)).to(dtype)


def step_of(x, least, greatest):
    """In which of 255 steps a number is, by the edges of these, and numbers outside in the nearest level."""
    edges = [least + (greatest - least) * k / 255 for k in range(1, 256)]
    return sum(x >= edge for edge in edges) - 128


@pytest.mark.parametrize("ranges", ["of all", "of others"])
def test_int8_is_that_of_sentence_transformers(ranges):
    quantization = pytest.importorskip("sentence_transformers.util.quantization")
    x, others = vectors(), vectors(1)
    x[:, 3] = 0.25  # a column without width
    calibration = x if ranges == "of all" else others
    given = fastqt.quantization_ranges(calibration)
    theirs = quantization.quantize_embeddings(x.numpy(), "int8", calibration_embeddings=calibration.numpy())
    assert np.array_equal(fastqt.quantized(x, "int8", given).numpy(), theirs)
    if ranges == "of all":
        assert np.array_equal(fastqt.quantized(x, "int8").numpy(), theirs)


def test_int8_counts_the_edges_below():
    x, ranges = vectors(2, torch.float64), torch.tensor([[-1.0] * D, [1.5] * D]).double()
    levels = fastqt.quantized(x, "int8", ranges)
    wanted = [[step_of(value, -1.0, 1.5) for value in row] for row in x.tolist()]
    assert levels.tolist() == wanted
    assert {-128.0, 127.0} <= set(levels.flatten().tolist())  # some numbers are outside


def test_binary_is_that_of_sentence_transformers():
    quantization = pytest.importorskip("sentence_transformers.util.quantization")
    x = vectors(3)
    x[0, :4] = torch.tensor([0.0, -0.0, 1e-40, -1e-40])
    bits = np.unpackbits(quantization.quantize_embeddings(x.numpy(), "ubinary"), axis=-1)[:, :D]
    levels = fastqt.quantized(x, "binary").numpy()
    assert np.array_equal(levels, 2.0 * bits - 1)

    differing = (bits[:, None] != bits[None]).sum(axis=2)
    assert np.array_equal(levels @ levels.T, D - 2 * differing)


def test_gradient_of_int8_is_that_of_the_steps_before_rounding():
    x = vectors(4, torch.float64).requires_grad_()
    upstream = vectors(5, torch.float64)
    ranges = torch.stack([x.detach().quantile(0.1, 0), x.detach().quantile(0.8, 0)])
    (gradient,) = torch.autograd.grad(fastqt.quantized(x, "int8", ranges), x, upstream)
    inside = (x >= ranges[0]) & (x <= ranges[1])
    wanted = torch.where(inside, upstream * 255 / (ranges[1] - ranges[0]), 0.0)
    assert relative(gradient, wanted) < FLOAT64
    assert 0 < inside.double().mean() < 1


def test_gradient_of_int8_reaches_the_ends_of_its_own_range():
    """The greatest number of a column has the gradient of the others, though it is in the last step alone."""
    x = vectors(4, torch.float64).requires_grad_()
    (gradient,) = torch.autograd.grad(fastqt.quantized(x, "int8").sum(), x)
    assert relative(gradient, (255 / (x.amax(0) - x.amin(0))).expand(N, D)) < FLOAT64


def test_gradient_of_binary_is_that_of_the_nearest_multiple():
    x, upstream = vectors(6, torch.float64).requires_grad_(), vectors(7, torch.float64)
    (gradient,) = torch.autograd.grad(fastqt.quantized(x, "binary"), x, upstream)
    signs = np.where(x.detach().numpy() > 0, 1.0, -1.0)
    # The a for which a * signs is the nearest to x, by least squares.
    nearest = [
        np.linalg.lstsq(s[:, None], row, rcond=None)[0][0]
        for s, row in zip(signs, x.detach().numpy(), strict=True)
    ]
    assert relative(gradient, upstream / torch.tensor(nearest)[:, None]) < FLOAT64


def test_a_vector_of_zeros_has_finite_gradients():
    x = torch.zeros(3, D, requires_grad=True)
    for precision in ("int8", "binary"):
        (gradient,) = torch.autograd.grad(fastqt.quantized(x, precision).sum(), x)
        assert torch.equal(gradient, torch.ones(3, D))
    assert torch.equal(fastqt.quantized(x, "binary"), -torch.ones(3, D))


@pytest.mark.parametrize("precision", ["int8", "binary"])
def test_gradients_of_cosines_are_of_one_size(precision):
    """As those of the vectors themselves, they are c times as small for vectors c times as long."""
    queries, documents = vectors(8, torch.float64), vectors(9, torch.float64)

    def gradient(factor):
        q = (factor * queries).requires_grad_()
        quantised = (fastqt.quantized(x, precision) for x in (q, factor * documents))
        fastqt.info_nce_loss(*quantised, scale=5.0).backward()
        return q.grad

    assert relative(1024 * gradient(1024.0), gradient(1.0)) < FLOAT64


@pytest.mark.parametrize("precision", ["int8", "binary"])
def test_prefixes_are_quantised_prefixes(precision):
    q, d = vectors(10), vectors(11)
    ranges = fastqt.quantization_ranges(torch.cat([q, d])) if precision == "int8" else None
    whole = [fastqt.quantized(x, precision, ranges) for x in (q, d)]
    losses = []
    for dim in (4, 8, D):
        cut = None if ranges is None else ranges[:, :dim]
        prefixes = [fastqt.quantized(x[:, :dim], precision, cut) for x in (q, d)]
        assert all(torch.equal(a[:, :dim], b) for a, b in zip(whole, prefixes, strict=True))
        losses.append(fastqt.info_nce_loss(*prefixes))
    assert relative(fastqt.info_nce_loss(*whole, matryoshka=(4, 8, D)), sum(losses)) < FLOAT32


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("precision", ["int8", "binary"])
def test_levels_are_exact_in_each_dtype(dtype, precision):
    x = vectors(12, dtype).requires_grad_()
    levels = fastqt.quantized(x, precision)
    wide = x.detach().double().requires_grad_()
    exact = fastqt.quantized(wide, precision)
    assert levels.dtype == dtype
    assert torch.equal(levels, levels.round())
    # A number within a rounding of an edge may be on its other side.
    assert (levels.double() - exact).abs().max() <= (1 if precision == "int8" else 0)
    assert (levels.double() != exact).double().mean() < 0.01

    upstream = vectors(13, dtype)
    (gradient,) = torch.autograd.grad(levels, x, upstream)
    (wanted,) = torch.autograd.grad(exact, wide, upstream.double())
    assert gradient.dtype == dtype
    assert relative(gradient, wanted) < max(FLOAT32, torch.finfo(dtype).eps)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(fastqt.quantized(x, precision), levels)


def test_vectors_of_tokens_are_quantised_by_the_ranges_of_all():
    x = vectors(14, shape=(5, 7, D))
    for precision in ("int8", "binary"):
        flat = fastqt.quantized(x.flatten(0, 1), precision)
        assert torch.equal(fastqt.quantized(x, precision).flatten(0, 1), flat)
        assert torch.equal(
            fastqt.quantized(
                flat[0],
                precision,
                None if precision == "binary" else torch.stack([flat.amin(0), flat.amax(0)]),
            ),
            fastqt.quantized(flat, precision)[0],
        )


@pytest.mark.parametrize("precision", ["int8", "binary"])
def test_is_one_graph_of_all_numbers_of_rows(precision):
    torch._dynamo.reset()
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph)
        return graph

    def step(x, ranges):
        return fastqt.quantized(x, precision, ranges)

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend=keep)
    for rows in (5, 6, 9):
        x = vectors(rows, shape=(rows, D)).requires_grad_()
        ranges = fastqt.quantization_ranges(vectors(1)) if precision == "int8" else None
        found = torch.autograd.grad(compiled(x, ranges).square().sum(), x)
        wanted = torch.autograd.grad(step(x, ranges).square().sum(), x)
        assert torch.equal(*found, *wanted)
    assert len(graphs) == 1


@pytest.mark.parametrize("precision", ["int8", "binary"])
def test_transforms_of_torch_func(precision):
    x = vectors(15, torch.float64, shape=(3, N, D))

    def loss(rows):
        return fastqt.quantized(rows, precision).square().mul(torch.arange(D)).sum()

    mapped = torch.func.vmap(torch.func.grad(loss))(x)
    for rows, found in zip(x, mapped, strict=True):
        leaf = rows.clone().requires_grad_()
        (wanted,) = torch.autograd.grad(loss(leaf), leaf)
        assert relative(found, wanted) < FLOAT64


def test_what_is_not_finite_stays_so():
    ranges = torch.tensor([[-1.0] * D, [1.0] * D])
    x = torch.zeros(3, D)
    x[0, 1], x[1, 1], x[2, 1] = math.nan, math.inf, -math.inf
    levels = fastqt.quantized(x, "int8", ranges)
    assert math.isnan(levels[0, 1])
    assert levels[:, 0].tolist() == [-1, -1, -1]
    assert levels[1:, 1].tolist() == [127, -128]
    binary = fastqt.quantized(x, "binary").isnan()
    assert binary[0].all()
    assert binary[:, 1].all()
    assert fastqt.quantized(x, "int8")[:, 1].isnan().all()  # no range has a NaN


def test_training_moves_signs():
    """A loss of binary vectors alone makes those of pairs agree."""
    queries, documents = vectors(16), vectors(17)
    documents.requires_grad_()
    optimizer = torch.optim.Adam([documents], lr=0.1)
    for _ in range(200):
        optimizer.zero_grad()
        binary = (fastqt.quantized(x, "binary") for x in (queries, documents))
        fastqt.info_nce_loss(*binary, scale=10.0).backward()
        optimizer.step()
    scores = fastqt.quantized(queries, "binary") @ fastqt.quantized(documents.detach(), "binary").T
    assert (scores.argmax(1) == torch.arange(N)).double().mean() > 0.9


X = torch.zeros(4, D)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: fastqt.quantized(X, "int4"),
            ValueError,
            "precision: want one of 'int8', 'binary', got 'int4'",
        ),
        (lambda: fastqt.quantized(X.long(), "int8"), TypeError, "x: want a floating-point dtype"),
        (lambda: fastqt.quantized(X[:0], "int8"), ValueError, r"x: want shape \(..., D\) with at least one"),
        (
            lambda: fastqt.quantized(X, "int8", X),
            ValueError,
            r"ranges: want shape \(2, D\) = \(2, 12\), got \(4,",
        ),
        (lambda: fastqt.quantized(X, "int8", X[:2].long()), TypeError, "ranges: want a floating-point dtype"),
        (lambda: fastqt.quantized(X, "int8", [0, 1]), TypeError, "ranges: want a tensor, got list"),
        (
            lambda: fastqt.quantized(X, "int8", torch.stack([X[0] + 1, X[0]])),
            ValueError,
            "ranges: want the least number of each column before the greatest",
        ),
        (
            lambda: fastqt.quantized(X, "binary", X[:2]),
            ValueError,
            "ranges: want None with precision 'binary'",
        ),
        (lambda: fastqt.quantization_ranges(X[0]), ValueError, r"x: want shape \(rows, D\)"),
        (lambda: fastqt.quantization_ranges(X[:0]), ValueError, "x: want at least one row"),
    ],
)
def test_refuses(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_unit_vectors_have_the_signs_of_others():
    x = vectors(18)
    assert torch.equal(fastqt.quantized(F.normalize(x, dim=1), "binary"), fastqt.quantized(x, "binary"))
