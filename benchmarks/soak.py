"""A long training whose memory stays flat, and a training that is killed again and again.

python -m benchmarks.soak --minutes 120 --out benchmarks/results/soak-120-minutes.json

trains in a child process, with validations and checkpoints, and reads from /proc every ten seconds how much
memory is resident, how many file descriptors are open and how many threads run. The first tenth of the
samples is warm-up. Of the other samples, the second half is compared with the first:

- the median of the resident memory may not have grown by more than 1 %, nor that of its anonymous part. The
  kernel drops the pages of files, which libraries are, when other processes need memory; a leak is anonymous.
  In a training of two hours, a leak of 1 % an hour is seen, which is a few bytes a step. What a checkpoint
  allocates for a moment is not;
- the smallest numbers of descriptors and of threads may not have grown. The largest would count a checkpoint
  that is being written in the moment of a sample; a leak raises the smallest too.

Options that this command does not know go to `fastqt train`, for instance `--encoder gru`.

python -m benchmarks.soak --kills 100 --out benchmarks/results/soak-100-kills.json

is described in benchmarks/kills.py.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks.corpus import write_corpus
from benchmarks.kills import kill_and_resume
from benchmarks.measure.machine import processor_and_versions

INTERVAL = 10.0  # seconds between two samples
WARM_UP = 0.1  # share of the samples
RSS_GROWTH = 0.01  # of the median, between the halves
PATIENCE = 120.0  # seconds within which the training must save and stop when it is asked to

SETTINGS = ("--word-dim", "100", "--batch-size", "400", "--epochs", "1000000000", "--learning-rate", "1e-3")
SETTINGS += ("--report-every", "50", "--valid-every", "250", "--checkpoint-every", "500")


class Sample(NamedTuple):
    """What a process held at one moment."""

    seconds: float  # since the start
    rss_kib: int
    anonymous_kib: int  # the part of it that is no page of a file
    descriptors: int
    threads: int


def sample(pid: int, seconds: float) -> Sample:
    """Reads from /proc what a process holds now."""
    process = Path("/proc") / str(pid)
    status = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines())
    descriptors = len(list((process / "fd").iterdir()))
    resident, anonymous = (int(status[name].split()[0]) for name in ("VmRSS", "RssAnon"))
    return Sample(seconds, resident, anonymous, descriptors, int(status["Threads"]))


def verdict(samples: Sequence[Sample]) -> dict[str, Any]:
    """Compares the two halves of the samples after warm-up; the docstring of the module has the criterion.

    Args:
        samples: at least ten, in the order of their times.

    Returns:
        For each quantity its figure in the halves and whether it is flat, and `flat`: all of them are.
    """
    if len(samples) < 10:
        raise ValueError(f"samples: want at least 10, got {len(samples)}")
    settled = samples[round(WARM_UP * len(samples)) :]
    halves = settled[: len(settled) // 2], settled[len(settled) // 2 :]
    figures: dict[str, Any] = {"rss_peaks_kib": [max(each.rss_kib for each in half) for half in halves]}
    for name in ("rss_kib", "anonymous_kib"):
        medians = [median(getattr(each, name) for each in half) for half in halves]
        figures[name] = {"medians": medians, "flat": medians[1] <= medians[0] * (1 + RSS_GROWTH)}
    for name in ("descriptors", "threads"):
        least = [min(getattr(each, name) for each in half) for half in halves]
        figures[name] = {"smallest": least, "flat": least[1] <= least[0]}
    figures["flat"] = all(part["flat"] for part in figures.values() if isinstance(part, dict))
    return figures


def watch(minutes: float, out: Path, corpus: str | None, options: Sequence[str]) -> bool:
    """Trains for some minutes, and stores the samples and the verdict.

    Args:
        minutes: how long the training runs after its first report.
        out: the JSON file. It is written again with each sample, so that a run that is cut short is kept.
        corpus: the text to train on; a synthetic one if None.
        options: further options of `fastqt train`.

    Returns:
        Whether memory, descriptors and threads stayed flat and the training ended as it was asked to.
    """

    with tempfile.TemporaryDirectory() as folder:
        text, held_out, run = (Path(folder) / name for name in ("text.txt", "held_out.txt", "run"))
        write_corpus(text, 20_000, seed=0)
        write_corpus(held_out, 2_000, seed=1)

        settings = [*SETTINGS, "--valid", str(held_out), *options]
        command = [sys.executable, "-m", "fastqt", "train", corpus or str(text), "--out", str(run), *settings]

        stored: dict[str, Any] = {
            "machine_info": processor_and_versions(),
            "command": " ".join(["fastqt", "train", *SETTINGS, *options]),
            "corpus": "a file" if corpus else "synthetic",
            "minutes": minutes,
        }

        with open(Path(folder) / "stderr", "w+") as stderr:
            with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=stderr) as training:
                _wait_for(run / "metrics.jsonl", training)
                samples = _samples_until(training, 60 * minutes, out, stored)
                training.send_signal(signal.SIGTERM)
                status = training.wait(PATIENCE)
            stderr.seek(0)
            print("".join(stderr.readlines()[-3:]), end="")

        metrics = run / "metrics.jsonl"
        lines = metrics.read_text().splitlines() if metrics.exists() else []

        stored |= {"exit_status": status, "steps": json.loads(lines[-1])["step"] if lines else 0}
        # SIGTERM saves a checkpoint and ends the training with 128 + its number.
        stopped = status == 128 + signal.SIGTERM and (run / "checkpoint.safetensors").exists()
    stored |= {"stopped_as_asked": stopped, "verdict": verdict(samples)}
    _store(out, stored, samples)
    print(json.dumps(stored["verdict"], indent=2))
    return stopped and bool(stored["verdict"]["flat"])


def _wait_for(report: Path, training: subprocess.Popen[Any]) -> None:
    """Waits until the training has written a report or has ended."""
    while training.poll() is None and not (report.exists() and report.stat().st_size):
        time.sleep(0.05)


def _samples_until(
    training: subprocess.Popen[Any], seconds: float, out: Path, stored: dict[str, Any]
) -> list[Sample]:
    """Samples until the time is over or the training has ended."""
    samples: list[Sample] = []
    began = time.monotonic()
    interval = min(INTERVAL, seconds / 20)
    while (now := time.monotonic() - began) < seconds:
        time.sleep(min(interval, seconds - now))
        if training.poll() is not None:
            break
        samples.append(sample(training.pid, time.monotonic() - began))
        _store(out, stored, samples)
    return samples


def _store(out: Path, stored: dict[str, Any], samples: Sequence[Sample]) -> None:
    columns = {name: [getattr(each, name) for each in samples] for name in Sample._fields}
    columns["seconds"] = [round(seconds, 1) for seconds in columns["seconds"]]
    partial = out.with_name(out.name + ".partial")
    partial.write_text(json.dumps(stored | {"samples": columns}) + "\n")
    partial.replace(out)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a soak; returns 0 if everything held."""
    parser = argparse.ArgumentParser(prog="benchmarks.soak", description=__doc__.split("\n")[0])
    kind = parser.add_mutually_exclusive_group(required=True)
    kind.add_argument("--minutes", type=float, help="train for so long and watch the memory")
    kind.add_argument("--kills", type=int, help="kill and resume a training so many times")
    parser.add_argument("--out", type=Path, required=True, help="JSON file for what was found")
    parser.add_argument("--corpus", help="text to train on (default: a synthetic one)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments of the kills (default: 0)")
    options, others = parser.parse_known_args(arguments)
    if options.kills is not None:
        return 0 if kill_and_resume(options.kills, options.out, options.seed) else 1
    return 0 if watch(options.minutes, options.out, options.corpus, others) else 1


if __name__ == "__main__":
    sys.exit(main())
