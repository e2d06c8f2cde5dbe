"""Tables of trainings: their held-out accuracy, and the evaluation of their sentence vectors."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from statistics import mean
from typing import Any

from benchmarks.keep import kept
from benchmarks.measure.tables import table
from benchmarks.paths import RESULTS

RETRIEVAL = RESULTS / "retrieval"

# The stored evaluations, in the table's order. A model that was trained from several seeds has one for each,
# NAME-SEED, and the table shows their mean.
ENCODERS = {
    "quickthoughts-bow": "QuickThoughts, bag of words",
    "quickthoughts-gru": "QuickThoughts, GRU",
    "gloss-bow": "GLOSS, bags of words",
    "gloss-pos": "GLOSS, words by position",
    "simcse": "SimCSE, Transformer",
    "mixcse": "MixCSE, Transformer",
    "random-bow": "a bag of words as it begins",
    "random-gru": "a GRU as it begins",
    "random-transformer": "a Transformer as it begins",
    "word2vec": "mean of word2vec vectors",
    "sif": "their SIF mean",
}
# The stored runs of `fastqt retrieve`, NAME-SEED.json each, in the table's order.
CAPTIONS = {
    "openclipart-quickthoughts": "QuickThoughts, a bag of words after one pass over the novels",
    "openclipart-random": "the same with random weights",
    "openclipart-word2vec": "the mean of word2vec vectors",
}
DIRECTIONS = ("captions by image", "images by caption")
RECALLS = ("R@1", "R@5", "R@10")
ACCURACIES = ("MR", "CR", "SUBJ", "TREC", "SST2", "MRPC")
SIMILARITIES = ("STS12", "STS13", "STS14", "STS15")


def learning_table(name: str) -> str:
    """A training's held-out accuracy over time, at about six points."""
    kept = _six([line for line in _reports(name) if "validation_forward_accuracy" in line])
    header = ("step", "minutes", "loss", "forward accuracy", "backward accuracy", "chance")
    return table(
        header,
        (
            (
                f"{line['step']:,}",
                f"{line['seconds'] / 60:.1f}",
                f"{line['validation_loss']:.3f}",
                f"{line['validation_forward_accuracy']:.2%}",
                f"{line['validation_backward_accuracy']:.2%}",
                f"{line['chance']:.2%}",
            )
            for line in kept
        ),
    )


def gloss_table() -> str:
    """The loss per word of training sentences for each decoder, at about six points."""
    bags, places = (_six(_reports(name)) for name in ("gloss-bow", "gloss-pos"))
    header = ("step", "minutes", "bags: loss per word", "minutes", "by position: loss per word")
    return table(
        header,
        (
            (f"{bag['step']:,}", *_of_words(bag), *_of_words(place))
            for bag, place in zip(bags, places, strict=True)
        ),
    )


def gloss_inference_table() -> str:
    """What each way of inference costs and finds, as it is stored."""
    rows = json.loads((RESULTS / "gloss-inference.json").read_text())["rows"]
    header = ("decoder", "inference", "steps", "shapes", "dtype", "seconds of a batch", "seconds of one")
    return table(
        (*header, "mean loss", "largest difference between batch and alone"),
        (
            (
                row["decoder"],
                "safeguarded" if row["safeguard"] else "specified",
                f"{row['steps']:,}",
                row["shapes"],
                row["dtype"],
                f"{row['seconds']:.1f}",
                f"{row['seconds_alone']:.2f}",
                f"{row['mean_loss']:,.1f}",
                f"{row['largest_difference']:.1e}" if row["largest_difference"] else "0",
            )
            for row in rows
        ),
    )


def _of_words(line: dict[str, float]) -> tuple[str, str]:
    return f"{line['seconds'] / 60:.1f}", f"{line['loss_per_word']:.2f}"


def _reports(name: str) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = kept("trainings")[name]["metrics"]
    return lines


def _six(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The first line, the last one and some evenly spaced between them, each once."""
    kept = [lines[round(i * (len(lines) - 1) / 5)] for i in range(6)]
    return list({line["step"]: line for line in kept}.values())


def evaluation_table() -> str:
    """Accuracies, Pearson's correlation for SICK and Spearman's for the STS tasks, all in per cent."""
    rows = []
    for name, title in ENCODERS.items():
        runs = _evaluations(name)
        if runs:
            figures = zip(*map(_figures, runs), strict=True)
            rows.append((title, f"{runs[0]['width']:,}", *map(_mean_in_per_cent, figures)))
    return table(("vectors", "width", *ACCURACIES, "SICK", *SIMILARITIES, "STS-B"), rows)


def seeds_table() -> str:
    """The mean over the STS tasks, in per cent, for SimCSE and MixCSE from each seed."""
    runs = {model: [_similarities(run) for run in _evaluations(model)] for model in ("simcse", "mixcse")}
    header = ("model", *(f"seed {seed}" for seed in range(len(runs["simcse"]))), "mean")
    return table(
        header,
        (
            (ENCODERS[model], *map(_mean_in_per_cent, of_seeds), _mean_in_per_cent(map(mean, of_seeds)))
            for model, of_seeds in runs.items()
        ),
    )


def retrieval_table() -> str:
    """R@1 / R@5 / R@10 in per cent and the median rank, as means over the seeds."""
    runs = {title: _retrievals(name) for name, title in CAPTIONS.items()}
    rows = []
    for title, of_seeds in runs.items():
        rows.append((title, *(_ranks([run[way] for run in of_seeds]) for way in DIRECTIONS)))
    first = next(iter(runs.values()))
    rows.append(("chance", *(_ranks([run[way]["chance"] for run in first]) for way in DIRECTIONS)))
    return table(("captions", "found by image", "images found by caption"), rows)


def retrieval_sentence() -> str:
    """How far the retrieval is above chance, and the error of a share of the table's size."""
    runs = [run[way] for name in CAPTIONS for run in _retrievals(name) for way in DIRECTIONS]
    times = mean(run["R@1"] for run in runs) / mean(run["chance"]["R@1"] for run in runs)
    settings = json.loads((RETRIEVAL / f"{next(iter(CAPTIONS))}-0.json").read_text())["settings"]
    pictures = settings["parts"]["test"]["images"]
    share = 0.2
    points = 100 * (share * (1 - share) / pictures) ** 0.5
    lines = (
        f"R@1 is about {times:.0f} times that of chance, so the protocol finds what these features and",
        "titles have in common. The differences between the three encoders of captions are within the error:",
        f"a share of {100 * share:.0f} % of {pictures} has a standard error of {points:.1f} points in a run.",
    )
    return "\n".join(lines)


def _retrievals(name: str) -> list[dict[str, Any]]:
    """What was found in the stored runs of a name, one for each seed."""
    return [json.loads(path.read_text())["tasks"] for path in sorted(RETRIEVAL.glob(f"{name}-[0-9].json"))]


def _ranks(figures: list[dict[str, Any]]) -> str:
    recalls = " / ".join(_mean_in_per_cent(run[name] for run in figures) for name in RECALLS)
    return f"{recalls}, {mean(run['median rank'] for run in figures):.1f}"


def _evaluations(name: str) -> list[dict[str, Any]]:
    """The stored evaluations of a model, one for each seed."""
    return [run for key, run in sorted(kept("evaluation").items()) if re.fullmatch(rf"{name}(-[0-9])?", key)]


def _similarities(run: dict[str, Any]) -> list[float]:
    tasks = run["tasks"]
    return [*(tasks[name]["all"]["spearman"] for name in SIMILARITIES), tasks["STSB"]["test"]["spearman"]]


def _figures(run: dict[str, Any]) -> list[float]:
    tasks = run["tasks"]
    accuracies = [tasks[name]["accuracy"] for name in ACCURACIES]
    return [*accuracies, tasks["SICK"]["pearson"], *_similarities(run)]


def _mean_in_per_cent(shares: Iterable[float]) -> str:
    return f"{100 * mean(shares):.1f}"


def neighbours_text(name: str) -> str:
    """The neighbours of some sentences by the vectors of a training."""
    return _block(kept("trainings")[name]["neighbours"])


def stored_text(name: str) -> str:
    return _block((RESULTS / name).read_text())


def _block(text: str) -> str:
    return f"```\n{text.strip()}\n```"
