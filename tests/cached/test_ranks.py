"""cached_backward on two processes has the gradients of a plain step, and reduces them once."""

import pytest
import torch.distributed as dist

from tests.shared import cached_on_ranks
from tests.shared.tolerances import FLOAT64

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="this torch has no Gloo")

# Of two ranks, in chunks of 4: as many, one more, several against one, a few rows against none.
ROWS = [(8, 8), (9, 8), (13, 3), (3, 0)]


def check(results):
    """Every rank has the wanted gradients in every step, and each module reduced its gradients once."""
    for rank in results:
        for distance, reductions in rank:
            assert distance <= FLOAT64
            assert reductions == [1] * len(reductions)


@pytest.mark.parametrize("rows", ROWS)
def test_two_views_under_ddp(two_ranks, rows):
    check(two_ranks.run(cached_on_ranks.two_views, rows, "call", {}))


@pytest.mark.parametrize(
    "form",
    [
        "module",
        "module that is wrapped later",
        "function",
        "given",
        "method",
        "object",
        "list in a module",
    ],
)
def test_forms(two_ranks, form):
    check(two_ranks.run(cached_on_ranks.two_views, (9, 3), form, {}))


@pytest.mark.parametrize(
    "options",
    [{"find_unused_parameters": True}, {"gradient_as_bucket_view": True}, {"bucket_cap_mb": 1e-4}],
    ids=lambda options: next(iter(options)),
)
def test_options_of_ddp(two_ranks, options):
    check(two_ranks.run(cached_on_ranks.two_views, (9, 3), "call", options))


@pytest.mark.parametrize("rows", ROWS)
def test_two_towers_under_a_ddp_each(two_ranks, rows):
    check(two_ranks.run(cached_on_ranks.two_towers, rows, "each"))


@pytest.mark.parametrize("form", ["of an object", "unused on one rank"])
def test_other_forms_of_two_towers(two_ranks, form):
    check(two_ranks.run(cached_on_ranks.two_towers, (9, 3), form))


@pytest.mark.parametrize("rows", ROWS)
def test_two_towers_under_one_ddp(two_ranks, rows):
    check(two_ranks.run(cached_on_ranks.two_towers_in_one_module, rows))


def test_accumulation_reduces_once(two_ranks):
    check(two_ranks.run(cached_on_ranks.accumulated, (9, 3)))


def test_after_an_error_in_the_second_pass(two_ranks):
    check(two_ranks.run(cached_on_ranks.raised, (9, 7)))


def test_what_cannot_be_held_back_is_refused(two_ranks):
    for names, static in two_ranks.run(cached_on_ranks.refused):
        assert names.startswith(
            "ddp: want it given, one for each encoder: encoders is a function that names 2"
        )
        assert static.startswith("ddp: want a module without static_graph=True")


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}], ids=str)
@pytest.mark.parametrize("rows", [(8, 8), (13, 3), (3, 0)])
def test_ddp_around_encoders_and_loss(two_ranks, rows, options):
    check(two_ranks.run(cached_on_ranks.ddp_around, rows, options))


def test_what_cannot_be_within_ddp_is_refused(two_ranks):
    for backward, function in two_ranks.run(cached_on_ranks.refused_inside):
        assert backward.startswith("cached_backward: want a call outside of the forward pass of Distributed")
        assert function.startswith("encoders: want a module without DistributedDataParallel")


@pytest.mark.parametrize("form", ["call", "module"])
@pytest.mark.parametrize("rows", [(8, 8), (13, 3), (13, 0)])
def test_fsdp2(two_ranks, rows, form):
    check(two_ranks.run(cached_on_ranks.sharded, rows, form))


@pytest.mark.parametrize("rows", [(8, 8), (13, 3), (13, 0)])
def test_fsdp2_around_encoders_and_loss(two_ranks, rows):
    check(two_ranks.run(cached_on_ranks.sharded_around, rows))


@pytest.mark.parametrize("rows", ROWS)
def test_a_loss_over_all_ranks(two_ranks, rows):
    check(two_ranks.run(cached_on_ranks.across_ranks, rows))
