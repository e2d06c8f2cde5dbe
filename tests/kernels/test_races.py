"""No kernel, interpreted, has threads of one program race for an element of memory."""

import importlib
import pkgutil
from unittest import mock

import pytest
import torch

import fastqt
import fastqt.kernels
from fastqt.engines.triton import copies
from fastqt.kernels.launch import elements_of_program
from fastqt.kernels.upstream import scale_gradients
from tests.kernels.races import watched

N, K = 18, 3
SOFTMAX = {"row_shifts_kernel", "scores_kernel", "row_stats_kernel"}
GRADIENTS = {"gradient_kernel"}
WIDTHS = (6, 64, 130)  # of one warp, of two, and of four


def rows_of(count: int, D: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(count)
    return torch.randn(count, D, generator=generator).to(dtype).requires_grad_()


def softmax(D, dtype, normalize=False):
    queries, candidates = rows_of(N, D, dtype), rows_of(N + 1, D, dtype)
    own, negatives = rows_of(N + 2, D, dtype)[:N], rows_of(K, D, dtype)
    scale = torch.tensor(2.0, requires_grad=True)
    options = {"row_negatives": own, "negatives": negatives, "scale": scale, "normalize": normalize}
    return fastqt.contrastive_loss(queries, candidates, backend="triton", **options)


def cosines(D, dtype):
    return softmax(D, dtype, normalize=True)


def mixed_cosines(D, dtype):
    queries, candidates = rows_of(N, D, dtype), rows_of(N + 1, D, dtype)
    mixed = fastqt.Mixed(partners=torch.arange(N).roll(1))
    options = {"row_negatives": mixed, "normalize": True, "backend": "triton"}
    return fastqt.contrastive_loss(queries, candidates[:N], fastqt.Diagonal(), diagonal="keep", **options)


def overflowing(D, dtype):
    """Shifts come from the targets, whose scores are small beside those of other candidates."""
    queries, candidates = rows_of(N, D, dtype), rows_of(N + 1, D, dtype)
    negatives = rows_of(K, D, dtype)
    options = {"negatives": negatives, "scale": 1000.0, "memory": "low", "backend": "triton"}
    return fastqt.contrastive_loss(queries, candidates, **options)


def sigmoid(D, dtype):
    queries, candidates = rows_of(N, D, dtype), rows_of(N + 1, D, dtype)
    bias = torch.zeros(N + 1, requires_grad=True)
    return fastqt.sigmoid_loss(queries, candidates, fastqt.Window(), bias=bias, backend="triton")


def whole_rows(D, dtype, loss=fastqt.contrastive_loss):
    """Here D is the number of candidates, of which a program has a whole row."""
    queries, candidates = rows_of(N, 8, dtype), rows_of(D, 8, dtype)
    targets = torch.full((N, D), 1 / D)
    return loss(queries, candidates, targets, diagonal="keep", backend="triton")


def whole_rows_of_sigmoids(D, dtype):
    return whole_rows(D, dtype, fastqt.sigmoid_loss)


def clip(D, dtype):
    return fastqt.clip_loss(rows_of(N, D, dtype), rows_of(N + 1, D, dtype)[:N], scale=2.0, backend="triton")


def three_blocks(D, dtype):
    scale = torch.tensor(2.0, requires_grad=True)
    options = {"form": "released", "stop_gradient": False, "scale": scale, "backend": "triton"}
    return fastqt.mixcse_loss(rows_of(N, D, dtype), rows_of(N + 1, D, dtype)[:N], **options)


def from_copies(D, dtype):
    with mock.patch.object(copies, "LEAST_CELLS", 0):
        return softmax(D + 1, dtype)


LAUNCHES = {
    softmax: {*SOFTMAX, *GRADIENTS},
    cosines: {*SOFTMAX, *GRADIENTS, "inverse_norms_kernel"},
    mixed_cosines: {*SOFTMAX, *GRADIENTS, "inverse_norms_kernel"},
    overflowing: {*SOFTMAX, *GRADIENTS, "row_products_kernel"},
    sigmoid: {"scores_kernel", "sigmoid_row_stats_kernel", "bias_gradient_kernel"},
    whole_rows: {"loss_rows_kernel"},
    whole_rows_of_sigmoids: {"loss_rows_kernel"},
    clip: SOFTMAX,
    three_blocks: {"three_block_rows_kernel", "three_block_gradients_kernel"},
    from_copies: {"copy_rows_kernel"},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("D", WIDTHS)
@pytest.mark.parametrize("loss", LAUNCHES, ids=lambda loss: loss.__name__)
@pytest.mark.thinned(6)
@pytest.mark.pairwise
def test_no_element_is_loaded_and_stored_by_several_warps(loss, D, dtype):
    with watched() as watch:
        loss(D, dtype).backward(torch.tensor(3.0))
    assert not watch.races
    assert watch.launches >= LAUNCHES[loss]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_are_multiplied_in_place_without_a_race(dtype):
    gradients = [rows_of(N, D, dtype).detach() for D in WIDTHS]
    with watched() as watch:
        scale_gradients(gradients, torch.tensor(3.0), 1.0)
    assert not watch.races
    assert watch.launches == {"scale_gradients_kernel"}


def test_every_kernel_is_watched():
    names = set()
    for module in pkgutil.walk_packages(fastqt.kernels.__path__, "fastqt.kernels."):
        found = vars(importlib.import_module(module.name))
        names |= {name for name in found if name.endswith("_kernel")}
    assert names == {"scale_gradients_kernel"}.union(*LAUNCHES.values())


@pytest.mark.parametrize("most", [1024, 2048])
@pytest.mark.parametrize("n", [1, 16, 32, 33, 64, 100, 128, 2400])
def test_programs_have_an_element_for_each_thread(n, most):
    program = elements_of_program(n, most, 8)
    assert 32 * program["num_warps"] <= program["BLOCK"]
    assert min(n, most) <= program["BLOCK"] <= max(most, 32)
    assert program["num_warps"] <= 8
