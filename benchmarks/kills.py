"""A training that is killed again and again, and what is left of it each time.

python -m benchmarks.soak --kills 100 --out benchmarks/results/soak-100-kills.json

starts a training in one directory, ends it with SIGKILL at a random moment, and resumes it, so many times.
The moments are uniform over a time in which the training starts, takes steps and writes many checkpoints;
much of its time goes into writing them. After each kill the checkpoint and the model must be whole, and the
tensors of the checkpoint must be those that an uninterrupted training has at the same step. At the end the
model must be, byte for byte, that of the uninterrupted training, and the metrics must be the same but for
their times.

`serve` runs in a process of its own, which imports everything once, and forks a process for each training.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.corpus import write_corpus
from benchmarks.measure.machine import processor_and_versions
from fastqt.sentences.runs import checkpoint
from fastqt.sentences.runs.config import TrainConfig, with_tuples
from fastqt.sentences.runs.files import PARTIAL
from fastqt.sentences.runs.tensor_files import open_tensors

FIRST_STEPS = 20  # the time that they take sets the times of the kills
LAST_STEPS = 50  # after the last kill
LONGEST = 4.0  # the latest moment of a kill, in times of the first steps
SETTINGS: dict[str, Any] = {"word_dim": 50, "batch_size": 100, "context_size": 3, "epochs": 10**9}
SETTINGS |= {"report_every": 3, "valid_every": 20, "valid_batches": 2, "checkpoint_every": 5}


def serve() -> None:
    """Trains as each line of standard input says, a JSON list of settings, directory and file of digests.

    The first training runs in this process, so that everything is imported; each further one in a process of
    its own, whose number and exit status are printed. This process has one thread only, because other threads
    would not survive the fork.
    """
    import torch

    torch.set_num_threads(1)
    _train(sys.stdin.readline())
    print("ready", flush=True)
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            _train(line)
            os._exit(0)
        print(pid, flush=True)
        print(os.waitpid(pid, 0)[1], flush=True)


def _train(line: str) -> None:
    from fastqt.sentences.train import train

    settings, out, digests = json.loads(line)
    if digests is not None:
        _record_digests(Path(digests))
    train(TrainConfig(**with_tuples(settings)), out, resume=True)


def _record_digests(path: Path) -> None:
    """Writes the digest of each checkpoint to a file, once it is written."""
    save = checkpoint.save_checkpoint

    def save_and_record(file: Path, *others: Any) -> None:
        save(file, *others)
        with path.open("a") as digests:
            digests.write(json.dumps(digest_of(file)) + "\n")

    checkpoint.save_checkpoint = save_and_record


def digest_of(path: Path) -> tuple[int, str]:
    """The step of a checkpoint, and the SHA-256 of its tensors; the times of the training are in neither."""
    digest = hashlib.sha256()
    with open_tensors(path) as file:
        for name in sorted(file.keys()):
            tensor = file.get_tensor(name).contiguous()
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.reshape(-1).numpy().tobytes())
    return checkpoint.read_progress(path).step, digest.hexdigest()


class Trainer:
    """The process that `serve` runs in."""

    def __init__(self) -> None:
        environment = os.environ | {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.kills"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            text=True,
        )

    def start(self, config: TrainConfig, out: Path, digests: Path | None = None) -> str:
        """Starts a training; returns the number of its process."""
        assert self.process.stdin is not None
        line = json.dumps([asdict(config), str(out), None if digests is None else str(digests)])
        print(line, file=self.process.stdin, flush=True)
        return self.answer()

    def answer(self) -> str:
        """Waits for the next line of the process: after `start`, the exit status of the training."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def close(self) -> None:
        """Ends the process."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait()


def kill_and_resume(kills: int, out: Path, seed: int) -> bool:
    """Kills a training so many times and stores what was found.

    Args:
        kills: how often.
        out: the JSON file.
        seed: of the moments.

    Returns:
        Whether every kill left a whole run, and the last training ended as an uninterrupted one.
    """
    trainer = Trainer()
    try:
        with tempfile.TemporaryDirectory() as folder:
            outcome = _kill_and_resume(trainer, kills, Path(folder), random.Random(seed))
    finally:
        trainer.close()
    outcome = {"machine_info": processor_and_versions(), "kills": kills, "seed": seed, **outcome}
    out.write_text(json.dumps(outcome) + "\n")
    print({name: value for name, value in outcome.items() if name not in ("machine_info", "each")})
    return bool(outcome["survived"] == kills and outcome["same_model"] and outcome["same_metrics"])


def _kill_and_resume(trainer: Trainer, kills: int, folder: Path, generator: random.Random) -> dict[str, Any]:
    text, held_out, run, whole = (folder / name for name in ("text.txt", "held_out.txt", "run", "whole"))
    write_corpus(text, 2_000, seed=0)
    write_corpus(held_out, 500, seed=1)
    config = TrainConfig((str(text),), valid=str(held_out), **SETTINGS)
    first = replace(config, steps=FIRST_STEPS)
    assert trainer.start(first, folder / "imports") == "ready"
    began = time.monotonic()
    trainer.start(first, folder / "first")
    assert trainer.answer() == "0"
    longest = LONGEST * (time.monotonic() - began)

    each = []
    for _ in range(kills):
        moment = generator.uniform(0.0, longest)
        pid = int(trainer.start(config, run))
        time.sleep(moment)
        os.kill(pid, signal.SIGKILL)
        status = int(trainer.answer())
        each.append({"seconds": round(moment, 4), "status": status, **_left(run)})
    last = replace(config, steps=max(kill["step"] for kill in each) + LAST_STEPS)
    for directory, digests in ((run, None), (whole, folder / "digests")):
        trainer.start(last, directory, digests)
        assert trainer.answer() == "0"

    wanted = dict(json.loads(line) for line in (folder / "digests").read_text().splitlines())
    for kill, before in zip(each, [0, *(kill["step"] for kill in each)], strict=False):
        same = kill.pop("digest") == wanted.get(kill["step"]) if kill["step"] else True
        # A process that has ended before the kill would have the status 0, or another one after an error.
        kill["survived"] = kill["status"] == signal.SIGKILL and same and kill["step"] >= before
    return {
        "survived": sum(kill["survived"] for kill in each),
        "killed_while_writing": sum(kill["partial"] for kill in each),
        "steps": last.steps,
        "same_model": (run / checkpoint.MODEL).read_bytes() == (whole / checkpoint.MODEL).read_bytes(),
        "same_metrics": metrics_without_times(run) == metrics_without_times(whole),
        "each": each,
    }


def _left(run: Path) -> dict[str, Any]:
    """What a kill left: the step and the digest of the checkpoint, and whether a file was being written."""
    step, digest = 0, None
    if (run / checkpoint.CHECKPOINT).exists():
        step, digest = digest_of(run / checkpoint.CHECKPOINT)
        with open_tensors(run / checkpoint.MODEL):
            pass  # its checksum was verified
    return {"step": step, "digest": digest, "partial": bool(list(run.glob(f"*{PARTIAL}")))}


def metrics_without_times(run: Path) -> list[dict[str, float]]:
    """The lines of metrics.jsonl without the times."""
    lines = map(json.loads, (run / checkpoint.METRICS).read_text().splitlines())
    return [{name: line[name] for name in line if "second" not in name} for line in lines]


if __name__ == "__main__":
    serve()
