"""The tables of docs/papers.md, from the stored runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import mean, stdev
from typing import Any

from benchmarks.measure.tables import number, table
from benchmarks.papers import gloss_pages
from benchmarks.papers.plans import SEEDS, TABLES, VIEWS
from benchmarks.papers.runs import CLASSIFICATION, STS, figure
from benchmarks.papers.store import stored

Record = Mapping[str, Any]
RANGE_OF_FOUR = 2.059  # the expected range of four draws from N(0, 1)
NOT_STORED = "Not all runs of this table are stored yet."

# Of studies whose results are stored, and whose scripts the history has.
FEW_LABELS_TASKS, FEW_LABELS_SIZES = ("MR", "CR", "SUBJ"), (8, 32, 128, 512, 2048)
FEW_LABELS_SYSTEMS = (
    "mean of GloVe",
    "bag of words before training",
    "bag of words from GloVe",
    "the bag with GloVe's words",
    "mean of GloVe, the bag's words",
)
SHARES = (1, 3, 10, 30, 100)  # of the text, in per cent
LOSSES = ("before training", "CURL, pairs", "CURL, blocks", "QuickThoughts")
LOSSES_TASKS = ("MR", "CR", "SUBJ", "TREC")


def of_task(record: Record, task: str) -> float:
    """A record's figure of a task, in per cent."""
    return figure(task, record["tasks"][task])


def mean_of(record: Record, tasks: Sequence[str]) -> float:
    return mean(of_task(record, task) for task in tasks)


def _seeds(name: str, records: Mapping[str, Record]) -> list[Record]:
    """The records of a run from each seed that is stored."""
    of_seeds = (records.get(f"{name}-seed{seed}") for seed in SEEDS)
    return [record for record in of_seeds if record is not None]


def spread(values: Sequence[float]) -> str:
    """The mean, and the standard deviation where there are several."""
    if not values:
        return "–"
    return f"{mean(values):.1f}" + (f" ± {stdev(values):.1f}" if len(values) > 1 else "")


def blog_table() -> str:
    """k neighbours on each side: accuracies of each k, over the seeds."""
    records = stored("blog")
    rows = []
    for encoder, prefix in (("bag of words", "bow"), ("GRU", "gru")):
        for k in (1, 2, 3, 4):
            name = f"{prefix}-k{k}"
            of_k = _seeds(name, records) or [records[x] for x in (name,) if x in records]
            if of_k:
                figures = (spread([of_task(r, task) for r in of_k]) for task in CLASSIFICATION)
                similar = spread([mean_of(r, STS) for r in of_k])
                rows.append((encoder, str(k), *figures, similar, f"{len(of_k)}"))
    return table(("encoder", "k", *CLASSIFICATION, "mean of STS", "seeds"), rows)


def blog_ordering() -> str:
    """Whether k matters: how far the means of the four k are apart, beside what seeds alone would do."""
    records = stored("blog")
    of_seeds = {k: _seeds(f"bow-k{k}", records) for k in (1, 2, 3, 4)}
    if any(len(seed_records) < len(SEEDS) for seed_records in of_seeds.values()):
        return NOT_STORED

    rows = []
    for name, tasks in (*((task, (task,)) for task in CLASSIFICATION), ("mean of STS", STS)):
        by_k = {
            k: [mean_of(record, tasks) for record in seed_records] for k, seed_records in of_seeds.items()
        }
        means = {k: mean(values) for k, values in by_k.items()}

        best, worst = max(means, key=means.__getitem__), min(means, key=means.__getitem__)
        within = mean(stdev(values) ** 2 for values in by_k.values()) ** 0.5
        rows.append(
            (
                name,
                f"k={best}: {means[best]:.1f}",
                f"k={worst}: {means[worst]:.1f}",
                f"{means[best] - means[worst]:.1f}",
                f"{RANGE_OF_FOUR * within / len(SEEDS) ** 0.5:.1f}",
            )
        )

    return table(("task", "best", "worst", "difference", "by seeds alone"), rows)


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


def beside_the_mean_table() -> str:
    """How each encoder of QuickThoughts compares with the mean of the GloVe vectors."""
    records = stored("quickthoughts")
    base = records.get("mean of GloVe")
    if base is None:
        return NOT_STORED
    rows = []
    for run in TABLES["quickthoughts"]:
        if (run.train is None and run.words is None) or run.name not in records:
            continue
        record = records[run.name]
        gains = {task: of_task(record, task) - of_task(base, task) for task in CLASSIFICATION}
        better = [task for task in CLASSIFICATION if gains[task] > 0]
        worse = ", ".join(f"{task} {gains[task]:+.1f}" for task in CLASSIFICATION if gains[task] <= 0)
        similar = mean_of(record, STS) - mean_of(base, STS)
        rows.append((run.name, f"{len(better)} of {len(CLASSIFICATION)}", worse or "–", f"{similar:+.1f}"))
    return table(("encoder", "tasks better", "tasks not better", "mean of STS"), rows)


def masked_words_table() -> str:
    """What the Transformer predicts of held-out text through its training with masked words."""
    records = stored("masked-words")
    rows = [
        (
            f"{line['step']:,}",
            f"{line['validation_loss']:.2f}",
            f"{100 * line['validation_accuracy']:.1f}",
            f"{line['cpu_seconds'] / 60:.0f}",
        )
        for line in records["log"][::3] + records["log"][-1:]
    ]
    return table(("steps", "nats per masked token", "predicted rightly, %", "CPU minutes"), rows)


def views_table(base: str) -> str:
    """SimCSE and MixCSE from an encoder: STS over the seeds, of the model that development chose."""
    records = stored(f"views-{base}")
    alone = [run.name for run in TABLES[f"views-{base}"] if "-seed" not in run.name]
    rows = []
    for name in (*alone, *VIEWS):
        of_seeds = _seeds(name, records) or ([records[name]] if name in records else [])
        if of_seeds:
            figures = (spread([of_task(r, task) for r in of_seeds]) for task in (*STS, "SICK"))
            rows.append(
                (
                    f"`{name}`" if name in VIEWS else name,
                    *figures,
                    spread([mean_of(r, STS) for r in of_seeds]),
                )
            )
    return table(("loss", *STS, "SICK", "mean of STS"), rows) if rows else NOT_STORED


# What a training with views reports, and the title of its column.
SCORES = {
    "positive_cosine": "positives",
    "mixed_cosine": "mixtures",
    "negative_cosine": "other sentences",
    "alignment": "alignment",
    "uniformity": "uniformity",
}


def scores_table(base: str) -> str:
    """The mean cosines of the last batches before the end, with dropout, and the geometry of the vectors."""
    records = stored(f"views-{base}")
    rows = []
    for name in VIEWS:
        ends = [record["log"][-1] for record in _seeds(name, records)]
        if ends:
            rows.append((f"`{name}`", *(f"{mean(end[key] for end in ends):.2f}" for key in SCORES)))
    return table(("loss", *SCORES.values()), rows) if rows else NOT_STORED


def bootstrap_table(base: str) -> str:
    """Each form of MixCSE minus SimCSE in the mean of STS: the interval, and each seed's difference."""
    records = stored("bootstrap")

    rows = []
    for form in VIEWS:
        record = records.get(f"{base} {form}")
        if record is not None:
            low, high = record["interval"]
            rows.append(
                (
                    f"`{form}`",
                    f"{record['difference']:+.2f}",
                    f"{low:+.2f} to {high:+.2f}",
                    ", ".join(f"{x:+.2f}" for x in record["difference_of_seeds"]),
                    f"{stdev(record['difference_of_seeds']):.2f}",
                    "yes" if low > 0 else "no" if high < 0 else "not decided",
                )
            )

    if not rows:
        return NOT_STORED
    header = ("form", "difference", "95 % interval", "of each seed", "their standard deviation")
    return table((*header, "better than SimCSE"), rows)


def sizes_table() -> str:
    """Width of the sentence vectors, minutes of training, mean accuracy."""
    records = stored("sizes")
    rows = [
        (
            run.name.removeprefix("H="),
            f"{records[run.name]['width']:,}",
            number(records[run.name]["cpu_minutes"]),
            *(f"{of_task(records[run.name], task):.1f}" for task in (*CLASSIFICATION, "SICK")),
            f"{mean_of(records[run.name], CLASSIFICATION):.1f}",
        )
        for run in TABLES["sizes"]
        if run.name in records
    ]
    return table(("H", "width", "CPU minutes", *CLASSIFICATION, "SICK", "mean of the six"), rows)


def hours_table() -> str:
    """Mean accuracy over the minutes of training."""
    records = stored("hours")
    rows = []
    for run in TABLES["hours"]:
        if run.name in records:
            record, (model, _, steps) = records[run.name], run.name.partition(" at ")
            figures = (f"{of_task(record, task):.1f}" for task in CLASSIFICATION)
            mean = f"{mean_of(record, CLASSIFICATION):.1f}"
            rows.append((model, f"{int(steps):,}", number(record["cpu_minutes"]), *figures, mean))
    return table(("model", "steps", "CPU minutes", *CLASSIFICATION, "mean"), rows)


def curve(record: Record) -> dict[int, tuple[float, float]]:
    """Mean and standard deviation of the draws for each number of labels, in per cent."""
    return {
        int(size): (100 * mean(values), 100 * stdev(values)) for size, values in record["accuracies"].items()
    }


def few_labels_table() -> str:
    """Accuracy over the number of labelled sentences, for each encoder."""
    records = stored("few-labels")
    rows = []
    for task in FEW_LABELS_TASKS:
        for system in FEW_LABELS_SYSTEMS:
            record = records.get(f"{task}, {system}")
            if record is not None:
                of_sizes = curve(record).values()
                rows.append(
                    (task, system, *(f"{mean:.1f} ± {deviation:.1f}" for mean, deviation in of_sizes))
                )
    if not rows:
        return NOT_STORED
    return table(("task", "vectors", *(f"n = {size:,}" for size in FEW_LABELS_SIZES)), rows)


def limited_text_table(*, expanded: bool = False) -> str:
    """Figures over the share of the corpus, with the vocabulary of the share, or with GloVe's words added."""
    records = stored("limited-text")

    rows = []
    for share in SHARES:
        ending = " expanded" if expanded else ""
        names = (f"{share}-seed{seed}{ending}" for seed in SEEDS)
        of_seeds = [records[name] for name in names if name in records]

        if of_seeds:
            rows.append(
                (
                    f"{share} %",
                    f"{mean(record['text']['sentences'] for record in of_seeds):,.0f}",
                    *(spread([of_task(r, task) for r in of_seeds]) for task in CLASSIFICATION),
                    *(spread([mean_of(r, tasks) for r in of_seeds]) for tasks in (CLASSIFICATION, STS)),
                    f"{len(of_seeds)}",
                )
            )

    if not rows:
        return NOT_STORED
    return table(("text", "sentences", *CLASSIFICATION, "classification", "STS", "seeds"), rows)


def mean_classifier_table(form: str = "unit") -> str:
    """The mean classifier and logistic regression on the vectors of each loss, over the seeds.

    Args:
        form: "unit" for vectors at norm 1, "raw" for the vectors as they are.
    """
    records = stored("mean-classifier")
    rows = []
    for task in LOSSES_TASKS:
        for loss in LOSSES:
            named = (records.get(f"{loss}, seed {seed}") for seed in SEEDS)
            of_seeds = [r["tasks"][task][form] for r in named if r is not None and task in r["tasks"]]
            if of_seeds:
                names = ("means", "centred", "few", "few_centred", "logistic")
                figures = (spread([100 * of_seed[name] for of_seed in of_seeds]) for name in names)
                rows.append((task, loss, *figures, f"{len(of_seeds)}"))
    if not rows:
        return NOT_STORED
    header = ("task", "encoder", "means", "means, centred", "of 5 each", "of 5 each, centred", "logistic")
    return table((*header, "seeds"), rows)


# Which runs the curves of a table need.
CURVES = {
    "hours": [run.name for run in TABLES["hours"]],
    **{
        f"views-{base}": [f"{loss}-seed{seed}" for loss in ("simcse", "mixcse-0.2") for seed in SEEDS]
        for base in ("minilm", "masked-words")
    },
}


def curves(name: str, title: str) -> str:
    """The picture that benchmarks/papers/curves.py draws from the stored runs of a table."""
    if not all(run in stored(name) for run in CURVES[name]):
        return NOT_STORED
    return f"![{title}](../benchmarks/results/papers/{name}.svg)"


def neighbours_text() -> str:
    """The nearest sentences of each query, by both kinds of vectors."""
    records = stored("neighbours")
    lines = []
    for query in next(iter(records.values()))["neighbours"]:
        lines.append(query)
        for system, record in records.items():
            lines.append(f"  {system}")
            lines += [f"    {n['cosine']:.3f}  {n['sentence']}" for n in record["neighbours"][query]]
        lines.append("")
    return "\n".join(["```", *lines[:-1], "```"])


SECTIONS: dict[str, Callable[[], str]] = {
    "blog": blog_table,
    "blog ordering": blog_ordering,
    "systems": systems_table,
    "systems beside the mean": beside_the_mean_table,
    "sizes": sizes_table,
    "hours": hours_table,
    "masked words": masked_words_table,
    "views minilm": lambda: views_table("minilm"),
    "views masked words": lambda: views_table("masked-words"),
    "views masked words longer": lambda: views_table("masked-words-longer"),
    "scores minilm": lambda: scores_table("minilm"),
    "scores masked words": lambda: scores_table("masked-words"),
    "scores masked words longer": lambda: scores_table("masked-words-longer"),
    "few labels": few_labels_table,
    "limited text": limited_text_table,
    "limited text expanded": lambda: limited_text_table(expanded=True),
    "mean classifier": mean_classifier_table,
    "mean classifier raw": lambda: mean_classifier_table("raw"),
    "neighbours": neighbours_text,
    "curves hours": lambda: curves("hours", "Accuracy over minutes of training"),
    "curves minilm": lambda: curves("views-minilm", "Scores through training, from MiniLM"),
    "curves masked words": lambda: curves("views-masked-words", "Scores through training, from masked words"),
    "bootstrap minilm": lambda: bootstrap_table("minilm"),
    "bootstrap masked words": lambda: bootstrap_table("masked-words"),
    "bootstrap masked words longer": lambda: bootstrap_table("masked-words-longer"),
    **gloss_pages.SECTIONS,
}
