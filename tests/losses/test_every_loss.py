"""What holds for every public loss: its value, dtypes, odd inputs, and how torch.compile takes it."""

import inspect
import math
import re
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fastqt
from fastqt.targets import cache
from tests.shared.every_loss import (
    EVERY_LOSS,
    D,
    Loss,
    N,
    cosines,
    dcl,
    debiased,
    guided,
    own,
    pairs,
    taught,
    with_numbers,
)
from tests.shared.tolerances import EAGER_FACTOR, FLOAT32, FLOAT64, HALF_ULP, relative
from tests.shared.without_float64 import WithoutFloat64


def smoothed(scores: Tensor) -> Tensor:
    return F.cross_entropy(scores, own(scores), label_smoothing=0.1)


def simcse(z1: Tensor, z2: Tensor, z3: Tensor, weight: float) -> Tensor:
    """Of any number of hard negatives a sentence."""
    hard = [20 * cosines(z1, z) + weight * torch.eye(len(z1)) for z in z3.reshape(len(z1), -1, D).unbind(1)]
    return F.cross_entropy(torch.cat([20 * cosines(z1, z2), *hard], 1), own(z1))


def mixcse(z1: Tensor, z2: Tensor) -> Tensor:
    """As released, with mixtures of the second views alone, through which gradients flow."""
    mixtures = 0.4 * z2 + 0.6 * z2.roll(-1, 0)
    after = torch.eye(len(z1)).roll(1, 1).bool()
    second = (20 * cosines(z1, mixtures)).masked_fill(after.T, -math.inf) - 3 * torch.eye(len(z1))
    return F.cross_entropy(torch.cat([20 * cosines(z1, z2), second], 1), own(z1))


def weighted(z1: Tensor, z2: Tensor, scale: Tensor) -> Tensor:
    """DCLW by its formula, in which no gradient flows through the weights."""
    pair = F.cosine_similarity(z1, z2)
    shares = (pair.detach() / 0.5).exp()
    return dcl(z1, z2, scale) - (1 - shares / shares.mean()) * scale * pair


def call_guided(anchors: Tensor, positives: Tensor, guide_anchors: Tensor, guide_positives: Tensor) -> Tensor:
    guide = fastqt.Guide(guide_anchors, guide_positives, margin=0.1)
    return fastqt.info_nce_loss(anchors, positives, exclude=guide)


def with_guide(anchors: Tensor, positives: Tensor, guide_anchors: Tensor, guide_positives: Tensor) -> Tensor:
    of_guide = cosines(guide_anchors.double(), guide_positives.double())
    leaves = (of_guide > of_guide.diagonal()[:, None] - 0.1) & ~torch.eye(len(anchors), dtype=torch.bool)
    return F.cross_entropy((20 * cosines(anchors, positives)).masked_fill(leaves, -math.inf), own(anchors))


def distances(queries: Tensor, candidates: Tensor) -> Tensor:
    norms = queries.square().sum(1)[:, None] + candidates.square().sum(1)
    scores, itself = 4 * queries @ candidates.T - 2 * norms, torch.eye(len(queries), dtype=torch.bool)
    others = scores.masked_fill(itself, -math.inf).logsumexp(1) - scores.diagonal()
    return torch.logaddexp(torch.zeros_like(others), others)


def row_cells(queries: Tensor, candidates: Tensor, row_negatives: Tensor, row_scores: Tensor) -> Tensor:
    of_rows = torch.einsum("nd,nkd->nk", queries, row_negatives)
    return F.cross_entropy(torch.cat([queries @ candidates.T, of_rows, row_scores], 1), own(queries))


def with_row_cells(n: int, generator: torch.Generator, converged: bool) -> dict[str, Tensor]:
    found = pairs("queries", "candidates")(n, generator, converged)
    rows = torch.randn(n, 3, D, generator=generator) / 4
    return {**found, "row_negatives": rows, "row_scores": torch.randn(n, 2, generator=generator)}


def near(n: int, generator: torch.Generator, converged: bool) -> dict[str, Tensor]:
    found = pairs("queries", "candidates")(n, generator, False)
    return found | ({"queries": found["candidates"] + 0.02 * found["queries"]} if converged else {})


def with_several(n: int, generator: torch.Generator, converged: bool) -> dict[str, Tensor]:
    return pairs("z1", "z2")(n, generator, converged) | {"z3": torch.randn(n, 2, D, generator=generator)}


PAIRS = {"targets": fastqt.Diagonal(), "diagonal": "keep"}
RELEASED = {"form": "released", "blocks": "candidates", "masked_cell": "exclude"}
# Further options, whose other properties are those of the losses above.
FORMULAS = EVERY_LOSS | {
    "info_nce_loss, smoothing": Loss(
        fastqt.info_nce_loss,
        pairs("queries", "candidates", "negatives"),
        lambda queries, candidates, negatives: smoothed(
            20 * cosines(queries, torch.cat([candidates, negatives]))
        ),
        {"label_smoothing": 0.1},
    ),
    "simcse_loss, debiased": Loss(
        fastqt.simcse_loss,
        with_numbers(pairs("z1", "z2"), scale=5.0),
        lambda z1, z2, scale: debiased(z1, z2, 0.02, scale),
        {"tau_plus": 0.02},
    ),
    "clip_loss, debiased": Loss(
        fastqt.clip_loss,
        with_numbers(pairs("a", "b"), scale=5.0),
        lambda a, b, scale: (debiased(a, b, 0.01, scale) + debiased(b, a, 0.01, scale)) / 2,
        {"tau_plus": 0.01},
    ),
    "clip_loss, smoothing": Loss(
        fastqt.clip_loss,
        with_numbers(pairs("a", "b"), scale=20.0),
        lambda a, b, scale: (smoothed(scale * cosines(a, b)) + smoothed(scale * cosines(b, a))) / 2,
        {"label_smoothing": 0.1},
    ),
    "clip_loss, products": Loss(
        fastqt.clip_loss,
        with_numbers(pairs("a", "b"), scale=1.5),
        lambda a, b, scale: sum(F.cross_entropy(scale * x, own(x)) for x in (a @ b.T, b @ a.T)) / 2,
        {"normalize": False},
    ),
    **{
        f"simcse_loss, weighted {weight}": Loss(
            fastqt.simcse_loss,
            pairs("z1", "z2", "z3"),
            lambda z1, z2, z3, weight=weight: simcse(z1, z2, z3, weight),
            {"hard_negative_weight": weight},
        )
        for weight in (1.5, -20.0, 800.0)
    },
    **{
        f"simcse_loss, several weighted {weight}": Loss(
            fastqt.simcse_loss,
            with_several,
            lambda z1, z2, z3, weight=weight: simcse(z1, z2, z3, weight),
            {"hard_negative_weight": weight},
        )
        for weight in (0.0, -1.0)
    },
    "mixcse_loss, candidates": Loss(
        fastqt.mixcse_loss,
        pairs("z1", "z2"),
        mixcse,
        {**RELEASED, "mix": 0.4, "stop_gradient": False, "hard_negative_weight": -3.0},
    ),
    "dcl_loss, weighted": Loss(
        fastqt.dcl_loss, with_numbers(pairs("z1", "z2"), scale=5.0), weighted, {"sigma": 0.5}
    ),
    "info_nce_loss, guide": Loss(
        call_guided, guided, with_guide, {}, ("guide_anchors", "guide_positives"), fullgraph=False
    ),
    "contrastive_loss, distances": Loss(
        fastqt.contrastive_loss, near, distances, {**PAIRS, "similarity": "euclidean", "scale": 2.0}
    ),
    "similarity_distillation_loss, products": Loss(
        fastqt.similarity_distillation_loss,
        taught,
        lambda embeddings, teacher_embeddings: (
            (embeddings @ embeddings.T - teacher_embeddings @ teacher_embeddings.T).square().mean()
        ),
        {"normalize": False},
        ("teacher_embeddings",),
    ),
    "contrastive_loss, row cells": Loss(fastqt.contrastive_loss, with_row_cells, row_cells, PAIRS),
}
every_loss = pytest.mark.parametrize("name", EVERY_LOSS)
every_formula = pytest.mark.parametrize("name", FORMULAS)
# Some of each way in which losses are traced; the others are compiled by `make test-all` alone.
COMPILED_OFTEN = ("mixcse_loss", "max_margin_loss")
FEW_ROUNDINGS = 2e-5  # of float32, relative to the norm of a gradient
SEEDS = 4  # The rounding error of a single number, the loss, is small or large by chance.


def made(
    name: str, dtype: torch.dtype, rows: int = N, seed: int = 0, converged: bool = False
) -> tuple[Loss, dict[str, Tensor]]:
    """A loss and its inputs, with embeddings in `dtype`, and numbers such as a scale in float32 at least."""
    loss = FORMULAS[name]
    inputs = loss.inputs(rows, torch.Generator().manual_seed(seed), converged)
    for key, x in inputs.items():
        if x.is_floating_point():
            numbers = torch.promote_types(dtype, torch.float32)
            inputs[key] = x.to(dtype if x.dim() else numbers).requires_grad_(key not in loss.constant)
    return loss, inputs


def with_gradients(function, inputs: dict[str, Tensor], **options) -> list[Tensor]:
    """The value, and the gradient of each input that has one."""
    leaves = [x for x in inputs.values() if x.requires_grad]
    value = function(**inputs, **options)
    # Formulas of the mean of a loss may return its rows, as log_sum_exp does.
    return [value.detach(), *torch.autograd.grad(value.mean(), leaves)]


def eager_with_gradients(loss: Loss, inputs: dict[str, Tensor], like: Tensor) -> list[Tensor]:
    value, *gradients = with_gradients(loss.eager, inputs)
    return [value if like.dim() else value.mean(), *gradients]


def copied(inputs: dict[str, Tensor], dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """The same values as leaves of another graph."""
    return {
        key: x.detach()
        .to(dtype if dtype and x.is_floating_point() else x.dtype)
        .requires_grad_(x.requires_grad)
        for key, x in inputs.items()
    }


def error(a: Tensor, exact: Tensor) -> float:
    """The relative error in the norm of all elements."""
    size = exact.double().norm()
    return float((a.double() - exact.double()).norm() / torch.where(size > 0, size, 1.0))


def test_no_public_loss_is_missing():
    public = {name for name in fastqt.__all__ if name.endswith("_loss") or name == "log_sum_exp"}
    assert public == {name.split(",")[0] for name in EVERY_LOSS}


def ways(loss: Loss) -> list[dict[str, object]]:
    """How a loss can be computed: by the default engine `cpu`, by others, and in little memory."""
    values = {"backend": ["torch", "reference"], "memory": ["low", 2**25]}
    taken = inspect.signature(loss.function).parameters
    return [{}, *({name: value} for name in values if name in taken for value in values[name])]


@every_formula
@pytest.mark.parametrize("converged", [False, True])
def test_float64_is_the_formula(name, converged):
    loss, inputs = made(name, torch.float64, converged=converged)
    for way in ways(loss):
        found = with_gradients(loss.function, inputs, **loss.options, **way)
        wanted = eager_with_gradients(loss, inputs, found[0])
        assert found[0].dtype is torch.float64
        # Where losses are nearly 0 the formulas lose some digits, and differences of large numbers more.
        lost = 1e4 if name == "contrastive_loss, distances" else 1e2
        for a, b in zip(found, wanted, strict=True):
            assert relative(a, b) < lost * FLOAT64, way


@every_loss
def test_reductions_are_those_of_the_rows(name):
    """Of any weights of rows the gradients are the sum over rows, and the rows are the formula's."""
    loss, inputs = made(name, torch.float64)
    if "reduction" not in inspect.signature(loss.function).parameters:
        return
    options = {**loss.options, "reduction": "none"}
    rows = loss.function(**inputs, **options)
    leaves = [x for x in inputs.values() if x.requires_grad]
    total, *of_total = with_gradients(loss.function, inputs, **{**options, "reduction": "sum"})
    assert relative(rows.sum(), total) < FLOAT64
    parts = [torch.autograd.grad(row, leaves, retain_graph=True) for row in rows]
    weights = torch.linspace(-1, 2, len(rows), dtype=torch.float64)
    weighted = torch.autograd.grad(rows, leaves, weights)
    for found, wanted, each in zip(weighted, of_total, zip(*parts, strict=True), strict=True):
        assert relative(sum(each), wanted) < 10 * FLOAT64
        assert relative(found, sum(w * x for w, x in zip(weights, each, strict=True))) < 10 * FLOAT64
    wanted = loss.eager(**inputs)
    if wanted.shape == rows.shape:
        assert relative(rows, wanted) < 10 * FLOAT64


def shortened(inputs: dict[str, Tensor], name: str, factor: float) -> dict[str, Tensor]:
    """The same with shorter rows of an embedding, the first ones longer than the others."""
    x = inputs[name].detach()
    lengths = factor * 4.0 ** -torch.arange(len(x), dtype=x.dtype).view(-1, *[1] * (x.dim() - 1))
    return inputs | {name: (x * lengths).requires_grad_(inputs[name].requires_grad)}


# A cosine does not depend on the lengths of rows, except of those that are divided by 1e-12.
NOT_OF_COSINES = (
    *("contrastive_", "sigmoid_loss", "log_sum_exp", "max_margin_", "curl_", "binary_", "negative_"),
    *("gloss_", "lsep_", "cosent_", "score_distillation_", "margin_mse_", "flops_"),
    *("info_nce_loss, margin", "hcl_loss, debiased", "spread_out_loss, squares"),
)
OF_COSINES = [name for name in EVERY_LOSS if not name.startswith(NOT_OF_COSINES)]


@pytest.mark.parametrize("factor", [1e-11, 4e-25])
@pytest.mark.parametrize("name", [*OF_COSINES, "sigmoid_loss, several positives"])
def test_short_rows_are_divided_by_the_least_norm(name, factor):
    """As `torch.nn.functional.normalize` has it, in value and gradients, whichever side has such rows."""
    loss, inputs = made(name, torch.float64)
    for key in [key for key, x in inputs.items() if x.is_floating_point() and x.dim() > 1]:
        if key.startswith("guide"):  # whose scores are compared in float32
            continue
        short = shortened(inputs, key, factor)
        found = with_gradients(loss.function, short, **loss.options)
        wanted = eager_with_gradients(loss, short, found[0])
        for a, b in zip(found, wanted, strict=True):
            assert relative(a, b) < 1e2 * FLOAT64


@pytest.mark.parametrize(
    "name", [name for name in FORMULAS if name != "dcl_loss, weighted"]
)  # whose terms cancel
@pytest.mark.parametrize("converged", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_error_is_at_most_eagers(name, dtype, converged):
    """The value is float32, and no error is over that of eager PyTorch in the dtype of the inputs."""
    ours, eagers = [], []
    for seed in range(SEEDS):
        loss, inputs = made(name, dtype, seed=seed, converged=converged)
        found = with_gradients(loss.function, inputs, **loss.options)
        exact = eager_with_gradients(loss, copied(inputs, torch.float64), found[0])
        eager = eager_with_gradients(loss, copied(inputs), found[0])
        assert found[0].dtype is torch.float32
        assert [g.dtype for g in found[1:]] == [x.dtype for x in inputs.values() if x.requires_grad]
        ours.append([error(a, b) for a, b in zip(found, exact, strict=True)])
        eagers.append([error(a, b) for a, b in zip(eager, exact, strict=True)])
    a, b = (torch.tensor(x).mean(0) for x in (ours, eagers))
    # In float32 a few roundings are large or small by chance; lost digits are far more.
    rounding = FEW_ROUNDINGS / 4 if dtype is torch.float32 else HALF_ULP[torch.float32]
    assert (a <= EAGER_FACTOR * b + rounding).all(), (a, b)


# Losses whose backward pass is torch's own operations.
OF_TORCH = (
    *("lsep_", "cosent_", "angle_", "spread_out_", "similarity_distillation_"),
    *("score_distillation_", "margin_mse_", "flops_"),
)


@every_formula
def test_a_graph_is_walked_twice_and_a_second_derivative_is_right_or_refused(name):
    loss, inputs = made(name, torch.float64, rows=6)
    leaves = [x for x in inputs.values() if x.requires_grad]
    value = loss.function(**inputs, **loss.options).sum()
    first, again = (torch.autograd.grad(value, leaves, retain_graph=True) for _ in range(2))
    for a, b in zip(first, again, strict=True):
        assert relative(a, b) < FLOAT64

    def of_leaves(options: dict[str, object], *given: Tensor) -> Tensor:
        named = dict(zip((key for key, x in inputs.items() if x.requires_grad), given, strict=True))
        return loss.function(**inputs | named, **loss.options, **options)

    if name.startswith(OF_TORCH):
        assert torch.autograd.gradgradcheck(partial(of_leaves, {}), leaves, fast_mode=True)
    elif not name.startswith("curl_"):  # of blocks torch itself has no second derivative
        with pytest.raises(RuntimeError, match="differentiable once"):
            torch.autograd.grad(value, leaves, create_graph=True)
        if {"backend": "reference"} in ways(loss) and not name.startswith(("mixcse_", "dcl_loss, weighted")):
            reference = partial(of_leaves, {"backend": "reference"})  # of others some gradients stop within
            assert torch.autograd.gradgradcheck(reference, leaves, fast_mode=True)


@pytest.mark.parametrize("rows", [6, 1500])
@pytest.mark.parametrize("name", [name for name in EVERY_LOSS if name.startswith(OF_TORCH)])
def test_autocast_changes_nothing(name, rows):
    """Of losses of a whole batch, whose sums are in float64 however they are computed."""
    loss, inputs = made(name, torch.float32, rows=rows)
    exact = with_gradients(loss.function, inputs, **loss.options)
    with torch.autocast("cpu", torch.bfloat16):
        found = with_gradients(loss.function, inputs, **loss.options)
    for a, b in zip(found, exact, strict=True):
        assert a.dtype is b.dtype
        assert relative(a, b) < FLOAT32


NAN_CASES = [
    (name, key)
    for name, loss in EVERY_LOSS.items()
    for key, x in loss.inputs(N, torch.Generator(), False).items()
    if x.is_floating_point() and key not in loss.constant
]


@pytest.mark.parametrize(("name", "key"), NAN_CASES)
@pytest.mark.parametrize("place", [0, -1])
def test_nan_is_seen(name, key, place):
    """With gradients and without, in each input of its own; so it is with embeddings that are all NaN."""
    if key == "scale":  # Its value is checked where it is used.
        loss, inputs = made(name, torch.float32)
        with pytest.raises(ValueError, match=r"^scale: want a finite number"):
            loss.function(**inputs | {key: torch.tensor(math.nan)}, **loss.options)
        return
    for whole in (False, True):
        loss, inputs = made(name, torch.float32)
        with torch.no_grad():
            inputs[key].view(-1)[slice(None) if whole else place] = math.nan
            for way in ways(loss):
                assert not loss.function(**inputs, **loss.options, **way).isfinite().all(), way
        value, *gradients = with_gradients(loss.function, inputs, **loss.options)
        assert not value.isfinite().all()
        assert not all(g.isfinite().all() for g in gradients)


@every_loss
def test_no_rows_are_refused_in_words(name):
    loss, inputs = made(name, torch.float32, rows=0)
    with pytest.raises(ValueError, match=f"^({'|'.join(inputs)}): want at least one row"):
        loss.function(**inputs, **loss.options)


@every_loss
def test_one_row(name):
    """It is a batch like others, or a ValueError says for which argument it is too small."""
    loss, inputs = made(name, torch.float64, rows=1)
    if loss.one_row is not None:
        with pytest.raises(ValueError, match=rf"^{re.escape(loss.one_row)}\b[^:]*: want"):
            loss.function(**inputs, **loss.options)
        return
    for x in with_gradients(loss.function, inputs, **loss.options):
        assert x.isfinite().all()


# torch's own, where a tensor with a graph crosses a break.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize(
    "name",
    [pytest.param(x, marks=() if x in COMPILED_OFTEN else pytest.mark.slow) for x in FORMULAS],
)
def test_compiled_is_eager(name):
    """It is one graph, but for losses that docs/faq.md excepts, whose graph breaks."""
    torch.compiler.reset()  # Dynamo counts the cases of one function.
    loss, inputs = made(name, torch.float64)

    def call(**given: Tensor) -> Tensor:
        return loss.function(**given, **loss.options)

    if not loss.fullgraph:
        with pytest.raises(torch._dynamo.exc.Unsupported):
            torch.compile(call, fullgraph=True, backend="aot_eager")(**inputs)
    compiled = torch.compile(call, fullgraph=loss.fullgraph, backend="aot_eager")

    wanted = with_gradients(call, inputs)
    for a, b in zip(with_gradients(compiled, inputs), wanted, strict=True):
        assert relative(a, b) < FLOAT64
    with torch.no_grad():
        assert relative(compiled(**inputs), wanted[0]) < FLOAT64


@pytest.mark.parametrize("converged", [False, True], ids=["random", "converged"])
@pytest.mark.parametrize(
    ("name", "backend"),
    # gloss_pos_loss has a walk of its own where no engine is asked for.
    [*((name, "torch") for name in EVERY_LOSS), ("gloss_pos_loss", "")],
)
def test_no_tensor_of_float64_is_made(name, backend, converged, monkeypatch):
    monkeypatch.setenv("FASTQT_BACKEND", backend)
    monkeypatch.setattr(cache, "CACHED", cache.RowsCache(size=8))  # that has float64 of other tests
    loss, inputs = made(name, torch.float32, converged=converged)
    with WithoutFloat64():
        found = with_gradients(loss.function, inputs, **loss.options)

    _, exact = made(name, torch.float64, converged=converged)
    truth = with_gradients(loss.eager, exact)
    truth[0] = truth[0] if found[0].dim() else truth[0].mean()
    for x, y in zip(found, truth, strict=True):
        assert x.dtype is torch.float32
        if x.dim() == 0 and name.startswith("similarity_distillation_loss"):
            # A mean of squared differences of cosines is small beside that of their squares, at least 1 / D.
            assert (x - y).abs() < FEW_ROUNDINGS / D
        else:
            assert error(x, y) < FEW_ROUNDINGS
