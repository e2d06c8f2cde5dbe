"""The tiles of the scores kernel: from a table for each GPU, which `python -m benchmarks.tune` measures."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from importlib import resources
from typing import Any

import torch

from fastqt.devices import generation, is_described, properties, shared_bytes
from fastqt.kernels.launch import INTERPRETED, Config, cdiv

DEFAULT = {
    torch.bfloat16: Config(rows=128, columns=128, width=64, group=8, warps=8, stages=4),
    torch.float16: Config(rows=128, columns=128, width=64, group=8, warps=8, stages=4),
    torch.float32: Config(rows=128, columns=128, width=32, group=8, warps=8, stages=3),
}
# Larger tiles load less, and are used where they do not leave multiprocessors idle for it. With 256 columns
# each group of warps reads the candidates' part of a tile once, with 256 rows twice. Tiles that run at once,
# 16 by 8 of them or 8 by 16, have as many rows as columns, so that they load the fewest.
HOPPER = Config(rows=128, columns=256, width=64, group=16, warps=8, stages=4, descriptors=True)
# The sums of columns take fewer instructions where a tile has fewer of them, and their norms fewer registers.
HOPPER_TALL = replace(HOPPER, rows=256, columns=128, group=8)
# How much longer larger tiles may take than smaller ones by the waves of tiles that the multiprocessors
# take one after the other: the smaller ones load their operands more often.
LOADS = 1.05
# Candidates of more bytes than a GPU's L2 cache are read anew for each group of tiles, which then has so many
# rows, twice as many as otherwise. Of 65,536 rows of 768 columns in 16 bits 3 GB are read in place of 6.
CACHED_BYTES, ROWS_OF_GROUP = 40 * 2**20, 2048
# Bytes of E up to which the launches of a problem may be repeated with other addresses: what takes longer
# keeps the GPU busy for longer than the host. A descriptor holds an address, so that such problems have none.
REPEATED_BYTES = 64 * 2**20
SAMPLE_SIDE = 128
SMALL_MEMORY = Config(rows=128, columns=128, width=32, group=8, warps=8, stages=3)
# For epilogues with several values of each column. A thread of Blackwell has half of a tile's columns, and
# products of float32 take more registers than others.
NARROW = {
    torch.bfloat16: Config(rows=128, columns=64, width=64, group=8, warps=8, stages=4),
    torch.float32: Config(rows=128, columns=64, width=32, group=8, warps=8, stages=3),
}
# The epilogues that a table has tiles for. An entry without a name is from before there were others than the
# plain one, whose largest tiles would spill registers in any other.
EPILOGUES = PLAIN, FEW_COLUMNS, HEAVY, WIDE = "plain", "few_columns", "heavy", "wide"
WHEN_INTERPRETED = Config(rows=16, columns=32, width=16, group=2)
# Programs that repair rows hold all scores twice. A tile has few rows, because most of them need no repair.
REPAIR = WHEN_INTERPRETED if INTERPRETED else Config(rows=64, columns=128, width=32, warps=8, stages=3)


def score_config(
    device: torch.device,
    dtype: torch.dtype,
    N: int,
    M: int,
    D: int,
    heavy: bool = False,
    few_columns: bool = False,
    wide: bool = False,
    of_columns: bool = False,
) -> Config:
    """The tiles for (N, D) queries against (M, D) candidates.

    The first entry of the GPU's table that covers the problem and has its epilogue is used. A heavy epilogue,
    that of a sigmoid or of a mask, needs the registers that a large tile takes. One that sums up columns, or
    reads a value of each, is better off with few of them; a wide one reads several. One that adds a bias or
    compares groups `of_columns` has room for the largest tile on Hopper, and not on Blackwell.
    """
    if INTERPRETED or (device.type != "cuda" and not is_described()):
        return WHEN_INTERPRETED

    gpu = properties(device)
    epilogue = epilogue_of(heavy, few_columns, wide)
    for entry in tables().get(gpu.name, {}).get(str(dtype).removeprefix("torch."), ()):
        covers = entry["most_scores"] >= N * M and entry["most_width"] >= D
        if covers and entry.get("epilogue", PLAIN) == epilogue:
            return Config(**entry["config"])

    config = _unmeasured(gpu, dtype, N, M, heavy, few_columns, wide, of_columns)
    if M * D * dtype.itemsize <= CACHED_BYTES:
        return config
    return replace(config, group=max(config.group, ROWS_OF_GROUP // config.rows))


def _unmeasured(
    gpu: Any,
    dtype: torch.dtype,
    N: int,
    M: int,
    heavy: bool,
    few_columns: bool,
    wide: bool,
    of_columns: bool,
) -> Config:
    """The tiles on a GPU that has no table, for candidates that its L2 cache holds."""
    # A stage holds a tile of both operands. Only data-center GPUs have the shared memory for the default.
    if shared_bytes(gpu) < 160 * 1024:
        return SMALL_MEMORY
    if wide and (generation(gpu) == 10 or dtype is torch.float32) and dtype in NARROW:
        return NARROW[dtype]

    default, large = DEFAULT[dtype], HOPPER_TALL if few_columns else HOPPER
    plain = not (few_columns or of_columns)
    has_room = generation(gpu) == 9 or (generation(gpu) == 10 and plain)
    if not has_room or heavy or dtype is torch.float32:
        return default

    time, least = (_cells_of_waves(N, M, x, gpu.multi_processor_count) for x in (large, default))
    if time > LOADS * least:
        return default
    return replace(large, descriptors=N * M * dtype.itemsize > REPEATED_BYTES)


def _cells_of_waves(N: int, M: int, config: Config, multiprocessors: int) -> int:
    """The cells that one multiprocessor computes, with those of tiles that it has no part of.

    A tile takes a multiprocessor's shared memory, and as long as its cells' products and, about 220 columns
    more, their epilogue: the width of the embeddings is a factor of all tiles alike.
    """
    waves = cdiv(cdiv(N, config.rows) * cdiv(M, config.columns), multiprocessors)
    return waves * config.rows * config.columns


def epilogue_of(heavy: bool, few_columns: bool, wide: bool) -> str:
    """How a table names an epilogue: by what takes the most registers of it."""
    if wide:
        return WIDE
    if heavy:
        return HEAVY
    return FEW_COLUMNS if few_columns else PLAIN


def sample_config(config: Config) -> Config:
    """The tiles for a sample of the columns that are scored in those of `config`.

    Columns are so few that larger tiles would leave multiprocessors idle.
    """
    rows, columns = (min(side, SAMPLE_SIDE) for side in (config.rows, config.columns))
    return replace(config, rows=rows, columns=columns)


@functools.cache
def tables() -> dict[str, Any]:
    """The table of every GPU that has one, by the name that CUDA gives the GPU."""
    files = resources.files(f"{__package__}.tuned").iterdir()
    measured = (json.loads(file.read_text(encoding="utf-8")) for file in files if file.name.endswith(".json"))
    return {table["device"]: table["scores"] for table in measured}
