"""The time of a stored schedule: launches add up; without a graph the slower of host and device counts."""

import pytest

from benchmarks.predict.roofline import Rates
from benchmarks.predict.schedules import PLANNED, device_seconds, eager_seconds, host_seconds, planned

RATES = Rates(launch=1.0, memory=1.0, host_triton=3.0, host_torch=2.0)
IDLE = {"kind": "rows", "kernel": "idle", "redo": True, "count": 4}
ROWS = {"kind": "rows", "kernel": "rows", "redo": False, "bytes": 9, "product_bytes": 0, "count": 2}
OPERATION = {"kind": "operation", "bytes": 5, "count": 1}
KERNELS = {"idle": {}, "rows": {}}


def test_launches_add_up():
    schedule = {"events": [IDLE, ROWS, OPERATION]}
    assert device_seconds(schedule, KERNELS, RATES) == pytest.approx(4 * 1 + 2 * (1 + 9) + 1 + 5)
    assert host_seconds(schedule, RATES) == pytest.approx(6 * 3 + 1 * 2)


def test_the_slower_of_host_and_device_counts():
    bound_by_host, bound_by_device = {"events": [IDLE]}, {"events": [ROWS]}
    assert eager_seconds(bound_by_host, KERNELS, RATES) == pytest.approx(12)
    assert eager_seconds(bound_by_device, KERNELS, RATES) == pytest.approx(20)


def test_planned_launches_change_the_hosts_time_alone():
    schedule = {"events": [IDLE, ROWS, OPERATION]}
    assert host_seconds(schedule, planned(RATES)) == pytest.approx(6 * PLANNED + 2)
    assert device_seconds(schedule, KERNELS, planned(RATES)) == device_seconds(schedule, KERNELS, RATES)
