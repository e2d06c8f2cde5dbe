"""A default device that the user sets for other tensors changes nothing in what fastqt computes."""

import ast
from pathlib import Path

import pytest
import torch
from torch.utils._device import _device_constructors

import fastqt
from tests.shared.calls import CALLS

ROOT = Path(fastqt.__file__).parent.parent
FACTORIES = {function.__name__ for function in _device_constructors()}
# A module's parameters and buffers are made where the user's default device says, as those of torch are.
OF_MODULES = ("Parameter", "register_buffer")


def factories_without_device(tree):
    """The calls of torch that would make a tensor on the default device."""
    excused = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in OF_MODULES
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or id(node) in excused:
            continue
        match node.func:
            case ast.Attribute(value=ast.Name(id="torch"), attr=name) if name in FACTORIES:
                if not any(keyword.arg == "device" for keyword in node.keywords):
                    yield node


def test_every_tensor_is_made_on_a_device_that_is_named():
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}"
        for path in sorted([*ROOT.glob("fastqt/**/*.py"), *ROOT.glob("kernels/**/*.py")])
        for node in factories_without_device(ast.parse(path.read_text()))
    ]
    assert not found, "\n".join(found)


def test_a_factory_without_a_device_is_found():
    source = "torch.zeros(3)\ntorch.zeros(3, device=d)\nnn.Parameter(torch.empty(3).uniform_())\nx.zeros(3)"
    assert [node.lineno for node in factories_without_device(ast.parse(source))] == [1]


WAYS = {
    **{f"{name} of {backend}": (name, {"backend": backend}) for name in ("contrastive", "sigmoid of targets")
       for backend in ("cpu", "reference")},
    "contrastive low": ("contrastive", {"memory": "low"}),
    "contrastive of rows": ("contrastive of targets", {"reduction": "none"}),
    "contrastive mixed": ("contrastive of targets", {"row_negatives": fastqt.Mixed()}),
    "contrastive smoothed": (
        "contrastive",
        {"targets": fastqt.smoothed(fastqt.Window(2)), "document_ids": None, "mask": None,
         "query_groups": None, "candidate_groups": None},
    ),
    "mixcse random": ("mixcse", {"partner": "random", "generator": torch.Generator()}),
    "mixcse released": ("mixcse", {"form": "released"}),
    "mixcse released low": ("mixcse", {"form": "released", "memory": "low", "reduction": "none"}),
    "mixcse composed": ("mixcse", {"form": "released", "backend": "reference"}),
    "simcse weighted": ("simcse", {"hard_negative_weight": 1.0}),
    "clip of rows": ("clip", {"reduction": "none"}),
    "clip low": ("clip", {"memory": "low"}),
    "curl complement": ("curl_block", {"negatives": "complement"}),
    "curl random": ("curl_block", {"negatives": "random", "generator": torch.Generator()}),
    "gloss_pos by scores": ("gloss_pos", {"backend": "cpu"}),
}  # fmt: skip
OBJECTS = ("Guide", "Mixed", "Noise", "Window", "smoothed", "Sparse", "MultiChannel")
TENSOR_RESULTS = [name for name in CALLS if name not in OBJECTS]


def result_and_gradients(name, options):
    function, arguments = CALLS[name]
    leaves = {
        key: value.clone().requires_grad_()
        for key, value in arguments.items()
        if isinstance(value, torch.Tensor) and value.is_floating_point() and key != "targets"
    }
    if isinstance(options.get("generator"), torch.Generator):
        options["generator"].manual_seed(3)
    result = function(**{**arguments, **leaves, **options})
    result = torch.cat([x.flatten() for x in result]) if isinstance(result, tuple) else result
    result.square().sum().backward()
    return [result.detach(), *(x.grad for x in leaves.values())]


@pytest.mark.parametrize("name", [*TENSOR_RESULTS, *WAYS])
def test_results_are_the_same_under_another_default_device(name):
    name, options = WAYS.get(name, (name, {}))
    expected = result_and_gradients(name, options)
    with torch.device("meta"):
        found = result_and_gradients(name, options)
    for x, y in zip(found, expected, strict=True):
        assert (x is None) == (y is None)
        if x is not None:
            assert x.device.type == "cpu"
            torch.testing.assert_close(x, y)
