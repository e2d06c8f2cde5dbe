"""SPLADE's pooling is the maximum over tokens of each word, in value and gradients, without all logits."""

import math

import numpy as np
import pytest
import torch

import fastqt
from fastqt import splade
from tests.shared.tolerances import FLOAT32, FLOAT64, UNIT_ROUNDOFF, relative

SIZES = {
    "small": (3, 5, 40, 6),
    "tiles": (4, 512, 2500, 4),  # the logits of 1,024 words at a time
    "blocks": (64, 8, 9000, 4),  # the gradients of 4,096 words at a time
    "one token": (2, 1, 3, 7),
}
NAMES = ("hidden", "weight", "bias")


def made(size="small", dtype=torch.float64, *, masked=True, biased=True, seed=0):
    """Inputs, of which the mask has padding at either end, between tokens, and a text of padding alone."""
    B, L, V, D = SIZES[size]
    draw = np.random.default_rng(seed)
    arrays = draw.normal(size=(B, L, D)), draw.normal(size=(V, D)) / math.sqrt(D), draw.normal(size=V) / 2
    hidden, weight, bias = (torch.from_numpy(x).to(dtype).requires_grad_() for x in arrays)
    mask = torch.from_numpy(draw.random((B, L)) < 0.7)
    mask[0], mask[1] = False, True
    if L > 2:
        mask[2, 0], mask[2, -1] = False, False
    return hidden, weight, bias if biased else None, mask if masked else None


def exact(inputs, upstream):
    """The pooled weights and the gradients of their products with `upstream`, text by text in float64."""
    hidden, weight, bias, mask = (None if x is None else x.detach().numpy() for x in inputs)
    hidden, weight = hidden.astype(np.float64), weight.astype(np.float64)
    bias = np.zeros(len(weight)) if bias is None else bias.astype(np.float64)
    mask = np.ones(hidden.shape[:2], bool) if mask is None else mask
    pooled = np.zeros((len(hidden), len(weight)))
    gradients = [np.zeros_like(hidden), np.zeros_like(weight), np.zeros_like(bias)]
    for b, (tokens, there) in enumerate(zip(hidden, mask, strict=True)):
        (kept,) = np.nonzero(there)
        if not len(kept):
            continue
        logits = tokens[kept] @ weight.T + bias
        best = logits.argmax(axis=0)  # the first of equal ones
        most = np.maximum(logits[best, np.arange(len(weight))], 0)
        pooled[b] = np.log1p(most)
        d = np.where(most > 0, upstream[b].double().numpy() / (1 + most), 0)
        np.add.at(gradients[0][b], kept[best], d[:, None] * weight)
        gradients[1] += d[:, None] * tokens[kept[best]]
        gradients[2] += d
    return pooled, gradients


def found(inputs, upstream):
    pooled = fastqt.splade_pool(*inputs)
    leaves = [x for x in inputs[:3] if x is not None]
    return pooled, torch.autograd.grad(pooled, leaves, upstream.to(pooled.dtype))


def upstream_of(inputs, seed=1):
    shape = len(inputs[0]), len(inputs[1])
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape)).float()


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_is_that_of_the_formula(size, dtype, masked, biased):
    inputs = made(size, dtype, masked=masked, biased=biased)
    upstream = upstream_of(inputs)
    pooled, gradients = found(inputs, upstream)
    wanted, wanted_gradients = exact(inputs, upstream)
    tolerance = FLOAT64 if dtype is torch.float64 else FLOAT32
    assert pooled.dtype == dtype
    assert pooled.is_contiguous()
    assert relative(pooled, wanted) < tolerance
    for name, x, y in zip(NAMES, gradients, wanted_gradients, strict=False):
        assert x.dtype == dtype, name
        assert relative(x, y) < tolerance, name
    with torch.no_grad():
        assert relative(fastqt.splade_pool(*inputs), wanted) < tolerance


def test_few_words_have_a_weight():
    """As in a trained model: of sparse maxima the sums are those of the few."""
    hidden, weight, bias, mask = made("blocks")
    inputs = hidden, weight, (bias.detach() - 3).requires_grad_(), mask
    upstream = upstream_of(inputs)
    pooled, gradients = found(inputs, upstream)
    wanted, wanted_gradients = exact(inputs, upstream)
    assert 0 < (pooled > 0).double().mean() < 0.1
    assert relative(pooled, wanted) < FLOAT64
    for x, y in zip(gradients, wanted_gradients, strict=True):
        assert relative(x, y) < FLOAT64


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bits_are_added_up_in_float32(dtype):
    inputs = made("tiles", dtype)
    upstream = upstream_of(inputs)
    pooled, gradients = found(inputs, upstream)
    wanted, wanted_gradients = exact(
        [x if x is None or x.dtype is torch.bool else x.float() for x in inputs], upstream
    )
    assert pooled.dtype is torch.float32
    assert relative(pooled, wanted) < FLOAT32
    for x, y in zip(gradients, wanted_gradients, strict=True):
        assert x.dtype is dtype
        assert relative(x, y) < UNIT_ROUNDOFF[dtype] + FLOAT32


def test_autocast_changes_nothing_on_a_cpu():
    inputs = made("tiles", torch.float32)
    upstream = upstream_of(inputs)
    pooled, gradients = found(inputs, upstream)
    with torch.autocast("cpu", torch.bfloat16):
        again = fastqt.splade_pool(*inputs)
        mixed = fastqt.splade_pool(inputs[0].bfloat16(), *inputs[1:])  # what a layer under autocast returns
    assert torch.equal(again, pooled)
    assert mixed.dtype is torch.float32
    assert relative(mixed, pooled) < 0.05
    for x, y in zip(torch.autograd.grad(again, inputs[:3], upstream), gradients, strict=True):
        assert torch.equal(x, y)


def test_of_equal_tokens_the_first_has_the_gradient():
    # Whole numbers, whose logits have no rounding errors, which differ between the rows of a product.
    hidden, weight = (4 * x.detach().round() for x in made("small")[:2])
    hidden = hidden[:, :1].repeat(1, 5, 1).requires_grad_()
    mask = torch.ones(3, 5, dtype=torch.bool)
    mask[1, :2] = False
    pooled = fastqt.splade_pool(hidden, weight, mask=mask)
    (gradient,) = torch.autograd.grad(pooled.sum(), hidden)
    has_gradient = gradient.abs().sum(2) > 0
    assert has_gradient.nonzero().tolist() == [[0, 0], [1, 2], [2, 0]]


def test_a_maximum_of_zero_has_no_gradient():
    hidden = torch.zeros(1, 2, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.ones(4, 3, dtype=torch.float64, requires_grad=True)
    bias = torch.tensor([0.0, -1.0, 1e-300, 1.0], dtype=torch.float64, requires_grad=True)
    pooled, gradients = found((hidden, weight, bias, None), torch.ones(1, 4))
    assert pooled.tolist() == [[0, 0, 1e-300, math.log(2)]]
    assert gradients[2].tolist() == [0, 0, 1, 0.5]


@pytest.mark.parametrize("size", [1e3, 1e6, 1e30])
def test_large_logits_keep_their_gradients(size):
    """The derivative of log(1 + x) is about 1 / x, of which the weight, log x, has all digits."""
    inputs = [x.detach() for x in made("small", torch.float32)[:2]]
    inputs = [(inputs[0] * size).requires_grad_(), inputs[1].requires_grad_(), None, None]
    upstream = upstream_of(inputs)
    pooled, gradients = found(inputs, upstream)
    wanted, wanted_gradients = exact(inputs, upstream)
    assert relative(pooled, wanted) < FLOAT32
    for x, y in zip(gradients, wanted_gradients, strict=False):
        assert relative(x, y) < FLOAT32


def test_padding_does_not_count_whatever_it_holds():
    hidden, weight, bias, mask = made("small")
    wanted, gradients = found((hidden, weight, bias, mask), upstream_of((hidden, weight)))
    for value in (math.nan, math.inf, 1e300):
        spoiled = hidden.detach().masked_fill(~mask[:, :, None], value).requires_grad_()
        pooled, others = found((spoiled, weight, bias, mask), upstream_of((hidden, weight)))
        assert torch.equal(pooled, wanted)
        for x, y in zip(others, gradients, strict=True):
            assert torch.equal(x, y)
    assert (wanted[0] == 0).all()
    assert (gradients[0][0] == 0).all()
    assert (gradients[0][~mask] == 0).all()


def test_devices_that_do_not_leave_out_zeros(monkeypatch):
    """As a GPU, whose host does not wait to learn which are 0: the sums have the rows of padding too."""
    hidden, weight, bias, mask = made("small")
    spoiled = hidden.detach().masked_fill(~mask[:, :, None], math.nan).requires_grad_()
    inputs = spoiled, weight, bias, mask
    wanted, gradients = found(inputs, upstream_of(inputs))
    monkeypatch.setattr(splade, "leaves_out_zeros", lambda cells: False)
    pooled, others = found(inputs, upstream_of(inputs))
    assert torch.equal(pooled, wanted)
    for x, y in zip(others, gradients, strict=True):
        assert relative(x, y) < FLOAT64


def test_nan_of_a_token_stays():
    hidden, weight, bias, mask = made("small")
    with torch.no_grad():
        hidden[1, 3, 2] = math.nan
    pooled, gradients = found((hidden, weight, bias, mask), upstream_of((hidden, weight)))
    assert pooled[1].isnan().all()
    assert pooled[2].isfinite().all()
    assert gradients[0][1, 3].isnan().all()
    assert gradients[0][2].isfinite().all()
    assert gradients[1].isnan().all()


def test_is_the_same_each_time():
    inputs = made("blocks", torch.float32)
    upstream = upstream_of(inputs)
    first, second = (found(inputs, upstream) for _ in range(2))
    assert torch.equal(first[0], second[0])
    for x, y in zip(first[1], second[1], strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("needed", range(3))
def test_gradients_of_some_inputs_alone(needed):
    inputs = made("small")
    upstream = upstream_of(inputs)
    _, gradients = found(inputs, upstream)
    some = [x.detach() for x in inputs]
    some[needed].requires_grad_()
    pooled = fastqt.splade_pool(*some)
    (gradient,) = torch.autograd.grad(pooled, some[needed], upstream.double())
    assert torch.equal(gradient, gradients[needed])


def test_operators_are_sound():
    hidden, weight, bias, mask = (x.detach() for x in made("small"))
    for case in ((bias, mask), (None, None)):
        torch.library.opcheck(torch.ops.fastqt.splade_pool, (hidden, weight, *case, True))
        pooled, tokens = torch.ops.fastqt.splade_pool(hidden, weight, *case, True)
        arguments = (torch.ones_like(pooled), hidden, weight, case[1], pooled, tokens)
        for needs in ([True, True, True], [True, False, False]):
            torch.library.opcheck(torch.ops.fastqt.splade_pool_gradients, (*arguments, needs))
    torch.library.opcheck(torch.ops.fastqt.splade_pool, (hidden, weight, bias, mask, False))


def test_is_one_graph_of_all_sizes():
    torch._dynamo.reset()
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph)
        return graph

    compiled = torch.compile(fastqt.splade_pool, fullgraph=True, dynamic=True, backend=keep)
    for B, L in ((3, 5), (4, 6), (7, 9)):
        draw = torch.Generator().manual_seed(B)
        hidden = torch.randn(B, L, 6, generator=draw, requires_grad=True)
        weight, bias = (torch.randn(*n, generator=draw, requires_grad=True) for n in ((30, 6), (30,)))
        mask = torch.rand(B, L, generator=draw) < 0.7
        wanted = fastqt.splade_pool(hidden, weight, bias, mask)
        ours = compiled(hidden, weight, bias, mask)
        assert torch.equal(ours, wanted)
        for x, y in zip(
            torch.autograd.grad(ours.square().sum(), (hidden, weight, bias)),
            torch.autograd.grad(wanted.square().sum(), (hidden, weight, bias)),
            strict=True,
        ):
            assert torch.equal(x, y)
    assert len(graphs) == 1


@pytest.mark.slow
def test_a_compiled_step_has_the_gradients_of_another():
    inputs = made("small", torch.float32)

    def step(hidden, weight, bias, mask):
        return fastqt.info_nce_loss(*fastqt.splade_pool(hidden, weight, bias, mask)[1:].split(1))

    wanted = torch.autograd.grad(step(*inputs), inputs[:3])
    ours = torch.autograd.grad(torch.compile(step, fullgraph=True)(*inputs), inputs[:3])
    for x, y in zip(ours, wanted, strict=True):
        assert relative(x, y) < FLOAT32 or (x - y).abs().max() < 1e-7


def test_transforms_of_torch_func():
    inputs = made("small")
    upstream = upstream_of(inputs).double()
    _, gradients = found(inputs, upstream)
    hidden, weight, bias, mask = (x.detach() for x in inputs)

    def loss(hidden, weight, bias):
        return (fastqt.splade_pool(hidden, weight, bias, mask) * upstream).sum()

    for x, y in zip(torch.func.grad(loss, (0, 1, 2))(hidden, weight, bias), gradients, strict=True):
        assert torch.equal(x, y)
    several = torch.stack([hidden, 2 * hidden])
    mapped = torch.func.vmap(torch.func.grad(loss), (0, None, None))(several, weight, bias)
    assert torch.equal(mapped[0], gradients[0])
    pooled = torch.func.vmap(lambda x: fastqt.splade_pool(x, weight, bias, mask))(several)
    assert torch.equal(pooled[1], fastqt.splade_pool(2 * hidden, weight, bias, mask))


def test_is_differentiable_once():
    inputs = made("small")
    pooled = fastqt.splade_pool(*inputs)
    (gradient,) = torch.autograd.grad(pooled.sum(), inputs[0], create_graph=True)
    with pytest.raises(RuntimeError, match=r"fastqt.splade_pool is differentiable once"):
        gradient.sum().backward()


@pytest.mark.parametrize("train", [True, False])
def test_is_that_of_sentence_transformers(train):
    modules = pytest.importorskip("sentence_transformers.sparse_encoder.modules")
    inputs = made("small", torch.float32)
    hidden, weight, bias, mask = inputs
    pooling = modules.SpladePooling().train(train)
    logits = hidden @ weight.T + bias
    features = {"token_embeddings": logits, "attention_mask": mask.long()}
    upstream = upstream_of(inputs)
    ours, gradients = found(inputs, upstream)
    if train:
        theirs = pooling(features)["sentence_embedding"]
        for x, y in zip(gradients, torch.autograd.grad(theirs, inputs[:3], upstream), strict=True):
            assert relative(x, y) < FLOAT32
    else:
        with torch.no_grad():
            theirs = pooling(features)["sentence_embedding"]
    assert relative(ours, theirs) < FLOAT32


H, W, M = torch.zeros(2, 3, 4), torch.zeros(5, 4), torch.ones(2, 3, dtype=torch.bool)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((H[0], W), ValueError, r"hidden: want shape \(B, L, D\) with numbers, got \(3, 4\)"),
        ((H.long(), W), TypeError, "hidden: want a floating-point dtype"),
        ((H[:, :0], W), ValueError, r"hidden: want shape \(B, L, D\) with numbers, got \(2, 0, 4\)"),
        ((H, W.T), ValueError, r"weight: want shape \(V, D\) = \(V, 4\), got \(4, 5\)"),
        ((H, W.double()), TypeError, "weight: want dtype torch.float32 as hidden, got torch.float64"),
        ((H, W, W[:, :1]), ValueError, r"bias: want shape \(V,\) = \(5,\), got \(5, 1\)"),
        ((H, W, torch.zeros(4)), ValueError, r"bias: want shape \(V,\) = \(5,\), got \(4,\)"),
        ((H, W, None, M.long()), TypeError, "mask: want dtype torch.bool .* convert it by bool"),
        ((H, W, None, M[:, :2]), ValueError, r"mask: want shape \(B, L\) = \(2, 3\), got \(2, 2\)"),
        (([1.0], W), TypeError, "hidden: want a tensor, got list"),
    ],
)
def test_refuses(arguments, error, message):
    with pytest.raises(error, match=message):
        fastqt.splade_pool(*arguments)
