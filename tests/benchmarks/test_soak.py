"""What the soak calls flat, and that a short one runs to its end."""

import json

import pytest

from benchmarks import soak
from benchmarks.kills import digest_of, kill_and_resume
from benchmarks.soak import Sample, verdict


def samples(**quantities):
    """A hundred samples whose quantities follow from the number of the sample."""
    flat = {"rss_kib": lambda t: 400_000, "anonymous_kib": lambda t: 300_000}
    flat |= {"descriptors": lambda t: 5, "threads": lambda t: 3}
    every = flat | quantities
    return [Sample(10.0 * t, **{name: function(t) for name, function in every.items()}) for t in range(100)]


@pytest.mark.parametrize(
    "quantities",
    [
        {},
        {"rss_kib": lambda t: 200_000 if t < 8 else 400_000},  # warm-up
        {"rss_kib": lambda t: 400_000 + 100_000 * (t % 7 == 0)},  # checkpoints
        {"rss_kib": lambda t: 400_000 - 1000 * t},  # the kernel takes pages of files
        {"descriptors": lambda t: 5 + (t > 90 and t % 3 == 0)},  # a file that is open now and then
    ],
)
def test_flat(quantities):
    assert verdict(samples(**quantities))["flat"]


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("rss_kib", lambda t: 400_000 + 200 * t),
        ("anonymous_kib", lambda t: 300_000 + 100 * t),
        ("descriptors", lambda t: 5 + t // 50),
        ("threads", lambda t: 3 + t // 50),
    ],
)
def test_leaks(name, function):
    found = verdict(samples(**{name: function}))
    assert not found["flat"]
    assert [
        each for each in ("rss_kib", "anonymous_kib", "descriptors", "threads") if not found[each]["flat"]
    ] == [name]


@pytest.mark.slow
def test_a_short_soak(tmp_path):
    """Whether it is flat cannot be known after seconds; that it runs, samples and stops can."""
    soak.watch(0.3, tmp_path / "out.json", None, ["--encoder", "gru", "--hidden-size", "8"])
    stored = json.loads((tmp_path / "out.json").read_text())
    assert stored["stopped_as_asked"]
    assert stored["steps"] > 0
    assert len(stored["samples"]["seconds"]) > 10
    assert all(size > 10_000 for size in stored["samples"]["anonymous_kib"])


@pytest.mark.slow
def test_a_few_kills(tmp_path):
    assert kill_and_resume(4, tmp_path / "out.json", seed=1)
    stored = json.loads((tmp_path / "out.json").read_text())
    assert stored["survived"] == 4
    assert len(stored["each"]) == 4


def test_a_digest_tells_checkpoints_apart(planted, tmp_path):
    from fastqt.sentences.runs.config import TrainConfig
    from fastqt.sentences.train import train

    found = []
    for run, seed in (("a", 0), ("b", 0), ("c", 1)):
        config = TrainConfig(
            (planted[0],), word_dim=4, batch_size=100, steps=2, seed=seed, keep_checkpoint=True
        )
        train(config, tmp_path / run)
        found.append(digest_of(tmp_path / run / "checkpoint.safetensors"))
    assert found[0] == found[1] != found[2]
    assert found[0][0] == 2
