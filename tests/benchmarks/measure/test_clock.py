"""How times are taken on a GPU, on one that is played: what the host takes to launch is not in them."""

from types import SimpleNamespace

import pytest
import torch

from benchmarks.measure import clocks, timing
from benchmarks.measure.clocks import Meter
from benchmarks.measure.timing import CYCLES_A_SECOND, MOST_LEAD, Clock, Effort, in_turns

GPU = torch.device("cuda")
LAUNCH, WORK = 40e-6, 10e-6  # seconds that a launch takes the host, and its work the device


class PlayedGpu:
    """A device that works off a queue while the host goes on."""

    def __init__(self) -> None:
        self.host = self.device = 0.0

    def queue(self, seconds: float) -> float:
        self.device = max(self.device, self.host) + seconds
        return self.device

    def launch(self) -> None:
        self.host += LAUNCH
        self.queue(WORK)

    def synchronize(self, *_: object) -> None:
        self.host = max(self.host, self.device)

    def event(self, **_: object) -> SimpleNamespace:
        made = SimpleNamespace(synchronize=self.synchronize)
        made.record = lambda: setattr(made, "at", self.queue(0.0))
        made.elapsed_time = lambda last: 1e3 * (last.at - made.at)
        return made


@pytest.fixture
def gpu(monkeypatch):
    played = PlayedGpu()
    monkeypatch.setattr(torch.cuda, "synchronize", played.synchronize)
    monkeypatch.setattr(torch.cuda, "Event", played.event)
    monkeypatch.setattr(
        torch.cuda, "_sleep", lambda cycles: played.queue(cycles / CYCLES_A_SECOND), raising=False
    )
    monkeypatch.setattr(timing.time, "perf_counter", lambda: played.host)
    monkeypatch.setattr(torch.cuda, "clock_rate", lambda _: 1755)
    monkeypatch.setattr(torch.cuda, "power_draw", lambda _: 650_000)
    return played


def steps(gpu, launches):
    def run():
        for _ in range(launches):
            gpu.launch()

    return run


def test_a_time_is_that_of_the_work_and_not_of_the_launches(gpu):
    clock = Clock(GPU)
    assert clock.seconds(steps(gpu, 20)) == pytest.approx(20 * WORK)
    assert clock.launch_seconds == pytest.approx(20 * LAUNCH)
    without = clock.seconds(steps(gpu, 20), lead=0.0)
    assert without > 20 * LAUNCH - LAUNCH


def test_the_lead_of_a_turn_covers_the_launches_of_its_contestant(gpu, monkeypatch):
    """Also where they take far longer than the shortest lead."""
    run = steps(gpu, 1000)

    def make(inputs):
        def step(i):
            run()
            return [torch.ones(())]

        return step

    monkeypatch.setattr(timing, "peak_above_results", lambda clock, step: (step(0), 0))
    (result,) = in_turns({"ours": make}, None, Clock(GPU), Effort(2, 4, 0.0)).values()
    assert result.seconds == pytest.approx(1000 * WORK)
    assert result.launch_seconds == pytest.approx(1000 * LAUNCH)
    assert (result.clock_mhz, result.power_watts, result.meter_reason) == (1755, 650, None)


def test_a_lead_is_never_long(gpu):
    Clock(GPU).seconds(lambda: None, lead=3600.0)
    assert gpu.host <= MOST_LEAD + 1e-9


def test_readings_that_cannot_be_had_have_a_reason(monkeypatch):
    asked = []

    def absent(device):
        asked.append(device)
        raise ModuleNotFoundError("pynvml does not seem to be installed")

    monkeypatch.setattr(clocks.torch.cuda, "clock_rate", absent)
    meter = Meter(GPU)
    meter.read()
    meter.read()
    assert len(asked) == 1
    assert meter.medians() == (None, None)
    assert meter.reason == "ModuleNotFoundError: pynvml does not seem to be installed"
    on_cpu = Meter(torch.device("cpu"))
    on_cpu.read()
    assert on_cpu.reason == "cpu has no such readings"
