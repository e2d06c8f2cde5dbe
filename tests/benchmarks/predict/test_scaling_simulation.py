"""The simulation of ranks: cases worked out by hand, the formulas where they hold, and what noise costs."""

import numpy as np
import pytest

from benchmarks.predict.scaling_formulas import (
    CLIP_DIRECT,
    CLIP_GATHER,
    CLIP_RING,
    FLOPS,
    ROWS,
    SOFTMAX_DIRECT,
    SOFTMAX_GATHER,
    SOFTMAX_RING,
    Network,
    Trip,
    loss_seconds,
)
from benchmarks.predict.scaling_simulation import (
    NO_NOISE,
    Noise,
    Ranks,
    direct_trip,
    gather,
    rails_trip,
    reduce_scatter,
    simulated,
)

NETWORK = Network()
D = 768
SECOND = FLOPS  # operations a cell of a block of one row and one column that take a second


def ranks_of(P, node, nvlink=1.0, rail=1.0, nic=1.0, noise=NO_NOISE, **latencies):
    """Blocks of one row and one column; a byte a cell takes a second on a link of 1.0."""
    network = Network(
        node=node,
        nvlink=nvlink,
        rails=rail * node,
        nic=nic,
        **{"nvlink_latency": 0.0, "network_latency": 0.0, **latencies},
    )
    return Ranks(P, 1, 1, network, noise, seed=0)


@pytest.mark.parametrize(
    ("P", "trip", "seconds"),
    [
        (1, Trip(SECOND, 1, 1), 1),  # nothing to exchange
        (4, Trip(SECOND, 0.5), 4),  # blocks come while the one before is computed
        (
            4,
            Trip(SECOND, 2),
            1 + 3 + 3 * 1,
        ),  # each of three blocks takes two seconds to come, the last is computed
        (4, Trip(SECOND, 0.5, 0.25), 4 + 0.25),  # the last gradient goes home alone
    ],
)
def test_a_ring_in_a_node_by_hand(P, trip, seconds):
    ranks = ranks_of(P, node=P)
    found = rails_trip(ranks, trip, ranks.began)
    np.testing.assert_allclose(found, seconds)


@pytest.mark.parametrize(
    ("P", "trip", "seconds"),
    [
        (1, Trip(SECOND, 1, 1), 1),
        (4, Trip(SECOND, 0.5), 4),  # shards come while the one before is computed
        (4, Trip(SECOND, 2), 3 * 2 + 1),  # a visit begins when its shard is there, and asks for the next one
        (4, Trip(SECOND, 0.5, 0.25), 4 + 0.25),
        (2, Trip(SECOND, 0.5, 3), 2 + 3),
        (3, Trip(SECOND, 0.5, 3), 2 + 3 + 3),  # the second gradient leaves when the first one has arrived
        (4, Trip(SECOND, 1, 3), 2 + 3 + 1 + 3 + 3),  # the third shard waits until the first gradient is home
    ],
)
def test_shards_that_are_sent_directly_by_hand(P, trip, seconds):
    ranks = ranks_of(P, node=P)
    np.testing.assert_allclose(direct_trip(ranks, trip, ranks.began), seconds)


def test_shards_of_other_nodes_come_over_the_nic():
    # Two nodes of two. GPU 1 receives from the other node in 4 + 4 seconds, from its own in 1, and computes.
    # GPU 0 has its own node's at once, and then waits for a NIC until that has sent to GPU 1.
    ranks = ranks_of(4, node=2, nic=0.25)
    found = direct_trip(ranks, Trip(SECOND, 1), ranks.began)
    np.testing.assert_allclose(found, [[4 + 4 + 4 + 1, 4 + 4 + 1 + 1]] * 2)


def test_a_latency_is_paid_by_every_message():
    ranks = ranks_of(4, node=4, nvlink_latency=10.0)
    np.testing.assert_allclose(rails_trip(ranks, Trip(SECOND, 0.5), ranks.began), 3 * 10.5 + 1)


def test_rails_bring_what_a_node_then_shares():
    # Two nodes of two: a rail's block takes four seconds to come, one more over NVLink, then its product.
    ranks = ranks_of(4, node=2, rail=0.25)
    np.testing.assert_allclose(rails_trip(ranks, Trip(SECOND, 1), ranks.began), 4 + 1 + 1)


def test_a_gather_and_a_reduce_scatter_by_hand():
    ranks = ranks_of(4, node=4)
    np.testing.assert_allclose(gather(ranks, 1, ranks.began), 3)
    np.testing.assert_allclose(reduce_scatter(ranks, 1, ranks.began), 3)
    ranks = ranks_of(4, node=2, rail=0.25)
    np.testing.assert_allclose(gather(ranks, 1, ranks.began), 4 + 1)
    np.testing.assert_allclose(reduce_scatter(ranks, 1, ranks.began), 1 + 4)


def test_a_rank_that_begins_late_delays_all_that_wait_for_it():
    ranks = ranks_of(4, node=4, noise=Noise(late=100.0))
    assert gather(ranks, 1, ranks.began).min() >= 100
    assert rails_trip(ranks, Trip(SECOND, 0.5, 0.25), ranks.began).min() >= 100


@pytest.mark.parametrize("node", [8, 1])
def test_a_rank_has_room_for_one_block_beside_the_one_it_computes(node):
    # The slow rank takes 10 seconds a block. The rank before it gets its last block once it has sent on its
    # sixth one, for which the slow rank has room when it has computed 5, and then computes for a second.
    ranks = ranks_of(8, node=node, nvlink=1e6, rail=1e6, noise=Noise(slowest=10.0))
    found = rails_trip(ranks, Trip(SECOND, 1), ranks.began).reshape(-1)
    slow = found.argmax()
    assert found[slow] == pytest.approx(80, rel=1e-4)
    assert found[slow - 1] == pytest.approx(51, rel=1e-4)


by_ranks = pytest.mark.parametrize("P", [8, 16, 64, 512, pytest.param(4096, marks=pytest.mark.slow)])
DIRECT = [method for method in (*ROWS, CLIP_DIRECT) if method.way == "direct"]
OTHERS = [method for method in (*ROWS, CLIP_GATHER, CLIP_RING) if method.way != "direct"]


@by_ranks
@pytest.mark.parametrize("method", OTHERS, ids=lambda m: m.name)
@pytest.mark.parametrize("n", [4096, 8192])
def test_simulation_agrees_with_the_formulas(method, n, P):
    found = simulated(method, n, P, D, NETWORK)
    assert found == pytest.approx(loss_seconds(method, n, P, D, NETWORK), rel=0.05)


@by_ranks
@pytest.mark.parametrize("method", DIRECT, ids=lambda m: m.name)
@pytest.mark.parametrize("n", [16384, 65536])
def test_and_with_shards_sent_directly_where_they_are_hidden(method, n, P):
    found = simulated(method, n, P, D, NETWORK)
    assert found == pytest.approx(loss_seconds(method, n, P, D, NETWORK), rel=0.05)


@pytest.mark.parametrize("method", DIRECT, ids=lambda m: m.name)
def test_shards_sent_directly_that_are_not_hidden_take_longer_than_the_formula(method):
    # At a step some ranks get a shard from their own node and some from another one, and wait for each other.
    found = simulated(method, 4096, 64, D, NETWORK)
    assert 1.05 < found / loss_seconds(method, 4096, 64, D, NETWORK) < 1.2


@pytest.mark.parametrize("method", OTHERS, ids=lambda m: m.name)
@pytest.mark.parametrize("n", [256, 1024, 2048])
def test_and_with_few_rows_where_a_message_costs_no_latency(method, n):
    network = Network(nvlink_latency=0.0, network_latency=0.0)
    found = simulated(method, n, 512, D, network)
    assert found == pytest.approx(loss_seconds(method, n, 512, D, network), rel=0.05)


@pytest.mark.parametrize("P", [64, 512])
def test_what_stragglers_cost(P):
    n = 16384

    def cost(method, noise):
        return simulated(method, n, P, D, NETWORK, noise) / simulated(method, n, P, D, NETWORK)

    # All wait for the slowest rank, but in a gather not for the messages' part.
    slow, jitter = Noise(slowest=1.5), Noise(jitter=0.3)
    assert 1.4 < cost(SOFTMAX_GATHER, slow) < 1.5
    for ring in (SOFTMAX_DIRECT, SOFTMAX_RING):
        assert cost(ring, slow) == pytest.approx(1.5, rel=0.02)
        # A gather's one product averages over blocks; the ranks of a ring wait for each other at every block.
        assert 1 < cost(SOFTMAX_GATHER, jitter) < cost(ring, jitter) < 1.3


def test_the_same_seed_gives_the_same_times():
    noise = Noise(spread=0.1, jitter=0.3)
    first, same = (simulated(SOFTMAX_DIRECT, 8192, 64, D, NETWORK, noise, seed=1) for _ in range(2))
    assert first == same != simulated(SOFTMAX_DIRECT, 8192, 64, D, NETWORK, noise, seed=2)


def test_ranks_fill_whole_nodes():
    with pytest.raises(ValueError, match=r"ranks: want whole nodes of 8, got 12"):
        simulated(SOFTMAX_DIRECT, 8192, 12, D, NETWORK)
