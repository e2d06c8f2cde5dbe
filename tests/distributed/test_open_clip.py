"""What open_clip's own tests check holds of fastqt's losses in its losses' place.

Its test of the gathered loss (tests/test_loss.py) wants the ranks' rows one after the other, from a
transposed tensor too. Its test of SigLIP (tests/test_siglip_chunked_loss.py) wants 64 or 70 pairs in parts of
64, 32, 8 or 1 rows, the last of which may be shorter, with and without pairs in them, to have the value and
the gradients of the whole to 1e-5. Here the parts are those of ranks. Where open_clip is installed, fastqt's
losses are also compared with its own on the same ranks: `pip install --no-deps open_clip_torch`.
"""

import importlib.util

import open_clip_checks as checks
import pytest
import torch

pytestmark = pytest.mark.slow  # Starting the processes takes several seconds.
SIZE = 4
CLOSE = 1e-5  # open_clip's tolerance, in float32
has_open_clip = pytest.mark.skipif(
    importlib.util.find_spec("open_clip") is None,
    reason="open_clip is not installed: pip install --no-deps open_clip_torch",
)
by_exchange = pytest.mark.parametrize("exchange", ["gather", "ring"])


def test_rows_of_a_transposed_tensor_are_gathered_in_order(ranks):
    sum_of_ranks = sum(range(1, SIZE + 1))
    for rank, (found, wanted, gradient) in enumerate(ranks(SIZE).run(checks.gathered_transposed)):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)
        rows = 1.0 + 3 * rank + torch.arange(3)
        torch.testing.assert_close(gradient, sum_of_ranks * rows[:, None].expand(3, 2))


@by_exchange
@pytest.mark.parametrize("no_pairs", [False, True])
@pytest.mark.parametrize(
    "counts",
    [(16, 16, 16, 16), (64, 0, 0, 0), (32, 32, 0, 0), (8, 8, 8, 40), (1, 1, 1, 61), (8, 8, 8, 46)],
    ids=str,
)
def test_siglip_in_parts_is_that_of_the_whole(ranks, counts, no_pairs, exchange):
    for found in ranks(SIZE).run(checks.siglip_in_parts, sum(counts), counts, no_pairs, exchange):
        assert max(found) < CLOSE


@has_open_clip
@by_exchange
def test_clip_in_place_of_its_loss(ranks, exchange):
    for found in ranks(SIZE).run(checks.clip_in_place, exchange):
        assert max(found) < CLOSE


@has_open_clip
@by_exchange
@pytest.mark.parametrize("way", ["bidir", "shift", "reduce", "gather"])
def test_siglip_in_place_of_its_loss(ranks, way, exchange):
    for found in ranks(SIZE).run(checks.siglip_in_place, way, exchange):
        assert max(found) < CLOSE
