"""What the figures say about the sources' claims, from the stored parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import mean
from typing import Any

from benchmarks.measure.tables import table
from benchmarks.papers.pages import (
    FEW_LABELS_SIZES,
    FEW_LABELS_SYSTEMS,
    FEW_LABELS_TASKS,
    LOSSES,
    LOSSES_TASKS,
    NOT_STORED,
    curve,
    mean_of,
    of_task,
)
from benchmarks.papers.plans import SEEDS
from benchmarks.papers.runs import CLASSIFICATION, STS
from benchmarks.papers.store import stored

BASELINE = "bag of words before training"
UNTRAINED = "before training"
SHOWN = 0.05  # per cent: smaller gains are 0 in the tables


def few_labels_needed() -> str:
    """With how many labels each encoder is as good as the untrained bag is with the most."""
    records = stored("few-labels")
    most = FEW_LABELS_SIZES[-1]
    systems = [system for system in FEW_LABELS_SYSTEMS if system != BASELINE]
    rows = []
    for task in FEW_LABELS_TASKS:
        baseline = records.get(f"{task}, {BASELINE}")
        if baseline is not None:
            wanted = curve(baseline)[most][0]
            needed = (_needed(records.get(f"{task}, {system}"), wanted) for system in systems)
            rows.append((task, f"{wanted:.1f}", *needed))
    if not rows:
        return NOT_STORED
    return table(("task", f"{BASELINE}, n = {most:,}", *systems), rows)


def _needed(record: Mapping[str, Any] | None, wanted: float) -> str:
    if record is None:
        return "–"
    reached = (size for size, (accuracy, _) in curve(record).items() if accuracy >= wanted)
    return next((f"{size:,}" for size in reached), "more")


def more_text() -> str:
    """What ten times the text changes, over the seeds that have both shares."""
    records = stored("limited-text")
    rows = []
    for less, more in ((1, 10), (10, 100)):
        for expanded in (False, True):
            ending = " expanded" if expanded else ""

            names = [(f"{less}-seed{seed}{ending}", f"{more}-seed{seed}{ending}") for seed in SEEDS]
            pairs = [(records[a], records[b]) for a, b in names if a in records and b in records]

            if pairs:
                gains = {t: mean(of_task(b, t) - of_task(a, t) for a, b in pairs) for t in CLASSIFICATION}
                similar = mean(mean_of(b, STS) - mean_of(a, STS) for a, b in pairs)
                better = [task for task, gain in gains.items() if gain > SHOWN]
                rows.append(
                    (
                        f"{less} % to {more} %",
                        "GloVe's words added" if expanded else "of the text",
                        f"{len(better)} of {len(gains)}",
                        f"{mean(gains.values()):+.1f}",
                        f"{similar:+.1f}",
                        f"{len(pairs)}",
                    )
                )

    if not rows:
        return NOT_STORED
    return table(("text", "vocabulary", "tasks that gain", "classification", "STS", "seeds"), rows)


def mean_classifier_claims() -> str:
    """What training changes for the mean classifier, and how far it is behind logistic regression."""
    records = stored("mean-classifier")
    rows = []
    for loss in LOSSES:
        for kind, shown in (("means", "means"), ("centred", "means, centred")):
            now, before = _of_tasks(records, loss, kind), _of_tasks(records, UNTRAINED, kind)
            if not now or not before:
                continue

            gains = [now[task] - before[task] for task in now]
            logistic = _of_tasks(records, loss, "logistic")
            rows.append(
                (
                    loss,
                    shown,
                    "–" if loss == UNTRAINED else f"{sum(gain > SHOWN for gain in gains)} of {len(gains)}",
                    "–" if loss == UNTRAINED else f"{mean(gains):+.1f}",
                    f"{mean(logistic[task] - now[task] for task in now):.1f}",
                )
            )

    if not rows:
        return NOT_STORED
    header = ("encoder", "classifier", "tasks that gain by training", "mean gain")
    return table((*header, "behind logistic regression"), rows)


def _of_tasks(records: Mapping[str, Mapping[str, Any]], loss: str, classifier: str) -> dict[str, float]:
    """The accuracies of a classifier on unit vectors in per cent, each the mean over the seeds."""
    named = (records.get(f"{loss}, seed {seed}") for seed in SEEDS)
    by_seed = [record["tasks"] for record in named if record is not None]
    if not by_seed:
        return {}
    return {task: 100 * mean(tasks[task]["unit"][classifier] for tasks in by_seed) for task in LOSSES_TASKS}


SECTIONS: dict[str, Callable[[], str]] = {
    "few labels needed": few_labels_needed,
    "more text": more_text,
    "mean classifier claims": mean_classifier_claims,
}
