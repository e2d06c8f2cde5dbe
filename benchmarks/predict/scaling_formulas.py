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

    def link(self, ranks: int) -> float:
        """Of the last hop of a ring, which is one GPU's alone."""
        return self.nvlink if ranks <= self.node else self.rails / self.node


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
    """A loss, and how its embeddings get to the ranks."""

    name: str
    trips: tuple[Trip, ...]
    ring: bool = False
    pace: float = 1.0  # of its products, in times that of bfloat16
    flat: bool = False  # a ring of ranks in which one NIC carries all that crosses a node
    scores: float = 0.0  # bytes that are kept of each score, in all

    @property
    def operations(self) -> float:
        return sum(trip.operations for trip in self.trips)

    @property
    def bytes(self) -> float:
        return sum(trip.bytes for trip in self.trips)


# Embeddings arrive in bfloat16. Their gradients return in float32, or in bfloat16 where that is asked for.
CLIP_GATHER = Method("fastqt, gather", (Trip(8, 2, 4),))
CLIP_GATHER_BFLOAT16 = Method("fastqt, gather, gradients in bfloat16", (Trip(8, 2, 2),))
CLIP_RING = Method("fastqt, ring", (Trip(2, 2), Trip(6, 2, 4)), ring=True)
# Both sides are gathered, and scored once for the rows and once for the columns; autograd keeps the scores.
OPEN_CLIP = Method("open_clip, local_loss with gather_with_grad", (Trip(12, 4, 4),), scores=4)
# Each direction is a ring of its own. Its backward computes the scores once for dq and once more for dk.
INF_CL = Method(
    "Inf-CL",
    (Trip(2, 4), Trip(8, 4, 4)) * 2,
    ring=True,
    pace=TF32,
    flat=True,
)
CLIP = (CLIP_GATHER, CLIP_GATHER_BFLOAT16, CLIP_RING, OPEN_CLIP, INF_CL)
SOFTMAX_GATHER = Method("softmax, gather", (Trip(6, 2, 2),))
SOFTMAX_RING = Method("softmax, ring", (Trip(2, 2), Trip(6, 2, 2)), ring=True)
SIGMOID_RING = Method("sigmoid, ring", (Trip(6, 2, 2),), ring=True)
ROWS = (SOFTMAX_GATHER, SOFTMAX_RING, SIGMOID_RING)  # losses whose softmax is that of rows alone


def compute_seconds(operations: float, n: float, N: float, D: float, flops: float = FLOPS) -> float:
    return operations * n * N * D / flops


def transfer_seconds(received: float, N: float, D: float, bandwidth: float) -> float:
    return received * N * D / bandwidth


def hidden_from(moved: float, operations: float, bandwidth: float, flops: float = FLOPS) -> float:
    """The rows of a rank from which on products take longer than messages, whatever P and D are."""
    return moved * flops / (operations * bandwidth)


def bandwidth(method: Method, ranks: int, network: Network) -> float:
    return network.nic if method.flat and ranks > network.node else network.bandwidth(ranks)


def link(method: Method, ranks: int, network: Network) -> float:
    return network.nic if method.flat and ranks > network.node else network.link(ranks)


def exposed_seconds(method: Method, n: float, ranks: int, D: float, network: Network) -> float:
    """What messages add to the products: all of a gather's, and of a ring's what is longer than a product."""
    return loss_seconds(method, n, ranks, D, network) - compute_seconds(
        method.operations, n, n * ranks, D, FLOPS * method.pace
    )


def loss_seconds(method: Method, n: float, ranks: int, D: float, network: Network) -> float:
    """Loss and gradients on each of the ranks, none of which is slower than the others.

    What a gather exchanges is all exposed. In a ring each block's messages are hidden behind its products, or
    the reverse, and the gradient of the last block then takes one hop home.
    """
    N, pace = n * ranks, bandwidth(method, ranks, network)
    spent = 0.0
    for trip in method.trips:
        compute = compute_seconds(trip.operations, n, N, D, FLOPS * method.pace)
        transfer = transfer_seconds(trip.bytes, N, D, pace)
        if method.ring:
            home = 0.0 if ranks == 1 else transfer_seconds(trip.returned, n, D, link(method, ranks, network))
            spent += max(compute, transfer) + home
        else:
            spent += compute + transfer
    return spent


def memory(method: Method, n: float, ranks: int, D: float) -> float:
    """Bytes of candidates and their gradients, all of them or two shards, and of scores that are kept.

    Gradients are float32 where they are added up, whatever they return in.
    """
    trip = method.trips[-1]
    added_up = 4 if method.scores == 0 else trip.returned  # autograd adds nothing up before they return
    rows = 2 * n if method.ring else n * ranks
    return (trip.received + added_up) * D * rows + method.scores * n * n * ranks
