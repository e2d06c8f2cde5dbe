"""Questions to CUDA are about the device that they name, and leave the current one as it is."""

import contextlib
import types

import pytest
import torch

from fastqt import devices
from fastqt.devices import is_capturing


@pytest.mark.parametrize("current", [0, 1])
@pytest.mark.parametrize("asked", [0, 1])
def test_a_capture_is_looked_for_on_the_named_device(current, asked, monkeypatch):
    devices = [current]

    @contextlib.contextmanager
    def device(wanted):
        devices.append(wanted.index)
        yield
        devices.pop()

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: devices[-1] == 1)
    assert is_capturing(torch.device("cuda", asked)) == (asked == 1)
    assert devices == [current]


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
