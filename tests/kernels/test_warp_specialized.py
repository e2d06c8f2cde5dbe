"""The warp-specialised kernel of the scores: its values, and what the emulator has to say of its protocol.

Gluon has no interpreter. In processes of their own Triton compiles the kernel for Hopper, with the smallest
tiles, and the emulator executes the PTX.
"""

import functools
import json
import subprocess
import sys

import pytest
import torch

from tests.shared.tolerances import FLOAT32, UNIT_ROUNDOFF

BLOCK_D = 16
LOCKSTEP, ALONE = ("lockstep", 0), ("alone", 0)
RANDOM = [("random", seed) for seed in range(8)]
AHEAD = RANDOM[5:]  # in which the first group of warps has turns ten times as often as the second one
SHAPES = {  # rows, columns, depth, and where the rows and columns begin among all
    "a tile": (128, 64, 64, 0, 0),
    "whole tiles": (256, 192, 80, 0, 0),
    "partial tiles": (150, 100, 70, 0, 0),
    "less than a tile": (3, 5, 64, 0, 0),
    "a part of all": (140, 90, 87, 6, 4),
    "a longer ring's worth": (132, 70, 131, 1, 8),
}
PARTIAL = {"shape": SHAPES["partial tiles"]}
WITHOUT_EXACT_CELLS = {**PARTIAL, "diagonal": False, "targets": False}
WRITTEN = {
    "E and sums": {},
    "weighted E": {"factors": True, "summed": False},
    "sums": {"stored": False},
}
RIGHT = {
    **{
        f"{shape}: {written}": {"shape": SHAPES[shape], **WRITTEN[written]}
        for shape in SHAPES
        for written in WRITTEN
    },
    "without exact cells": WITHOUT_EXACT_CELLS,
    "each warp alone": {**PARTIAL, "orders": [ALONE]},
    "more programs than tiles": {**PARTIAL, "programs": 20},
    "blocks in random orders": {**PARTIAL, "programs": 3, "orders": RANDOM[:4]},
}
# Rings and tiles of several lengths, and every lead: no order deadlocks or mixes stages.
IN_ORDERS = {
    f"{stages} stages, {steps} steps more, a lead of {lead}": {
        "shape": (150, 100, (stages + steps) * BLOCK_D - 1, 2, 3),
        "programs": 2,
        "stages": stages,
        "lead": lead,
        "orders": [RANDOM[(3 * stages + steps + lead) % len(RANDOM)]],
    }
    for stages in (2, 3, 4)
    for steps in (0, 1, 3)
    for lead in range(1, stages + 1)
}

# What is changed in the kernel's source, or left out of it, and how that is found: by a kind of report,
# because threads wait for ever ("stopped"), or by wrong values alone.
MISTAKES = {
    "stages are filled before they are read": (
        ("            mbarrier.wait(read.index(stage), phase)\n", ""),
        "pending",
    ),
    "stages are multiplied before they are filled": (
        ("    mbarrier.wait(filled.index(stage), phase)\n", ""),
        "uninitialised",
    ),
    "one group's reading frees a stage": (
        ("mbarrier.init(read.index(stage), count=GROUPS)", "mbarrier.init(read.index(stage), count=1)"),
        "race",
    ),
    "a stage is freed before its products are made": (
        ("warpgroup_mma_wait(1, ", "warpgroup_mma_wait(2, "),
        "pending",
    ),
    "another stage is freed than the one that was read": (
        (
            "            mbarrier.arrive(read.index(before))\n",
            "            mbarrier.arrive(read.index(stage))\n",
        ),
        "stopped",
    ),
    "the last stage of a tile is not freed": (
        ("(0, deps=(scores,))\n        mbarrier.arrive(read.index(before))\n", "(0, deps=(scores,))\n"),
        "stopped",
    ),
    "phases do not alternate": (("gl.where(last, phase ^ 1, phase)", "phase"), "pending"),
    "the ring is begun in the wrong phase": (("stage, phase = 0, 1", "stage, phase = 0, 0"), "stopped"),
    "the second group waits for the wrong tile": (("            lead_phase ^= 1\n", ""), "stopped"),
    "the second group is never led": (
        ("mbarrier.arrive(led, pred=d == (LEAD - 1) * BLOCK_D)", "mbarrier.arrive(led, pred=d < 0)"),
        "stopped",
    ),
    "two arrivals are expected of one warp": (
        ("mbarrier.init(filled.index(stage), count=1)", "mbarrier.init(filled.index(stage), count=2)"),
        "stopped",
    ),
    "fewer bytes are expected": (
        ("= GROUPS * queries.block_type.nbytes", "= queries.block_type.nbytes"),
        "race",
    ),
    "a buffer is written while it is copied": (
        ("tma.store_wait(1)", "tma.store_wait(2)"),
        "pending",
    ),
    # It is left out of the PTX: where the source has no fence Triton puts one.
    "copies are not ordered after stores": ((r"fence\.proxy\.async\S*;", ""), "proxy"),
    "the kernel ends before its copies": (("tma.store_wait(0)", "tma.store_wait(1)"), "pending"),
    "both groups read the same rows": (("stage * GROUPS + GROUP)", "stage * GROUPS)"), "values"),
    "sums are taken before products end": (("warpgroup_mma_wait(0, ", "warpgroup_mma_wait(1, "), "pending"),
    "columns beyond the last are added up": (("if M - start_m < BLOCK_M:", "if M - start_m < 0:"), "values"),
}
IN_PTX = ("copies are not ordered after stores",)
FOUND_AHEAD = ("the second group waits for the wrong tile",)
PLANTED = {
    name: {
        **WITHOUT_EXACT_CELLS,
        "ptx" if name in IN_PTX else "source": change,
        "orders": AHEAD if name in FOUND_AHEAD else [LOCKSTEP],
    }
    for name, (change, _) in MISTAKES.items()
}
# The first group gets a whole tile ahead, so that the second one waits for a phase that is over.
FEW_STEPS = {
    **WITHOUT_EXACT_CELLS,
    "shape": (1024, 64, BLOCK_D, 0, 0),
    "stages": 5,
    "lead": 1,
    "orders": AHEAD,
}

SAMPLE = (
    *("partial tiles: E and sums", "a part of all: weighted E", "less than a tile: sums"),
    "2 stages, 1 steps more, a lead of 1",
    *("stages are filled before they are read", "stages are multiplied before they are filled"),
    *("one group's reading frees a stage", "the second group is never led"),
    *("copies are not ordered after stores", "the kernel ends before its copies"),
    "columns beyond the last are added up",
)
REQUESTS = {**RIGHT, **IN_ORDERS, **PLANTED, "few steps": FEW_STEPS}


def parametrized(names):
    """A sample of them for `make test`, and all for `make test-all`."""
    params = [pytest.param(x, id=x, marks=() if x in SAMPLE else pytest.mark.slow) for x in names]
    return pytest.mark.parametrize("name", params)


@functools.cache
def outcomes(names):
    command = [sys.executable, "-m", "tests.kernels.emulated_warp_specialized"]
    requests = json.dumps([REQUESTS[name] for name in names])
    done = subprocess.run(command, input=requests, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(zip(names, map(json.loads, done.stdout.splitlines()), strict=True))


def outcome(name):
    """What became of a request: those of the sample run in one process, and all others in another one."""
    return outcomes(SAMPLE if name in SAMPLE else tuple(x for x in REQUESTS if x not in SAMPLE))[name]


def is_right(errors):
    """E is computed in float32 and rounded once, sums are of float32; neither if it is NaN."""
    bounds = {"cells": UNIT_ROUNDOFF[torch.bfloat16] + FLOAT32, "sums": FLOAT32}
    return all(error <= bounds[name] for name, error in errors.items())


@parametrized([*RIGHT, *IN_ORDERS])
def test_every_cell_and_sum(name):
    result = outcome(name)
    assert not result["stopped"]
    assert result["reports"] == []
    assert is_right(result["errors"])


@parametrized(MISTAKES)
def test_a_mistake_in_the_protocol_is_found(name):
    _, wanted = MISTAKES[name]
    result = outcome(name)
    if wanted == "stopped":
        assert result["stopped"]
    elif wanted == "values":
        assert result["reports"] == []
        assert not is_right(result["errors"])
    else:
        assert wanted in result["kinds"]


@pytest.mark.slow
def test_a_tile_of_fewer_steps_than_stages_is_found():
    assert outcome("few steps")["stopped"]
