"""What `warm_up` has Triton compile for a GPU that is not there, and what calls of the losses do.

python -m tests.shared.warmed sources     # nothing is compiled: what either would be compiled from
python -m tests.shared.warmed cache       # compiles, and counts what a call finds in Triton's cache
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from typing import Any
from unittest import mock

import fastqt
from fastqt import compiling
from tests.shared.absent_driver import NotCompiled
from tests.shared.host_calls import GPU, D, N, leaves, losses, taken_for_a_gpu

TARGET = "sm_90"
# Whose exponentials fit the GPU's room at once, and would not fit a smaller GPU's.
LARGE, LARGE_ROWS = "InfoNCE, large", 20_000


@contextlib.contextmanager
def compiling_by(compiled: Any) -> Iterator[None]:
    """Triton compiles by another function, to what is not launched, for the GPU that seems to be there."""
    import triton.compiler

    def compile(source: Any, target: Any = None, options: Any = None, **_: Any) -> NotCompiled:
        compiled(source, target, options)
        return NotCompiled(source, None)

    with (
        mock.patch.dict(compiling.TARGETS, {TARGET: GPU}),
        mock.patch.object(triton.compiler, "compile", compile),
    ):
        yield


def sources() -> dict[str, tuple[list[str], list[str], list[str]]]:
    """For each loss what it adds to those before: by `warm_up`, by a call, and what the former tells."""
    noted: list[str] = []

    def note(source: Any, target: Any, options: Any) -> None:
        code = source.signature, source.constants, source.attrs, sorted(options.items())
        noted.append(f"{source.fn.__name__} {code!r}")

    cases = {name: (loss, N) for name, loss in losses().items()}
    cases[LARGE] = cases["InfoNCE"][0], LARGE_ROWS
    warmed, told, called = {}, {}, {}
    with compiling_by(note):
        for name, (loss, rows) in cases.items():
            noted.clear()
            told[name] = list(fastqt.warm_up(loss, (rows, D), (rows, D), target=TARGET).kernels)
            warmed[name] = sorted(noted)

    with taken_for_a_gpu(), compiling_by(note):
        for name, (loss, rows) in cases.items():
            noted.clear()
            loss(*leaves(rows)).backward()
            called[name] = sorted(noted)
    return {name: (warmed[name], called[name], told[name]) for name in told}


def cache() -> dict[str, int]:
    """How many kernels `warm_up` compiles, and how many of them a call compiles and finds."""
    import triton.compiler
    from triton import knobs

    counts = {"warmed": 0, "compiled": 0, "found": 0}
    genuine = triton.compiler.compile

    def count(*, cache_hit: bool, **_: Any) -> None:
        counts["found" if cache_hit else "compiled"] += 1

    loss = losses()["QuickThoughts"]
    with mock.patch.dict(compiling.TARGETS, {TARGET: GPU}):
        counts["warmed"] = len(fastqt.warm_up(loss, (N, D), (N, D), target=TARGET).kernels)

    knobs.compilation.listener = count
    with taken_for_a_gpu(), compiling_by(lambda *asked: genuine(asked[0], target=asked[1], options=asked[2])):
        loss(*leaves()).backward()
    return counts


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        print(json.dumps({"sources": sources, "cache": cache}[sys.argv[1]]()))


if __name__ == "__main__":
    main()
