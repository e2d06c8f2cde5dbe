"""Tensors are made where their inputs are, whatever the default device is; what torch is asked of one."""

import ast
import contextlib
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from torch.utils._device import _device_constructors

import fastqt
from fastqt import devices
from fastqt.devices import is_capturing
from fastqt.torch_modes import cpu_rounds_float32
from tests.shared.calls import CALLS, OF_IDS


@pytest.mark.parametrize("current", [0, 1])
@pytest.mark.parametrize("asked", [0, 1])
def test_a_capture_is_looked_for_on_the_named_device(current, asked, monkeypatch):
    chosen = [current]

    @contextlib.contextmanager
    def device(wanted):
        chosen.append(wanted.index)
        yield
        chosen.pop()

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: chosen[-1] == 1)
    assert is_capturing(torch.device("cuda", asked)) == (asked == 1)
    assert chosen == [current]


def test_other_devices_have_no_captures(monkeypatch):
    monkeypatch.delattr(torch.cuda, "is_current_stream_capturing")
    assert not is_capturing(torch.device("cpu"))
    assert not is_capturing(torch.device("mps"))


def test_memory_is_a_devices_own_where_it_has_some(monkeypatch):
    properties = types.SimpleNamespace(total_memory=7)
    monkeypatch.setattr(torch.xpu, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(devices, "known_properties", lambda _: properties)
    assert devices.memory_of(torch.device("xpu", 0)) == devices.memory_of(torch.device("cuda", 0)) == 7
    assert devices.memory_of(torch.device("cpu")) == devices.memory_of(torch.device("mps")) > 2**20


@pytest.mark.parametrize("setting", ["legacy", "matmul", "all"])
@pytest.mark.thinned(2)
def test_tf32_is_allowed_as_torch_is_set(setting):
    """In a process of its own, because torch keeps that both kinds of setting have been used."""
    changes = {
        "legacy": "torch.set_float32_matmul_precision('high')",
        "matmul": "torch.backends.cuda.matmul.fp32_precision = 'tf32'",
        "all": "torch.backends.fp32_precision = 'tf32'",
    }
    script = f"""
import torch
from fastqt.torch_modes import tf32_allowed
from fastqt.kernels.launch import precision
assert not tf32_allowed() and precision(torch.float32) == "ieee"
{changes[setting]}
assert tf32_allowed() and precision(torch.float32) == "tf32"
assert precision(torch.bfloat16) == precision(torch.float16) == "ieee"
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_a_cpu_rounds_float32_as_torch_is_set():
    before = torch.get_float32_matmul_precision()
    try:
        for precision in ("highest", "high", "medium"):
            torch.set_float32_matmul_precision(precision)
            assert cpu_rounds_float32() is (precision != "highest")
    finally:
        torch.set_float32_matmul_precision(before)


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


OBJECTS = (
    "Guide",
    *(kind.__name__ for kind in OF_IDS),
    "Above",
    "Mixed",
    "Noise",
    "Window",
    "smoothed",
    "Sparse",
    "MultiChannel",
)
TENSOR_RESULTS = [name for name in CALLS if name not in OBJECTS]


def result_and_gradients(name):
    function, arguments = CALLS[name]
    leaves = {
        key: value.clone().requires_grad_()
        for key, value in arguments.items()
        if isinstance(value, torch.Tensor) and value.is_floating_point() and key != "targets"
    }
    result = function(**{**arguments, **leaves})
    result = torch.cat([x.flatten() for x in result]) if isinstance(result, tuple) else result
    result.square().sum().backward()
    return [result.detach(), *(x.grad for x in leaves.values())]


@pytest.mark.parametrize("name", TENSOR_RESULTS)
def test_results_are_the_same_under_another_default_device(name):
    expected = result_and_gradients(name)
    with torch.device("meta"):
        found = result_and_gradients(name)
    for x, y in zip(found, expected, strict=True):
        assert (x is None) == (y is None)
        if x is not None:
            assert x.device.type == "cpu"
            torch.testing.assert_close(x, y)
