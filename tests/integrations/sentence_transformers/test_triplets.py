"""Losses of all triplets of a batch: values and gradients beside those of the library."""

from unittest import mock

import pytest
import torch

from tests.shared.largest import Largest
from tests.shared.tolerances import FLOAT64, relative

pytest.importorskip("sentence_transformers", reason="the extra st is not installed")
pytest.importorskip("accelerate", reason="the extra st is not installed")

# The library can be imported after the skips alone.
from sentence_transformers.sentence_transformer import losses

import fastqt.integrations.sentence_transformers as ours

DISTANCES = losses.BatchHardTripletLossDistanceFunction
METRICS = {"euclidean": DISTANCES.euclidean_distance, "cosine": DISTANCES.cosine_distance}
NAMES = [name for name, module in ours.REPLACEMENTS.items() if module == "triplets"]
THEIRS = {name: getattr(losses, name) for name in NAMES}
SOFT = "BatchHardSoftMarginTripletLoss"
# Rows, labels, and how far the rows of a label are from their centre.
BATCHES = {
    "many labels": (60, 30, 1.0),
    "few labels": (60, 4, 1.0),
    "one label": (20, 1, 1.0),
    "a label each": (20, 20, 1.0),
    "one row": (1, 1, 1.0),
    "learnt": (60, 12, 1e-3),
}


def batch(name, dtype=torch.float64):
    N, labels, spread = BATCHES[name]
    generator = torch.Generator().manual_seed(0)
    numbers = torch.arange(N) % labels if labels == N else torch.randint(labels, (N,), generator=generator)
    centres = torch.randn(labels, 16, dtype=torch.float64, generator=generator)
    noise = torch.randn(N, 16, dtype=torch.float64, generator=generator)
    return (centres[numbers] + spread * noise).to(dtype), 3 * numbers - 1


def loss_of(kind, name, metric="euclidean", margin=5.0):
    options = {} if name == SOFT else {"margin": margin}
    return kind[name](None, distance_metric=METRICS.get(metric, metric), **options)


def step(loss, embeddings, labels):
    embeddings = embeddings.clone().requires_grad_()
    value = loss.compute_loss_from_embeddings([embeddings], labels)
    (gradient,) = torch.autograd.grad(3 * value, embeddings, materialize_grads=True, allow_unused=True)
    return value.detach(), gradient


OURS = {name: getattr(ours, name) for name in NAMES}


@pytest.mark.parametrize("rows_at_once", [None, 7])
@pytest.mark.parametrize("margin", [5.0, 0.1])
@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("case", BATCHES)
@pytest.mark.parametrize("name", NAMES)
def test_value_and_gradients_are_the_librarys(name, case, metric, margin, rows_at_once):
    embeddings, labels = batch(case)
    at_once = 2**20 if rows_at_once is None else rows_at_once * len(embeddings)
    value, gradient = step(loss_of(THEIRS, name, metric, margin), embeddings, labels)
    with mock.patch("fastqt.losses.triplets.DISTANCES_AT_ONCE", at_once):
        own_value, own_gradient = step(loss_of(OURS, name, metric, margin), embeddings, labels)
    # Their distances are differences of products, also of rows that are near each other.
    bound = 1e-8 if case == "learnt" else FLOAT64
    assert own_value.dtype is value.dtype
    assert abs(own_value - value) <= bound * max(abs(value), 1)
    assert (own_gradient - gradient).norm() <= bound * max(gradient.norm(), 1)


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("case", ["few labels", "learnt"])
@pytest.mark.parametrize("name", [name for name in NAMES if name != "BatchSemiHardTripletLoss"])
def test_float32_is_as_near_to_float64_as_the_library(name, case, metric):
    """Not of semi-hard triplets: rounding decides which of two negatives is the next one."""
    embeddings, labels = batch(case)
    embeddings = embeddings.float()
    exact = step(loss_of(THEIRS, name, metric), embeddings.double(), labels)
    theirs = step(loss_of(THEIRS, name, metric), embeddings, labels)
    ours_of_step = step(loss_of(OURS, name, metric), embeddings, labels)
    for x, y, z in zip(ours_of_step, theirs, exact, strict=True):
        assert relative(x, z) <= 1.5 * relative(y, z) + 1e-6


@pytest.mark.parametrize("name", NAMES)
def test_pairs_at_a_small_distance_have_the_gradient_of_unit_length(name):
    """The direction from one row to another is exact however near they are, which products cannot say."""
    embeddings = torch.tensor([[1.0, 2.0], [1.0, 2.0 + 1e-5], [9.0, 0.0], [9.0, 1e-5]])
    labels = torch.tensor([0, 0, 1, 1])
    exact = step(loss_of(THEIRS, name, margin=20.0), embeddings.double(), labels)
    ours_of_step = step(loss_of(OURS, name, margin=20.0), embeddings, labels)
    assert relative(ours_of_step[0], exact[0]) <= 1e-6
    assert relative(ours_of_step[1], exact[1]) <= 1e-5


@pytest.mark.parametrize("name", NAMES)
def test_a_part_that_all_rows_share_costs_no_digits(name):
    embeddings, labels = batch("few labels")
    embeddings = (embeddings + 300).float()
    exact = step(loss_of(THEIRS, name), embeddings.double(), labels)
    ours_of_step = step(loss_of(OURS, name), embeddings, labels)
    assert relative(ours_of_step[0], exact[0]) <= 1e-6
    assert relative(ours_of_step[1], exact[1]) <= 1e-5


@pytest.mark.parametrize("margin", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("name", NAMES)
def test_distances_that_are_equal_or_differ_by_the_margin(name, margin):
    """Eight rows at integers on a line, so that all differences, also from their mean, are exact.

    A loss that is 0 of exactly equal numbers has several derivatives. The library has half of 1 for semi-hard
    triplets, 1 for the others, and here it is 0 for these.
    """
    places = torch.tensor([-5, -3, 1, 5, -9, -7, 0, 7], dtype=torch.float64)
    embeddings = torch.stack([places, torch.zeros_like(places)], 1)
    labels = torch.tensor([0, 0, 0, 1, 1, 1, 1, 2])
    value, gradient = step(loss_of(THEIRS, name, margin=margin), embeddings, labels)
    own_value, own_gradient = step(loss_of(OURS, name, margin=margin), embeddings, labels)
    assert own_value == value
    if name in ("BatchSemiHardTripletLoss", SOFT):
        torch.testing.assert_close(own_gradient, gradient)


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("name", NAMES)
def test_rows_that_are_equal_or_zero(name, metric):
    embeddings, labels = batch("few labels")
    embeddings[7], labels[7] = embeddings[8], labels[8]
    value = loss_of(THEIRS, name, metric).compute_loss_from_embeddings([embeddings], labels)
    value_here, gradient = step(loss_of(OURS, name, metric), embeddings, labels)
    assert relative(value_here, value) <= FLOAT64
    assert gradient.isfinite().all()
    embeddings[3] = 0
    value = loss_of(THEIRS, name, metric).compute_loss_from_embeddings([embeddings], labels)
    assert relative(step(loss_of(OURS, name, metric), embeddings, labels)[0], value) <= FLOAT64


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", NAMES)
def test_16_bits_and_autocast_are_computed_in_float32(name, dtype):
    embeddings, labels = batch("few labels", dtype)
    exact, of_float32 = step(loss_of(OURS, name), embeddings.float(), labels)
    value, gradient = step(loss_of(OURS, name), embeddings, labels)
    assert value.dtype is torch.float32
    assert value == exact
    assert gradient.dtype is dtype
    torch.testing.assert_close(gradient, of_float32.to(dtype))
    with torch.autocast("cpu", torch.bfloat16):
        assert loss_of(OURS, name).compute_loss_from_embeddings([embeddings.float()], labels) == exact


@pytest.mark.parametrize("name", NAMES)
def test_what_the_library_computes(name):
    """Another distance, wrong labels, and torch.compile."""
    embeddings, labels = batch("few labels")
    with mock.patch("fastqt.integrations.sentence_transformers.triplets.triplet_loss") as never:
        pair = [loss_of(kind, name, lambda x: torch.cdist(x, x, p=1)) for kind in (OURS, THEIRS)]
        assert step(pair[0], embeddings, labels)[0] == step(pair[1], embeddings, labels)[0]
        with pytest.raises(ValueError, match="expects 60 labels"):
            step(loss_of(OURS, name), embeddings, labels[:5])
    never.assert_not_called()


@pytest.mark.parametrize("name", NAMES)
def test_labels_of_any_shape_and_no_second_derivative(name):
    embeddings, labels = batch("few labels")
    wanted = step(loss_of(OURS, name), embeddings, labels)
    torch.testing.assert_close(step(loss_of(OURS, name), embeddings, labels[:, None]), wanted)
    embeddings.requires_grad_()
    value = loss_of(OURS, name).compute_loss_from_embeddings([embeddings], labels)
    with pytest.raises(RuntimeError, match="triplet_loss"):
        torch.autograd.grad(value, embeddings, create_graph=True)


@pytest.mark.parametrize("name", NAMES)
def test_no_matrix_of_all_distances(name):
    N = 2048
    embeddings = torch.randn(N, 8, requires_grad=True)
    with Largest() as largest:
        loss = loss_of(OURS, name).compute_loss_from_embeddings([embeddings], torch.arange(N) // 2)
        loss.backward()
    assert largest.elements <= 2**19 < N * N
