"""Benchmarks run to their end where nothing is to be measured, and take turns where it is."""

from benchmarks.measure.timing import in_turns_with


def test_turns(benchmark):
    """As `pytest` has it, each once; as `pytest --benchmark` has it, one warm-up and the rounds."""
    order = []
    ours, others = in_turns_with(
        benchmark, lambda: order.append("ours"), {"theirs": lambda: order.append("theirs")}, rounds=3
    )
    assert order == ["theirs", "ours"] * (1 if benchmark.disabled else 4)
    assert ours > 0
    assert others.keys() == {"theirs"}
    assert others["theirs"] > 0
