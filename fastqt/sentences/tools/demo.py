"""The demonstration: the loss beside eager PyTorch, and a training on docstrings of this machine, offline."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from fastqt.machine import times
from fastqt.sentences.inference.encoder import SentenceEncoder
from fastqt.sentences.inference.search import nearest
from fastqt.sentences.runs.config import TrainConfig
from fastqt.sentences.tools.library_text import folders, read_library
from fastqt.sentences.train import train
from fastqt.sentences.train.progress import Display

HELD_OUT = 8  # every eighth module is held out
SETTINGS: dict[str, Any] = {
    **{"batch_size": 256, "context_size": 1, "vocab_size": 8000, "max_length": 30},
    **{"learning_rate": 0.002, "clip": 1.0, "epochs": 2},
    **{"report_every": 1 << 20, "valid_every": 60, "valid_batches": 20},
}
QUERIES = (
    "The connection to the server was lost.",
    "The string is split at white space.",
    "The lock is released.",
)
BAR = 400  # characters of the chart for a share of 1
WIDEST_BAR = 60


def run(seed: int = 0) -> None:
    """Measures losses beside eager PyTorch, trains a small model and prints what it has learnt."""
    began = time.perf_counter()
    threads = torch.get_num_threads()
    print(f"fastqt demo, on {threads} thread{'s' if threads > 1 else ''} of this machine's CPU, offline")
    _show_loss()

    documents = read_library(folders())
    with tempfile.TemporaryDirectory(prefix="fastqt-demo-") as name:
        corpus, valid, directory = (Path(name, part) for part in ("corpus.txt", "valid.txt", "run"))
        kept = [text for number, text in enumerate(documents) if number % HELD_OUT]
        held_out = documents[::HELD_OUT]
        _write(corpus, kept)
        _write(valid, held_out)

        config = TrainConfig((str(corpus),), valid=str(valid), seed=seed, **SETTINGS)
        print(
            "\n2. Sentence vectors learnt from the order of sentences (QuickThoughts, sums of word vectors)\n"
            f"   Text: {_count(kept):,} sentences from docstrings of Python, NumPy and PyTorch.\n"
            f"   Held out: {_count(held_out):,} sentences of other modules. The chart shows how often one of "
            f"them\n   picks its neighbour, the sentence before or after it, out of {config.batch_size}.\n"
        )
        train(config, directory, display=_Chart)
        _show_neighbors(directory, str(valid), seed)

    print(f"\n{time.perf_counter() - began:.0f} s in all. Your own text: fastqt train CORPUS --out DIR")


def _count(documents: list[list[str]]) -> int:
    return sum(map(len, documents))


def _write(path: Path, documents: list[list[str]]) -> None:
    path.write_text("\n\n".join("\n".join(sentences) for sentences in documents), encoding="utf-8")


def _show_loss() -> None:
    measurements = times.measure(torch.device("cpu"))
    first = measurements[0]
    print(
        "\n1. Contrastive losses with their gradients beside eager PyTorch, at "
        f"N = {first.N:,} rows of width D = {first.D:,}, {first.dtype};\n"
        "   MiB: peak above inputs and gradients\n"
    )
    for line in times.lines(measurements):
        print(f" {line}")
    print("   fastqt check compares the values with the formulas.")


class _Chart(Display):
    """Prints a bar for each validation, on standard output."""

    def __init__(self, total: int, done: int) -> None:
        self.total, self.done, self._bar = total, done, None
        print(f"   {'step':>7}  held out", flush=True)

    @staticmethod
    def note(text: str) -> None:
        """Prints nothing, because reading this small text takes no time."""

    @staticmethod
    def say(text: str) -> None:
        """Prints nothing: `run` has told what is trained."""

    def report(self, line: dict[str, float]) -> None:
        if "validation_chance" not in line:
            return
        self._draw(f"{line['step']}", _share(line), "#", "untrained" if line["step"] == 0 else "")
        self._chance = 2 * line["validation_chance"]

    def _draw(self, name: str, share: float, sign: str, remark: str = "") -> None:
        bar = sign * min(round(BAR * share), WIDEST_BAR)
        print(f"   {name:>7}  {share:>8.1%}  {bar} {remark}".rstrip(), flush=True)

    def __exit__(self, *about: Any) -> None:
        if hasattr(self, "_chance"):
            self._draw("chance", self._chance, ".")


def _share(line: dict[str, float]) -> float:
    """The share of the rows that pick one of their neighbours.

    Each accuracy is a share of the N-1 rows that have that neighbour; this is one of all N rows.
    """
    rows = 1 - line["validation_chance"]
    return rows * (line["validation_forward_accuracy"] + line["validation_backward_accuracy"])


def _show_neighbors(directory: Path, pool: str, seed: int) -> None:
    """Prints the nearest held-out sentences, by the model before and after training."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        before = SentenceEncoder.load(directory, trained=False)
    after = SentenceEncoder.load(directory)
    print("\n3. The nearest held-out sentence to a query, by cosine")
    neighbors = [nearest(encoder, QUERIES, [pool], 1) for encoder in (before, after)]
    for query, untrained, trained in zip(QUERIES, *neighbors, strict=True):
        print(f"\n   {query}")
        for name, (neighbor,) in (("untrained", untrained), ("trained", trained)):
            print(f"   {name:>11}  {neighbor.cosine:.2f}  {_shortened(neighbor.sentence)}")


def _shortened(sentence: str, width: int = 84) -> str:
    return sentence if len(sentence) <= width else sentence[: width - 1].rsplit(" ", 1)[0] + " …"
