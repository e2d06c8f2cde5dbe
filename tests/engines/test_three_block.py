"""MixCSE's three blocks from one matrix of cosines: values, and gradients of all inputs.

By Triton's kernels, interpreted, and by the walk of the C++ engine, whose threads take pieces of 32 rows.
"""

import math
from dataclasses import dataclass, replace
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F

from fastqt import autograd
from fastqt.engines.cpu import contrastive
from fastqt.engines.cpu import three_block as cpu_three_block
from fastqt.engines.triton import operands
from fastqt.engines.triton import three_block as triton_three_block
from fastqt.kernels import three_block, three_block_gradients
from fastqt.problem import ThreeBlockProblem
from tests.shared.tolerances import FLOAT32, FLOAT64, REORDERED, TWO_ROUNDINGS, relative

NAMES = ("u", "v", "own columns", "next columns", "own rows", "next rows", "scale")


@dataclass(frozen=True)
class Options:
    """Those of a `ThreeBlockProblem`."""

    both: bool = True
    excluded: bool = False
    weight: float = 0.0
    stop_gradient: bool = True
    memory: str = "fast"
    computation: ModuleType = triton_three_block


PLAIN = Options()
by_half = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
OPTIONS = [
    replace(PLAIN, both=both, weight=0.6 if both else 0.0, excluded=excluded, stop_gradient=stop_gradient)
    for both in (True, False)
    for stop_gradient in (True, False)
    for excluded in (True, False)
]


def described(options: Options) -> str:
    shown = {"both": options.both, "excluded": options.excluded, "stop": options.stop_gradient}
    return " ".join(name if value else f"-{name}" for name, value in shown.items())


by_options = pytest.mark.parametrize("options", OPTIONS, ids=described)
by_blocks = pytest.mark.parametrize("options", OPTIONS[::2], ids=described)


def inputs_of(N: int, D: int, dtype: torch.dtype = torch.float32, scale: float = 5.0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(N)
    sides = [F.normalize(torch.randn(N, D, generator=generator), dim=1).to(dtype) for _ in range(2)]
    shares = [torch.rand(N, generator=generator) + 0.2 for _ in range(4)]
    if dtype is torch.float64:
        shares = [x.double() for x in shares]
    return [x.requires_grad_() for x in (*sides, *shares, torch.tensor(scale, dtype=shares[0].dtype))]


def exact(inputs: list[torch.Tensor], options: Options) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The rows' losses by whole matrices in float64, and what to differentiate them by."""
    leaves = [x.detach().double().requires_grad_() for x in inputs]
    u, v, own_columns, next_columns, own_rows, next_rows, scale = leaves
    m = own_columns[:, None] * v + next_columns[:, None] * v.roll(-1, 0)
    a = own_rows[:, None] * u + next_rows[:, None] * u.roll(-1, 0)
    if options.stop_gradient:
        m, a = m.detach(), a.detach()
    eye, masked_score = torch.eye(len(u), dtype=torch.float64), -math.inf if options.excluded else 0.0
    second, third = (scale * x + options.weight * eye for x in (u @ m.T, a @ v.T))
    second = second.masked_fill(eye.roll(-1, 1).bool(), masked_score)
    third = third.masked_fill(eye.roll(1, 1).bool(), masked_score)
    first = scale * u @ v.T
    others = first.masked_fill(eye.bool(), -math.inf)
    blocks = [others, second, third] if options.both else [others, second]
    return F.softplus(torch.cat(blocks, 1).logsumexp(1) - first.diagonal(), threshold=40), leaves


def ours(inputs: list[torch.Tensor], options: Options, reduction: str = "mean") -> torch.Tensor:
    u, v, own_columns, next_columns, own_rows, next_rows, scale = inputs
    shares = [own_columns, next_columns, own_rows, next_rows]
    if options.stop_gradient:
        shares = [x.detach() for x in shares]
    flags = options.both, options.excluded, options.weight, options.stop_gradient, options.memory
    p = ThreeBlockProblem(u, v, *shares, scale, *flags)
    return autograd.loss_of(p, reduction, options.computation, "fastqt.mixcse_loss")


def check(inputs, options, tolerance, reduction="mean", upstream=None, loss_tolerance=FLOAT32) -> None:
    rows, leaves = exact(inputs, options)
    expected = rows if reduction == "none" else getattr(rows, reduction)()
    upstream = torch.ones_like(expected) if upstream is None else upstream.double()
    loss = ours(inputs, options, reduction)
    assert relative(loss, expected) < loss_tolerance
    found = torch.autograd.grad(loss, inputs, upstream.to(loss.dtype), allow_unused=True)
    wanted = torch.autograd.grad(expected, leaves, upstream, allow_unused=True)
    for name, x, a, b in zip(NAMES, inputs, found, wanted, strict=True):
        if b is None or not b.any():
            assert a is None or not a.any(), name
            continue
        assert a.dtype is x.dtype
        # The scale's is one sum, of terms that all but cancel.
        assert relative(a, b) < (10 if name == "scale" else 1) * tolerance, name


@by_options
@pytest.mark.parametrize("N", [2, 13])
def test_is_the_oracles_on_triton(N, options):
    check(inputs_of(N, 7), options, FLOAT32)


def on_a_cpu(options: Options) -> Options:
    return replace(options, computation=cpu_three_block)


@by_options
@pytest.mark.parametrize("rows", [None, 33])
@pytest.mark.parametrize("N", [2, 31, 33, 100])
def test_is_the_oracles_on_a_cpu(N, rows, options, monkeypatch):
    """A mixture at the border of two pieces, or of two chunks, has a part in each."""
    if rows is not None:
        monkeypatch.setattr(contrastive, "CHUNK_BYTES", 1)
        monkeypatch.setattr(contrastive, "MIN_CHUNK_ROWS", rows)
    weights = torch.linspace(-1, 2, N, dtype=torch.float64)
    inputs = inputs_of(N, 7, torch.float64)
    check(inputs, on_a_cpu(options), FLOAT64, "none", weights, loss_tolerance=FLOAT64)


def test_memory_is_what_the_chunks_take_on_a_cpu():
    u, v, *shares, scale = inputs_of(4096, 6, torch.float64)
    p = ThreeBlockProblem(u, v, *shares, scale, True, False, 0.6, True)
    rows = [cpu_three_block._chunk_rows(replace(p, memory=m)) for m in ("fast", "low", 2**25, 2**40)]
    assert rows == [512, 164, 316, 512]


def test_threads_agree_and_runs_repeat_on_a_cpu():
    threads, found = torch.get_num_threads(), []
    inputs, options = inputs_of(200, 7), on_a_cpu(replace(PLAIN, stop_gradient=False))
    try:
        for count in (2, 2, 1):
            torch.set_num_threads(count)
            loss = ours(inputs, options, "sum")
            found.append([loss.detach(), *torch.autograd.grad(loss, inputs)])
    finally:
        torch.set_num_threads(threads)
    two, again, one = found
    assert all(torch.equal(x, y) for x, y in zip(two, again, strict=True))
    assert all(relative(x, y) < REORDERED[torch.float32] for x, y in zip(one, two, strict=True))


@pytest.mark.parametrize("computation", [triton_three_block, cpu_three_block], ids=["triton", "cpu"])
def test_strides_do_not_change_the_result(computation):
    inputs = inputs_of(40, 7)
    sides = [x.detach().T.repeat_interleave(2, 0)[::2].T.requires_grad_() for x in inputs[:2]]
    check([*sides, *inputs[2:]], replace(PLAIN, computation=computation), FLOAT32)


@pytest.mark.parametrize("wanted", range(7), ids=NAMES.__getitem__)
@pytest.mark.parametrize("computation", [triton_three_block, cpu_three_block], ids=["triton", "cpu"])
@pytest.mark.parametrize("stop_gradient", [True, False])
@pytest.mark.thinned(2)
def test_one_gradient_alone(wanted, computation, stop_gradient):
    inputs = [x.detach() for x in inputs_of(40 if computation is cpu_three_block else 13, 7)]
    options = replace(PLAIN, stop_gradient=stop_gradient, computation=computation)
    inputs[wanted].requires_grad_()
    if stop_gradient and 2 <= wanted < 6:
        assert not ours(inputs, options).requires_grad
        return
    rows, leaves = exact(inputs, options)
    (expected,) = torch.autograd.grad(rows.mean(), leaves[wanted])
    (found,) = torch.autograd.grad(ours(inputs, options), inputs[wanted])
    assert relative(found, expected) < FLOAT32


@by_options
@pytest.mark.thinned(4)
def test_many_tiles_on_triton(monkeypatch, options):
    """The gradients have many tiles, and the largest score of a row may be in any of them."""
    monkeypatch.setattr(three_block, "block", lambda n, most: 8)
    monkeypatch.setattr(three_block_gradients, "BLOCK_ROWS", 4)
    monkeypatch.setattr(three_block_gradients, "BLOCK_COLUMNS", 8)
    check(inputs_of(19, 7, scale=30.0), options, FLOAT32)


@by_half
@by_options
@pytest.mark.thinned(2)
def test_half_precision_on_triton(options, dtype):
    check(inputs_of(13, 7, dtype), options, FLOAT32 + TWO_ROUNDINGS[dtype])


@by_blocks
@pytest.mark.parametrize("memory", ["fast", "low"])
@pytest.mark.thinned(2)
def test_chunks_do_not_change_the_result_on_triton(monkeypatch, memory, options):
    """A mixture at the border of two chunks has a part in each. The last chunk is shorter."""
    inputs = inputs_of(14, 7)
    options = replace(options, memory=memory)
    whole = ours(inputs, options, "sum")
    gradients = torch.autograd.grad(whole, inputs, allow_unused=True)
    for name, value in {"ROW_MULTIPLE": 6, "FAST_BYTES": 0, "LOW_BYTES": 0}.items():
        monkeypatch.setattr(operands, name, value)
    heights = []
    rows = three_block.three_block_rows

    def noted(lines, *rest):
        heights.append(len(lines.cosines))
        rows(lines, *rest)

    monkeypatch.setattr(triton_three_block, "three_block_rows", noted)
    loss = ours(inputs, options, "sum")
    assert heights == [8, 8, 4]
    assert relative(loss, whole) < REORDERED[torch.float32]
    found = torch.autograd.grad(loss, inputs, allow_unused=True)
    for a, b in zip(found, gradients, strict=True):
        assert (a is None) == (b is None)
        assert a is None or relative(a, b) < REORDERED[torch.float32]
    with torch.no_grad():
        assert relative(ours(inputs, options, "sum"), loss) < REORDERED[torch.float32]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@by_blocks
@pytest.mark.thinned(2)
def test_rows_weighted_by_an_upstream_gradient_on_triton(options, dtype):
    """With reduction="none" the upstream gradient has both signs, zeros and very different sizes."""
    upstream = torch.tensor([1.0, -2.0, 0.0, 1e-3, 0.5, 3.0, -1e-2, 1.0, 0.0, 2.0, -1.0, 1e-4, 1.0])
    check(inputs_of(13, 7, dtype), options, FLOAT32 + TWO_ROUNDINGS[dtype], "none", upstream)


def converged(N: int, dtype: torch.dtype, scale: float) -> list[torch.Tensor]:
    """The two views of a sentence are nearly equal, and nearly orthogonal to those of other sentences."""
    generator = torch.Generator().manual_seed(0)
    u = torch.linalg.qr(torch.randn(N, N, generator=generator)).Q
    v = F.normalize(u + 0.01 * torch.randn(N, N, generator=generator), dim=1)
    shares = [torch.full((N,), share) for share in (0.2425, 0.9701) * 2]
    return [x.requires_grad_() for x in (u.to(dtype), v.to(dtype), *shares, torch.tensor(scale))]


def test_gradients_keep_their_digits_on_a_cpu():
    """Positives of probability 1 - 1e-15: in float32 that is 1, and a gradient of p - 1 would be 0."""
    inputs = converged(64, torch.float32, 60.0)
    options = on_a_cpu(replace(PLAIN, excluded=True))
    rows, _ = exact(inputs, options)
    assert (-rows).exp().min() > 1 - 1e-13
    check(inputs, options, 12 * FLOAT32, "none", (1 / rows).float(), 12 * FLOAT32)


@by_blocks
@pytest.mark.parametrize(
    ("dtype", "scale", "least"),
    [
        (torch.float32, 20.0, 1 - 1e-5),
        (torch.float32, 60.0, 1 - 1e-15),
        (torch.bfloat16, 60.0, 1 - 1e-15),
        (torch.float16, 20.0, 1 - 1e-5),
    ],
)
@pytest.mark.thinned(2)
def test_gradients_keep_their_digits_when_all_is_learnt_on_triton(dtype, scale, least, options):
    """The rows' weights are large, because gradients as small as the loss would underflow in float16."""
    inputs = converged(13, dtype, scale)
    rows, _ = exact(inputs, options)
    assert (-rows).exp().min() > least
    weights = (1 / rows).float()
    # Cosines are sums of 13 products, whose error the scale makes larger before they are exponents.
    check(
        inputs,
        options,
        scale / 5 * FLOAT32 + TWO_ROUNDINGS[dtype],
        "none",
        weights,
        scale / 5 * FLOAT32,
    )


def test_shares_beyond_the_range_of_float16_on_triton():
    """The parts of a mixture nearly cancel, which multiplies the rounding errors of the product by 900."""
    u, v, *shares, scale = inputs_of(13, 7, torch.float16)
    with torch.no_grad():
        v[5] = 2.0**-9 - v[4]
        shares[0][4] = shares[1][4] = 900.0
    for stop_gradient in (True, False):
        options = replace(PLAIN, stop_gradient=stop_gradient)
        check([u, v, *shares, scale], options, 900 * TWO_ROUNDINGS[torch.float16])


def test_upstream_beyond_the_range_of_float16_on_triton():
    """A loss scaler gives such an upstream gradient."""
    inputs = inputs_of(13, 7, torch.float16)
    once = torch.autograd.grad(ours(inputs, PLAIN), inputs[0])[0]
    scaled = torch.autograd.grad(ours(inputs, PLAIN), inputs[0], torch.tensor(2.0**16))[0]
    assert relative(scaled, 2**16 * once.float()) < TWO_ROUNDINGS[torch.float16]
