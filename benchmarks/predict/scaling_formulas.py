"""How long a loss over many GPUs takes by formula, and when its messages are hidden behind its products.

n are the rows of a rank, P the ranks, N = n P the rows of the batch, D the columns. Operations are counted in
units of n N D, bytes of messages in units of N D, both a rank.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.predict.roofline import Rates

FLOPS = Rates().tensor
TF32 = 0.5  # of the pace of bfloat16


@dataclass(frozen=True)
class Network:
    """What joins the GPUs; bytes a second in one direction, and seconds a message."""

    node: int = 8  # GPUs that NVLink joins
    nvlink: float = 450e9
    rails: float = 340e9  # of a node's NICs together, one a GPU, at 0.85 of their pace
    nic: float = 50e9  # of one of them, at its full pace
    nvlink_latency: float = 3e-6
    network_latency: float = 10e-6

    def bandwidth(self, ranks: int) -> float:
        """At which a rank receives what all others send: by NVLink in a node, by all rails across nodes."""
        return self.nvlink if ranks <= self.node else self.rails


@dataclass(frozen=True)
class Trip:
    """One way past all candidates: operations, and bytes that come in and that go back."""

    operations: float
    received: float
    returned: float = 0.0

    @property
    def bytes(self) -> float:
        return self.received + self.returned


@dataclass(frozen=True)
class Method:
    """A loss, and how its embeddings get to the ranks.

    Args:
        name: of the loss and the way.
        trips: past all candidates.
        way: "gather": all candidates at once. Shard by shard instead: "direct": each rank sends its shard to
            one rank after the other; "rails": on rings, of GPUs of equal index across nodes and of the GPUs
            in a node; "flat": on one ring of all ranks.
        pace: of its products, in times that of bfloat16.
        scores: bytes that are kept of each score, in all.
    """

    name: str
    trips: tuple[Trip, ...]
    way: str = "gather"
    pace: float = 1.0
    scores: float = 0.0

    @property
    def operations(self) -> float:
        return sum(trip.operations for trip in self.trips)

    @property
    def bytes(self) -> float:
        return sum(trip.bytes for trip in self.trips)


# Embeddings arrive in bfloat16. Their gradients return in float32, or in bfloat16 where that is asked for.
TWO_TRIPS, ONE_TRIP = (Trip(2, 2), Trip(6, 2, 2)), (Trip(6, 2, 2),)
SOFTMAX_GATHER = Method("softmax, gather", ONE_TRIP)
SOFTMAX_DIRECT = Method("softmax, direct ring", TWO_TRIPS, "direct")
SOFTMAX_RING = Method("softmax, ring", TWO_TRIPS, "rails")
SIGMOID_DIRECT = Method("sigmoid, direct ring", ONE_TRIP, "direct")
SIGMOID_RING = Method("sigmoid, ring", ONE_TRIP, "rails")
ROWS = (SOFTMAX_GATHER, SOFTMAX_RING, SOFTMAX_DIRECT, SIGMOID_DIRECT, SIGMOID_RING)

CLIP_GATHER = Method("fastqt, gather", (Trip(8, 2, 4),))
CLIP_GATHER_BFLOAT16 = Method("fastqt, gather, gradients in bfloat16", (Trip(8, 2, 2),))
CLIP_RING = Method("fastqt, ring", (Trip(2, 2), Trip(6, 2, 4)), "rails")
CLIP_DIRECT = Method("a ring of direct messages", CLIP_RING.trips, "direct")
# Both sides are gathered, and scored once for the rows and once for the columns; autograd keeps the scores.
OPEN_CLIP = Method("open_clip, local_loss with gather_with_grad", (Trip(12, 4, 4),), scores=4)
# Each direction is a ring of its own. Its backward computes the scores once for dq and once more for dk.
INF_CL = Method("Inf-CL", (Trip(2, 4), Trip(8, 4, 4)) * 2, "flat", pace=TF32)
CLIP = (CLIP_GATHER, CLIP_GATHER_BFLOAT16, CLIP_RING, CLIP_DIRECT, OPEN_CLIP, INF_CL)


def compute_seconds(operations: float, n: float, N: float, D: float, flops: float = FLOPS) -> float:
    return operations * n * N * D / flops


def transfer_seconds(received: float, N: float, D: float, bandwidth: float) -> float:
    return received * N * D / bandwidth


def hidden_from(moved: float, operations: float, bandwidth: float, flops: float = FLOPS) -> float:
    """The rows of a rank from which on products take longer than messages, whatever P and D are."""
    return moved * flops / (operations * bandwidth)


def exposed_seconds(method: Method, n: float, ranks: int, D: float, network: Network) -> float:
    """What messages add to the products."""
    compute = compute_seconds(method.operations, n, n * ranks, D, FLOPS * method.pace)
    return loss_seconds(method, n, ranks, D, network) - compute


def loss_seconds(method: Method, n: float, ranks: int, D: float, network: Network) -> float:
    """Loss and gradients on each of the ranks, none of which is slower than the others.

    What a gather exchanges is all exposed. Shard by shard, the messages of a shard are hidden behind its
    products, or the reverse, and the gradient of the last shard then takes one hop home.
    """
    if method.way == "gather":
        compute = compute_seconds(method.operations, n, n * ranks, D, FLOPS * method.pace)
        return compute + transfer_seconds(method.bytes, n * ranks, D, network.bandwidth(ranks))
    spent = 0.0
    for trip in method.trips:
        compute = compute_seconds(trip.operations, n, n, D, FLOPS * method.pace)
        for shards, pace in paces(method, ranks, network):
            spent += shards * max(compute, transfer_seconds(trip.bytes, n, D, pace))
        if ranks > 1:
            spent += transfer_seconds(trip.returned, n, D, last_link(method, ranks, network))
    return spent


def paces(method: Method, ranks: int, network: Network) -> list[tuple[int, float]]:
    """How many shards arrive at which pace, this rank's own among them."""
    if ranks <= network.node:
        return [(ranks, network.nvlink)]
    if method.way == "direct":
        return [(network.node, network.nvlink), (ranks - network.node, network.nic)]
    return [(ranks, network.rails if method.way == "rails" else network.nic)]


def last_link(method: Method, ranks: int, network: Network) -> float:
    """Over which the gradient of a rank's last shard goes home."""
    if ranks <= network.node:
        return network.nvlink
    return network.rails / network.node if method.way == "rails" else network.nic


def memory(method: Method, n: float, ranks: int, D: float) -> float:
    """Bytes of candidates and their gradients, all of them or two shards, and of scores that are kept.

    Gradients are float32 where they are added up, whatever they return in.
    """
    trip = method.trips[-1]
    added_up = 4 if method.scores == 0 else trip.returned  # autograd adds nothing up before they return
    rows = n * ranks if method.way == "gather" else 2 * n
    return (trip.received + added_up) * D * rows + method.scores * n * n * ranks
