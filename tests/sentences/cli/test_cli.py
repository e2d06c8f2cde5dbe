"""The command line from end to end: trainings, what they print, and how they are stopped and resumed."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from fastqt.sentences.cli import main
from tests.shared.command_lines import SMALL, error_line
from tests.shared.trainings import assert_same_weights, lines_of


def test_a_training_ends_with_a_summary_and_its_model_is_used(planted, tmp_path, capsys):
    run = tmp_path / "my run"
    options = ["--valid", planted[1], "--encoder", "bigru", "--report-every", "5"]
    assert main(["train", planted[0], "--out", str(run), *SMALL, *options]) == 0
    names = {"config.json", "vocabulary.json", "metrics.jsonl", "finished.json"}
    assert {path.name for path in run.iterdir()} == names | {"model.safetensors"}
    figures = {"step", "loss", "forward_accuracy", "backward_accuracy", "sentences_per_second"}
    assert figures < lines_of(run)[-1].keys()

    out, err = capsys.readouterr()
    assert err.startswith(f"corpus      {planted[0]}: 480 sentences")
    told, table, speed, *_ = out.strip().split("\n\n")
    assert told == f"{run}: trained, 12 steps"
    assert table.startswith("held out           fresh weights  step 12  chance\nloss ")
    assert re.fullmatch(
        r"[\d,]+ sentences/s, [\d,]+ tokens/s; time: data \d+%, gradients \d+%, optimiser \d+%"
        r"(\npeak memory: [\d,]+ MiB of the process.*)?",
        speed,
    )
    query = next(line for line in Path(planted[1]).read_text().splitlines() if line)
    assert main(["neighbors", str(run), planted[1], "--query", query, "-k", "3"]) == 0
    asked, first, *others = capsys.readouterr().out.splitlines()
    assert asked == query
    assert re.fullmatch(rf"  1\.000  {query}  \({planted[1]}:\d+\)", first)
    assert len(others) == 2
    embed = ["embed", str(run), planted[1], "--out"]
    assert main([*embed, str(run / "vectors.npy")]) == 0
    assert "139 x 12 float32" in capsys.readouterr().out
    assert main([*embed, str(tmp_path / "raw.npy"), "--raw"]) == 0
    is_text = [bool(line) for line in Path(planted[1]).read_text().splitlines()]
    unit, raw = (np.load(path)[is_text][:, :6] for path in (run / "vectors.npy", tmp_path / "raw.npy"))
    np.testing.assert_allclose(raw / np.linalg.norm(raw, axis=1, keepdims=True), unit, atol=1e-5)
    capsys.readouterr()
    assert main(["train", "--out", str(run), "--resume"]) == 0
    assert capsys.readouterr() == (f"{run}: finished already, after 12 steps\n", "")
    assert "kept no checkpoint" in error_line(capsys, "train", "--out", run, "--resume", "--epochs", "2")


def test_a_training_that_stops_early_says_so(planted, tmp_path, capsys):
    run = str(tmp_path / "run")
    options = ["--early-stop", "1", "--valid-every", "1", "--learning-rate", "0.5"]
    options += ["--epochs", "9", "--keep-checkpoint"]
    assert main(["train", planted[0], "--valid", planted[1], "--out", run, *SMALL, *options]) == 0
    out = capsys.readouterr().out
    steps = re.match(r".*: trained, (\d+) steps\nIt has stopped early: validation_loss was no better", out)[1]
    assert 0 < int(steps) < 9 * 12
    assert f"step {int(steps) - 1}, kept" in out
    assert main(["train", "--out", run, "--resume"]) == 0
    ended = f"{run}: finished already, after {steps} steps; with a higher --early-stop it goes on\n"
    assert capsys.readouterr().out == ended


def test_a_training_without_held_out_text_says_so_and_is_resumed_by_its_directory(planted, tmp_path, capsys):
    run = str(tmp_path / "run")
    assert main(["train", planted[0], "--out", run, *SMALL, "--keep-checkpoint"]) == 0
    out = capsys.readouterr().out
    assert "\ncorpus, last report  step 12  chance\n" in out
    assert "Held-out text is given with --valid." in out
    assert main(["train", "--out", run, "--resume"]) == 0
    assert capsys.readouterr().out.endswith("12 steps; with a higher --epochs or --steps it goes on\n")
    assert main(["train", "--out", run, "--resume", "--epochs", "2"]) == 0
    assert "trained, 24 steps" in capsys.readouterr().out
    assert main(["train", planted[0], "--out", str(tmp_path / "whole"), *SMALL, "--epochs", "2"]) == 0
    assert_same_weights(tmp_path / "run", tmp_path / "whole")


def test_a_full_disk_is_reported(planted, tmp_path, capsys, monkeypatch):
    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("fastqt.sentences.runs.tensor_files.save_file", full)
    assert main(["train", planted[0], "--out", str(tmp_path / "run"), *SMALL]) == 2
    assert "No space left on device" in capsys.readouterr().err
    assert not list((tmp_path / "run").glob("*.partial"))


def test_a_command_line_without_a_command_is_answered_with_help(capsys):
    assert main([]) == 0
    assert "COMMAND" in capsys.readouterr().out


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.thinned(2)
def test_a_signal_stops_a_training_process(planted, tmp_path, number):
    run = tmp_path / "run"
    command = [sys.executable, "-m", "fastqt", "train", planted[0], "--out", str(run), *SMALL]
    process = subprocess.Popen([*command, "--epochs", "1000000"], stderr=subprocess.PIPE, text=True)
    while not (run / "metrics.jsonl").exists() or not (run / "metrics.jsonl").stat().st_size:
        assert process.poll() is None
        time.sleep(0.05)
    os.kill(process.pid, number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    name = signal.Signals(number).name
    assert f"fastqt: stopped by {name} at step " in err.splitlines()[-1]
    assert err.splitlines()[-1].endswith(f"continue with: fastqt train --resume --out {run}")
    assert (run / "checkpoint.safetensors").exists()


def test_ctrl_c_in_another_command(capsys, monkeypatch):
    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr("fastqt.engines.show_config", interrupted)
    assert main(["config"]) == 130
    assert capsys.readouterr().err == "fastqt: interrupted\n"


@pytest.mark.slow
def test_torchrun_trains_on_several_processes(planted, tmp_path):
    """The command is the one of a single process, and what it prints is printed once."""
    options = ["--out", str(tmp_path / "run"), *SMALL, "--report-every", "2", "--keep-checkpoint"]

    def run(ranks, *more):
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command = [*launch, "-m", "fastqt", "train", planted[0], *options, *more]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)

    ended = run(2)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("trained, 6 steps") == 1
    steps = [line.split()[1] for line in ended.stderr.splitlines() if line.startswith("step")]
    assert steps == ["2", "4", "6"]
    ended = run(3, "--resume", "--epochs", "2")
    assert ended.stdout.count("trained, 10 steps") == 1, ended.stderr
    # A wrong setting is reported once.
    ended = run(2, "--resume", "--seed", "7")
    assert ended.returncode != 0
    assert ended.stderr.count("fastqt: cannot resume: seed is 7") == 1
    assert ended.stderr.count("fastqt: ") == 1
