"""What holds for every public loss: its value, dtypes, odd inputs, and how torch.compile takes it."""

import math
import re

import pytest
import torch
from torch import Tensor

import fastqt
from tests.shared.every_loss import EVERY_LOSS, Loss, N
from tests.shared.tolerances import EAGER_FACTOR, FLOAT64, HALF_ULP, relative

every_loss = pytest.mark.parametrize("name", EVERY_LOSS)
# Some of each way in which losses are traced; the others are compiled by `make test-all` alone.
COMPILED_OFTEN = ("mixcse_loss", "max_margin_loss")
SEEDS = 4  # The rounding error of a single number, the loss, is small or large by chance.


def made(
    name: str, dtype: torch.dtype, rows: int = N, seed: int = 0, converged: bool = False
) -> tuple[Loss, dict[str, Tensor]]:
    """A loss and its inputs, with embeddings in `dtype`, and numbers such as a scale in float32 at least."""
    loss = EVERY_LOSS[name]
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


@every_loss
@pytest.mark.parametrize("converged", [False, True])
def test_float64_is_the_formula(name, converged):
    loss, inputs = made(name, torch.float64, converged=converged)
    found = with_gradients(loss.function, inputs, **loss.options)
    wanted = eager_with_gradients(loss, inputs, found[0])
    assert found[0].dtype is torch.float64
    for a, b in zip(found, wanted, strict=True):
        assert relative(a, b) < 1e2 * FLOAT64  # The formulas lose some digits where losses are nearly 0.


def shortened(inputs: dict[str, Tensor], name: str, factor: float) -> dict[str, Tensor]:
    """The same with shorter rows of an embedding, the first ones longer than the others."""
    x = inputs[name].detach()
    lengths = factor * 4.0 ** -torch.arange(len(x), dtype=x.dtype).view(-1, *[1] * (x.dim() - 1))
    return inputs | {name: (x * lengths).requires_grad_(inputs[name].requires_grad)}


# A cosine does not depend on the lengths of rows, except of those that are divided by 1e-12.
OF_COSINES = {
    *(
        "info_nce_loss",
        "simcse_loss",
        "multiple_negatives_ranking_loss",
        "mixcse_loss",
        "mixcse_loss, released",
    ),
    *(
        "cosface_loss",
        "arcface_loss",
        "dcl_loss",
        "hcl_loss",
        "distillation_loss",
        "clip_loss",
        "siglip_loss",
    ),
    *("maxsim_loss", "supcon_loss", "ntxent_loss", "angle_loss", "spread_out_loss", "gist_embed_loss"),
    *("similarity_distillation_loss", "similarity_distillation_loss, candidates", "clip_loss, Matryoshka"),
    *("info_nce_loss, Matryoshka", "siglip_loss, Matryoshka", "supcon_loss, Matryoshka"),
}


@pytest.mark.parametrize("factor", [1e-11, 4e-25])
@pytest.mark.parametrize("name", sorted(OF_COSINES))
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


@every_loss
@pytest.mark.parametrize("converged", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits_are_computed_in_float32(name, dtype, converged):
    """The value is float32, and no error is over that of the formula in 16 bits."""
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
    assert (a <= EAGER_FACTOR * b + HALF_ULP[torch.float32]).all(), (a, b)


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
            assert not loss.function(**inputs, **loss.options).isfinite().all()
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
    [pytest.param(x, marks=() if x in COMPILED_OFTEN else pytest.mark.slow) for x in EVERY_LOSS],
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
