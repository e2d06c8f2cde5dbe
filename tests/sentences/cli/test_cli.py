"""The command line from end to end; every error is reported on one line."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import fastqt
from fastqt.sentences.cli import main
from tests.shared.command_lines import SMALL, error_line


def test_train_embed_and_neighbors(planted, tmp_path, capsys):
    run = tmp_path / "run"
    options = ["--valid", planted[1], "--encoder", "bigru", "--epochs", "2", "--report-every", "5"]
    assert main(["train", planted[0], "--out", str(run), *SMALL, *options]) == 0
    assert "trained, 24 steps" in capsys.readouterr().out
    assert {path.name for path in run.iterdir()} == {
        "config.json",
        "vocabulary.json",
        "metrics.jsonl",
        "model.safetensors",
        "finished.json",
        "README.md",
    }
    line = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert {"step", "loss", "forward_accuracy", "backward_accuracy", "sentences_per_second"} < line.keys()

    assert main(["embed", str(run), planted[1], "--out", str(tmp_path / "x.npy")]) == 0
    assert "139 x 12 float32" in capsys.readouterr().out
    sentences = [bool(line.strip()) for line in Path(planted[1]).read_text().splitlines()]
    assert not np.load(tmp_path / "x.npy")[np.logical_not(sentences)].any()
    matrix = np.load(tmp_path / "x.npy")[sentences]
    np.testing.assert_allclose(np.linalg.norm(matrix, axis=1), np.sqrt(2), rtol=1e-5)
    assert main(["embed", str(run), planted[1], "--raw", "--out", str(tmp_path / "raw.npy")]) == 0
    raw = np.load(tmp_path / "raw.npy")[sentences]
    np.testing.assert_allclose(
        raw[:, :6] / np.linalg.norm(raw[:, :6], axis=1, keepdims=True), matrix[:, :6], atol=1e-5
    )
    capsys.readouterr()

    sentence = Path(planted[1]).read_text().splitlines()[3]
    assert main(["neighbors", str(run), planted[1], planted[0], "--query", sentence, "-k", "3"]) == 0
    query, first, *others = capsys.readouterr().out.splitlines()
    assert query == sentence
    assert first == f"  1.000  {sentence}  ({planted[1]}:4)"
    assert len(others) == 2


def test_the_end_of_a_training_says_what_to_do_next(planted, tmp_path, capsys):
    """The commands that it prints work as they are."""
    run = str(tmp_path / "my run")
    assert main(["train", planted[0], "--valid", planted[1], "--out", run, *SMALL]) == 0
    out, err = capsys.readouterr()
    assert err.startswith(f"corpus      {planted[0]}: 480 sentences")
    told, table, speed, *_, following = out.split("\n\n")
    assert told == f"{run}: trained, 12 steps"
    assert table.startswith("held out           fresh weights  step 12  chance\nloss ")
    assert re.fullmatch(
        r"[\d,]+ sentences/s, [\d,]+ tokens/s; time: data \d+%, gradients \d+%, optimiser \d+%"
        r"(\npeak memory: [\d,]+ MiB of the process.*)?",
        speed,
    )
    title, *commands = following.splitlines()
    assert title == "Next, for example:"
    neighbors, embed, _ = (shlex.split(command) for command in commands)
    assert neighbors[0] == embed[0] == "fastqt"
    assert main(neighbors[1:]) == 0
    assert capsys.readouterr().out.startswith(f"{neighbors[-1]}\n  1.000  {neighbors[-1]}")
    assert main(embed[1:]) == 0
    assert (tmp_path / "my run" / "vectors.npy").exists()
    capsys.readouterr()
    assert main(["train", "--out", run, "--resume"]) == 0
    assert capsys.readouterr() == (f"{run}: finished already, after 12 steps\n", "")
    assert "kept no checkpoint" in error_line(capsys, "train", "--out", run, "--resume", "--epochs", "2")


def test_a_training_that_stops_early_says_so_and_writes_its_trace(planted, tmp_path, capsys):
    run, trace = str(tmp_path / "run"), tmp_path / "trace.json"
    options = ["--early-stop", "1", "--valid-every", "1", "--learning-rate", "0.5", "--average", "0.5"]
    options += ["--epochs", "9", "--keep-checkpoint", "--profile", str(trace)]
    assert main(["train", planted[0], "--valid", planted[1], "--out", run, *SMALL, *options]) == 0
    out, err = capsys.readouterr()
    steps = re.match(r".*: trained, (\d+) steps\nIt has stopped early: validation_loss was no better", out)[1]
    assert 0 < int(steps) < 9 * 12
    assert f"step {int(steps) - 1}, kept" in out
    assert "trace.json: " in err
    assert main(["train", "--out", run, "--resume"]) == 0
    ended = f"{run}: finished already, after {steps} steps; with a higher --early-stop it goes on\n"
    assert capsys.readouterr().out == ended
    assert "want it with encoder transformer" in error_line(
        capsys, "train", planted[0], "--out", tmp_path / "new", "--compile"
    )


def test_a_training_without_held_out_text_says_so(planted, tmp_path, capsys):
    assert main(["train", planted[0], "--out", str(tmp_path / "run"), *SMALL, "--keep-checkpoint"]) == 0
    out = capsys.readouterr().out
    assert "\nlast batch of the corpus  step 12  chance\n" in out
    assert "Held-out text is given with --valid." in out
    assert main(["train", "--out", str(tmp_path / "run"), "--resume"]) == 0
    assert capsys.readouterr().out.endswith("12 steps; with a higher --epochs or --steps it goes on\n")


def test_resuming_needs_only_the_directory(planted, tmp_path, capsys):
    model = str(tmp_path / "model")
    assert main(["train", planted[0], "--out", model, *SMALL, "--keep-checkpoint"]) == 0
    assert main(["train", "--out", model, "--resume", "--epochs", "2"]) == 0
    assert "trained, 24 steps" in capsys.readouterr().out
    assert main(["train", planted[0], "--out", str(tmp_path / "whole"), *SMALL, "--epochs", "2"]) == 0
    weights = [(Path(run) / "model.safetensors").read_bytes() for run in (model, tmp_path / "whole")]
    assert weights[0] == weights[1]


def test_errors_of_train(model, planted, tmp_path, capsys, monkeypatch):
    corpus, out = planted[0], tmp_path / "run"
    (tmp_path / "empty.txt").touch()
    (tmp_path / "latin.txt").write_bytes(b"one\ntwo\xe9\n")
    for arguments, message in (
        (
            [tmp_path / "none.txt", "--out", out],
            f"cannot read {tmp_path}/none.txt: No such file or directory",
        ),
        ([tmp_path / "empty.txt", "--out", out], f"the corpus is empty: no sentence in {tmp_path}/empty.txt"),
        (
            [tmp_path / "latin.txt", "--out", out],
            "line 2 is not UTF-8 (byte 0xe9 at byte offset 7 of the text)",
        ),
        ([corpus, "--out", out], "the corpus is shorter than a batch: 480 sentences in"),
        ([corpus, "--out", model], "already holds a run"),
        ([corpus, "--out", corpus], f"cannot write to {corpus}: File exists"),
        (["--out", out], "no CORPUS given"),
        (["--out", out, "--resume"], f"no CORPUS given, and no run to resume in {out}"),
        ([corpus], "the following arguments are required: --out (see fastqt train --help)"),
        ([corpus, "--out", out, "--encoder", "cnn"], "argument --encoder: invalid choice: 'cnn'"),
        (
            [corpus, "--out", out, "--batch-size", "many"],
            "argument --batch-size: want a whole number, got 'many'",
        ),
        ([corpus, "--out", out, "--clip", "-1"], "clip: want at least 0, got -1.0"),
        (
            [corpus, "--out", out, "--encoder", "bigru", "--hidden-size", "5"],
            "hidden_size: want an even number",
        ),
        (
            ["--out", model, "--resume", "--batch-size", "41"],
            "cannot resume: batch_size is 41, but the run was started with 40",
        ),
    ):
        assert message in error_line(capsys, "train", *arguments)
    assert not (out / "config.json").exists()


def test_evaluate(model, reviews, tmp_path, capsys):
    out, cache = tmp_path / "out.json", tmp_path / "cache"
    for name in (model, f"random:{model}"):
        command = [
            "evaluate",
            name,
            "--data",
            reviews,
            "--json",
            str(out),
            "--cache",
            str(cache),
            "--seed",
            "3",
        ]
        assert main(command) == 0
        lines = capsys.readouterr().out.splitlines()
        assert [line.split()[:2] for line in lines] == [
            ["MR", "accuracy"],
            ["STS12", "pearson"],
            ["STS12", "spearman"],
        ]
        stored = json.loads(out.read_text())
        assert stored["model"] == name
        assert stored["tasks"]["MR"]["accuracy"] > 0.9
        assert stored["settings"]["seed"] == 3
        assert max(stored["settings"]["grid"]) == 256
        assert (cache / f"{stored['sha256']}.npz").exists()
    assert len(list(cache.iterdir())) == 2
    options = ["--tasks", "MR", "--grid", "senteval"]
    assert main(["evaluate", model, "--data", reviews, "--json", str(out), *options]) == 0
    assert list(json.loads(out.read_text())["tasks"]) == ["MR"]
    assert max(json.loads(out.read_text())["settings"]["grid"]) == 8


def test_errors_of_evaluate(model, reviews, tmp_path, capsys, monkeypatch):
    for arguments, message in (
        ([model, "--data", reviews, "--tasks", "MR,CR"], "tasks: CR needs CR/all.tsv.xz in "),
        ([model, "--data", reviews, "--tasks", ""], "tasks: want some of MR, CR, "),
        ([model, "--data", tmp_path / "none"], f"data: {tmp_path}/none is not a directory"),
        ([model, "--data", reviews, "--json", tmp_path / "none" / "x.json"], "cannot write "),
        ([model, "--data", reviews, "-t", "0"], "t: want a positive number, got 0.0"),
        (["sif:none.npz", "--data", reviews], "no such file: none.npz"),
        ([tmp_path / "none", "--data", reviews], "no trained model: "),
        ([model], "the following arguments are required: --data"),
    ):
        assert message in error_line(capsys, "evaluate", *arguments)
    for name in [name for name in sys.modules if name.startswith("fastqt.sentences.evaluation")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr("fastqt.sentences.evaluation")
    monkeypatch.setitem(sys.modules, "sklearn.metrics", None)
    said = error_line(capsys, "evaluate", model, "--data", reviews)
    assert said == "evaluate: want sklearn.metrics, got none: pip install 'fastqt[eval]'"


def test_errors_of_embed_and_neighbors(model, planted, tmp_path, capsys):
    x = tmp_path / "x.npy"
    for arguments, message in (
        (
            ["embed", tmp_path / "none", planted[1], "--out", x],
            f"no trained model: {tmp_path}/none is not a directory",
        ),
        (
            ["embed", tmp_path, planted[1], "--out", x],
            f"no trained model in {tmp_path}: config.json is missing",
        ),
        (["embed", model, "none.txt", "--out", x], "no such file: none.txt"),
        (["embed", model, planted[1], "--out", tmp_path / "no" / "x.npy"], "cannot write "),
        (
            ["embed", model, planted[1], "--out", x, "--device", "tpu"],
            "argument --device: invalid choice: 'tpu'",
        ),
        (["neighbors", model, planted[1], "--query", " "], "query: want a sentence, got blank text"),
        (["neighbors", model, planted[1], "--query", "a", "-k", "0"], "k: want at least 1, got 0"),
        (["neighbors", model, planted[1]], "the following arguments are required: --query"),
        (["fly"], "invalid choice: 'fly'"),
    ):
        assert message in error_line(capsys, *arguments)
    assert not x.exists()


@pytest.mark.parametrize("name", ["config.json", "vocabulary.json", "model.safetensors"])
def test_a_missing_or_damaged_file_is_named(model, planted, tmp_path, capsys, name):
    path = Path(model) / name
    path.write_bytes(path.read_bytes()[:50])
    assert name in error_line(capsys, "embed", model, planted[1], "--out", tmp_path / "x.npy")
    path.unlink()
    assert f"{name} is missing" in error_line(capsys, "embed", model, planted[1], "--out", tmp_path / "x.npy")


def test_a_model_of_another_version_or_shape_is_refused(model, planted, tmp_path, capsys):
    path = Path(model) / "config.json"
    config = json.loads(path.read_text())
    for change, message in (
        (
            {"format": 99, "fastqt": "9.0"},
            "config.json has format 99, written by fastqt 9.0; fastqt 0.1.0 reads format 1",
        ),
        ({"word_dim": 9}, "model.safetensors does not fit its config.json: the shape of "),
        ({"encoder": "gru"}, "model.safetensors does not fit its config.json: "),
        ({"colour": "red"}, "config.json is not the config.json of a training run"),
    ):
        path.write_text(json.dumps(config | change))
        assert message in error_line(capsys, "embed", model, planted[1], "--out", tmp_path / "x.npy")


def test_a_full_disk_is_reported(model, planted, tmp_path, capsys, monkeypatch):
    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("fastqt.sentences.runs.tensor_files.save_file", full)
    message = training_error(capsys, planted[0], tmp_path / "run")
    assert "No space left on device" in message
    assert not list((tmp_path / "run").glob("*.partial"))


def training_error(capsys, corpus, out):
    assert main(["train", corpus, "--out", str(out), *SMALL]) == 2
    return capsys.readouterr().err


def test_help_version_and_config(capsys):
    assert main([]) == 0
    assert "COMMAND" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"fastqt {fastqt.__version__}\n"
    assert main(["config"]) == 0
    assert "backend" in capsys.readouterr().out


def test_python_m_fastqt_is_the_command():
    command = [sys.executable, "-m", "fastqt"]
    version = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True)
    assert version.stdout == f"fastqt {fastqt.__version__}\n"
    wrong = subprocess.run([*command, "embed", "none", "none.txt", "--out", "x.npy"], capture_output=True)
    assert wrong.returncode == 2
    assert wrong.stderr == b"fastqt: no trained model: none is not a directory\n"


def test_bench(capsys, monkeypatch):
    monkeypatch.setattr("fastqt.sentences.tools.bench.SIZES", ((32, 8), (48, 4)))
    assert main(["bench"]) == 0
    rows = [line.split()[:2] for line in capsys.readouterr().out.splitlines()[2:]]
    assert rows == [["32", "8"], ["48", "4"]]


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
    run = tmp_path / "run"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    trace = tmp_path / "trace.json"
    options = ["--out", str(run), *SMALL, "--report-every", "2", "--keep-checkpoint", "--profile", str(trace)]
    train = ["-m", "fastqt", "train", planted[0], *options]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [*command, "2", *train], capture_output=True, text=True, env=environment, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("trained, 6 steps") == 1
    assert ended.stderr.count("trace.json: trace of steps 2 to 6") == 1
    assert [line.split()[1] for line in ended.stderr.splitlines() if line.startswith("step")] == [
        "2",
        "4",
        "6",
    ]
    resumed = [*train, "--resume", "--epochs", "2"]
    ended = subprocess.run(
        [*command, "3", *resumed], capture_output=True, text=True, env=environment, check=False
    )
    assert ended.stdout.count("trained, 10 steps") == 1, ended.stderr
    # A wrong setting is reported once.
    ended = subprocess.run(
        [*command, "2", *train, "--resume", "--seed", "7"],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert ended.returncode != 0
    assert ended.stderr.count("fastqt: cannot resume: seed is 7") == 1
    assert ended.stderr.count("fastqt: ") == 1
