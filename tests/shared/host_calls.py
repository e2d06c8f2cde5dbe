"""What a loss on a GPU makes its host do, without a GPU: CPU tensors are taken for a GPU's.

python -m tests.shared.host_calls                  # what a call of each loss asks torch about the GPU

Triton's launches run up to the call of the driver, torch's products are left out, and its other operations
are those of a CPU, on a few rows. A process of its own runs this, in which Triton does not interpret.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import importlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

os.environ.pop("TRITON_INTERPRET", None)  # before anything imports fastqt.kernels

import torch
from torch import Tensor

from tests.shared.absent_driver import absent_driver

N, D = 64, 64
GPU = SimpleNamespace(
    name="a GPU that is not there",
    major=9,
    minor=0,
    multi_processor_count=132,
    shared_memory_per_block_optin=227 * 1024,
    total_memory=79 * 2**30,
)
FREE = 70 * 2**30
PLENTY: dict[str, Any] = {
    "mem_get_info": (FREE, GPU.total_memory),
    "memory_reserved": 0,
    "memory_allocated": 0,
    "get_device_properties": GPU,
    "current_device": 0,
    "is_current_stream_capturing": False,
}


@contextlib.contextmanager
def taken_for_a_gpu(launched: Callable[..., None] | None = None) -> Iterator[collections.Counter[str]]:
    """CPU tensors are taken for a GPU's, with each question about it counted; `launched` as of the driver."""
    from fastqt.engines import ENGINES
    from fastqt.engines.triton import scores
    from fastqt.kernels import tuning

    asked: collections.Counter[str] = collections.Counter()

    def answer(name: str, *_: Any) -> Any:
        asked[name] += 1
        return PLENTY[name]

    def config(_: torch.device, *shape: Any) -> Any:
        return tuning.score_config(torch.device("cuda"), *shape)

    with contextlib.ExitStack() as stack:
        stack.enter_context(absent_driver(launched))
        here = replace(ENGINES["triton"], why_not_here=None)
        stack.enter_context(mock.patch.dict(ENGINES, triton=here))
        replaced: list[tuple[Any, str, Any]] = [
            *((torch.cuda, name, functools.partial(answer, name)) for name in PLENTY),
            (torch.cuda, "device", lambda _: contextlib.nullcontext()),
            (scores, "score_config", config),
        ]
        for module in ("loop", "two_walks", "rows", "three_block"):
            owner = importlib.import_module(f"fastqt.engines.triton.{module}")
            replaced.append((owner, "multiply", lambda *_, **__: None))
        for owner, name, new in replaced:
            stack.enter_context(mock.patch.object(owner, name, new))
        for name, answer in (("is_cuda", True), ("is_cpu", False)):
            stack.enter_context(mock.patch.object(Tensor, name, answer, create=True))
        yield asked


def leaves(rows: int = N) -> list[Tensor]:
    """Both sides of a batch of bfloat16."""
    return [torch.zeros(rows, D, dtype=torch.bfloat16, requires_grad=True) for _ in range(2)]


def losses() -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
    """Some losses of two matrices."""
    import fastqt

    plain = functools.partial(fastqt.contrastive_loss, backend="triton")
    own = {"targets": fastqt.Diagonal(), "diagonal": "keep"}
    dense = {"targets": torch.eye(N, dtype=torch.bfloat16), "diagonal": "keep"}
    mixed = {"form": "released", "memory": "fast", "backend": "triton"}
    return {
        "InfoNCE": functools.partial(plain, scale=20.0, **own),
        "InfoNCE of cosines": functools.partial(fastqt.info_nce_loss, backend="triton"),
        "InfoNCE, low memory": functools.partial(plain, scale=20.0, memory="low", **own),
        "QuickThoughts": plain,
        "dense targets": functools.partial(plain, **dense),
        "CLIP": functools.partial(fastqt.clip_loss, scale=20.0, backend="triton"),
        "SigLIP": functools.partial(fastqt.siglip_loss, scale=10.0, bias=-10.0, backend="triton"),
        "MixCSE released": functools.partial(fastqt.mixcse_loss, **mixed),
    }


def main() -> None:
    questions = {}
    with taken_for_a_gpu() as asked:
        for name, loss in losses().items():
            for call in ("first", "second"):
                asked.clear()
                loss(*leaves()).backward()
                questions[f"{name}, {call} call"] = dict(asked)
    print(json.dumps(questions))


if __name__ == "__main__":
    main()
