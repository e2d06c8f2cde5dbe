"""A long training whose memory stays flat.

python -m benchmarks.soak --minutes 120 --out benchmarks/results/soak-120-minutes.json

trains in a child process, with validations and checkpoints, and reads from /proc every ten seconds how much
memory is resident, how many file descriptors are open and how many threads run. The first tenth of the samples
is warm-up. Of the other samples, the second half is compared with the first:

- the median of the resident memory may not have grown by more than 1 %. In a training of two hours, a leak of
  1 % an hour is seen, which is a few bytes a step; what a checkpoint allocates for a moment is not;
- the smallest numbers of descriptors and of threads may not have grown. The largest would count a checkpoint
  that is being written in the moment of a sample; a leak raises the smallest too.

Options that this command does not know go to `fastqt train`, for instance `--encoder gru`.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

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
    descriptors: int
    threads: int


def sample(pid: int, seconds: float) -> Sample:
    """Reads from /proc what a process holds now."""
    process = Path("/proc") / str(pid)
    status = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines())
    descriptors = len(list((process / "fd").iterdir()))
    return Sample(seconds, int(status["VmRSS"].split()[0]), descriptors, int(status["Threads"]))


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
    rss = [median(each.rss_kib for each in half) for half in halves]
    found: dict[str, Any] = {
        "rss_kib": {"medians": rss, "flat": rss[1] <= rss[0] * (1 + RSS_GROWTH)},
        "rss_peaks_kib": [max(each.rss_kib for each in half) for half in halves],
    }
    for name in ("descriptors", "threads"):
        least = [min(getattr(each, name) for each in half) for half in halves]
        found[name] = {"smallest": least, "flat": least[1] <= least[0]}
    found["flat"] = all(part["flat"] for part in found.values() if isinstance(part, dict))
    return found


def write_corpus(path: Path, sentences: int, seed: int) -> None:
    """Writes documents of eight sentences, whose words are rare and frequent as in a language.

    Args:
        path: the file to write.
        sentences: their number.
        seed: determines the text.
    """
    generator = random.Random(seed)
    words = [f"word{number}" for number in range(5000)]
    shares = [1 / rank for rank in range(1, len(words) + 1)]
    lines = []
    for number in range(sentences):
        if number and number % 8 == 0:
            lines.append("")
        # Each document has a word of its own, so that there is something to learn.
        lines.append(
            " ".join(
                [f"topic{number // 8 % 500}", *generator.choices(words, shares, k=generator.randint(4, 20))]
            )
        )
    path.write_text("\n".join(lines) + "\n")


def watch(minutes: float, out: Path, corpus: str | None, options: Sequence[str]) -> bool:
    """Trains for some minutes, and stores the samples and the verdict.

    Args:
        minutes: how long the training runs.
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
            "command": f"fastqt train {'CORPUS' if corpus else 'SYNTHETIC'} {' '.join([*SETTINGS, *options])}",
            "minutes": minutes,
        }
        with open(Path(folder) / "stderr", "w+") as stderr:
            with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=stderr) as training:
                samples = _samples_until(training, 60 * minutes, out, stored)
                training.send_signal(signal.SIGTERM)
                status = training.wait(PATIENCE)
            stderr.seek(0)
            print("".join(stderr.readlines()[-3:]), end="")
        lines = (run / "metrics.jsonl").read_text().splitlines() if run.exists() else []
        stored |= {"exit_status": status, "steps": json.loads(lines[-1])["step"] if lines else 0}
        # SIGTERM saves a checkpoint and ends the training with 128 + its number.
        stopped = status == 128 + signal.SIGTERM and (run / "checkpoint.safetensors").exists()
    stored |= {"stopped_as_asked": stopped, "verdict": verdict(samples)}
    _store(out, stored, samples)
    print(json.dumps(stored["verdict"], indent=2))
    return stopped and bool(stored["verdict"]["flat"])


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
    parser.add_argument("--minutes", type=float, required=True, help="how long to train")
    parser.add_argument("--out", type=Path, required=True, help="JSON file for what was found")
    parser.add_argument("--corpus", help="text to train on (default: a synthetic one)")
    options, others = parser.parse_known_args(arguments)
    return 0 if watch(options.minutes, options.out, options.corpus, others) else 1


if __name__ == "__main__":
    sys.exit(main())
