"""Tables of what trainings came to: their held-out accuracy, and their sentence vectors' figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.tables import table

RESULTS = Path(__file__).parent / "results"
EVALUATION = RESULTS / "evaluation"

# The stored evaluations, in the order in which the table has them.
ENCODERS = {
    "quickthoughts-bow": "QuickThoughts, bag of words",
    "quickthoughts-gru": "QuickThoughts, GRU",
    "gloss-bow": "GLOSS, bags of words",
    "gloss-pos": "GLOSS, words by position",
    "simcse": "SimCSE, Transformer",
    "mixcse": "MixCSE, Transformer",
    "random-bow": "the first with fresh weights",
    "word2vec": "mean of word2vec vectors",
    "sif": "their SIF mean",
}
ACCURACIES = ("MR", "CR", "SUBJ", "TREC", "SST2", "MRPC")
SIMILARITIES = ("STS12", "STS13", "STS14", "STS15")


def learning_table(name: str) -> str:
    """A training's held-out accuracy over time, at about six points."""
    lines = [json.loads(line) for line in (RESULTS / name / "metrics.jsonl").read_text().splitlines()]
    validated = [line for line in lines if "validation_forward_accuracy" in line]
    kept = [validated[round(i * (len(validated) - 1) / 5)] for i in range(6)]
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
            for line in {line["step"]: line for line in kept}.values()
        ),
    )


def evaluation_table() -> str:
    """Accuracies, Pearson's coefficient for SICK and Spearman's for the STS tasks, all in per cent."""
    stored = {name: EVALUATION / f"{name}.json" for name in ENCODERS}
    rows = [
        (ENCODERS[name], *_figures(json.loads(path.read_text())))
        for name, path in stored.items()
        if path.exists()
    ]
    return table(("vectors", "width", *ACCURACIES, "SICK", *SIMILARITIES, "STS-B"), rows)


def _figures(run: dict[str, Any]) -> list[str]:
    tasks = run["tasks"]
    shares = [
        *(tasks[name]["accuracy"] for name in ACCURACIES),
        tasks["SICK"]["pearson"],
        *(tasks[name]["all"]["spearman"] for name in SIMILARITIES),
        tasks["STSB"]["test"]["spearman"],
    ]
    return [f"{run['width']:,}", *(f"{100 * share:.1f}" for share in shares)]


def stored_text(name: str) -> str:
    return "```\n" + (RESULTS / name).read_text().strip() + "\n```"
