"""The examples run under torchrun, and several processes do what one does with the whole batch."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RUNNER = str(ROOT / "tests/shared/run_example.py")
# Of each: options of both runs, of that of one process alone, and the part of the first loss that is left.
EXAMPLES = {
    "clip_two_encoders": (["--steps", "12"], [], 0.6),
    "ddp_simcse": (["--steps", "10", "--dropout", "0"], [], 0.3),
    # It begins at what guessing gives.
    "fsdp2_quickthoughts": (["--steps", "60", "--dropout", "0"], [], 0.92),
    # Lightning's batch size is that of a rank.
    "lightning_simcse": (["--steps", "10", "--dropout", "0"], ["--batch-size", "128"], 0.3),
}
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]


def run(directory: Path, example: str, processes: int, *options: str) -> list[dict]:
    """What each rank of an example's run has at the end; one process runs without torchrun."""
    directory.mkdir()
    launcher = [] if processes == 1 else [*TORCHRUN, str(processes)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    finished = subprocess.run(
        [sys.executable, *launcher, RUNNER, example, str(directory), *options],
        env=environment,
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert finished.returncode == 0, finished.stderr[-4000:]
    return [json.loads((directory / f"{rank}.json").read_text()) for rank in range(processes)]


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES)
def test_two_processes_train_as_one_does(example, tmp_path):
    if example.startswith("lightning") and importlib.util.find_spec("lightning") is None:
        pytest.skip("lightning is not installed, which the example is for")
    options, of_one, least = EXAMPLES[example]
    first, second = run(tmp_path / "two", example, 2, *options)
    assert first == second  # the losses, and all bits of the parameters
    losses = first["losses"]
    assert sum(losses[-3:]) / 3 < least * losses[0]
    (alone,) = run(tmp_path / "one", example, 1, *options, *of_one)
    assert losses[0] == pytest.approx(alone["losses"][0], rel=1e-6)
    # The first step's gradients were the same too.
    assert losses[1] == pytest.approx(alone["losses"][1], rel=1e-3)


@pytest.mark.slow
def test_chunks_and_a_text_of_ones_own(tmp_path):
    text = tmp_path / "text"
    text.write_text("\n".join(f"Sentence {i} is about {i * i} things." for i in range(200)))
    options = ["--data", str(text), "--steps", "3", "--batch-size", "48", "--dropout", "0"]
    whole = run(tmp_path / "whole", "ddp_simcse", 2, *options)
    chunks = run(tmp_path / "chunks", "ddp_simcse", 2, *options, "--chunk-size", "7")
    assert chunks[0] == chunks[1]
    assert chunks[0]["losses"] == pytest.approx(whole[0]["losses"], rel=1e-4)
