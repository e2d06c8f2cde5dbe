"""torch.compile makes one graph of a loss for all batch sizes and scales, in each dtype and with autocast."""

import inspect
import math
from unittest import mock

import pytest
import torch
from torch import Tensor

import fastqt
from fastqt import nn
from fastqt.engines import cpu
from tests.losses.test_every_loss import copied, made, with_gradients
from tests.shared.every_loss import EVERY_LOSS
from tests.shared.tolerances import FLOAT32, UNIT_ROUNDOFF, relative

SIZES = range(5, 17)
# A dtype, and whether autocast to bfloat16 is enabled.
DTYPES = {
    "float32": (torch.float32, False),
    "bfloat16": (torch.bfloat16, False),
    "float16": (torch.float16, False),
    "float64": (torch.float64, False),
    "autocast": (torch.float32, True),
}
COMPILED = [name for name, loss in EVERY_LOSS.items() if loss.fullgraph]
# They have one form of fewer rows than columns, and one of more.
TWO_FORMS = tuple(
    f"{name}{options}"
    for name in ("spread_out_loss", "similarity_distillation_loss")
    for options in ("", ", squares", ", candidates")
)
LEAST_ROWS = {"curl_block_loss": 6}  # two windows of three
OF_REFERENCE = [
    pytest.param(name, marks=() if name == "info_nce_loss" else pytest.mark.slow)
    for name in COMPILED
    if "backend" in inspect.signature(EVERY_LOSS[name].function).parameters
]
# Some of each way in which losses are traced.
SAMPLE = {("info_nce_loss", "bfloat16"), ("info_nce_loss", "autocast"), ("clip_loss", "float32")}
# Each loss with autocast and in one dtype, and each dtype with many losses.
TABLE = [
    pytest.param(name, dtype, marks=() if (name, dtype) in SAMPLE else pytest.mark.slow)
    for place, name in enumerate(COMPILED)
    for dtype in dict.fromkeys(
        ("autocast", tuple(DTYPES)[place % 4], *(d for n, d in sorted(SAMPLE) if n == name))
    )
]
OFTEN = [
    pytest.param(name, marks=() if name == "siglip_loss" else pytest.mark.slow)
    for place, name in enumerate(COMPILED)
    if name == "siglip_loss" or place % 3 == 0
]


@pytest.mark.parametrize(("name", "dtype"), TABLE)
def test_dynamic_shapes_are_one_graph(name, dtype):
    of_form = {"graphs": 2 if name in TWO_FORMS else 1, "dynamic": True}
    of_graph = "aot_eager" if (name, dtype) in SAMPLE else "eager"
    check(name, *DTYPES[dtype], **of_form, backend_of_graph=of_graph)


@pytest.mark.parametrize("name", OFTEN)
def test_sizes_that_change_are_two_graphs(name):
    """By itself, torch.compile takes sizes and numbers for constants until they change."""
    check(name, torch.float32, False, graphs=3 if name in TWO_FORMS else 2, backend_of_graph="eager")


@pytest.mark.parametrize("name", OF_REFERENCE)
def test_the_reference_is_one_graph(name):
    by = {"backend": "reference", "backend_of_graph": "eager"}
    check(name, torch.float32, False, graphs=1, dynamic=True, **by)


def compiled(function, graphs: int, backend_of_graph: str = "aot_eager", **options):
    """The function with torch.compile, which raises an error for one graph more.

    The backend "eager" traces no backward passes, which takes the most time.

    Calls of the compiler are no measure: it may be called twice for a graph of some numbers.
    """
    torch.compiler.reset()
    whole = torch.compile(function, fullgraph=True, backend=backend_of_graph, **options)

    def call(*arguments, **named):
        with torch._dynamo.config.patch(recompile_limit=graphs):
            return whole(*arguments, **named)

    return call


def check(
    name: str,
    dtype: torch.dtype,
    autocast: bool,
    *,
    graphs: int,
    dynamic: bool | None = None,
    backend_of_graph: str = "aot_eager",
    **options,
) -> None:
    """Compares the value and the gradients of each batch with those without a graph."""
    loss = EVERY_LOSS[name]
    fixed = {**loss.options, **options}
    scaled = "scale" in inspect.signature(loss.function).parameters

    def call(numbers: dict[str, float], given: dict[str, Tensor]) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return loss.function(**given, **fixed, **numbers)

    of_graph = compiled(call, graphs, backend_of_graph, dynamic=dynamic)
    read_as = torch.bfloat16 if autocast else dtype
    # Gradients that are summed in another order and then rounded; products may be rounded before.
    error = FLOAT32 + 4 * UNIT_ROUNDOFF[read_as] * (read_as.itemsize == 2)
    for step, rows in enumerate(SIZES):
        _, inputs = made(name, dtype, max(rows, LEAST_ROWS.get(name, 0)), seed=step)
        numbers = {"scale": 3.0 + step / 7} if scaled and "scale" not in {**inputs, **fixed} else {}
        with mock.patch.object(cpu, "CELLS_PER_TARGET", 0):  # A graph computes few rows in bfloat16, too.
            wanted = with_gradients(lambda numbers=numbers, **x: call(numbers, x), inputs)
        found = with_gradients(lambda numbers=numbers, **x: of_graph(numbers, x), copied(inputs))
        for a, b in zip(found, wanted, strict=True):
            # The loss and a scale's gradient are sums of terms of about 1, which are rounded and may cancel.
            least = 0.0 if b.dim() else 1.0
            assert (a - b).abs().max() < error * max(b.abs().max(), least), (rows, a, b)


@pytest.mark.parametrize("make", [nn.CLIPLoss, pytest.param(nn.SigLIPLoss, marks=pytest.mark.slow)])
def test_a_learnt_scale_is_one_graph(make):
    """Its steps are those without a graph; max_scale bounds it."""
    modules = [make(scale=4.0, max_scale=4.5) for _ in range(2)]
    calls = compiled(modules[0], 1, dynamic=True), modules[1]
    for step, rows in enumerate(SIZES):
        a, b = torch.randn(2, rows, 6, generator=torch.Generator().manual_seed(step))
        for module, call in zip(modules, calls, strict=True):
            module.zero_grad()
            call(a + b, b).backward()
            with torch.no_grad():
                module.log_scale -= 0.1 * module.log_scale.grad
        assert relative(modules[0].log_scale, modules[1].log_scale) < FLOAT32
    assert modules[1].scale <= 4.5 + 1e-6


@pytest.mark.slow
def test_marked_sizes_are_one_graph():
    of_graph = compiled(fastqt.info_nce_loss, 1)
    for rows in SIZES:
        a, b = torch.randn(2, rows, 6)
        for x in (a, b):
            torch._dynamo.mark_dynamic(x, 0)
        assert math.isclose(of_graph(a, b).item(), fastqt.info_nce_loss(a, b).item(), rel_tol=FLOAT32)


@pytest.mark.parametrize(
    ("targets", "options"),
    [(torch.tensor([0, 5, 1]), {}), (torch.tensor([0, 1, -1]), {}), (torch.full((3, 3), -1.0), {})],
    ids=["outside", "below", "weights"],
)
@pytest.mark.slow
def test_a_graph_of_the_reference_asserts_its_targets(targets, options):
    x = torch.randn(3, 4)
    compiled = torch.compile(fastqt.contrastive_loss, fullgraph=True, backend="aot_eager")
    with pytest.raises(RuntimeError, match="targets: want"):
        compiled(x, x, targets, diagonal="keep", backend="reference", **options)
