"""Programs that share a multiprocessor, and the scores' kernel: what its tiles hide, and what they do not."""

import pytest

from benchmarks.predict.roofline import Rates, blocks_per_multiprocessor, rows_time, scores_time

# A tile's products take a second, and so do its other instructions.
SIMPLE = Rates(
    multiprocessors=2,
    tensor=2 * 2.0 * 128 * 256 * 64,
    pointers=0.5,
    memory=1e30,
    l2=1e30,
    clock=1.0,
    fill=10.0,
    refill=1.0,
    launch=100.0,
)
ALONE = {"threads": 256, "registers": 255, "shared": 196608, "sass": 0.5, "loads_ahead": True}
SHARED = {**ALONE, "registers": 128, "shared": 0}
TWO_GROUPS = {**ALONE, "threads": 384, "sass": 0.75}  # instructions of 2.25 seconds, of three groups of warps
EVENT = {
    **{"rows": 512, "columns": 256, "width": 64, "itemsize": 2, "store": True, "tile": [128, 256]},
    **{"step": 64, "group": 8, "descriptors": True, "programs": 4},
}


@pytest.mark.parametrize(
    ("threads", "registers", "shared", "programs"),
    [
        (128, 32, 0, 16),  # threads
        (256, 255, 0, 1),  # registers: 256 x 256 = 2^16
        (256, 128, 0, 2),
        (128, 168, 0, 3),
        (128, 32, 113 * 1024, 2),  # shared memory, and 1 KiB of each program's own
        (128, 32, 114 * 1024, 1),
        (32, 16, 0, 32),
    ],
)
def test_programs_that_share_a_multiprocessor(threads, registers, shared, programs):
    resources = {"threads": threads, "registers": registers, "shared": shared}
    assert blocks_per_multiprocessor(resources, Rates()) == programs


@pytest.mark.parametrize(
    ("changed", "resources", "seconds"),
    [
        ({}, ALONE, 2 * (10 + 1 + 1)),  # two waves of programs that each begin anew
        ({"descriptors": False}, ALONE, 2 * (10 + 2 + 1)),
        ({"programs": 2}, ALONE, 10 + 1 + 1 + 1 + 1 + 1),  # persistent: the second tile waits for operands
        ({"programs": 2, "ahead": True}, ALONE, 10 + 2 * 2),
        ({"programs": 2, "lead": 1}, TWO_GROUPS, 10 + 2 * 1),
        # Of 8 steps of 1/8 second, a lead of 2 hides a quarter of the other instructions' 3/4 seconds.
        ({"programs": 2, "lead": 2, "step": 8}, TWO_GROUPS, 10 + 2 * (1 + 0.75 - 0.25)),
        ({}, SHARED, 10 + 2 * 1),  # another program's products hide both
        ({"rows": 384}, ALONE, 2 * (10 + 1 + 1)),  # a wave that is not full takes as long
        ({"rows": 256}, ALONE, 10 + 1 + 1),
    ],
)
def test_time_of_tiles(changed, resources, seconds):
    assert scores_time({**EVENT, **changed}, resources, SIMPLE).seconds == pytest.approx(100 + seconds)


def test_the_pace_of_a_kernel_that_loads_by_descriptors():
    rates = Rates(**{**vars(SIMPLE), "descriptors": 0.25})  # a tile's products take 4 seconds
    assert scores_time(EVENT, ALONE, rates).seconds == pytest.approx(100 + 2 * (10 + 4 + 1))
    by_pointers = scores_time({**EVENT, "descriptors": False}, ALONE, rates)
    assert by_pointers.seconds == pytest.approx(100 + 2 * (10 + 2 + 1))


def test_operands_from_the_l2_cache():
    rates = Rates(**{**vars(SIMPLE), "l2": 2.0 * 64 * 384 / 100})  # a tile's operands take 100 seconds
    assert scores_time(EVENT, ALONE, rates).seconds == pytest.approx(100 + 4 * 100)
    assert scores_time({**EVENT, "multicast": 2}, ALONE, rates).seconds == pytest.approx(100 + 2 * 100)


@pytest.mark.parametrize(("l2_size", "times"), [(2 * 2 * 256 * 64, 1), (2 * 2 * 256 * 64 - 1, 2)])
def test_candidates_that_do_not_stay_in_the_l2_cache_are_read_for_each_group_of_rows(l2_size, times):
    rates = Rates(**{**vars(SIMPLE), "l2_size": l2_size})
    time = scores_time({**EVENT, "group": 2}, ALONE, rates)
    assert time.bytes == 2 * (512 * 64 + times * 256 * 64 + 512 * 256)


def test_what_the_last_wave_stores_is_not_hidden():
    rates = Rates(**{**vars(SIMPLE), "memory": 2.0 * 128 * 256})  # a tile of E takes a second
    time = scores_time({**EVENT, "rows": 384}, ALONE, rates)
    assert time.seconds == pytest.approx(100 + 24 + 1)
    assert scores_time(EVENT, ALONE, rates).seconds == pytest.approx(100 + 24 + 2)


def test_a_small_product_is_read_from_the_l2_cache():
    rates = Rates(launch=0.0, memory=1.0, l2=10.0, l2_size=200)
    assert rows_time({"bytes": 3, "product_bytes": 100}, {}, rates).seconds == pytest.approx(3 + 10)
    assert rows_time({"bytes": 3, "product_bytes": 101}, {}, rates).seconds == pytest.approx(3 + 101)
