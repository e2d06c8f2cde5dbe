"""The model of the vendor's products: parts that fit a workspace, whole waves, and what nothing hides."""

from dataclasses import replace

import pytest

from benchmarks.predict.products import gemm_time, product_time, splits, tiled_time
from benchmarks.predict.roofline import Rates

RATES = Rates()
TILE = 128, 256, 1.0
# A tile of an inner dimension of 1,000 takes a second, and so does its result in float32; nothing else does.
SECOND = 2.0 * 128 * 256 * 1000
SIMPLE = Rates(
    multiprocessors=2,
    tensor=2 * SECOND,
    memory=4.0 * 128 * 256,
    clock=1e30,
    fill=0.0,
    drain=0.0,
    launch=0.0,
)


@pytest.mark.parametrize(
    ("n", "m", "parts"),
    [
        (2304, 768, [1, 2, 3, 4]),
        (3584, 768, [1, 2, 3]),  # 33,030,144 bytes of float32 sums; 32 MiB are 33,554,432
        (5632, 768, [1]),
        (65536, 768, [1]),
    ],
)
def test_sums_of_all_parts_fit_the_workspace(n, m, parts):
    assert splits(n, m, RATES) == parts


def test_parts_are_few_however_large_the_workspace():
    assert splits(128, 128, replace(RATES, workspace=2**50)) == [1, 2, 3, 4]
    assert splits(128, 128, replace(RATES, workspace=0)) == [1]


@pytest.mark.parametrize(
    ("tiles", "seconds"),
    [
        (2, 1 + 2),  # one wave, whose results nothing hides
        (1, 1 + 1),  # a wave that is not full takes as long for its products
        (4, 2 + 2),  # the first wave's results are hidden by the products of the second
        (3, 2 + 1),
        (6, 4 + 2),  # more than the products hide: 4 seconds of results beside 3 of products
    ],
)
def test_only_the_last_wave_is_not_hidden(tiles, seconds):
    time = tiled_time((128 * tiles, 256, 1000), 0, 4, False, TILE, 1, SIMPLE)
    assert time.seconds == pytest.approx(seconds)


def test_what_is_added_to_is_read_as_well():
    time = tiled_time((256, 256, 1000), 0, 4, True, TILE, 1, SIMPLE)
    assert time.seconds == pytest.approx(1 + 4)
    assert time.bytes == 2 * 2 * 4 * 128 * 256


def test_parts_are_written_in_float32_and_added_up_by_a_second_launch():
    # A tile in two parts: half of the products, 2 seconds of sums written, 2 read, half a one of the result.
    rates = replace(SIMPLE, launch=10.0)
    time = tiled_time((128, 256, 1000), 0, 2, False, TILE, 2, rates)
    assert time.seconds == pytest.approx(10 + 0.5 + 2 + 10 + 2 + 0.5)


def test_moving_a_tile_takes_its_time_between_waves():
    # 128 × 256 cells of 4 bytes at 128 bytes a clock are 1,024 clocks; read at 64 bytes a clock, 2,048 more.
    rates = replace(SIMPLE, clock=1024.0, memory=1e30)
    written = tiled_time((512, 256, 1000), 0, 4, False, TILE, 1, rates).seconds
    assert written == pytest.approx(2 + 2 * 1)
    added = tiled_time((512, 256, 1000), 0, 4, True, TILE, 1, rates).seconds
    assert added == pytest.approx(2 + 2 * 3)


def test_short_products_are_slower_than_long_ones():
    def rate(n, m, k):
        time = product_time(n, m, k, 2, 2, False, RATES)
        return time.flops / time.seconds

    assert 672e12 < rate(65536, 65536, 768) < 690e12
    whole_waves = rate(44 * 128, 3 * 256, 2**20)
    assert 0.995 * RATES.tensor < whole_waves <= RATES.tensor


def test_a_chunk_of_whole_waves_is_faster_than_one_of_fewer_rows():
    def seconds_a_row(n):
        return product_time(n, 768, 65536, 2, 4, False, RATES).seconds / n

    assert seconds_a_row(5632) < 0.8 * seconds_a_row(2304)
    assert seconds_a_row(5632) < seconds_a_row(5632 + 128)


@pytest.mark.parametrize("shape", [(2304, 768, 65536), (65536, 768, 2304), (400, 1000, 400), (1, 1024, 64)])
def test_nothing_is_faster_for_more_bytes_or_more_operations(shape):
    n, m, k = shape

    def seconds(n, m, k, out=4, add=False, rates=RATES):
        return product_time(n, m, k, 2, out, add, rates).seconds

    base = seconds(n, m, k)
    assert base <= seconds(n, m, k, add=True)
    assert seconds(n, m, k, out=2) <= base
    assert base <= seconds(2 * n, m, k)
    assert base <= seconds(n, 2 * m, k)
    assert base <= seconds(n, m, 2 * k)
    assert base <= seconds(n, m, k, rates=replace(RATES, splits=1))
    assert base <= seconds(n, m, k, rates=replace(RATES, memory=RATES.memory / 2))


def test_three_products_are_no_faster_than_the_tensor_cores():
    for N, D in ((65536, 768), (16384, 1024), (8192, 2400)):
        assert gemm_time(N, D, RATES) > 6 * N * N * D / RATES.tensor
