"""What open_clip's own tests check holds of fastqt's losses in its losses' place.

Its test of the gathered loss (tests/test_loss.py) wants the ranks' rows one after the other, from a
transposed tensor too. Its test of SigLIP (tests/test_siglip_chunked_loss.py) wants 64 or 70 pairs in parts of
64, 32, 8 or 1 rows, the last of which may be shorter, with and without pairs in them, to have the value and
the gradients of the whole to 1e-5. Here the parts are those of ranks. Where open_clip is installed, fastqt's
losses are also compared with its own on the same ranks: `pip install --no-deps open_clip_torch`.
"""

import importlib.util
import itertools

import pytest
import torch

from tests.shared import open_clip_checks as checks
from tests.shared.ranks import RankError

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


WAYS = [
    {"local_loss": local, "gather_with_grad": with_grad}
    for local, with_grad in itertools.product([False, True], repeat=2)
]
EXCHANGES = ["bidir", "shift", "reduce", "gather"]
ADAPTED = [
    *(("ClipLoss", ways) for ways in WAYS),
    *(("SigLipLoss", {"dist_impl": way}) for way in EXCHANGES),
    ("SigLipLoss", {"cache_labels": True}),
]


@pytest.mark.parametrize("ways", WAYS, ids=str)
def test_the_adapted_clip_loss_has_the_gradients_that_it_says(ranks, ways):
    for errors, spread in ranks(SIZE).run(checks.adapted_clip, ways):
        assert max(errors) < CLOSE
        assert (spread == 0) != ways["local_loss"]


@pytest.mark.parametrize("ways", WAYS, ids=str)
def test_the_adapted_distillation_has_the_gradients_that_clip_says(ranks, ways):
    for errors in ranks(SIZE).run(checks.adapted_distillation, ways):
        assert max(errors) < CLOSE


@pytest.mark.parametrize("ring", [False, True])
def test_the_adapted_siglip_loss_is_that_of_a_ranks_images(ranks, ring):
    for found in ranks(SIZE).run(checks.adapted_siglip, ring):
        assert max(found) < CLOSE


@has_open_clip
@pytest.mark.parametrize(("name", "options"), ADAPTED, ids=str)
def test_the_adapted_losses_equal_theirs(ranks, name, options):
    for found in ranks(SIZE).run(checks.beside_theirs, name, options):
        assert max(found) < CLOSE


@has_open_clip
@pytest.mark.parametrize("ways", WAYS, ids=str)
def test_scores_and_labels_equal_theirs(ranks, ways):
    for found in ranks(SIZE).run(checks.methods_beside_theirs, ways):
        assert max(found) < CLOSE


@pytest.mark.parametrize(
    ("place", "message"),
    [((0, 1), "world_size: want 4, as torch.distributed has it, got 5"), ((1, 0), "rank: want ")],
)
def test_another_place_than_this_process_has_is_refused(ranks, place, message):
    with pytest.raises(RankError) as raised:
        ranks(SIZE).run(checks.other_place, *place)
    assert all(message in str(error) for error in raised.value.errors)
