"""Benchmarks take turns when they are measured, and run once when benchmarks are disabled."""

from functools import partial

from benchmarks.measure.timing import Clock, in_turns_with, steps_in_a_row


def test_turns(benchmark):
    """Plain `pytest` runs each function once; `pytest --benchmark` runs one warm-up round and the rounds."""
    order = []
    ours, others = in_turns_with(
        benchmark, lambda: order.append("ours"), {"theirs": lambda: order.append("theirs")}, rounds=3
    )
    assert order == ["theirs", "ours"] * (1 if benchmark.disabled else 4)
    assert ours > 0
    assert others.keys() == {"theirs"}
    assert others["theirs"] > 0


def test_steps_in_a_row(monkeypatch):
    order = []

    def seconds(clock, function):
        before = len(order)
        function()
        order.append("timed")
        return float(before)

    monkeypatch.setattr(Clock, "seconds", seconds)
    functions = {name: partial(order.append, name) for name in ("ours", "theirs")}
    # The medians of 1 and 9, and of 5 and 13, each for two steps.
    assert steps_in_a_row(functions, steps=2, rounds=2) == {"ours": 5 / 2, "theirs": 9 / 2}
    assert order == [*["ours"] * 3, "timed", *["theirs"] * 3, "timed"] * 2
