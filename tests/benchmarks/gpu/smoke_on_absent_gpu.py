"""The smoke steps' Python in the sizes of a GPU, with a GPU that is not there.

A process runs this that has loaded what tests/engines/triton/absent_gpu.cpp makes before torch, and in which
Triton does not interpret. Fake tensors hold no values, so that whatever is compared is near.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.gpu import correctness
from benchmarks.gpu.cuda_graphs import host_graph
from benchmarks.gpu.sections import Options, Verdict
from benchmarks.gpu.smoke import losses, products, scores, vendor
from benchmarks.gpu.stages import smoke
from tests.engines.triton import absent_gpu as absent


def near(results: dict[str, tuple[Tensor, Tensor, float]]) -> Verdict:
    """That results and exact values are alike but for their dtypes."""
    for name, (found, exact, bound) in results.items():
        assert found.shape == exact.shape, f"{name}: {found.shape} beside {exact.shape}"
        assert found.device == exact.device, f"{name}: on {found.device} beside {exact.device}"
        assert bound > 0
    return Verdict(True, "alike")


def clock(_: torch.device) -> SimpleNamespace:
    def seconds(function: Any) -> float:
        function()
        return 1.0

    return SimpleNamespace(seconds=seconds, wait=lambda: None)


REPLACED = (
    *((module, "near", near) for module in (losses, products, scores)),
    (losses, "captured", host_graph),
    (losses, "streams", lambda _: [contextlib.nullcontext()] * 3),
    (losses, "equal_verdict", lambda differ: Verdict(tuple(differ.shape) == (2, 3), "alike")),
    (losses, "LAUNCHES", 2),
    (correctness, "target_matrix", lambda rows, M, _: rows.new_empty((len(rows), M), dtype=torch.float64)),
    (correctness, "_errors", lambda found, exact: [0.0] * len(found)),
    (correctness, "assert_kind", lambda *_: None),
    (vendor, "Clock", clock),
    (vendor, "kernels_of", lambda *_: ([], "nothing runs")),
    (absent, "OnGpu", FakeTensorMode),  # inputs are drawn on the host and copied
    (torch.cuda, "synchronize", lambda *_: None),
    (torch.cuda, "get_device_capability", lambda *_: (9, 0)),
    # Another one than the current device, so that every launch has to make it the current one.
    (Options, "device", torch.device("cuda", 0)),
)


def main() -> None:
    """Prints what failed in each step, and what was launched."""
    torch.autograd.set_multithreading_enabled(False)
    found: dict[str, Any] = {}
    for section in (section for wave in smoke() for section in wave if section.name != "machine"):
        small = section.name == "smoke, one launch"
        dtype = torch.float32 if "TF32" in section.name else torch.bfloat16
        p = absent.Problem(lambda *_: None, 0, dtype, captured="graph" in section.name, small=small)
        if "large tiles" in section.name:
            p = replace(p, descriptors=None)  # as the engine chooses
        with contextlib.ExitStack() as stack:
            for owner, name, new in REPLACED:
                stack.enter_context(mock.patch.object(owner, name, new))
            launched = stack.enter_context(absent.absent_gpu(p))
            records = list(section.records(Options()))
        found[section.name] = {
            "failed": [record for record in records if record.get("ok") is False],
            "passed": sum(record.get("ok") is True for record in records),
            "products": sum(record["kind"] == "product" for record in records),
            "launched": sorted(launched),
        }
    print(json.dumps(found))
