"""How much of a gradient is computed at a time: whole waves of the vendor's tiles, within the room."""

import math
import random

import pytest

from fastqt.engines.triton.heights import best_step, side_of_tiles, within_a_wave

SMS = 132
TILE = 128, 256


def tiles(rows: int, D: int) -> int:
    return math.ceil(rows / 128) * math.ceil(D / 256)


def waves(length: int, step: int, D: int) -> int:
    """Of products of (step, D) outputs that cover the length, without splits."""
    whole, rest = divmod(length, step)
    return whole * math.ceil(tiles(step, D) / SMS) + math.ceil(tiles(rest, D) / SMS)


def test_the_largest_exact_waves_that_fit():
    """132 tiles are 44 x 3 or 33 x 4 of them."""
    assert best_step(65536, 65536, 6300, 768, SMS, 128, TILE) == 44 * 128
    assert best_step(65536, 65536, 6300, 1024, SMS, 128, TILE) == 33 * 128
    # Less than a wave: so many tiles that two parts of the inner dimension fill it.
    assert best_step(65536, 65536, 2900, 768, SMS, 128, TILE) == 22 * 128


@pytest.mark.parametrize("D", [300, 768, 1024, 2400])
def test_waves_are_nearly_full(D):
    """Whatever the length: neither the chunks nor a short last one leave many multiprocessors idle."""
    rng = random.Random(D)
    for _ in range(40):
        length = rng.randrange(10_000, 150_000)
        wave = 128 * (SMS // math.ceil(D / 256))
        most = rng.randrange(wave, 3 * wave)
        step = best_step(length, length, most, D, SMS, 128, TILE)
        assert waves(length, step, D) <= 1.03 * tiles(length, D) / SMS + 1


def test_steps_fit():
    rng = random.Random(0)
    for _ in range(200):
        length, other = rng.randrange(1, 40_000), rng.randrange(1, 40_000)
        most, D, multiple = rng.randrange(1, 8_000), rng.randrange(1, 3_000), rng.choice((5, 128, 256))
        covering = math.ceil(length / multiple) * multiple
        for step in (
            best_step(length, other, most, D, SMS, multiple, TILE),
            side_of_tiles(length, most, other, D, SMS, multiple, TILE),
        ):
            assert step > 0
            assert step % multiple == 0
            assert step <= max(min(most, covering), multiple)
        for step in within_a_wave(length, most, D, SMS, multiple):
            assert step % multiple == 0
            assert step <= max(min(most, covering), multiple)
            assert tiles(step, D) <= max(SMS, tiles(multiple, D))


def test_everything_at_once_where_it_fits():
    assert best_step(16384, 16384, 16400, 1024, SMS, 128, TILE) == 16384
    assert best_step(1000, 1000, 5000, 768, SMS, 128, TILE) == 1024


def test_tiles_of_scores_in_whole_waves():
    """44 x 33 tiles of 128 x 256 are eleven waves; the width that would just fit leaves the twelfth empty."""
    assert side_of_tiles(65536, 8937, 5632, 768, SMS, 256, (256, 128)) == 33 * 256
