"""Losses under torch.func: what a transform gives is what loops and torch.autograd give."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch.autograd.functional import jacobian
from torch.func import (
    functional_call,
    grad,
    grad_and_value,
    jacrev,
    jvp,
    stack_module_state,
    vmap,
)

import fastqt
from tests.losses.test_every_loss import made
from tests.shared.every_loss import EVERY_LOSS
from tests.shared.tolerances import FLOAT64, relative

pytestmark = pytest.mark.usefixtures("low_memory_in_tiles")

N, D, B = 9, 5, 3
IDS = torch.arange(N) // 3
# Losses whose backward pass is torch's own operations.
OF_TORCH = (
    *("curl_", "lsep_", "cosent_", "angle_", "spread_out_", "similarity_distillation_"),
    *("score_distillation_", "margin_mse_", "flops_"),
)


def losses(**options: str) -> dict[str, Callable[..., torch.Tensor]]:
    return {
        "contrastive": lambda x, y, s: fastqt.contrastive_loss(x, y, scale=s, **options),
        "low": lambda x, y, s: fastqt.contrastive_loss(x, y, scale=s, memory="low", **options),
        "sum": lambda x, y, s: fastqt.contrastive_loss(
            x, y, scale=s, normalize=True, exclude=fastqt.Same(IDS), reduction="sum", **options
        ),
        "mixed": lambda x, y, s: fastqt.mixcse_loss(x, y, scale=s, **options),
        "released": lambda x, y, s: fastqt.mixcse_loss(x, y, scale=s, form="released", **options),
        "siglip": lambda x, y, s: fastqt.siglip_loss(x, y, scale=s, bias=-2.0, **options),
        "dcl": lambda x, y, s: fastqt.dcl_loss(x, y, scale=s, sigma=0.5, **options),
        "hcl": lambda x, y, s: fastqt.hcl_loss(x, y, scale=s, **options),
        "distillation": lambda x, y, s: fastqt.distillation_loss(x, y, y.detach(), x.detach(), scale=s),
        "maxsim": lambda x, y, s: fastqt.maxsim_loss(x[:, None], y[:, None], scale=s),
        "cosface": lambda x, y, s: fastqt.cosface_loss(x, y, IDS, scale=s, **options),
        "arcface": lambda x, y, s: fastqt.arcface_loss(x, y, IDS, scale=s, **options),
        "clip": lambda x, y, s: fastqt.clip_loss(x, y, scale=s, **options),
        "supcon": lambda x, y, s: fastqt.supcon_loss(x * y, IDS, scale=s, **options),
        "ntxent": lambda x, y, s: fastqt.ntxent_loss(
            x, IDS, candidates=y, candidate_labels=IDS.flip(0), scale=s, **options
        ),
        "simcse": lambda x, y, s: fastqt.simcse_loss(x, y, y * x, scale=s, hard_negative_weight=1, **options),
    }


def inputs(*batch: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(*batch, N, D, generator=generator, dtype=torch.float64) for _ in range(2))
    return [x, y, 2 + torch.rand(batch, generator=generator, dtype=torch.float64)]


def check(found: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> None:
    for a, b in zip(found, expected, strict=True):
        assert relative(a, b) < FLOAT64


def usual_gradients(loss: Callable[..., torch.Tensor], given: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    leaves = [x.clone().requires_grad_() for x in given]
    return torch.autograd.grad(loss(*leaves), leaves)


@pytest.mark.parametrize("backend", ["cpu", "torch"])
@pytest.mark.parametrize("name", losses())
def test_grad(name, backend):
    loss, given = losses(backend=backend)[name], inputs()
    gradients, value = grad_and_value(loss, argnums=(0, 1, 2))(*given)
    check((*gradients, value), (*usual_gradients(loss, given), loss(*given)))


@pytest.mark.parametrize("name", losses())
def test_vmap_of_grad(name):
    loss, given = losses()[name], inputs(B)
    found = vmap(grad(loss, argnums=(0, 1, 2)))(*given)
    each = [usual_gradients(loss, [x[b] for x in given]) for b in range(B)]
    check(found, tuple(torch.stack(gradients) for gradients in zip(*each, strict=True)))


def test_grad_of_vmap_over_one_argument_in_any_dimension():
    x, y, s = inputs(B)
    y, s = y[0], s[0]

    def total(x, y, s):
        return vmap(fastqt.contrastive_loss, in_dims=(1, None))(x, y * s).sum()

    def loop(x, y, s):
        return torch.stack([fastqt.contrastive_loss(x[:, b], y * s) for b in range(B)]).sum()

    given = [x.movedim(0, 1), y, s]
    check(grad(total, argnums=(0, 1, 2))(*given), usual_gradients(loop, given))


def test_reference_takes_second_derivatives_and_forward_mode():
    loss, given = losses(backend="reference")["contrastive"], inputs()
    x, y, s = given
    found = grad(lambda s: grad(loss, argnums=2)(x, y, s))(s)
    leaf = s.clone().requires_grad_()
    (first,) = torch.autograd.grad(loss(x, y, leaf), leaf, create_graph=True)
    check((found,), torch.autograd.grad(first, leaf))
    _, tangent = jvp(lambda x: loss(x, y, s), (x,), (x,))
    check((tangent,), ((usual_gradients(loss, given)[0] * x).sum(),))


@pytest.mark.parametrize("name", losses())
def test_others_refuse_them_in_words(name):
    loss, (x, y, s) = losses()[name], inputs()
    words = r"fastqt\.\w+ is differentiable once and in reverse mode; .*reference"
    with pytest.raises(RuntimeError, match=words):
        grad(lambda s: grad(loss, argnums=2)(x, y, s))(s)
    with pytest.raises(RuntimeError, match=words):
        jvp(lambda x: loss(x, y, s), (x,), (x,))


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
@pytest.mark.parametrize("name", EVERY_LOSS)
@pytest.mark.thinned(6)
def test_jacobians(name):
    """torch.func.jacrev has several upstream gradients at once; what is older has them, or says so."""
    loss, given = made(name, torch.float64, rows=6)
    keys = [key for key, x in given.items() if x.requires_grad]
    values = tuple(given[key].detach() for key in keys)

    def function(*values: torch.Tensor) -> torch.Tensor:
        return loss.function(**given | dict(zip(keys, values, strict=True)), **loss.options)

    expected = jacobian(function, values)
    check(jacrev(function, argnums=tuple(range(len(keys))))(*values), expected)
    if name.startswith(OF_TORCH):
        check(jacobian(function, values, vectorize=True), expected)
        return
    words = r"fastqt\.\w+: want one upstream gradient .*torch\.func\.jacrev"
    with pytest.raises(RuntimeError, match=words):
        jacobian(function, values, vectorize=True)


@pytest.mark.parametrize("make", [fastqt.nn.SigLIPLoss, partial(fastqt.nn.CLIPLoss, max_scale=4.0)])
def test_a_learnt_scale_of_several_modules(make):
    """As torch's tutorial of ensembles has it: `functional_call` under vmap."""
    x, y, _ = inputs()
    modules = [make(scale=scale, learn_scale=True).double() for scale in (2.0, 3.0, 4.0)]
    state, _ = stack_module_state(modules)

    def loss(state: dict[str, torch.Tensor]) -> torch.Tensor:
        return functional_call(modules[0], state, (x, y))

    found = vmap(loss)({key: value.detach() for key, value in state.items()})
    check((found,), (torch.stack([module(x, y) for module in modules]).detach(),))
    of_scale = vmap(grad(loss))({key: value.detach() for key, value in state.items()})["log_scale"]
    for module in modules:
        module(x, y).backward()
    check((of_scale,), (torch.stack([module.log_scale.grad for module in modules]),))


@pytest.mark.parametrize("options", [{}, {"memory": "low"}, {"normalize": True}], ids=str)
def test_a_tensor_that_outlives_its_transform_is_the_value_it_had(options):
    """torch.func leaves wrappers in it, which torch takes off before an autograd function sees it."""
    kept = []

    def keep(x):
        kept.append(x * 2)
        return x.sum()

    x, candidates = torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(0))
    torch.func.grad(keep)(x)
    candidates.requires_grad_()
    expected = fastqt.contrastive_loss(x * 2, candidates, **options)
    (gradient,) = torch.autograd.grad(expected, candidates)
    for _ in range(2):  # A second backward pass would find the graph of the transform, and that it is freed.
        loss = fastqt.contrastive_loss(kept[0], candidates, **options)
        candidates.grad = None
        loss.backward()
        torch.testing.assert_close(loss, expected)
        torch.testing.assert_close(candidates.grad, gradient)
