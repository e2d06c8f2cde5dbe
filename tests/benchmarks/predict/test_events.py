"""What is kept of a launch; a kernel that the model does not know is named."""

from types import SimpleNamespace

import pytest
import torch

from benchmarks.predict.events import IDLE, stored_event
from tests.shared.launches import Launch, Operation, Product


def launch_of(name, constants=(), **arguments):
    """A launch of a kernel whose parameters are the arguments; some of them are constants."""
    params = [
        SimpleNamespace(name=argument, is_constexpr=argument in constants, has_default=False, default=None)
        for argument in arguments
    ]
    return Launch(SimpleNamespace(__name__=name, params=params), 132, arguments, {})


def test_products_and_operations():
    assert stored_event(Product(1, 2, 3, 2, 4, True)) == {
        **{"kind": "product", "n": 1, "m": 2, "k": 3},
        **{"itemsize": 2, "out_itemsize": 4, "add": True},
    }
    assert stored_event(Operation("mul", 7)) == {"kind": "operation", "bytes": 7}


@pytest.mark.parametrize("name", IDLE)
def test_some_find_nothing_to_do(name):
    assert stored_event(launch_of(name)) == {"kind": "rows", "kernel": name[:-7], "redo": True}


def test_an_unknown_kernel_is_named():
    with pytest.raises(ValueError, match=r"want one whose traffic is known, got brand_new_kernel"):
        stored_event(launch_of("brand_new_kernel"))


def test_a_known_kernel_with_other_arguments_is_named():
    with pytest.raises(ValueError, match=r"gradient_kernel: want the arguments .* got gradient"):
        stored_event(launch_of("gradient_kernel", gradient=None))


@pytest.mark.parametrize("descriptors", [False, True])
def test_tiles_of_the_scores_kernel(descriptors):
    queries = candidates = torch.empty(512, 64, dtype=torch.bfloat16, device="meta")
    if descriptors:
        queries = SimpleNamespace(base=queries, block_shape=[128, 32])
    constants = {"BLOCK_N": 128, "BLOCK_M": 256, "BLOCK_D": 32, "GROUP_N": 8, "DESCRIPTORS": descriptors}
    arguments = {"queries": queries, "candidates": candidates, "N": 300, "M": 512, "out": None, **constants}
    event = stored_event(launch_of("scores_kernel", constants, **arguments))
    assert (event["kind"], event["tile"], event["step"], event["group"]) == ("scores", [128, 256], 32, 8)
    assert (event["rows"], event["columns"], event["width"], event["itemsize"]) == (300, 512, 64, 2)
    assert (event["programs"], event["store"], event["descriptors"]) == (132, False, descriptors)


def test_tiles_of_the_warp_specialised_kernel():
    sides = torch.empty(512, 64, dtype=torch.bfloat16, device="meta")
    queries = SimpleNamespace(base=sides, block_shape=[64, 32])
    candidates = SimpleNamespace(base=sides, block_shape=[256, 32])
    constants = {"GROUP_N": 8, "LEAD": 3}
    arguments = {"queries": queries, "candidates": candidates, "N": 300, "M": 512, "out": sides, **constants}
    event = stored_event(launch_of("warp_specialized_scores_kernel", constants, **arguments))
    assert (event["kind"], event["tile"], event["step"], event["store"]) == ("scores", [128, 256], 32, True)
    assert (event["descriptors"], event["lead"]) == (True, 3)
