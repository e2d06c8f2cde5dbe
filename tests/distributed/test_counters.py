"""What a call over a group computes and sends, counted, beside the formulas of the documentation.

D numbers of e bytes a row, n rows on each of P ranks, N = P n in all.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.shared.ranks import Ranks
from tests.shared.ring_memory import peaks
from tests.shared.traffic import Call, traffic_of_all

P = 3
N_BYTES = 8  # of a number that all ranks gather or add up: float64


@pytest.fixture(scope="module")
def ranks():
    made = Ranks(P)
    yield made
    made.close()


def counted(ranks, *calls):
    """What the first and a further run of each call have counted, the same on all ranks."""
    found, *others = ranks.run(traffic_of_all, list(calls))
    assert all(other == found for other in others)
    return found


SIGMOID = {"scale": 1.0, "bias": -1.0}
# The products of a call, in 2 n N D operations, and how often each collective is called.
GATHERED = {"all_gather": 2, "all_to_all": 1}  # candidates and the loss; the parts of their gradient
CLIP = {"all_gather": 3, "all_reduce": 2, "all_to_all": 1}  # the pairs' scores too; most and sum of columns
TRIPS = {1: 2 * (P - 1), 2: 3 * (P - 1)}  # messages of one or two trips out and one trip home
CALLS = [
    (Call("contrastive_loss", "gather"), 3, GATHERED),
    (Call("contrastive_loss", "ring"), 4, {"all_gather": 1, "send": TRIPS[2]}),
    (Call("info_nce_loss", "gather", options={"scale": 5.0}), 3, GATHERED),
    (Call("siglip_loss", "gather", options=SIGMOID), 3, GATHERED),
    (Call("siglip_loss", "ring", options=SIGMOID), 3, {"all_gather": 1, "send": TRIPS[1]}),
    (Call("clip_loss", "gather", options={"scale": 5.0}), 4, CLIP),
    (
        Call("clip_loss", "ring", options={"scale": 5.0}),
        4,
        {"all_gather": 2, "all_reduce": 2, "send": TRIPS[2]},
    ),
]


def moved(found):
    """The bytes that a rank sends: embeddings and their gradients, and all else."""
    numbers = found["sent"]["all_reduce"]
    return sum(found["sent"].values()) - numbers, numbers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.thinned(2)
def test_collectives_products_and_bytes_are_those_of_the_formulas(ranks, dtype):
    """Embeddings travel in their own dtype, and their gradients in float32 or, if so asked, in bfloat16."""
    calls = [
        replace(call, dtype=dtype, group={"return_dtype": home})
        for call, _, _ in CALLS
        for home in (torch.float32, torch.bfloat16)
    ]
    found = iter(counted(ranks, *calls))
    for call, products, collectives in CALLS:
        n, D, e = call.rows, call.width, dtype.itemsize
        for home in (4, 2):
            _, later = next(found)
            assert later["collectives"] == collectives
            assert later["operations"] == products * 2 * n * (P * n) * D
            trips = 2 if collectives.get("send") == TRIPS[2] else 1
            numbers = (P - 1) * N_BYTES * (1 + (n if call.loss == "clip_loss" else 0))
            embeddings, _ = moved(later)
            assert embeddings - numbers == (P - 1) * n * D * (trips * e + home)


def test_rows_and_memory_do_not_change_the_collectives(ranks):
    """None is called in a loop over chunks, of which there are several of 64 rows or of tiles of 16 by 32."""
    calls = []
    for call, _, _ in CALLS:
        calls.append(call)
        for memory in ("fast", "low"):
            options = {**call.options, "memory": memory}
            calls.append(replace(call, rows=300, small_chunks=True, options=options))
    found = counted(ranks, *calls)
    for i in range(0, len(found), 3):
        few, *many = (later["collectives"] for _, later in found[i : i + 3])
        assert many == [few, few]


def test_first_use_agrees_and_no_other_call_does(ranks):
    """Two exchanges of objects, of the call's signature and of errors; each sends its size and itself."""
    agreements = {
        first["collectives"]["all_gather_list"] for first, _ in counted(ranks, *(c for c, _, _ in CALLS))
    }
    assert agreements == {4}


def test_uneven_shards_gather_their_sizes_at_every_call(ranks):
    calls = [replace(call, group={"shards": "uneven"}) for call, _, _ in CALLS]
    for (_, _, collectives), (_, later) in zip(CALLS, counted(ranks, *calls), strict=True):
        assert later["collectives"] == {**collectives, "all_gather": collectives["all_gather"] + 1}


def test_shared_negatives_travel_like_candidates(ranks):
    gather, ring = (Call("contrastive_loss", exchange, negatives=7) for exchange in ("gather", "ring"))
    (_, gathered), (_, visiting) = counted(ranks, gather, ring)
    assert gathered["collectives"] == {"all_gather": 3, "all_to_all": 2}
    assert visiting["collectives"] == {"all_gather": 1, "send": 2 * TRIPS[2]}
    n, D, M = gather.rows, gather.width, P * (gather.rows + 7)
    assert (gathered["operations"], visiting["operations"]) == (6 * n * M * D, 8 * n * M * D)


def test_without_gradients_nothing_comes_home(ranks):
    calls = [replace(call, gradients=False) for call, _, _ in CALLS]
    for call, (_, later) in zip(calls, counted(ranks, *calls), strict=True):
        assert "all_to_all" not in later["collectives"]
        assert later["collectives"].get("send", 0) in (0, P - 1)
        assert later["operations"] == 2 * call.rows * (P * call.rows) * call.width


# A ring's memory: a few shards of embeddings, so that it falls as 1/P where the batch stays the same.
VISITORS = 2
# The gradients of both own sides, those of both sides of a visit, and the parts that leave and arrive.
GRADIENTS = 2 + 2 + 2
# Of a shard: tiles of scores, and numbers of float64 for each row and column.
REST = 0.3


@pytest.mark.slow
@pytest.mark.parametrize("counts", [[512] * 4, [512, 100, 0, 500], [256] * 8], ids=str)
def test_two_shards_visit_at_most(counts):
    """Shards of other sizes take the room of the greatest."""
    ranks = Ranks(len(counts))
    try:
        found = ranks.run(peaks, ["contrastive_loss", "info_nce_loss", "siglip_loss", "clip_loss"], counts)
    finally:
        ranks.close()
    for of_rank in found:
        for loss, peak in of_rank.items():
            assert VISITORS <= peak["without"] < VISITORS + REST, loss
            assert peak["with"] < VISITORS + GRADIENTS + REST, loss
