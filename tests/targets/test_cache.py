"""Cached rows are handed from one CUDA stream to another in order, in eager mode and inside captures.

There is no GPU: streams and events are replaced by ones that keep account of what is ordered before what.
"""

import contextlib
import random
import weakref
from collections import defaultdict
from dataclasses import dataclass, field

import pytest
import torch

import fastqt
from fastqt.targets import Window, cache
from fastqt.targets.cache import RowsCache

CPU = torch.device("cpu")
SIZES = range(4, 9)
KEPT = 3  # fewer than there are sizes


@dataclass
class Stream:
    device: int
    cuda_stream: int
    before: set[str] = field(default_factory=set)  # whose work comes before what it is given next


@dataclass(eq=False)
class Event:
    cuda: "Cuda"
    external: bool = False
    known: frozenset[str] | None = None

    def record(self, stream: Stream) -> None:
        assert stream is not self.cuda.capturing, "an event for others is recorded in a capture"
        self.known = frozenset(stream.before)

    def wait(self, stream: Stream) -> None:
        assert self.known is not None, "an event that was never recorded orders nothing"
        self.cuda.waits += 1
        if stream is not self.cuda.capturing:
            stream.before |= self.known
            return
        assert self.external, "cudaErrorStreamCaptureIsolation"
        self.cuda.before_replays |= self.known

    def query(self) -> bool:
        raise AssertionError("another thread's capture in the global mode forbids all questions")

    synchronize = query


class Cuda:
    """Two devices with three streams each, and what the library asks of `torch.cuda`."""

    def __init__(self) -> None:
        self.streams = [[Stream(device, 100 * device + i) for i in range(3)] for device in range(2)]
        self.current = [streams[0] for streams in self.streams]  # of each device
        self.current_device = 0
        self.capturing: Stream | None = None
        self.before_replays: set[str] = set()
        self.readers: dict[int, set[int]] = defaultdict(set)  # by address, as the allocator was told
        self.waits = 0

    @contextlib.contextmanager
    def device(self, device: torch.device):
        before, self.current_device = self.current_device, device.index
        yield
        self.current_device = before

    def current_stream(self, device: torch.device) -> Stream:
        return self.current[device.index]

    def is_current_stream_capturing(self) -> bool:
        return self.current[self.current_device] is self.capturing

    @contextlib.contextmanager
    def capture(self, device: int):
        self.capturing = self.current[device]
        yield
        self.capturing = None


@pytest.fixture
def cuda(monkeypatch):
    """`torch.cuda` of two devices, on which a window is lowered as work of the current stream."""
    cuda, lowered = Cuda(), Window._lowered_rows

    def lower(self, N, M, device):
        cuda.current[device.index].before.add(f"{N} rows on {device}")
        return lowered(self, N, M, CPU)

    for name in ("device", "current_stream", "is_current_stream_capturing"):
        monkeypatch.setattr(torch.cuda, name, getattr(cuda, name))
    monkeypatch.setattr(torch.cuda, "Event", lambda external=False: Event(cuda, external))
    tell = lambda x, stream: cuda.readers[x.data_ptr()].add(stream.cuda_stream)  # noqa: E731
    monkeypatch.setattr(torch.Tensor, "record_stream", tell, raising=False)
    monkeypatch.setattr(Window, "_lowered_rows", lower)
    monkeypatch.setattr(cache, "CACHED", RowsCache(KEPT))
    return cuda


def rows(N, device=0):
    return fastqt.Window(1).rows(N, N, torch.device("cuda", device))


@pytest.mark.parametrize("seed", range(5))
def test_every_stream_gets_rows_that_are_written_and_stay(cuda, seed):
    """Whoever asks for rows comes after their making, and is their owner or known as a reader."""
    choose, owners = random.Random(seed), {}
    for _ in range(300):
        N, device = choose.choice(SIZES), choose.randrange(2)
        cuda.current_device = choose.randrange(2)
        stream = cuda.current[device] = choose.choice(cuda.streams[device])
        known = {x.data_ptr() for entry in cache.CACHED._entries.values() for x in entry.rows.compressed()}
        found = rows(N, device)
        assert f"{N} rows on cuda:{device}" in stream.before
        for tensor in found.compressed():
            address = tensor.data_ptr()
            if address not in known:
                owners[address], cuda.readers[address] = stream, set()
            assert stream is owners[address] or stream.cuda_stream in cuda.readers[address]


def test_only_another_stream_waits_and_only_once(cuda):
    first, second, third = cuda.streams[0]
    for stream, waits in (
        (first, 0),
        (first, 0),
        (second, 1),
        (second, 1),
        (third, 2),
        (first, 2),
        (second, 2),
    ):
        cuda.current[0] = stream
        rows(5)
        assert cuda.waits == waits
    rows(5, device=1)
    assert cuda.waits == 2


def test_a_graph_waits_at_every_replay_for_rows_of_outside(cuda):
    """Whether or not the capture's stream made them: a replay may be on any stream."""
    for stream in cuda.streams[0][:2]:
        cuda.current[0], cuda.before_replays = cuda.streams[0][0], set()
        made = rows(6)
        cuda.current[0] = stream
        with cuda.capture(0):
            assert rows(6) is made
        assert cuda.before_replays == {"6 rows on cuda:0"}
    # A wait inside a capture orders nothing for the stream outside of it.
    cuda.current[0] = cuda.streams[0][2]
    with cuda.capture(0):
        rows(6)
    assert cuda.current[0].before == set()
    waits = cuda.waits
    rows(6)
    assert cuda.waits == waits + 1
    assert "6 rows on cuda:0" in cuda.current[0].before


def test_rows_and_events_of_graphs_are_never_freed(cuda):
    kept, evicted = weakref.ref(rows(5).columns), weakref.ref(rows(6).columns)
    with cuda.capture(0):
        rows(5)
    events = [entry.made for entry in cache.CACHED._entries.values()]
    graph_event, other_event = map(weakref.ref, events)
    del events
    for N in range(7, 30):
        rows(N)
    assert kept() is not None
    assert graph_event() is not None
    assert evicted() is None
    assert other_event() is None


@pytest.mark.parametrize("captured", [0, 1])
def test_a_capture_on_one_device_is_none_on_another(cuda, captured):
    """Rows made on the captured device live in the graph and are not cached; the other is the current one."""
    cuda.current_device = 1 - captured
    with cuda.capture(captured):
        assert not rows(5, captured).cached
        assert rows(5, captured) is not rows(5, captured)
        assert rows(5, 1 - captured).cached
        assert rows(5, 1 - captured) is rows(5, 1 - captured)


@pytest.mark.parametrize(("kind", "made"), [("cpu", 1), ("mps", 1), ("xpu", 3), ("hip", 3)])
def test_rows_of_streams_that_nobody_orders_are_not_kept(kind, made):
    devices = []

    def lower(N, M, device):
        devices.append(device)
        return fastqt.Diagonal().rows(N, M, torch.device("cpu"))

    rows = RowsCache(4)
    for _ in range(3):
        rows.rows("of", lower, 3, 3, torch.device(kind, 0))
    assert len(devices) == made


def test_a_device_without_an_index_is_not_cached(cuda, monkeypatch):
    """It means the current device, which the next call may find to be another one."""
    monkeypatch.setattr(Window, "_lowered_rows", lambda self, N, M, device: object())
    window_, device = fastqt.Window(1), torch.device("cuda")
    assert window_.rows(5, 5, device) is not window_.rows(5, 5, device)


def test_a_cpu_has_no_streams(monkeypatch):
    def fail(*_, **__):
        raise AssertionError("a question for CUDA's")

    for name in ("device", "current_stream", "is_current_stream_capturing", "Event"):
        monkeypatch.setattr(torch.cuda, name, fail)
    monkeypatch.setattr(cache, "CACHED", RowsCache(KEPT))
    window_ = fastqt.Window(1)
    assert window_.rows(5, 5, CPU) is window_.rows(5, 5, CPU)


@pytest.mark.parametrize("targets", [Window(), fastqt.Diagonal()], ids=["window", "diagonal"])
def test_wrapped_rows_of_a_transform_are_not_kept(targets, monkeypatch):
    """Nothing can read them once the transform is over."""
    monkeypatch.setattr(cache, "CACHED", RowsCache(size=8))
    x = torch.randn(5, 3)
    torch.func.grad(lambda x: fastqt.contrastive_loss(x, x, targets, diagonal="keep"))(x)
    rows = targets.rows(5, 5, CPU)
    assert rows.cached
    for tensor in rows.compressed():
        assert tensor.untyped_storage().data_ptr() != 0
