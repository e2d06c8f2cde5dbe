"""The figures that are no tables of trainings, and the parts of each."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.papers import bootstrap, few_labels, limited_text, mean_classifier, neighbours
from benchmarks.papers.parts import Part

STUDIES: dict[str, Sequence[Part]] = {
    "bootstrap": bootstrap.plan(),
    "few-labels": few_labels.plan(),
    limited_text.TABLE: limited_text.plan(),
    "mean-classifier": mean_classifier.plan(),
    "neighbours": neighbours.plan(),
}
