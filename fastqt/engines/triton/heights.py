"""How much of a gradient is computed at a time: what keeps all multiprocessors of a GPU busy.

The vendor's library gives each multiprocessor one tile of a product at a time. The last of these waves has
idle multiprocessors, unless the number of tiles is a multiple of theirs. Times are counted in terms of the
inner dimension: 1 is what a wave takes for one of them, 2 * 128 * 256 operations of each multiprocessor.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator

from fastqt.engines.triton import operands
from fastqt.engines.triton.operands import Operands
from fastqt.kernels.launch import Config, multiprocessors
from fastqt.steps import even_step

TILE_ROWS, TILE_COLUMNS = 128, 256  # of the vendor's products on Hopper
VENDOR = Config(rows=TILE_ROWS, columns=TILE_COLUMNS)  # its scores

# The library cuts a product's inner dimension where its tiles are few. Each part has a sum of its own, which
# is added to the others.
MOST_SPLITS = 4
WORKSPACE = 32 * 2**20  # bytes, for these sums
SPLIT_COST = 0.05  # of the product's time, for each of them beyond the first

# What an H100 would take, in the terms above, which are 12 ns there.
LAUNCH = 200  # a launch, until the first operands are there
LAST_SUMS = 1000  # a wave's sums in float32 that are read and written when its products are done
EARLIER_SUMS = 150  # those of other waves, while products go on
EPILOGUE = 220  # of a tile of scores


def product_time(rows: int, width: int, inner: int, sms: int) -> float:
    """Of a product with (rows, width) outputs, which are added to sums in float32."""
    tiles = math.ceil(rows / TILE_ROWS) * math.ceil(width / TILE_COLUMNS)
    most = max(min(WORKSPACE // (4 * rows * width), MOST_SPLITS), 1)

    def time(splits: int) -> float:
        waves = tiles * splits / sms
        sums = LAST_SUMS * min(waves, 1.0) + EARLIER_SUMS * max(waves - 1, 0.0)
        return math.ceil(waves) / splits * (1 + SPLIT_COST * (splits - 1)) * inner + sums

    return LAUNCH + min(map(time, range(1, most + 1)))


def scores_time(rows: int, columns: int, D: int, tile: tuple[int, int], sms: int) -> float:
    """Of the scores of some rows and columns, in tiles of some rows and columns."""
    waves = math.ceil(math.ceil(rows / tile[0]) * math.ceil(columns / tile[1]) / sms)
    return LAUNCH + waves * (D + EPILOGUE) * tile[0] * tile[1] / (TILE_ROWS * TILE_COLUMNS)


def steps(length: int, step: int) -> Iterator[tuple[int, int]]:
    """The sizes of steps that cover a length, and how many there are of each."""
    whole, rest = divmod(length, step)
    yield from ((size, count) for size, count in ((step, whole), (rest, 1)) if size and count)


def least(candidates: Iterable[int], length: int, time: Callable[[int], float]) -> int:
    """The step in which `length` takes the least time, the first of those that take as long."""
    return min(candidates, key=lambda step: sum(count * time(size) for size, count in steps(length, step)))


def multiples(most: int, multiple: int) -> range:
    """Those up to `most`, the largest first; the smallest if that is more."""
    return range(max(most // multiple, 1) * multiple, 0, -multiple)


def within_a_wave(length: int, most: int, width: int, sms: int, multiple: int) -> list[int]:
    """Heights of products whose tiles are at most one wave, and enough for one in splits."""
    wave = TILE_ROWS * max(sms // math.ceil(width / TILE_COLUMNS), 1)
    largest = min(wave, most, math.ceil(length / multiple) * multiple)
    heights = multiples(largest, multiple)
    return [height for height in heights if height * MOST_SPLITS >= min(heights[0], wave)]


@functools.lru_cache(maxsize=256)
def best_step(
    length: int, other: int, most: int, D: int, sms: int, multiple: int, tile: tuple[int, int]
) -> int:
    """How many rows of a gradient are computed at a time, from so many rows of E with all their columns.

    Args:
        length: the rows of the gradient.
        other: the columns of E, the rows of the other gradient, whose sums each step reads and adds to.
        most: rows that fit.
        D: the columns of both gradients.
        sms: the multiprocessors.
        multiple: what steps are multiples of.
        tile: rows and columns of E that a program computes.

    Returns:
        A multiple of `multiple`: the first that covers `length` where all fits, else at most `most` or
        `multiple` itself. The last step may be shorter.
    """
    covering = math.ceil(length / multiple) * multiple
    if most >= covering:
        return covering

    def time(rows: int) -> float:
        products = product_time(rows, D, other, sms) + product_time(other, D, rows, sms)
        return products + scores_time(rows, other, D, tile, sms)

    return least(multiples(most, multiple), length, time)


def side_of_tiles(
    length: int, most: int, other: int, D: int, sms: int, multiple: int, tile: tuple[int, int]
) -> int:
    """One side of tiles of E, whose products add up to a gradient of as many rows as the other side has.

    The tiles cover `length`, of which `most` fits. A program computes a `tile` of E, along this side and
    along the other. The other arguments are as of `best_step`.
    """
    covering = math.ceil(length / multiple) * multiple
    if most >= covering:
        return covering
    largest = multiples(most, multiple)[0]
    candidates = [largest, even_step(length, largest, multiple)]
    wave = tile[0] * (sms // math.gcd(sms, math.ceil(other / tile[1])))
    if wave <= largest and wave % multiple == 0:
        candidates.append(largest // wave * wave)
    return least(candidates, length, lambda n: tile_time(n, other, D, sms, tile))


def tile_time(n: int, other: int, D: int, sms: int, tile: tuple[int, int]) -> float:
    """Of a tile of E, of a gradient's sum of n terms in as many rows as the other side has."""
    return product_time(other, D, n, sms) + scores_time(n, other, D, tile, sms)


def chunk_rows(o: Operands, row_bytes: int, config: Config = VENDOR) -> int:
    """How many whole rows of E are computed at a time, each of which takes `row_bytes` of the room."""
    return rows_that_fit(o, o.room_beside_products // row_bytes, config)


def rows_that_fit(o: Operands, most: int, config: Config = VENDOR) -> int:
    """How many rows of E are computed at a time, at most N, if `most` fit."""
    tile, sms = (config.rows, config.columns), multiprocessors(o.p.queries)
    return min(best_step(o.N, o.width, most, o.D, sms, row_multiple(config), tile), o.N)


def columns_that_fit(o: Operands, most: int, config: Config) -> int:
    """How many columns of E are computed at a time, if `most` fit."""
    tile, sms = (config.columns, config.rows), multiprocessors(o.p.queries)
    widest = max(block.matrix.shape[0] for block in o.blocks)
    return best_step(widest, o.N, most, o.D, sms, config.columns, tile)


def row_multiple(config: Config) -> int:
    """What chunks of rows are multiples of, so that tiles of the scores' kernel are whole."""
    tiles: int = max(config.rows // TILE_ROWS, 1)
    return operands.ROW_MULTIPLE * tiles
