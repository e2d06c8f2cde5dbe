"""The loss in autograd: upstream gradients, graphs that are kept, changed inputs, inference mode."""

import contextlib
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fastqt
from fastqt.autograd import times
from fastqt.targets.cache import RowsCache
from tests.shared.cases import CASES
from tests.shared.tolerances import REORDERED, relative

pytestmark = pytest.mark.usefixtures("low_memory_in_tiles")

ALL = next(case for case in CASES if case.name == "all at once")
MODES = ({}, {"memory": "low"}, {"reduction": "none"}, {"reduction": "sum"})
by_mode = pytest.mark.parametrize("mode", MODES, ids=str)


@pytest.mark.parametrize("shape", [(), (3,), (2, 3)], ids=str)
@pytest.mark.parametrize(
    ("dtype", "upstream"), [(torch.float16, 2.0**16), (torch.bfloat16, 1 / 3), (torch.float64, 0.1)], ids=str
)
def test_times_an_upstream_outside_the_range_of_the_gradients_dtype(dtype, upstream, shape):
    gradient = torch.full(shape, 0.0123, dtype=torch.float64).to(dtype)
    upstream = torch.tensor(upstream)
    expected = (gradient.double() * upstream.double()).to(dtype)
    assert torch.equal(times(gradient, upstream), expected)
    times(gradient, upstream, out=gradient)
    assert torch.equal(gradient, expected)


@by_mode
def test_backward_twice_through_a_retained_graph(mode):
    inputs = ALL.inputs(torch.float64)
    loss = ALL.loss(inputs, **mode).sum()
    first = torch.autograd.grad(loss * 2, list(inputs.values()), retain_graph=True)
    kept = [gradient.clone() for gradient in first]
    second = torch.autograd.grad(loss * 3, list(inputs.values()))
    for a, b, c in zip(first, second, kept, strict=True):
        assert torch.equal(a, c), "the first gradients changed afterwards"
        assert relative(b / 3, a / 2) < REORDERED[torch.float64]


REPEATED = {
    "contrastive": fastqt.contrastive_loss,
    "sigmoid": fastqt.sigmoid_loss,
    "clip": fastqt.clip_loss,
    "three blocks": lambda x, y, **options: fastqt.mixcse_loss(
        x, y, form="released", stop_gradient=False, **options
    ),
}
SLOW_TRITON = pytest.param("triton", marks=pytest.mark.slow)  # interpreted
by_repeated = pytest.mark.parametrize("name", REPEATED)


def repeated_inputs(rows: int, width: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    rows_of = [torch.randn(rows, width, generator=generator) for _ in range(2)]
    return [x.to(dtype).requires_grad_() for x in (*rows_of, torch.tensor(2.5))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("backend", ["cpu", "torch", "reference", SLOW_TRITON])
@by_repeated
@pytest.mark.pairwise
def test_backward_passes_of_a_retained_graph_are_equal_to_the_bit(name, backend, dtype):
    """With the upstream gradient 1, which nothing is multiplied by, and with others, in any order."""
    inputs = repeated_inputs(33, 9, dtype)
    loss = REPEATED[name](*inputs[:2], scale=inputs[2], backend=backend)
    found = {}
    for upstream in (1.0, 2.5, 1.0, 2.5, 1.0):
        gradients = torch.autograd.grad(loss, inputs, torch.full_like(loss, upstream), retain_graph=True)
        kept = found.setdefault(upstream, [gradient.clone() for gradient in gradients])
        assert all(torch.equal(a, b) for a, b in zip(kept, gradients, strict=True)), upstream


def test_input_changed_before_a_recomputing_backward_is_torchs_error():
    inputs = ALL.inputs(torch.float64)
    queries = inputs["queries"] * 1
    loss = ALL.loss({**inputs, "queries": queries}, reduction="none").sum()
    queries.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def changed_inputs() -> dict[str, tuple[dict[str, Any], torch.Tensor]]:
    """Arguments, and the one of them that is changed before the backward pass."""
    ids, mask = torch.arange(13) % 5, torch.zeros(13, 13, dtype=torch.bool)
    dense = torch.eye(13, dtype=torch.float64).roll(1, 0)
    columns = torch.arange(13).roll(1)
    sparse = torch.sparse_csr_tensor(
        torch.arange(14), columns, torch.ones(13, dtype=torch.float64), check_invariants=True
    )
    partners = torch.arange(13).roll(3)
    kept = {"targets": fastqt.Diagonal(), "diagonal": "keep"}
    return {
        "mask": ({"exclude": mask}, mask),
        "groups": ({"exclude": fastqt.Same(ids, ids.clone())}, ids),
        "parts": ({"exclude": fastqt.Within(ids, ids.clone())}, ids),
        "dense targets": ({"targets": dense}, dense),
        "Sparse values": ({"targets": fastqt.Sparse(sparse)}, sparse.values()),
        "class indices": ({"targets": columns}, columns),
        "partners": ({**kept, "row_negatives": fastqt.Mixed(0.2, partners), "backend": "triton"}, partners),
    }


@pytest.mark.parametrize("mode", [{"memory": "low"}, {"reduction": "none"}], ids=str)
@pytest.mark.parametrize("name", changed_inputs())
def test_an_argument_changed_before_backward_is_noticed_or_does_not_matter(name, mode):
    arguments, argument = changed_inputs()[name]
    dtype = torch.float32 if "backend" in arguments else torch.float64
    inputs = [torch.randn(13, 5, dtype=dtype, requires_grad=True) for _ in range(2)]
    expected = torch.autograd.grad(fastqt.contrastive_loss(*inputs, **arguments, **mode).sum(), inputs)
    loss = fastqt.contrastive_loss(*inputs, **arguments, **mode).sum()
    argument.copy_(argument * 3 if argument.dtype.is_floating_point else argument.logical_not())
    gradients = None
    with contextlib.suppress(RuntimeError):  # torch's "modified by an inplace operation"
        gradients = torch.autograd.grad(loss, inputs)
    for a, b in zip(gradients or expected, expected, strict=True):
        assert relative(a, b) < REORDERED[dtype]


def losses_that_are_kept() -> dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]:
    ids = torch.arange(64).repeat_interleave(8)
    return {
        "contrastive": fastqt.contrastive_loss,
        "low": lambda x, y: fastqt.contrastive_loss(x, y, memory="low"),
        "none": lambda x, y: fastqt.contrastive_loss(x, y, reduction="none").sum(),
        "normalised": lambda x, y: fastqt.info_nce_loss(x, y),
        "groups": lambda x, y: fastqt.contrastive_loss(x, y, exclude=fastqt.Same(ids, ids.clone())),
        "parts": lambda x, y: fastqt.contrastive_loss(x, y, exclude=fastqt.Within(ids, ids.clone())),
        "clip": lambda x, y: fastqt.clip_loss(x, y, scale=20.0),
        "mixcse": lambda x, y: fastqt.mixcse_loss(x, y, form="released"),
        "log_sum_exp": lambda x, y: fastqt.log_sum_exp(x, y).sum(),
        "max margin": lambda x, y: fastqt.max_margin_loss(x, y),
    }


@pytest.mark.parametrize("name", losses_that_are_kept())
@pytest.mark.thinned(3)
def test_a_loss_that_is_kept_after_backward_keeps_no_matrix(name):
    function = losses_that_are_kept()[name]
    leaves = [torch.randn(512, 8, requires_grad=True) for _ in range(2)]
    inputs = [x * 1 for x in leaves]
    loss = function(*inputs)
    loss.backward()
    references = [weakref.ref(x) for x in inputs]
    del inputs
    gc.collect()
    assert [reference() for reference in references] == [None, None]
    tensors = (x for x in gc.get_objects() if type(x) is torch.Tensor and not x.is_nested)
    held = [x for x in tensors if tuple(x.shape) == (512, 8)]
    assert all(any(x is y for y in (*leaves, *(leaf.grad for leaf in leaves))) for x in held)
    assert loss.isfinite()


@by_mode
def test_double_backward_is_refused_in_words(mode):
    inputs = CASES[0].inputs(torch.float64)
    loss = CASES[0].loss(inputs, **mode).sum()
    with pytest.raises(RuntimeError, match=r"differentiable once.*reference"):
        torch.autograd.grad(loss, inputs["queries"], create_graph=True)


@pytest.mark.parametrize("upstream", ["expanded", "strided"])
def test_upstream_of_any_stride(upstream):
    inputs = CASES[0].inputs(torch.float64)
    rows = CASES[0].loss(inputs, reduction="none")
    dense = torch.full_like(rows, 0.3) if upstream == "expanded" else torch.randn_like(rows)
    strided = torch.tensor(0.3, dtype=torch.float64).expand(len(rows))
    if upstream == "strided":
        strided = torch.stack([dense, dense], 1)[:, 0]
    a = torch.autograd.grad(rows, inputs["queries"], strided, retain_graph=True)
    b = torch.autograd.grad(rows, inputs["queries"], dense)
    assert relative(a[0], b[0]) < REORDERED[torch.float64]


@pytest.mark.parametrize(
    "loss",
    [
        lambda q, c: fastqt.contrastive_loss(q, c, context_size=2, memory="low"),
        lambda q, c: fastqt.curl_block_loss(q, c, context_size=2, negatives="complement"),
    ],
)
def test_training_after_inference_mode(loss, monkeypatch):
    """A tensor cached by a call under inference_mode can be saved for a later backward pass."""
    monkeypatch.setattr("fastqt.targets.cache.CACHED", RowsCache(8))
    queries, candidates = torch.randn(9, 4), torch.randn(9, 4)
    with torch.inference_mode():
        loss(queries, candidates)
    leaves = [queries.requires_grad_(), candidates.requires_grad_()]
    loss(*leaves).backward()
    assert all(leaf.grad.isfinite().all() for leaf in leaves)
