"""Evaluation of sentence vectors by the protocols of the literature; see docs/evaluation.md."""

from fastqt.evaluation.baselines import SIF, WordVectors, random_encoder, remove_component
from fastqt.evaluation.classification import (
    PAPER_GRID,
    SENTEVAL_GRID,
    cross_validated,
    ensemble,
    held_out_validated,
    limited_data,
    nested_cross_validation,
    pair_features,
)
from fastqt.evaluation.encoders import load_encoder
from fastqt.evaluation.means import few_shot, mean_classifier
from fastqt.evaluation.pools import analogies, nearest_rows
from fastqt.evaluation.retrieval import LinearMaps, fit_maps
from fastqt.evaluation.similarity import (
    alignment,
    correlate,
    correlate_subsets,
    cosines,
    floor_split,
    relatedness,
    uniformity,
)
from fastqt.evaluation.suite import Results, evaluate
from fastqt.evaluation.vectors import Cache
from fastqt.inference.search import nearest

__all__ = [
    "PAPER_GRID",
    "SENTEVAL_GRID",
    "SIF",
    "Cache",
    "LinearMaps",
    "Results",
    "WordVectors",
    "alignment",
    "analogies",
    "correlate",
    "correlate_subsets",
    "cosines",
    "cross_validated",
    "ensemble",
    "evaluate",
    "few_shot",
    "fit_maps",
    "floor_split",
    "held_out_validated",
    "limited_data",
    "load_encoder",
    "mean_classifier",
    "nearest",
    "nearest_rows",
    "nested_cross_validation",
    "pair_features",
    "random_encoder",
    "relatedness",
    "remove_component",
    "uniformity",
]
