"""Benchmarks take turns when they are measured, and run once when benchmarks are disabled."""

from benchmarks.measure.timing import in_turns_with


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
