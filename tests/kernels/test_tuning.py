"""The tiles that an H100 gets where nothing has been measured, and the grid of their programs."""

from types import SimpleNamespace

import pytest
import torch

from fastqt.kernels import tuning
from fastqt.kernels.scores import launch

H100 = SimpleNamespace(
    major=9, minor=0, multi_processor_count=132, shared_memory_per_block_optin=227 * 1024, name="H100"
)


@pytest.fixture
def config_for(monkeypatch):
    """`score_config` as an H100 without a table has it."""
    for module in (tuning, launch):
        monkeypatch.setattr(module, "INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "an H100 without a table")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: H100)

    def config(N: int, dtype: torch.dtype = torch.bfloat16, **epilogue: bool) -> tuning.Config:
        return tuning.score_config(torch.device("cuda"), dtype, N, N, 768, **epilogue)

    return config


def test_large_tiles_where_there_are_enough(config_for):
    shapes = {
        "softmax": config_for(8192),
        "few columns": config_for(8192, few_columns=True),
        "heavy": config_for(8192, heavy=True),
        "few": config_for(1024),
        "float32": config_for(8192, torch.float32),
        "wide": config_for(8192, wide=True),
        "wide, float32": config_for(8192, torch.float32, wide=True),
    }
    assert {name: (c.rows, c.columns, c.descriptors) for name, c in shapes.items()} == {
        "softmax": (128, 256, True),
        "few columns": (256, 128, True),
        "heavy": (128, 128, False),
        "few": (128, 128, False),
        "float32": (128, 128, False),
        "wide": (128, 256, True),
        "wide, float32": (128, 64, False),
    }


def test_as_many_programs_as_are_resident(config_for):
    queries = torch.empty(8, 8, dtype=torch.bfloat16)
    config = config_for(8192)
    # A program takes most of the shared memory.
    assert launch._programs(queries, 5000, config, 64) == 132
    assert launch._programs(queries, 100, config, 64) == 100
    assert launch._programs(queries, 5000, tuning.SMALL_MEMORY, 32) == 4 * 132
