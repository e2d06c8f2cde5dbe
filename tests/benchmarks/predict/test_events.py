"""What is kept of a launch; a kernel that the model does not know is named."""

from types import SimpleNamespace

import pytest

from benchmarks.predict.events import stored_event
from benchmarks.predict.launches import Launch, Operation, Product


def launch_of(name, **arguments):
    return Launch(SimpleNamespace(__name__=name, params=[]), 1, arguments, {})


def test_products_and_operations():
    assert stored_event(Product(1, 2, 3, 2, 4, True)) == {
        **{"kind": "product", "n": 1, "m": 2, "k": 3},
        **{"itemsize": 2, "out_itemsize": 4, "add": True},
    }
    assert stored_event(Operation("mul", 7)) == {"kind": "operation", "bytes": 7}


@pytest.mark.parametrize("name", ["raise_row_shifts_kernel", "repair_rows_kernel"])
def test_repairs_have_nothing_to_do(name):
    assert stored_event(launch_of(name)) == {"kind": "rows", "kernel": name[:-7], "redo": True}


def test_an_unknown_kernel_is_named():
    with pytest.raises(ValueError, match=r"want one whose traffic is known, got brand_new_kernel"):
        stored_event(launch_of("brand_new_kernel"))


def test_a_known_kernel_with_other_arguments_is_named():
    with pytest.raises(ValueError, match=r"query_gradient_kernel: want the arguments .* got gradient"):
        stored_event(launch_of("query_gradient_kernel", gradient=None))
