"""Simulates the ranks of a loss over many GPUs: every message, every product, and who waits for whom.

A rank computes one block at a time, a link carries one message at a time in each direction, and a message
leaves once its data is there, its link is free and the receiver has room. The time of each event follows from
those of the events that it waits for. The events of one kind and step are computed for all ranks at once: an
array (nodes, GPUs of a node) holds a time for each rank.

There are two ways of shards past all ranks. By rails, as fastqt's ring has it: GPU g of a node has them from
GPU g of other nodes, over a NIC of its own, and what has come by its rail then visits the GPUs of the node
over NVLink. Here a node hands them on to the next one; fastqt fetches each from its owner, over the same NIC.
Or directly: at step t a rank has the shard of the rank t places after it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.predict.scaling_formulas import FLOPS, Method, Network, Trip

Times = NDArray[np.float64]


@dataclass(frozen=True)
class Noise:
    """How the ranks differ.

    Args:
        spread: standard deviation of the logarithm of a rank's pace, the same in all of its blocks.
        jitter: standard deviation of a block's time in times its mean, drawn anew for each block.
        slowest: times as long as the others that the products of one rank take.
        late: seconds by which one rank begins after the others.
    """

    spread: float = 0.0
    jitter: float = 0.0
    slowest: float = 1.0
    late: float = 0.0


NO_NOISE = Noise()


class Ranks:
    """The ranks of a simulation, and what their products and messages take."""

    def __init__(self, ranks: int, n: int, D: int, network: Network, noise: Noise, seed: int) -> None:
        self.gpus = min(ranks, network.node)
        self.nodes, self.rest = divmod(ranks, self.gpus)
        if self.rest:
            raise ValueError(f"ranks: want whole nodes of {network.node}, got {ranks}")
        self.network, self.noise, self.cell = network, noise, n * D
        self.block = float(n) * n * D / FLOPS  # seconds of one operation a cell of a block
        self.random = np.random.default_rng(seed)
        self.slowness = np.exp(noise.spread * self.random.standard_normal(self.shape))
        self.slowness[self.nodes // 2, 0] *= noise.slowest
        self.began = np.zeros(self.shape)
        self.began[self.nodes // 2, 0] += noise.late

    @property
    def shape(self) -> tuple[int, int]:
        return self.nodes, self.gpus

    def compute(self, operations: float, blocks: int = 1) -> Times:
        """Seconds of the products of some blocks, on each rank."""
        spent = operations * self.block * blocks * self.slowness
        if self.noise.jitter:
            shape = blocks / self.noise.jitter**2  # the sum of independent gammas is one
            spent = spent * self.random.gamma(shape, 1 / shape, self.shape)
        return spent

    def over_nvlink(self, size: float) -> float:
        return self.network.nvlink_latency + size * self.cell / self.network.nvlink

    def over_nic(self, size: float) -> float:
        return self.network.network_latency + size * self.cell / self.network.nic

    def over_rail(self, size: float) -> float:
        return self.network.network_latency + size * self.cell * self.network.node / self.network.rails


def from_gpu(times: Times) -> Times:
    """What the GPU before, in the ring of its node, has sent."""
    return np.roll(times, 1, axis=1)


def to_gpu(times: Times) -> Times:
    return np.roll(times, -1, axis=1)


def from_node(times: Times) -> Times:
    return np.roll(times, 1, axis=0)


def to_node(times: Times) -> Times:
    return np.roll(times, -1, axis=0)


def latest(*times: Times) -> Times:
    return np.maximum.reduce(times)


def rails_trip(ranks: Ranks, trip: Trip, began: Times) -> Times:
    """When each rank has computed all blocks and has got its own block's gradient back.

    A rank keeps the block that it computes and the next one of its node's ring, and of its rail the block
    that the node visits and the next one. Gradients are added up along the way that the blocks take.
    """
    computed, nvlink_free, nic_free = began, began, began
    rail_block, rail_gradient = began, began
    rail_room = room = began  # when the block before the current one is computed and sent on

    for step in range(ranks.nodes):
        block, sent_on = rail_block, began

        if step + 1 < ranks.nodes:
            # The rail's next block comes while the node computes this one.
            sent_on = latest(rail_block, nic_free, to_node(rail_room)) + ranks.over_rail(trip.received)
            rail_block, nic_free = from_node(sent_on), sent_on

        gradient = computed
        for hop in range(ranks.gpus):
            here, forwarded = block, began

            if hop + 1 < ranks.gpus:
                forwarded = latest(here, nvlink_free, to_gpu(room)) + ranks.over_nvlink(trip.received)
                block, nvlink_free = from_gpu(forwarded), forwarded

            computed = latest(here, computed) + ranks.compute(trip.operations)
            room = latest(computed, forwarded)

            if trip.returned and ranks.gpus > 1:
                added = computed if hop == 0 else latest(computed, gradient)
                sent = latest(added, nvlink_free) + ranks.over_nvlink(trip.returned)
                gradient, nvlink_free = from_gpu(sent), sent

        rail_room = latest(computed, sent_on)
        if trip.returned and ranks.nodes > 1:
            sent = latest(gradient, rail_gradient, nic_free) + ranks.over_rail(trip.returned)
            rail_gradient, nic_free = from_node(sent), sent

    if not trip.returned:
        return computed
    return latest(computed, rail_gradient if ranks.nodes > 1 else gradient)


def direct_trip(ranks: Ranks, trip: Trip, began: Times) -> Times:
    """The same where each rank sends its shard to one rank after the other.

    The next shard is asked for when a visit begins, and the visit's gradient is sent home when it ends; the
    gradient before has then arrived. A message begins when both ranks have come to it, and a rank sends and
    receives one at a time.
    """
    P = ranks.nodes * ranks.gpus
    start = computed = sending = receiving = began.reshape(P)
    home = computed
    for step in range(P):
        if step + 1 < P:
            arrival = _message(ranks, step + 1, trip.received, start, sending, receiving)
            here, sending, receiving = arrival
        computed = start + ranks.compute(trip.operations).reshape(P)
        if trip.returned:
            computed = latest(computed, home)
            if step:
                # The rank `step` places before has this rank's shard.
                home, sending, receiving = _message(ranks, -step, trip.returned, computed, sending, receiving)
        start = latest(computed, here) if step + 1 < P else computed
    return latest(computed, home).reshape(ranks.shape)


def _message(
    ranks: Ranks, places: int, size: float, ready: Times, sending: Times, receiving: Times
) -> tuple[Times, Times, Times]:
    """When a message from the rank some places after each rank is there, and when both are free again."""
    index = np.arange(len(ready))
    source = (index + places) % len(ready)
    same_node = source // ranks.gpus == index // ranks.gpus
    seconds = np.where(same_node, ranks.over_nvlink(size), ranks.over_nic(size))
    there = latest(ready, ready[source], sending[source], receiving) + seconds
    return there, np.roll(there, places), there


def gather(ranks: Ranks, size: float, began: Times) -> Times:
    """When each rank has the blocks of all."""
    return rails_trip(ranks, Trip(0, size), began)


def reduce_scatter(ranks: Ranks, size: float, began: Times) -> Times:
    """When each rank has the sum of its block's gradients: added up in the nodes, then along the rails."""
    nvlink_free, nic_free, rail_sum, node_sum = began, began, began, began
    for step in range(ranks.nodes):
        node_sum = began
        for _ in range(ranks.gpus - 1):
            sent = latest(node_sum, began, nvlink_free) + ranks.over_nvlink(size)
            node_sum, nvlink_free = from_gpu(sent), sent
        if step + 1 < ranks.nodes:
            sent = latest(node_sum, rail_sum, nic_free) + ranks.over_rail(size)
            rail_sum, nic_free = from_node(sent), sent
    return latest(began, node_sum, rail_sum)


def simulated(
    method: Method,
    n: int,
    ranks: int,
    D: int,
    network: Network,
    noise: Noise = NO_NOISE,
    seed: int = 0,
) -> float:
    """Seconds until the last rank has the loss and its gradients.

    Raises:
        ValueError: the ranks do not fill whole nodes.
    """
    world = Ranks(ranks, n, D, network, noise, seed)
    times = world.began
    for trip in method.trips:
        if method.way == "direct":
            times = direct_trip(world, trip, times)
        elif method.way == "rails":
            times = rails_trip(world, trip, times)
        else:
            times = gather(world, trip.received, times)
            times = times + world.compute(trip.operations, ranks)
            times = reduce_scatter(world, trip.returned, times)
    return float(times.max())
