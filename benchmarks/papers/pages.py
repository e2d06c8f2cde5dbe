"""The tables of docs/papers.md, from the stored runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import mean, stdev
from typing import Any

from benchmarks.measure.tables import table
from benchmarks.papers.plans import SEEDS, TABLES, VIEWS
from benchmarks.papers.runs import CLASSIFICATION, STS, figure
from benchmarks.papers.store import stored

Record = Mapping[str, Any]


def of_task(record: Record, task: str) -> float:
    """A record's figure of a task, in per cent."""
    return figure(task, record["tasks"][task])


def mean_of(record: Record, tasks: Sequence[str]) -> float:
    return mean(of_task(record, task) for task in tasks)


def _seeds(name: str, records: Mapping[str, Record]) -> list[Record]:
    """The records of a run from each seed that is stored."""
    found = (records.get(f"{name}-seed{seed}") for seed in SEEDS)
    return [record for record in found if record is not None]


def spread(values: Sequence[float]) -> str:
    """The mean, and the standard deviation where there are several."""
    if not values:
        return "–"
    return f"{mean(values):.1f}" + (f" ± {stdev(values):.1f}" if len(values) > 1 else "")


def blog_table() -> str:
    """k neighbours on each side: accuracies of each k, over the seeds."""
    records = stored("blog")
    rows = []
    for encoder, found in (("bag of words", "bow"), ("GRU", "gru")):
        for k in (1, 2, 3, 4):
            name = f"{found}-k{k}"
            of_k = _seeds(name, records) or [records[x] for x in (name,) if x in records]
            if of_k:
                figures = (spread([of_task(r, task) for r in of_k]) for task in CLASSIFICATION)
                similar = spread([mean_of(r, STS) for r in of_k])
                rows.append((encoder, str(k), *figures, similar, f"{len(of_k)}"))
    return table(("encoder", "k", *CLASSIFICATION, "mean of STS", "seeds"), rows)


def blog_ordering() -> str:
    """Whether k matters: how far the means of the four k are apart, beside what a seed changes."""
    records = stored("blog")
    rows = []
    for task in CLASSIFICATION:
        by_k = {k: [of_task(r, task) for r in _seeds(f"bow-k{k}", records)] for k in (1, 2, 3, 4)}
        if any(len(values) < len(SEEDS) for values in by_k.values()):
            continue
        means = {k: mean(values) for k, values in by_k.items()}
        best, worst = max(means, key=means.__getitem__), min(means, key=means.__getitem__)
        within = mean(stdev(values) ** 2 for values in by_k.values()) ** 0.5
        # Of a difference of two means of as many seeds each.
        error = within * (2 / len(SEEDS)) ** 0.5
        rows.append(
            (
                task,
                f"k={best}: {means[best]:.1f}",
                f"k={worst}: {means[worst]:.1f}",
                f"{means[best] - means[worst]:.1f}",
                f"{error:.1f}",
            )
        )
    if not rows:
        return "Not all runs of this table are stored yet."
    return table(("task", "best", "worst", "difference", "its standard error"), rows)


def systems_table() -> str:
    """The encoders of QuickThoughts beside baselines of the same word vectors."""
    records = stored("quickthoughts")
    rows = [
        (
            run.name,
            f"{records[run.name]['width']:,}",
            *(f"{of_task(records[run.name], task):.1f}" for task in (*CLASSIFICATION, "SICK", *STS)),
            f"{mean_of(records[run.name], CLASSIFICATION):.1f}",
            f"{mean_of(records[run.name], STS):.1f}",
        )
        for run in TABLES["quickthoughts"]
        if run.name in records
    ]
    header = ("encoder", "width", *CLASSIFICATION, "SICK", *STS, "classification", "STS")
    return table(header, rows)


def views_table(base: str) -> str:
    """SimCSE and MixCSE from an encoder: STS over the seeds, of the model that development chose."""
    records = stored(f"views-{base}")
    rows = []
    for name in VIEWS:
        found = _seeds(name, records)
        if found:
            figures = (spread([of_task(r, task) for r in found]) for task in (*STS, "SICK"))
            rows.append((f"`{name}`", *figures, spread([mean_of(r, STS) for r in found])))
    return table(("loss", *STS, "SICK", "mean of STS"), rows)


def sizes_table() -> str:
    """Width of the sentence vectors, minutes of training, mean accuracy."""
    records = stored("sizes")
    rows = [
        (
            run.name.removeprefix("H="),
            f"{records[run.name]['width']:,}",
            f"{records[run.name]['cpu_minutes']:.0f}",
            *(f"{of_task(records[run.name], task):.1f}" for task in CLASSIFICATION),
            f"{mean_of(records[run.name], CLASSIFICATION):.1f}",
        )
        for run in TABLES["sizes"]
        if run.name in records
    ]
    return table(("H", "width", "CPU minutes", *CLASSIFICATION, "mean"), rows)


def hours_table() -> str:
    """Mean accuracy over the minutes of training."""
    records = stored("hours")
    rows = []
    for run in TABLES["hours"]:
        if run.name in records:
            record, (model, _, steps) = records[run.name], run.name.partition(" at ")
            figures = (f"{of_task(record, task):.1f}" for task in CLASSIFICATION)
            mean = f"{mean_of(record, CLASSIFICATION):.1f}"
            rows.append((model, f"{int(steps):,}", f"{record['cpu_minutes']:.0f}", *figures, mean))
    return table(("model", "steps", "CPU minutes", *CLASSIFICATION, "mean"), rows)


SECTIONS: dict[str, Callable[[], str]] = {
    "blog": blog_table,
    "blog ordering": blog_ordering,
    "systems": systems_table,
    "sizes": sizes_table,
    "hours": hours_table,
    "views minilm": lambda: views_table("minilm"),
    "views masked words": lambda: views_table("masked-words"),
}
