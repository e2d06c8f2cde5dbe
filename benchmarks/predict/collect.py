"""What the model needs to know, found without a GPU: the engine's launches, and its kernels once compiled.

python -m benchmarks.predict.collect    # prints the launches as JSON, and compiles nothing
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from unittest import mock

from benchmarks.offline.compile import attempt, compiler
from benchmarks.predict.choices import TILES, tile_key
from benchmarks.predict.events import kernel_key, stored_event
from benchmarks.predict.roofline import Rates, Stored
from tests.shared.launches import GPUS, Case, Event, Gpu, Launch, noted

NARROW = tuple((65536, D) for D in (64, 128, 256, 300))
SHAPES = ((65536, 768), (16384, 1024), (8192, 2400), (1024, 768), (400, 1000), *NARROW)
LARGE_SHAPES = ((65536, 768), (16384, 1024))  # of the other losses
KEPT = ("threads", "registers", "shared", "spills", "sass")  # of what is known of a compiled kernel


def cases() -> Iterable[Case]:
    """The problems, each in the memory modes that differ."""
    listed = [Case("QuickThoughts", N=N, D=D) for N, D in SHAPES]
    for N, D in LARGE_SHAPES:
        pairs = Case("SigLIP", N=N, D=D, targets="own", diagonal="keep", scale=True)
        listed.append(replace(pairs, link="sigmoid", bias=True))
        listed.append(replace(pairs, name="CLIP", clip=True))
        listed.append(Case("MixCSE released", N=N, D=D, three_blocks="both"))
    order = [case.name for case in listed]
    for case in sorted(listed, key=lambda case: order.index(case.name)):
        # In low memory MixCSE's released form is three losses at these sizes.
        for memory in ("fast",) if case.three_blocks else ("fast", "low"):
            yield replace(case, memory=memory)


def collect() -> Stored:
    """The launches of every problem, and what the compiled kernels use."""
    import torch
    import triton

    schedules, kernels = [], {}
    for case, events in launched():
        kernels.update(compiled(events, hopper(), kernels))
        schedules.append(schedule_of(case, events))
    versions = {"triton": triton.__version__, "torch": torch.__version__.split("+")[0]}
    return {"versions": versions, "rates": asdict(Rates()), "kernels": kernels, "schedules": schedules}


def launched() -> Iterator[tuple[Case, list[Event]]]:
    """Every problem, and what the engine launches for it."""
    for case in cases():
        yield case, noted(replace(case, upstream=True, descriptors=None), hopper())


def schedule_of(case: Case, events: Iterable[Event]) -> Stored:
    """What the model reads of a problem's launches, equal ones counted."""
    counted = Counter(json.dumps(stored_event(event)) for event in events)
    listed = [{**json.loads(event), "count": count} for event, count in counted.items()]
    return {"loss": case.name, "N": case.N, "D": case.D, "memory": case.memory, "events": listed}


def hopper() -> Gpu:
    return next(gpu for gpu in GPUS if gpu.arch == 90)


def compiled(events: Iterable[Event], gpu: Gpu, known: Iterable[str]) -> Stored:
    """What the kernels that are not known yet use, by their names."""
    resources: Stored = {}
    for launch in (event for event in events if isinstance(event, Launch)):
        if kernel_key(launch) not in (*known, *resources):
            resources[kernel_key(launch)] = used(launch, gpu)
    return resources


def collect_tiles() -> Stored:
    """What the scores' kernel uses with each tile that `choices` prices, by pointers and by descriptors."""
    from fastqt.kernels import tuning

    resources = {}
    for rows, columns in TILES:
        for descriptors in (False, True):
            config = replace(tuning.HOPPER, rows=rows, columns=columns)
            with mock.patch.object(tuning, "HOPPER", config):
                events = noted(Case("tile", N=16384, descriptors=descriptors), hopper())
            launch = next(e for e in events if isinstance(e, Launch) and e.matches("scores_kernel out"))
            resources[tile_key((rows, columns), descriptors)] = used(launch, hopper())
    return resources


def used(launch: Launch, gpu: Gpu) -> Stored:
    """What a kernel uses once compiled; nothing of one that does not compile, whose error is printed."""
    outcome = attempt([launch], launch.kernel.__name__, gpu, disassembled=True)
    if "error" in outcome:
        print(f"{kernel_key(launch)}: {outcome['error']}", file=sys.stderr)
        return {}
    kept = {name: outcome[name] for name in KEPT}
    return {**kept, "loads_ahead": outcome["instructions"]["cp.async"] > 0}


if __name__ == "__main__":
    with compiler():
        print(json.dumps([schedule_of(*each) for each in launched()]))
