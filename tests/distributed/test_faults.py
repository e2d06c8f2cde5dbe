"""Ranks that are killed, come late or raise end the other ranks soon, with an error that names them.

Each case has processes and a process group of its own, with a short timeout.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
from torch.distributed import HashStore

from fastqt.distributed import faults
from tests.shared.faulty_ranks import TIMEOUT, End, Fault, all_endings, questions_of_good_steps
from tests.shared.ranks import Ranks

# No process may outlive the group's timeout by more seconds.
MARGIN = 10

RING, CLIP = {"exchange": "ring"}, {"loss": "clip_loss"}
CLIP_RING, SIGMOID_RING = {**CLIP, **RING}, {"loss": "sigmoid_loss", **RING}
HOME = "gradients of visiting rows"
PHASES = {
    "agreement": Fault("kill", "arguments", step=0),
    "second-agreement": Fault("kill", "arguments", 1, step=0),
    "sizes": Fault("kill", "numbers of rows", shards="uneven"),
    "gather": Fault("kill", "rows"),
    "gather-to-total": Fault("kill", "losses"),
    "backward": Fault("kill", "gradients of rows"),
    "ring-begins": Fault("kill", "visiting rows", **RING),
    "in-the-ring": Fault("kill", "visiting rows", 1, **RING),
    "ring-of-backward": Fault("kill", HOME, **RING),
    "second-return": Fault("kill", HOME, 1, **RING),
    "sigmoid-ring": Fault("kill", HOME, **SIGMOID_RING),
    "clip-gather": Fault("kill", "rows", **CLIP),
    "clip-maxima": Fault("kill", "maxima", **CLIP),
    "clip-sums": Fault("kill", "sums", **CLIP),
    "clip-gradients": Fault("kill", "gradients of rows", **CLIP),
    "clip-ring": Fault("kill", "visiting rows", 1, **CLIP_RING),
    "raise-first": Fault("raise", "computation", step=0),
    "raise": Fault("raise", "computation"),
    "raise-in-check": Fault("raise", "check"),
    "raise-in-ring": Fault("raise", "computation", **RING),
}
SEEDS = 5


def assert_named(fault: Fault, ends: list[End], alone: bool = False) -> None:
    """All ranks end in time, and those that did not fail by themselves name the one that did.

    Where a machine has much else to do, they may name another rank too that is slow to leave word.
    """
    for rank, end in enumerate(ends):
        assert 0 <= end.seconds <= TIMEOUT + MARGIN, (rank, end)
        if rank == fault.victim:
            assert end.code == (-9 if fault.kind == "kill" else 1), end
            continue
        assert end.code == 1, (rank, end)
        assert "RuntimeError" in end.kinds, (rank, end)
        if fault.kind == "raise" and fault.step == 0:
            assert (
                end.error
                == f"ArithmeticError: this rank cannot count (on rank {fault.victim} of {fault.size})"
            )
            continue
        assert end.cause == "RuntimeError"  # torch's own
        head, reason = re.fullmatch(r"group: (want .*, got none on rank \d+): (.*)", end.error).groups()
        assert f"of all {fault.size} ranks in fastqt.{fault.loss}, got none on rank {rank}" in head
        ranks = re.match(r"ranks? ([\d, ]+) (did not take part|came after|raised)", reason)
        missing = ranks[1].split(", ")
        assert missing == [str(fault.victim)] if alone else str(fault.victim) in missing, end
        if fault.kind == "raise":
            error = (
                "ValueError: scale: want" if fault.before == "check" else "ArithmeticError: this rank cannot"
            )
            assert reason.startswith(f"rank {fault.victim} raised {error}")


@pytest.mark.slow
def test_ranks_that_fail() -> None:
    """With four ranks, one waits for others than the one that fails."""
    names = ("gather-to-total", "ring-of-backward", "raise-in-ring")
    faults = [replace(PHASES[name], size=4) for name in names] + [Fault("late", "gradients of rows", **CLIP)]
    slow = Fault("slow", "losses", size=2)
    *found, steady = all_endings([*faults, slow], at_once=6)
    for fault, ends in zip(faults, found, strict=True):
        assert_named(fault, ends, alone=True)
    assert [(end.code, end.error) for end in steady] == [(0, ""), (0, "")]


@pytest.mark.slow
def test_a_hundred_of_a_hundred() -> None:
    faults = [
        replace(
            fault,
            seed=seed,
            size=2 + (seed + place) % 3,
            victim=(seed + place // 3) % (2 + (seed + place) % 3),
        )
        for place, fault in enumerate(PHASES.values())
        for seed in range(SEEDS)
    ]
    # With two ranks, a ring has one visit and one return.
    faults = [
        replace(fault, size=3) if fault.exchange == "ring" and fault.size == 2 else fault for fault in faults
    ]
    found = all_endings(faults)
    for fault, ends in zip(faults, found, strict=True):
        assert_named(fault, ends)
    assert len(found) == 100


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault", [Fault("late", "arguments", step=0), Fault("late", "rows"), Fault("late", HOME, **RING)]
)
def test_ranks_that_come_late(fault: Fault) -> None:
    assert_named(fault, *all_endings([fault]))


@pytest.mark.slow
def test_the_rank_that_holds_the_store() -> None:
    (ends,) = all_endings([Fault("kill", "gradients of rows", victim=0, store="tcp")])
    for end in ends[1:]:
        assert end.seconds <= TIMEOUT + MARGIN
        assert "the store of the process group does not answer; it is rank 0 of all processes" in end.error


def test_good_steps_leave_the_store_alone(ranks: Callable[[int], Ranks]) -> None:
    assert ranks(2).run(questions_of_good_steps) == [0, 0]


def test_missing_ranks_are_few_questions() -> None:
    """Thousands of ranks ask one store: each asks for many keys at once, and no more than it can name."""
    questions = 0

    class Counting(HashStore):
        def check(self, keys: list[str]) -> bool:
            nonlocal questions
            questions += 1
            return super().check(keys)

    store, keys = Counting(), [f"failed {rank}" for rank in range(4096)]
    for rank in range(4096):
        if rank not in (0, 1000, 4095):
            store.set(keys[rank], "")
    assert faults._absent(store, keys, 0) == [0, 1000, 4095]
    assert questions <= 2 * 3 * 12 + 1
    questions = 0
    assert len(faults._absent(Counting(), keys, 0)) > faults.NAMED_RANKS
    assert questions < 100
    assert faults.named(list(range(20)), faults.NAMED_RANKS) == "ranks 0, 1, 2, 3, 4, 5, 6, 7 and more"
    assert faults.named([3]) == "rank 3"
