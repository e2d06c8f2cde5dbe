"""What docs/papers.md shows of GLOSS, from the stored runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from statistics import mean
from typing import Any

from benchmarks.measure.tables import number, table
from benchmarks.papers.plans import TABLES
from benchmarks.papers.runs import STORED
from benchmarks.papers.store import stored

SUPERVISED, SIMILAR = ("CR", "TREC"), ("STS13", "STS15", "STSB")
# Singh, Fan and Auli (2019), tables 1 and 3: CR, TREC, STS13, STS15, STS-B, by the decoder and d.
SOURCE = {
    ("bow", 100): (72.0, 71.0, 51.8, 71.2, 72.4),
    ("bow", 300): (74.7, 78.0, 55.6, 73.4, 72.1),
    ("pos", 100): (73.9, 74.8, 54.8, 71.7, 69.7),
    ("pos", 300): (75.5, 80.2, 52.7, 73.4, 69.0),
}
TITLES = {"bow": "bags of words", "pos": "words by position"}


def figures(record: Mapping[str, Any]) -> tuple[float, ...]:
    """Accuracies of SUPERVISED, and Pearson's coefficients of SIMILAR as in the source, in per cent."""
    tasks = record["tasks"]
    accuracies = (tasks[task]["accuracy"] for task in SUPERVISED)
    part = {"STSB": "test"}
    coefficients = (tasks[task][part.get(task, "all")]["pearson"] for task in SIMILAR)
    return tuple(100 * value for value in (*accuracies, *coefficients))


def means(values: tuple[float, ...]) -> tuple[float, float]:
    """The mean of SUPERVISED and that of SIMILAR."""
    return mean(values[: len(SUPERVISED)]), mean(values[len(SUPERVISED) :])


def gloss_table() -> str:
    """Ours, and the source's."""
    records, rows = stored("gloss"), []
    for run in TABLES["gloss"]:
        if run.name in records:
            record, (decoder, _, d) = records[run.name], run.name.partition("-")
            title = f"{TITLES[decoder]} {d.partition(' ')[2]}".strip() if d else run.name
            minutes = number(record["cpu_minutes"])
            rows.append((title, f"{record['width']}", *_shown(figures(record)), minutes))
    for (decoder, width), values in SOURCE.items():
        rows.append((f"source: {TITLES[decoder]}", f"{width}", *_shown(values), "–"))
    header = ("vectors", "d", *SUPERVISED, "mean", *SIMILAR, "mean", "CPU minutes")
    return table(header, rows)


def _shown(values: tuple[float, ...]) -> tuple[str, ...]:
    supervised, similar = means(values)
    cut = len(SUPERVISED)
    whole = (*values[:cut], supervised, *values[cut:], similar)
    return tuple(f"{value:.1f}" for value in whole)


def gloss_ordering() -> str:
    """The source's orderings: its differences of means over these tasks, beside ours."""
    records = stored("gloss")
    of_decoders = _of_decoders(records, "")
    source = {key: means(values) for key, values in SOURCE.items()}
    sizes = sorted(
        {d for decoder, d in of_decoders if ("bow", d) in of_decoders and ("pos", d) in of_decoders}
    )

    rows = _decoder_rows(source, of_decoders, sizes, "")
    for way in OTHER_WAYS:
        of_way = _of_decoders(records, way)
        rows += _decoder_rows(
            source, of_way, [d for d in sizes if {("bow", d), ("pos", d)} <= {*of_way}], way
        )

    for small, large in pairwise(sizes):
        for decoder, name in TITLES.items():
            for title, index in (("STS", 1), ("supervised", 0)):
                ends = (decoder, large), (decoder, small)
                differences = _differences(source, of_decoders, *ends, index, 1)
                rows.append((f"{name}: {title}, d={large} − d={small}", *differences))

    if not rows:
        return "Not all runs of this table are stored yet."
    return table(("difference of means", "source", "ours"), rows)


Means = Mapping[tuple[str, int], tuple[float, float]]
OTHER_WAYS = (" for 60 epochs", " of seed 1")  # of training the same decoders


def _of_decoders(records: Mapping[str, Any], way: str) -> Means:
    """The means of the decoders that were trained in one way, by decoder and d."""
    by_size = {}
    for name, record in records.items():
        decoder, _, d = name.removesuffix(way).partition("-")
        if name.endswith(way) and decoder in TITLES and d.isdigit():
            by_size[decoder, int(d)] = means(figures(record))
    return by_size


def _decoder_rows(source: Means, ours: Means, sizes: list[int], way: str) -> list[tuple[str, ...]]:
    """How the two decoders of each size differ."""
    titles = (("STS, bags − positions", 1, 1), ("supervised, positions − bags", 0, -1))
    return [
        (f"d={d}{way}: {title}", *_differences(source, ours, ("bow", d), ("pos", d), index, sign))
        for d in sizes
        for title, index, sign in titles
    ]


def _differences(
    source: Means, ours: Means, one: tuple[str, int], other: tuple[str, int], index: int, sign: int
) -> tuple[str, ...]:
    return tuple(
        f"{sign * (known[one][index] - known[other][index]):+.1f}" if one in known and other in known else "–"
        for known in (source, ours)
    )


def reproduced_table() -> str:
    """What each decoder reproduces of its sentences."""
    rows = [
        (
            name,
            f"{record['settings']['word_dim']}",
            f"{record['settings']['epochs']}",
            f"{record['trained']:,}",
            f"{record['cpu_minutes']:.1f}",
            f"{record['loss_per_word']:.2f}",
            f"{100 * record['order_limit']:.0f}",
            *(
                f"{100 * record['reproduced'][of][share]:.0f}"
                for of in ("trained", "unseen")
                for share in ("right", "in_sentence")
            ),
        )
        for name, record in stored("gloss-samples").items()
    ]

    header = (
        "sentences",
        "d",
        "epochs",
        "trained on",
        "CPU minutes",
        "loss per word",
        "any d: right",
        "right",
        "in sentence",
    )
    return table((*header, "unseen: right", "unseen: in sentence"), rows)


SHARES = ("pairs", "triples", "whole", "repeats")


# Decoders of which the table of phrases has all rows; of the others it has what the page speaks of.
WHOLE = ("pronoun", "any beginning")
OF_OTHERS = ("normal", "fitted normal")


def phrases_table() -> str:
    """Word pairs and triples of real and of generated sentences."""
    rows = []
    for name, record in stored("gloss-samples").items():
        real = record["real"] if name in WHOLE else {}
        made = record["made"] if name in WHOLE else {kind: record["made"][kind] for kind in OF_OTHERS}
        for kind, shares in real.items():
            rows.append((name, kind, *_per_cent(*(shares[of] for of in SHARES)), *["–"] * 5))
        for kind, shares in made.items():
            shuffled, neither = shares["in_another_order"], shares["of_neither"]
            known = _per_cent(*(shares[of] for of in SHARES), shuffled["pairs"], shuffled["triples"])
            new = "–" if neither is None else f"{100 * neither:.1f}"
            rows.append((name, kind, *known, *_per_cent(shares["in_text"], shares["distinct"]), new))
    header = ("decoder", "sentences", "pairs", "triples", "all pairs", "a word twice in a row")
    last = ("shuffled: pairs", "shuffled: triples", "in the text", "distinct", "words of neither end")
    return table((*header, *last), rows)


def _per_cent(*values: float) -> tuple[str, ...]:
    return tuple(f"{100 * value:.0f}" for value in values)


def inference_table() -> str:
    """Two ways to infer the unseen sentences of the decoder whose samples are shown."""
    ways = stored("gloss-samples")[WHOLE[0]]["inference"]
    rows = [
        (
            f"{way['steps']}",
            f"{way['learning_rate']:g}",
            f"{1000 * way['cpu_seconds'] / way['sentences']:.1f}",
            f"{way['loss']:.2f}",
            f"{100 * way['right']:.1f}",
        )
        for way in ways
    ]
    return table(("steps", "learning rate", "CPU ms a sentence", "mean loss", "right words, %"), rows)


def samples_text() -> str:
    return f"```\n{(STORED / 'gloss-samples.txt').read_text().rstrip()}\n```"


SECTIONS: dict[str, Callable[[], str]] = {
    "gloss": gloss_table,
    "gloss ordering": gloss_ordering,
    "gloss reproduced": reproduced_table,
    "gloss phrases": phrases_table,
    "gloss inference": inference_table,
    "gloss samples": samples_text,
}
