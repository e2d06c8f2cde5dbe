"""What the benchmark of trainings in two precisions reads from a run, and what its tables say."""

from pathlib import Path

import pytest

from benchmarks import precision

TEXT = "\n".join(f"Sentence {i} follows sentence {i - 1} ." for i in range(40))


@pytest.mark.slow  # a process with torch for each training
def test_a_training_reports_each_step(tmp_path: Path) -> None:
    corpus = tmp_path / "text.txt"
    corpus.write_text(TEXT)
    options = ["--encoder", "bow", "--batch-size", "10", "--word-dim", "8", "--steps", "3"]
    losses = {
        p: [line["loss"] for line in precision.metrics_of(corpus, [*options, "--precision", p])]
        for p in precision.PRECISIONS
    }
    assert [len(x) for x in losses.values()] == [3, 3]
    assert losses["float32"] == pytest.approx(losses["bfloat16"], rel=0.02)


def test_a_training_that_fails_says_why(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="no-such-file"):
        precision.metrics_of(tmp_path / "no-such-file", [])


def test_tables_show_the_largest_differences_and_the_mean_one() -> None:
    losses = {
        "float32": [[5.0, 4.0], [5.5, 4.5], [5.1, 4.1]],
        "bfloat16": [[5.0, 4.125], [5.5, 4.5], [5.1, 4.1]],
    }
    line = precision.curves_table([{"model": "m", "losses": losses}]).splitlines()[-1]
    assert line == "| m | 3 | 4.2000 | 4.2417 | 0.1250 | 0.5000 | +0.0417 ± 0.0417 |"
    speeds = {"float32": 100.0, "bfloat16": 250.0}
    assert precision.speeds_table([{"model": "m", "sentences_per_second": speeds}]).endswith("| 2.50 × |")
