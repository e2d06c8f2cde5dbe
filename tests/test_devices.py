"""Questions to CUDA are about the device that they name, and leave the current one as it is."""

import contextlib

import pytest
import torch

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
