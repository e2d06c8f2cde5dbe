"""The time of a stored schedule, all launches of a loss and its gradients, under a CUDA graph and without."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.predict.products import product_time
from benchmarks.predict.roofline import Rates, Stored, Time, rows_time, scores_time

PLANNED = 10e-6  # seconds of Python that a Triton launch is to take once launches are planned


def event_time(event: Stored, kernels: Stored, rates: Rates) -> Time:
    """Of one launch on the device."""
    if event["kind"] == "product":
        n, m, k = (event[name] for name in "nmk")
        return product_time(n, m, k, event["itemsize"], event["out_itemsize"], event["add"], rates)
    if event.get("redo"):
        return Time(rates.launch, "launch")
    if event["kind"] == "scores" and kernels[event["kernel"]]:
        return scores_time(event, kernels[event["kernel"]], rates)
    return rows_time(event, kernels, rates)


def device_seconds(schedule: Stored, kernels: Stored, rates: Rates) -> float:
    """On the device, where nothing waits for the host: the time under a CUDA graph."""
    return sum(e["count"] * event_time(e, kernels, rates).seconds for e in schedule["events"])


def host_seconds(schedule: Stored, rates: Rates) -> float:
    """What the host takes to launch everything one by one."""
    triton = sum(e["count"] for e in schedule["events"] if "kernel" in e)
    torch = sum(e["count"] for e in schedule["events"] if "kernel" not in e)
    return triton * rates.host_triton + torch * rates.host_torch


def eager_seconds(schedule: Stored, kernels: Stored, rates: Rates) -> float:
    """Without a graph: the host runs ahead of the device, so that the slower one of them counts."""
    return max(host_seconds(schedule, rates), device_seconds(schedule, kernels, rates))


def planned(rates: Rates) -> Rates:
    """With a Triton launch that costs no more Python than a launch plan's."""
    return replace(rates, host_triton=PLANNED)
