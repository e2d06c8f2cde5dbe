"""What is compiled in a training: the kernels of its first batch, and few for a last one that is smaller."""

import json
import subprocess
import sys


def compiled(*sizes):
    command = [sys.executable, "-m", "tests.shared.specialisations", *map(str, sizes)]
    lines = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout.splitlines()
    return [json.loads(line) for line in lines]


def test_a_batch_of_another_size_is_not_compiled_for():
    first, *others, odd, another_odd = compiled(1024, 512, 768, 256, 1008, 333, 777)
    assert sorted(first) == ["gradient_kernel", "row_shifts_kernel", "row_stats_kernel", "scores_kernel"]
    # Tiles that are not whole are masked, in code of its own.
    assert others == [[], [], [], ["scores_kernel"]]
    # Rows of an odd length begin at any address.
    assert odd == ["scores_kernel", "row_stats_kernel"]
    assert another_odd == []
