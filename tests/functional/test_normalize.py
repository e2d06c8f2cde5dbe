"""Scores by cosine: engines take rows as they are, and finish the gradient of their normalisation."""

import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import fastqt
from fastqt.engines import cpu, reference
from tests.shared import cosines
from tests.shared.cases import CASES, Case
from tests.shared.cosines import ALL
from tests.shared.tolerances import (
    EAGER_FACTOR,
    FLOAT32,
    FLOAT64,
    FOR_DTYPE,
    HALF_ULP,
    REORDERED_FLOAT64,
    relative,
)

pytestmark = pytest.mark.usefixtures("low_memory_in_tiles")
by_case = pytest.mark.parametrize("case", ALL, ids=lambda case: case.name)
by_memory = pytest.mark.parametrize("memory", ["fast", "low"])
by_dtype = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
UPSTREAM = torch.tensor([1.0, -2.0, 0.0, 1e-3, 0.5, 3.0, -1e-2, 1.0, 0.0, 2.0, -1.0, 1e-4, 1.0])


def assert_oracles(case: Case, inputs: dict[str, torch.Tensor], dtype: torch.dtype, memory: str) -> None:
    """A scalar loss and its gradients, and the losses of rows with an upstream gradient each."""
    if case.link != "log_sum_exp":
        exact = cosines.expected(case, inputs)
        loss = case.loss(inputs, normalize=True, memory=memory, backend="cpu")
        assert relative(loss, exact["loss"].mean()) < FOR_DTYPE[dtype]
        for name, gradient in zip(inputs, torch.autograd.grad(loss, list(inputs.values())), strict=True):
            assert cosines.error(name, inputs, gradient, exact[name]) < FOR_DTYPE[dtype], name
    exact = cosines.expected(case, inputs, UPSTREAM.double().numpy())
    options = {} if case.link == "log_sum_exp" else {"reduction": "none"}
    rows = case.loss(inputs, normalize=True, memory=memory, backend="cpu", **options)
    assert relative(rows, exact["loss"]) < FOR_DTYPE[dtype]
    found = torch.autograd.grad(rows, list(inputs.values()), UPSTREAM.to(dtype))
    for name, gradient in zip(inputs, found, strict=True):
        assert cosines.error(name, inputs, gradient, exact[name]) < FOR_DTYPE[dtype], name


@by_dtype
@by_memory
@by_case
def test_is_the_oracles(case, memory, dtype):
    """The norms of rows differ by factors of some hundreds, and each matrix has a row of zeros."""
    assert_oracles(case, cosines.inputs_of(case, dtype), dtype, memory)


@by_dtype
@by_memory
@pytest.mark.parametrize("case", [ALL[0], *(c for c in ALL if "all at once" in c.name)], ids=lambda c: c.name)
def test_norms_near_the_ends_of_the_range(case, memory, dtype):
    """Rows of 1e-20 count as short ones, and products of rows of 1e20 are beyond float32."""
    inputs = cosines.inputs_of(case, torch.float64)
    with torch.no_grad():
        for name in set(cosines.EMBEDDINGS) & set(inputs):
            inputs[name][4] *= 1e-20
            inputs[name][-1] *= 1e20
            inputs[name][-2] *= 1e20
            row = inputs[name][6 if len(inputs[name]) > 6 else 0]
            row *= 3e-13 / row.norm()  # of length 0.3 after the division by 1e-12
    inputs = {name: x.detach().to(dtype).requires_grad_() for name, x in inputs.items()}
    assert_oracles(case, inputs, dtype, memory)


@by_memory
@by_case
def test_gradcheck(case, memory):
    inputs = {name: x.detach() for name, x in cosines.inputs_of(case, torch.float64).items()}
    for name in set(cosines.EMBEDDINGS) & set(inputs):
        zero = inputs[name].norm(dim=-1) == 0
        inputs[name][zero] = 1.0  # where the derivative of x / |x| has no limit
        inputs[name] /= inputs[name].norm(dim=-1, keepdim=True) / 2
    names = list(inputs)

    def loss(*leaves: torch.Tensor) -> torch.Tensor:
        return case.loss(dict(zip(names, leaves, strict=True)), normalize=True, memory=memory, backend="cpu")

    leaves = [x.requires_grad_() for x in inputs.values()]
    assert torch.autograd.gradcheck(loss, leaves, fast_mode=True, nondet_tol=1e-12)


@pytest.mark.parametrize("layout", cosines.LAYOUTS)
@pytest.mark.parametrize("name", ["queries", "candidates", "negatives", "row_negatives"])
def test_layouts(name, layout):
    case = next(c for c in CASES if c.name == "all at once")
    inputs = cosines.inputs_of(case, torch.float64)
    inputs[name] = cosines.LAYOUTS[layout](inputs[name].detach()).requires_grad_()
    exact = cosines.expected(case, inputs)
    loss = case.loss(inputs, normalize=True, backend="cpu")
    for key, gradient in zip(inputs, torch.autograd.grad(loss, list(inputs.values())), strict=True):
        assert cosines.error(key, inputs, gradient, exact[key]) < FLOAT64, key


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_no_number_reaches_the_loss(value):
    queries, candidates = (torch.randn(9, 4, requires_grad=True) for _ in range(2))
    with torch.no_grad():
        candidates[3, 1] = value
    loss = fastqt.contrastive_loss(queries, candidates, normalize=True, backend="cpu")
    loss.backward()
    assert loss.isnan()
    assert queries.grad.isnan().any()


def test_other_engines_are_given_copies():
    """An engine that does not take rows as they are gets them at norm 1, and no longer sees the option."""
    queries, candidates = (3 * torch.randn(9, 4) for _ in range(2))
    seen = []

    def contrastive_loss(p, reduction):
        seen.append(p)
        return reference.row_losses(p).mean()

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(reference, "contrastive_loss", contrastive_loss)
        loss = fastqt.contrastive_loss(queries, candidates, normalize=True, backend="reference")
    (p,) = seen
    assert not p.normalize
    assert relative(p.queries, F.normalize(queries, dim=1)) < FLOAT32
    ours = fastqt.contrastive_loss(queries, candidates, normalize=True, backend="cpu")
    assert relative(ours, loss) < FLOAT32


def test_under_transforms_of_torch_func():
    case = next(c for c in CASES if c.name == "all at once")
    inputs = cosines.inputs_of(case, torch.float64)
    exact = cosines.expected(case, inputs)

    def loss(inputs):
        return case.loss(inputs, normalize=True, backend="cpu")

    for name, gradient in torch.func.grad(loss)({k: x.detach() for k, x in inputs.items()}).items():
        assert cosines.error(name, inputs, gradient, exact[name]) < FLOAT64, name


def test_compiled():
    case = next(c for c in CASES if c.name == "row negatives")
    inputs = cosines.inputs_of(case, torch.float64)
    exact = cosines.expected(case, inputs)
    compiled = torch.compile(lambda x: case.loss(x, normalize=True), fullgraph=True, backend="aot_eager")
    for name, gradient in zip(
        inputs, torch.autograd.grad(compiled(inputs), list(inputs.values())), strict=True
    ):
        assert cosines.error(name, inputs, gradient, exact[name]) < FLOAT64, name


def test_tiles_do_not_change_the_result(monkeypatch):
    case = next(c for c in CASES if c.name == "sigmoid, all at once")
    inputs = cosines.inputs_of(case, torch.float64)

    def found() -> list[torch.Tensor]:
        loss = case.loss(inputs, normalize=True, memory="low")
        return [loss.detach(), *torch.autograd.grad(loss, list(inputs.values()))]

    whole = found()
    monkeypatch.setattr(cpu, "TILE_ROWS", 3)
    monkeypatch.setattr(cpu, "TILE_COLUMNS", 5)
    for a, b in zip(found(), whole, strict=True):
        assert relative(a, b) < REORDERED_FLOAT64


def converged(generator: torch.Generator, N: int, D: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Pairs of nearly equal directions and any norms: p > 0.999 at a scale of 40."""
    queries = torch.randn(N, D, generator=generator)
    candidates = queries + 0.05 * torch.randn(N, D, generator=generator)
    lengths = torch.randn(2, N, 1, generator=generator).exp()
    return queries * lengths[0], candidates * lengths[1]


@by_memory
@pytest.mark.parametrize("kind", ["random", "converged"])
def test_error_is_at_most_eagers(kind, memory):
    """Eager PyTorch has F.normalize, the product and a cross-entropy, in the same dtype."""
    N, D, scale = 96, 128, 40.0
    case = Case("pairs", {}, np.eye(N), {"diagonal": "keep", "scale": scale})
    ours, eagers = [], []
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        if kind == "random":
            inputs = [torch.randn(N, D, generator=generator) for _ in range(2)]
        else:
            inputs = list(converged(generator, N, D))
        leaves = {k: x.requires_grad_() for k, x in zip(("queries", "candidates"), inputs, strict=True)}
        exact = cosines.expected(case, leaves)
        if kind == "converged":
            assert np.exp(-exact["loss"]).min() > 0.999

        def errors(rows: torch.Tensor, leaves=leaves, exact=exact) -> list[float]:
            gradients = torch.autograd.grad(rows.mean(), list(leaves.values()))
            named = zip(leaves, gradients, strict=True)
            return [relative(rows, exact["loss"])] + [
                cosines.error(k, leaves, gradient, exact[k]) for k, gradient in named
            ]

        options = {"diagonal": "keep", "scale": scale, "normalize": True, "memory": memory, "backend": "cpu"}
        targets = fastqt.Diagonal()
        ours.append(errors(fastqt.contrastive_loss(*inputs, targets, reduction="none", **options)))
        mean = fastqt.contrastive_loss(*inputs, targets, **options)
        for k, gradient in zip(leaves, torch.autograd.grad(mean, inputs), strict=True):
            ours[-1].append(cosines.error(k, leaves, gradient, exact[k]))
        scores = scale * F.normalize(inputs[0], dim=1) @ F.normalize(inputs[1], dim=1).T
        eagers.append(errors(F.cross_entropy(scores, torch.arange(N), reduction="none")))
        eagers[-1] += eagers[-1][1:]
    bound = EAGER_FACTOR * np.mean(eagers, axis=0) + HALF_ULP[torch.float32]
    assert (np.mean(ours, axis=0) <= bound).all(), (np.mean(ours, axis=0), np.mean(eagers, axis=0))


def test_through_norms_is_the_derivative():
    """The oracle's own derivative of x / |x|, against differences."""
    rng = np.random.default_rng(0)
    x, upstream = rng.normal(size=(4, 3)), rng.normal(size=(4, 3))
    x[2] = 1e-14
    found = cosines.through_norms(x, upstream)
    for i, d in np.ndindex(x.shape):
        step = np.zeros_like(x)
        step[i, d] = 1e-6 * np.linalg.norm(x[i])
        ends = [(z / cosines.norms_of(z) * upstream).sum() for z in (x + step, x - step)]
        wanted = (ends[0] - ends[1]) / (2 * step[i, d])
        assert abs(found[i, d] - wanted) <= 1e-6 * np.abs(found[i]).max()


MEASURE = """
import resource, sys, torch, fastqt
N, M, D = {sizes}
def peak():  # bytes; Linux counts KiB, macOS bytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
options = {options}
small = torch.randn(64, D, requires_grad=True)
fastqt.{function}(small, small.detach(), normalize=True, **options).backward()  # loads what is loaded once
queries = torch.randn(N, D).requires_grad_()
candidates = torch.randn(M, D).requires_grad_()
grown = torch.ones((N + M) * D)  # the gradients' share, touched
before = peak()
del grown
fastqt.{function}(queries, candidates, normalize=True, **options).backward()
print(peak() - before)
"""
MEBIBYTE = 2**20
MEASURED = {
    "softmax": ("contrastive_loss", (256, 16384, 1024), {"memory": "low"}),
    "sigmoid": ("sigmoid_loss", (256, 16384, 1024), {"memory": "low"}),
    "CLIP": ("clip_loss", (4096, 4096, 1024), {"memory": "low", "scale": 1.0}),
    "CLIP, fast": ("clip_loss", (4096, 4096, 1024), {"scale": 1.0}),
}
MOST = {"fast": 64 * MEBIBYTE, "low": 24 * MEBIBYTE}


@pytest.mark.parametrize("name", MEASURED)
@pytest.mark.thinned(4)
def test_no_normalised_copy_is_made(name):
    """A copy of the candidates would take 64 MiB (CLIP's 16 MiB a side), and as much for its gradient.

    Scores take 16 MiB with memory="low" and 48 with "fast".
    """
    function, sizes, options = MEASURED[name]
    script = MEASURE.format(sizes=sizes, options=options, function=function)
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert int(run.stdout) <= MOST[options.get("memory", "fast")]
