"""What a later call of a loss does less: it asks for the free memory rarely, and repeats computations."""

import json
import weakref
from types import SimpleNamespace

import pytest
import torch

from fastqt.engines.triton import clip, contrastive, free_memory, three_block
from tests.shared.processes import printed

GPU = torch.device("cuda", 0)
PROBLEM = SimpleNamespace(queries=SimpleNamespace(device=GPU))
ROOM = 2**30
OF_MEMORY = ("mem_get_info", "memory_reserved", "memory_allocated")


@pytest.fixture
def memory(monkeypatch):
    """What the GPU answers, how often it was asked, and whether a graph is captured."""
    answers = {"free": 2**40, "asked": 0, "capturing": False}

    def mem_get_info(device):
        assert not answers["capturing"]
        answers["asked"] += 1
        return answers["free"], 2**40

    monkeypatch.setattr(free_memory, "_answers", {})
    monkeypatch.setattr(free_memory, "is_capturing", lambda device: answers["capturing"])
    for name, answer in zip(OF_MEMORY, (mem_get_info, lambda _: 7 * 2**20, lambda _: 2**20), strict=True):
        monkeypatch.setattr(torch.cuda, name, answer)
    return answers


def room(size=ROOM):
    return free_memory.room_within(ROOM, GPU, size)


def test_half_of_what_is_free_or_kept_for_torch(memory):
    assert room() == ROOM
    memory["free"] = 10 * 2**20
    free_memory._answers.clear()
    assert room() == 8 * 2**20


def test_an_answer_holds_for_many_calls(memory):
    memory["free"] = 10 * 2**20
    assert {room() for _ in range(free_memory.CALLS)} == {8 * 2**20}
    assert memory["asked"] == 1
    memory["free"] = 0
    assert room() == 3 * 2**20
    assert memory["asked"] == 2


def test_twice_as_much_is_asked_for_anew(memory):
    for size in (2**20, 2**20 + 5, 2**21, 2**22, 2**40, 2**41):
        room(size)
    assert memory["asked"] == 4  # no more than the room is ever taken


def test_a_graph_does_not_depend_on_it(memory):
    memory["capturing"] = True
    assert room() == ROOM
    memory["capturing"], memory["free"] = False, 2**20
    assert room() < ROOM
    memory["capturing"] = True
    assert room() == ROOM


def test_computes_again_after_an_old_answer(memory):
    """All of what the first attempt had allocated is free at the second one."""
    allocated, rooms = [], []

    @free_memory.asked_again_if_none_is_left
    def compute(p, *, most):
        of_attempt = torch.empty(1)
        assert all(earlier() is None for earlier in allocated)
        allocated.append(weakref.ref(of_attempt))
        rooms.append(room())
        if rooms[-1] > most:
            raise torch.OutOfMemoryError("too much")
        return rooms[-1]

    assert compute(PROBLEM, most=ROOM) == ROOM
    memory["free"] = 10 * 2**20
    assert compute(PROBLEM, most=2**29) == 8 * 2**20
    assert rooms == [ROOM, ROOM, 8 * 2**20]
    # Nothing else is to be learnt from what was asked for just now.
    free_memory._answers.clear()
    with pytest.raises(torch.OutOfMemoryError, match="too much"):
        compute(PROBLEM, most=0)
    assert len(rooms) == 4


@pytest.mark.parametrize("module", [contrastive, clip, three_block])
def test_every_computation_does(module):
    names = ["forward", "forward_with_gradients", "backward"]
    names += ["sums", "gradients_from"] if module is clip else []
    wanted = free_memory.asked_again_if_none_is_left(len).__code__
    assert all(getattr(module, name).__code__ is wanted for name in names)


@pytest.fixture(scope="module")
def asked():
    """What torch is asked about the GPU in calls of some losses."""
    return json.loads(printed("-m", "tests.shared.host_calls"))


def test_a_second_call_asks_for_nothing_but_the_current_device(asked):
    assert set(OF_MEMORY) < asked["InfoNCE, first call"].keys()
    second = {name: questions for name, questions in asked.items() if name.endswith("second call")}
    assert len(second) > 5
    for name, questions in second.items():
        assert questions.keys() == {"current_device"}, name


@pytest.mark.slow
def test_a_repeated_loss_has_the_bits_of_one_that_is_not():
    by_name = [json.loads(line) for line in printed("-m", "tests.shared.repeated_losses").splitlines()]
    assert len(by_name) > 3
    for found in by_name:
        assert found["repeated"] == found["wanted"], found
        assert found["equal"], found
        assert found["reports"] == [], found
