"""A run of a machine that was not quiet gives reasons, and is not rendered."""

import json

import pytest

from benchmarks.measure import quiet
from benchmarks.measure.quiet import Watch
from benchmarks.render import quiet_run


def watched(monkeypatch, rates=(1e11, 0.95e11), load=1.0, ticks=((1000, 0), (3000, 10))):
    """A watch that has probed a machine with these rates, loads and ticks."""
    given, counted = iter([1.0, *rates]), iter([*ticks, *ticks[-1:] * len(rates)])
    monkeypatch.setattr(quiet, "product_rate", lambda: next(given))
    monkeypatch.setattr(quiet.os, "getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr(quiet, "ticks", lambda: next(counted))
    watch = Watch()
    for _ in rates:
        watch.probe()
    return watch


def test_a_quiet_machine_has_no_reasons(monkeypatch):
    assert watched(monkeypatch).reasons() == []
    assert Watch().reasons() == []


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        ({"rates": (1e11, 0.85e11, 1e11)}, "the same product ran at 85 to 100 GFLOP/s"),
        ({"load": 9.0}, "9.0 processes were running"),
        ({"ticks": ((1000, 0), (3000, 200))}, "the host took 10% of the processors' time"),
    ],
)
def test_what_else_ran_is_a_reason(monkeypatch, found, reason):
    assert watched(monkeypatch, **found).reasons() == [reason]


def test_a_real_machine_is_probed():
    watch = Watch()
    watch.probe()
    assert watch.rates[0] > 0
    assert 0 <= watch.stolen() <= 1


def test_a_disturbed_run_is_not_rendered(tmp_path):
    path = tmp_path / "run.json"
    path.write_text(json.dumps({"benchmarks": [], "disturbed": []}))
    assert quiet_run(path)["benchmarks"] == []
    path.write_text(json.dumps({"benchmarks": [], "disturbed": ["9.0 processes were running"]}))
    with pytest.raises(SystemExit, match=r"run.json: measure again.*9.0 processes were running"):
        quiet_run(path)
