"""The tiles that a GPU gets, mostly where nothing has been measured, and the grid of their programs."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from fastqt import devices
from fastqt.devices import known_properties
from fastqt.engines.triton.softmax import SAMPLE
from fastqt.kernels import tuning
from fastqt.kernels.scores import column_tiles, launch, row_tiles

H100 = SimpleNamespace(
    name="an H100 without a table",
    major=9,
    minor=0,
    multi_processor_count=132,
    shared_memory_per_block_optin=227 * 1024,
)


@pytest.fixture
def config_for(monkeypatch):
    """`score_config` as an H100 without a table has it."""
    for module in (tuning, launch):
        monkeypatch.setattr(module, "INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: H100)
    known_properties.cache_clear()

    def config(N: int, dtype: torch.dtype = torch.bfloat16, **epilogue: bool) -> tuning.Config:
        return tuning.score_config(torch.device("cuda"), dtype, N, N, 768, **epilogue)

    yield config
    known_properties.cache_clear()


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


def test_a_b200_has_large_tiles_where_nothing_is_read_of_columns(config_for, monkeypatch):
    b200 = SimpleNamespace(**{**vars(H100), "name": "a B200", "major": 10, "multi_processor_count": 148})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: b200)
    assert config_for(8192) == tuning.HOPPER
    for epilogue in ("few_columns", "of_columns", "heavy"):
        assert config_for(8192, **{epilogue: True}) == tuning.DEFAULT[torch.bfloat16], epilogue


def modelled(N: int, D: int, rows: int, columns: int, multiprocessors: int) -> float:
    """What the scores of N rows with as many take: products, and an epilogue of about 220 more."""
    tiles = math.ceil(N / rows) * math.ceil(N / columns)
    return math.ceil(tiles / multiprocessors) * rows * columns * (D + 220)


@pytest.mark.parametrize(
    ("capability", "multiprocessors", "epilogue", "large"),
    [
        (9, 132, {}, (128, 256)),
        (9, 114, {}, (128, 256)),
        (9, 132, {"few_columns": True}, (256, 128)),
        (10, 148, {}, (128, 256)),
    ],
)
def test_tiles_are_those_that_take_the_least_by_waves(
    config_for, capability, multiprocessors, epilogue, large, monkeypatch
):
    """Over all sizes that a batch may have, the larger tiles unless they take 5 % more."""
    properties = {**vars(H100), "major": capability, "multi_processor_count": multiprocessors}
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(**properties))
    chosen = {N: config_for(N, **epilogue) for N in (*range(512, 16_385, 128), *range(555, 16_384, 333))}
    for N, config in chosen.items():
        times = [modelled(N, 768, *tiles, multiprocessors) for tiles in ((128, 128), large)]
        is_large = times[1] <= 1.05 * times[0]
        assert (config.rows, config.columns) == (large if is_large else (128, 128)), N
    assert {config.rows * config.columns for config in chosen.values()} == {2**14, 2**15}


def test_smaller_tiles_where_the_larger_ones_leave_a_third_of_a_wave(config_for):
    """What the model says that they save of 132 multiprocessors, at sizes that batches have."""
    smaller = [N for N in range(2048, 5121, 256) if config_for(N).columns == 128]
    assert {2304, 3072, 3840, 4352, 4864} <= set(smaller)
    assert config_for(4096).columns == config_for(2048).columns == 256


@pytest.mark.parametrize("epilogue", [{}, {"few_columns": True}, {"heavy": True}], ids=str)
def test_groups_of_tiles_have_2048_rows_where_the_cache_does_not_hold_the_candidates(config_for, epilogue):
    config = config_for(65_536, **epilogue)
    assert config.rows * config.group == 2048
    assert config_for(16_384, heavy=True) == tuning.DEFAULT[torch.bfloat16]


@pytest.mark.parametrize("multiprocessors", [108, 132, 148])
@pytest.mark.parametrize("config", [tuning.DEFAULT[torch.bfloat16], tuning.HOPPER, tuning.HOPPER_TALL])
def test_tiles_that_run_at_once_load_few_rows_and_columns(config, multiprocessors):
    """Each row of queries and of candidates once, as long as they are in the L2 cache."""

    def loaded(group: int) -> int:
        return group * config.rows + -(-multiprocessors // group) * config.columns

    assert loaded(config.group) <= 1.1 * min(map(loaded, (1, 2, 4, 8, 16, 32)))


def test_what_may_be_repeated_has_no_descriptors(config_for):
    assert config_for(5760) == replace(tuning.HOPPER, descriptors=False)
    assert config_for(6017) == tuning.HOPPER


def test_a_table_has_the_tiles_of_the_first_entry_that_covers_scores_and_width(config_for, monkeypatch):
    entries = [
        {"most_scores": 2**24, "most_width": width, "config": {"rows": rows, "columns": 64}}
        for width, rows in ((512, 16), (1024, 32), (2048, 64))
    ]
    monkeypatch.setattr(tuning, "tables", lambda: {H100.name: {"bfloat16": entries}})
    assert config_for(4096).rows == 32
    assert config_for(8192) == tuning.HOPPER


def test_an_amd_gpu_is_no_hopper(config_for, monkeypatch):
    """It has a compute capability of 9.4, as torch says, and LDS of 64 KiB, of which a block can have all."""
    amd = SimpleNamespace(name="an MI300X", major=9, minor=4, multi_processor_count=304)
    amd.shared_memory_per_block, amd.gcnArchName = 64 * 1024, "gfx942:sramecc+:xnack-"
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: amd)
    monkeypatch.setattr(devices, "AMD", True)
    assert config_for(8192) == tuning.SMALL_MEMORY
    assert devices.target_of(amd) == "gfx942"

    amd.shared_memory_per_block = 160 * 1024  # an MI350X
    assert config_for(8192) == tuning.DEFAULT[torch.bfloat16]


def test_as_many_programs_as_are_resident(config_for):
    queries = torch.empty(8, 8, dtype=torch.bfloat16)
    config = config_for(8192)
    # A program takes most of the shared memory.
    assert launch.resident_programs(queries, 5000, config, 64) == 132
    assert launch.resident_programs(queries, 100, config, 64) == 100
    assert launch.resident_programs(queries, 5000, tuning.SMALL_MEMORY, 32) == 4 * 132


def test_a_sample_has_a_tile_for_nearly_every_multiprocessor(config_for):
    of_sample = tuning.sample_config(config_for(8192))
    tiles = row_tiles(8192, of_sample) * column_tiles(SAMPLE, of_sample)
    assert 0.95 * H100.multi_processor_count < tiles <= H100.multi_processor_count
    assert of_sample.descriptors


def test_a_sample_has_no_larger_tiles_than_all_scores(config_for):
    for narrow in (tuning.WHEN_INTERPRETED, config_for(8192, torch.float32, wide=True)):
        assert tuning.sample_config(narrow) == narrow
