"""NaN and infinity in the inputs reach the loss and the gradients wherever plain PyTorch has them there.

A training whose loss is finite goes on. It must not be so because an engine has lost a NaN, and a GradScaler
has to find what has overflowed. Which gradients of a row become NaN beside an infinite score is not promised.
"""

import math
import random

import pytest
import torch

import fastqt
from tests.csrc.building import compiler
from tests.csrc.cuda.on_a_cpu import kernel_on_a_cpu
from tests.shared.draws import Seeded
from tests.shared.problems import ALL_DTYPES, DTYPES, Maker

LOSSES = {"softmax": fastqt.contrastive_loss, "sigmoid": fastqt.sigmoid_loss}
FLOATING = ("queries", "candidates", "negatives", "row_negatives", "row_scores", "bias")
MOST = 1e3  # of the sizes of scales, embeddings and weights of targets, so that nothing overflows by itself
# What a problem can have that the one-launch kernel does not take.
NOT_OF_CUDA = ("negatives", "bias", "row_scores", "exclude")


def tensors(arguments):
    return {name: x for name in FLOATING if isinstance(x := arguments.get(name), torch.Tensor)}


def weights_of(targets):
    """The weights of targets that are given as a matrix."""
    if not isinstance(targets, torch.Tensor) or not targets.is_floating_point():
        return []
    return [targets if targets.layout is torch.strided else targets.values()]


def spoiled(number, dtypes, without=()):
    """A problem of which one element, row or all of a tensor is not finite; None where that tells nothing."""
    problem, chance = Maker(Seeded(number), dtypes).problem, random.Random(number)
    arguments = {name: x for name, x in problem.arguments.items() if name not in without}
    scale = abs(float(arguments.get("scale", 1.0)))
    sized = [*tensors(arguments).values(), *weights_of(arguments.get("targets"))]
    sizes = [x.nan_to_num(posinf=0, neginf=0).abs().sum() for x in sized]
    # The products of a scale of 0 are not computed: such a loss does not depend on the embeddings.
    if problem.refusals or problem.autocast or not 0 < scale < MOST or max(sizes) > MOST:
        return None
    name = chance.choice([name for name, x in tensors(arguments).items() if x.numel()])
    x = arguments[name] = arguments[name].clone(memory_format=torch.contiguous_format)
    places = [slice(None), chance.randrange(x.numel())]
    rows = x.view(len(x), -1) if x.dim() else x.view(1, 1)
    x.view(-1)[chance.choice(places)] = chance.choice([math.nan, math.inf, -math.inf])
    if chance.random() < 0.3:
        rows[chance.randrange(len(rows))] = math.nan
    return problem, arguments


def finite(problem, arguments, backend):
    """Whether each loss is finite, each loss without a gradient, and all gradients together."""
    leaves = {name: x.detach().clone().requires_grad_() for name, x in tensors(arguments).items()}
    compute, given = LOSSES[problem.link], {**arguments, **leaves, "backend": backend}
    loss = compute(**given)
    with torch.no_grad():
        alone = compute(**given)
    gradients = torch.autograd.grad(loss.sum(), list(leaves.values()))
    return loss.isfinite().tolist(), alone.isfinite().tolist(), all(g.isfinite().all() for g in gradients)


def is_taken(backend, problem, arguments):
    """Whether an engine computes such a problem at all."""
    try:
        LOSSES[problem.link](**arguments, backend=backend)
    except ValueError as error:
        if "is not available: it does not know" in str(error):
            return False
        raise
    return True


def check(backend, numbers, dtypes, without=()):
    drawn = [problem for number in numbers if (problem := spoiled(number, dtypes, without)) is not None]
    drawn = [problem for problem in drawn if is_taken(backend, *problem)]
    found = []
    for problem, arguments in drawn:
        wanted = finite(problem, arguments, "reference")
        found.append(not all(wanted[0] if isinstance(wanted[0], list) else [wanted[0]]))
        assert finite(problem, arguments, backend) == wanted, problem
    assert len(drawn) > len(numbers) / (6 if not without else 20)
    assert sum(found) > len(drawn) / 2  # of the others' losses no spoiled element is a part


# NumPy, in which the interpreter computes, warns of what the test is about.
@pytest.mark.filterwarnings("ignore:(invalid|overflow|divide by zero).* encountered:RuntimeWarning")
@pytest.mark.parametrize("backend", ["cpu", "torch", pytest.param("triton", marks=pytest.mark.slow)])
def test_what_is_not_finite_is_so_in_plain_pytorch_too(backend):
    numbers = {"cpu": 600, "torch": 300, "triton": 100}
    check(backend, range(numbers[backend]), DTYPES if backend == "triton" else ALL_DTYPES)


@pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
def test_in_the_one_launch_kernel():
    with kernel_on_a_cpu():
        check("cuda", range(600), DTYPES, without=NOT_OF_CUDA)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_in_more_problems(backend):
    check(backend, range(1000, 4000), ALL_DTYPES)


def embeddings(*sizes, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(size, 5, generator=generator).to(dtype) for size in sizes]


@pytest.mark.parametrize("dtype", ALL_DTYPES)
@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("columns", [1, 2, 7, 33])
def test_a_tile_of_nothing_but_nan_counts(columns, gradients, dtype):
    queries, candidates, _ = embeddings(4, 9, 1)
    f, g = (x.to(dtype).requires_grad_(gradients) for x in (queries, candidates))
    lost = torch.full((columns, 5), math.nan, dtype=dtype)
    indices = torch.arange(4)
    losses = {
        "negatives": fastqt.contrastive_loss(f, g, indices, diagonal="keep", negatives=lost),
        "candidates": fastqt.contrastive_loss(f, torch.cat([g, lost]), indices, diagonal="keep"),
        "none": fastqt.contrastive_loss(
            f, g, indices, diagonal="keep", negatives=lost, reduction="none", memory="low"
        ),
        "sigmoid": fastqt.sigmoid_loss(f, g, indices, negatives=lost, diagonal="keep"),
        "logsumexp": fastqt.log_sum_exp(f, lost),
        "row negatives": fastqt.contrastive_loss(
            f, g, indices, diagonal="keep", row_negatives=lost[:1].expand(4, 5)
        ),
    }
    assert {name: loss.isnan().all().item() for name, loss in losses.items()} == dict.fromkeys(losses, True)


@pytest.mark.filterwarnings("ignore:invalid.* encountered:RuntimeWarning")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", ["cpu", "triton", "torch", "reference"])
def test_a_row_without_targets_has_no_gradient_from_a_nan(backend, dtype):
    queries, candidates = (x.to(dtype).requires_grad_() for x in embeddings(3, 4))
    targets = torch.tensor([[1.0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0.5, 0.5]])
    row_scores = torch.tensor([0.0, math.nan, 0.0], requires_grad=True)
    loss = fastqt.contrastive_loss(
        queries, candidates, targets, row_scores=row_scores, diagonal="keep", backend=backend
    )
    gradients = torch.autograd.grad(loss, (queries, candidates, row_scores))
    assert loss.isfinite()
    assert all(g.isfinite().all() for g in gradients)
    assert gradients[0][1].eq(0).all()
    assert gradients[2][1] == 0


@pytest.mark.filterwarnings("ignore:invalid.* encountered:RuntimeWarning")
@pytest.mark.parametrize("memory", ["fast", "low"])
@pytest.mark.parametrize("backend", ["cpu", "triton", "torch", "reference"])
def test_a_row_without_targets_has_no_gradient_from_an_infinite_bias(backend, memory):
    queries, candidates = (x.requires_grad_() for x in embeddings(3, 4))
    bias = torch.tensor([0.0, 0.0, math.inf, 0.0], requires_grad=True)
    options = {"diagonal": "keep", "reduction": "sum", "memory": memory, "backend": backend}
    loss = fastqt.contrastive_loss(
        queries, candidates, torch.tensor([-100, -100, -100]), bias=bias, **options
    )
    gradients = torch.autograd.grad(loss, (queries, candidates, bias))
    assert loss == 0
    assert not any(g.any() for g in gradients)


@pytest.mark.filterwarnings("ignore:invalid.* encountered:RuntimeWarning")
@pytest.mark.parametrize("backend", ["cpu", "triton", "torch", "reference"])
def test_a_bias_that_reaches_no_cell_has_no_gradient(backend):
    """The only cell of a column is the replaced one of the diagonal."""
    queries, candidates = embeddings(1, 1)
    bias = torch.tensor([math.nan], requires_grad=True)
    loss = fastqt.sigmoid_loss(
        queries,
        candidates,
        torch.tensor([-100]),
        bias=bias,
        diagonal="zero",
        reduction="sum",
        backend=backend,
    )
    assert loss.isfinite()
    assert torch.autograd.grad(loss, bias)[0] == 0


def test_the_last_of_many_candidates_is_seen_without_gradients():
    queries, candidates = embeddings(4, 4097)
    candidates[-1] = math.nan
    assert fastqt.contrastive_loss(queries, candidates).isnan()


@pytest.mark.parametrize("payload", [0x7FC00000, 0x7FFFFFFF, 0x7F800001, -0x1, -0x400000])
def test_any_nan_is_one(payload):
    """float32 has many bit patterns for it; that of a float16 has all bits set."""
    queries, candidates = embeddings(3, 4)
    candidates[3].view(torch.int32).fill_(payload)
    for loss in (fastqt.contrastive_loss, fastqt.sigmoid_loss):
        rows = loss(queries, candidates, torch.tensor([0, 1, 2]), diagonal="keep", reduction="none")
        assert rows.isnan().all()


@pytest.mark.parametrize("backend", ["cpu", "torch", "reference"])
def test_scores_that_overflow(backend):
    """No embedding is infinite, but the scores of pairs are."""
    x = torch.full((3, 4), 1e25, requires_grad=True)
    for loss in (
        fastqt.clip_loss(x, x, scale=1.0, normalize=False, backend=backend),
        fastqt.info_nce_loss(x, x, scale=1.0, normalize=False, backend=backend),
    ):
        assert loss.isnan()
        assert not torch.autograd.grad(loss, x)[0].isfinite().any()
