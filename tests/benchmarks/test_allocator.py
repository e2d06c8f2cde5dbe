"""What the table of allocators shows."""

from benchmarks.allocator import GIVEN_BACK, KEPT, allocator_table


def test_the_ratio_is_what_giving_memory_back_costs() -> None:
    row = {"case": "the loss", "who": "fastqt", "seconds": {KEPT: 0.1, GIVEN_BACK: 0.15}}
    line = allocator_table([row]).splitlines()[-1]
    assert line == "| the loss | fastqt | 100 | 150 | 1.50 × |"
