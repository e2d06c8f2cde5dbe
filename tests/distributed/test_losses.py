"""Losses over the ranks of a group are those of one process with the whole batch, and so are all gradients.

Each test draws one batch, of which every rank takes its own part. Gradients are compared as the group's own
reduction would leave them: rows for embeddings, and the sum over ranks for a scale or a bias.
"""

from __future__ import annotations

import inspect
from dataclasses import replace

import pytest
import torch

import fastqt
from tests.shared.ranks import RankError
from tests.shared.sharded_losses import Case, compare_all
from tests.shared.tolerances import UNIT_ROUNDOFF

# One more rounding of sums in another order, relative to the greatest number. A learnt pair's gradient is the
# difference of numbers near 1 and of scores near 100, whose last digits it inherits.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6}
CONVERGED = 1e-11

KEEP = {"diagonal": "keep"}
PAIRS = {"targets": fastqt.Diagonal(), **KEEP}
PREFIXES = {"matryoshka_dims": (3, 7, 12), "matryoshka_weights": (1.0, 0.5, 2.0)}
RELEASED = {"form": "released", "stop_gradient": False, "hard_negative_weight": 0.3}

# Losses whose guide is gathered with the candidates, which a ring would not visit.
GUIDED = {
    "guided": Case("contrastive_loss", options={"guided": {"margin": 0.05}}, given=("scale", "guide")),
    "guided-pairs": Case(
        "contrastive_loss",
        options={**PAIRS, "reduction": "none", "guided": {"margin": 0.1, "margin_strategy": "relative"}},
        given=("scale", "negatives", "biases", "guide"),
    ),
    "guided-sum": Case(
        "log_sum_exp",
        options={"diagonal": "exclude", "guided": {"normalize": False}},
        given=("negatives", "guide"),
    ),
    "gist": Case("gist_embed_loss", options={"scale": 5.0}, given=("gist_guides",)),
    "gist-rows": Case(
        "gist_embed_loss",
        options={"margin": 0.1, "contrast_positives": False, "reduction": "none"},
        given=("scale", "gist_guides"),
    ),
}
RANKING = Case("multiple_negatives_ranking_loss", given=("scale", "hard"))
DIRECTIONS = ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")

# What is computed: a loss, its options, and the arguments that are drawn for it.
LOSSES = {
    "window": Case("contrastive_loss"),
    "smoothing-window": Case("contrastive_loss", options={"window": {"size": 2, "smoothing": 0.1}}),
    "wide-window": Case("contrastive_loss", options={"window": {"size": 4}}),
    "next": Case(
        "contrastive_loss", options={"window": {"offsets": [1], "normalize": False}, "diagonal": "exclude"}
    ),
    "documents": Case("contrastive_loss", options={"window": {"size": 3}}, given=("document_ids",)),
    "smoothed": Case("contrastive_loss", options={"smoothing": 0.1}, given=("scale",)),
    "pairs": Case("contrastive_loss", options={**PAIRS, "normalize": True}, given=("scale",)),
    "classes": Case("contrastive_loss", options=KEEP, given=("classes", "scale")),
    "mean-of-targets": Case(
        "contrastive_loss", options={**KEEP, "reduction": "mean_of_targets"}, given=("classes",)
    ),
    "sparse": Case("contrastive_loss", given=("sparse",)),
    "dense": Case("contrastive_loss", options={"reduction": "sum"}, given=("dense", "scale")),
    "excluded": Case("contrastive_loss", options={"diagonal": "exclude"}, given=("scale", "bias")),
    "negatives": Case("contrastive_loss", given=("scale", "biases", "negatives", "row_negatives")),
    "row-scores": Case("contrastive_loss", given=("scale", "negatives", "row_scores")),
    "several-row-cells": Case(
        "contrastive_loss", options={"reduction": "none"}, given=("scale", "stacked", "several_row_scores")
    ),
    "mixed-and-row-scores": Case(
        "contrastive_loss", options={**PAIRS, "mixed": 0.2}, given=("row_scores", "partners")
    ),
    "euclidean": Case(
        "contrastive_loss",
        options={**PAIRS, "similarity": "euclidean"},
        given=("scale", "biases", "negatives", "stacked", "row_scores"),
    ),
    "exclusions": Case("contrastive_loss", given=("groups", "mask", "negatives")),
    "mixed": Case("contrastive_loss", options={**PAIRS, "normalize": True, "mixed": 0.2}),
    "mixed-partners": Case("contrastive_loss", options={**PAIRS, "mixed": 0.3}, given=("partners",)),
    "rows": Case("contrastive_loss", options={"reduction": "none"}, given=("scale",)),
    "low": Case("contrastive_loss", options={"memory": "low"}, given=("scale", "negatives")),
    "sigmoid": Case("sigmoid_loss", given=("scale", "bias", "negatives", "row_negatives")),
    "sigmoid-rows": Case(
        "sigmoid_loss", options={"diagonal": "zero", "reduction": "none"}, given=("scale", "biases", "groups")
    ),
    "sigmoid-sparse": Case("sigmoid_loss", options=KEEP, given=("sparse", "scale", "bias")),
    "sigmoid-row-scores": Case("sigmoid_loss", given=("bias", "row_scores")),
    "sigmoid-several-row-cells": Case("sigmoid_loss", given=("scale", "stacked", "several_row_scores")),
    "log-sum-exp-of-distances": Case(
        "log_sum_exp",
        options={"diagonal": "exclude", "similarity": "euclidean"},
        given=("scale", "negatives", "row_scores"),
    ),
    "log-sum-exp": Case(
        "log_sum_exp",
        options={"diagonal": "exclude", "normalize": True},
        given=("scale", "biases", "negatives"),
    ),
    "info-nce": Case("info_nce_loss", given=("scale", "negatives")),
    "margin": Case(
        "contrastive_loss",
        options={"false_negative_margin": 0.1, "normalize": True},
        given=("scale", "biases", "negatives", "row_negatives"),
    ),
    "margin-of-classes": Case(
        "contrastive_loss",
        options={**KEEP, "false_negative_margin": 0.4, "false_negative_margin_strategy": "relative"},
        given=("classes", "stacked"),
    ),
    "margin-of-pairs": Case(
        "info_nce_loss",
        options={"false_negative_margin": -0.1, "reduction": "none"},
        given=("scale", "negatives"),
    ),
    "info-nce-label-smoothing": Case(
        "info_nce_loss", options={"label_smoothing": 0.2}, given=("scale", "negatives")
    ),
    "siglip": Case("siglip_loss", given=("scale", "bias")),
    "clip": Case("clip_loss", given=("scale",)),
    "clip-rows": Case("clip_loss", options={"reduction": "none", "normalize": False}, given=("scale",)),
    "clip-sum": Case("clip_loss", options={"reduction": "sum", "memory": "low"}, given=("scale",)),
    "clip-label-smoothing": Case(
        "clip_loss", options={"label_smoothing": 0.3, "reduction": "none"}, given=("scale",)
    ),
    "simcse": Case("simcse_loss", given=("scale", "z3")),
    "simcse-weighted": Case("simcse_loss", options={"hard_negative_weight": 0.4}, given=("scale", "z3")),
    "simcse-margin": Case(
        "simcse_loss", options={"hard_negative_weight": 0.4, "false_negative_margin": 0.1}, given=("z3",)
    ),
    "simcse-several": Case("simcse_loss", given=("scale", "stacked_z3")),
    "simcse-several-weighted": Case(
        "simcse_loss", options={"hard_negative_weight": 0.4}, given=("scale", "stacked_z3")
    ),
    "mixcse": Case("mixcse_loss", given=("scale",)),
    "mixcse-random": Case("mixcse_loss", options={"partner": "random"}, given=("scale", "generator")),
    "mixcse-through-mixtures": Case("mixcse_loss", options={"stop_gradient": False}, given=("scale",)),
    "mixcse-released": Case("mixcse_loss", options={"form": "released"}, given=("scale",)),
    "mixcse-released-random": Case(
        "mixcse_loss",
        options={**RELEASED, "partner": "random", "masked_cell": "exclude"},
        given=("scale", "generator"),
    ),
    "mixcse-candidates": Case(
        "mixcse_loss", options={"form": "released", "blocks": "candidates", "reduction": "none"}
    ),
    "dcl": Case("dcl_loss", given=("scale",)),
    "dcl-weighted": Case("dcl_loss", options={"sigma": 0.4, "reduction": "none"}, given=("scale",)),
    "hcl": Case("hcl_loss", given=("scale",)),
    "hcl-debiased": Case("hcl_loss", options={"beta": 0.0, "tau_plus": 0.01, "reduction": "sum"}),
    "cosface": Case("cosface_loss", given=("scale", "labels")),
    "arcface": Case("arcface_loss", options={"reduction": "none", "scale": 3.0}, given=("labels",)),
    "distillation": Case("distillation_loss", given=("scale", "teacher")),
    "distillation-rows": Case(
        "distillation_loss", options={"reduction": "none", "normalize": False}, given=("teacher",)
    ),
    "curl": Case("curl_loss", given=("curl_negatives",)),
    "curl-shift": Case("curl_block_loss"),
    "curl-complement": Case("curl_block_loss", options={"negatives": "complement"}, given=("document_ids",)),
    "curl-random": Case("curl_block_loss", options={"negatives": "random"}, given=("generator",)),
    "binary-window": Case("binary_window_loss", given=("document_ids",)),
    "binary-window-rows": Case("binary_window_loss", options={"reduction": "none", "context_size": 2}),
    **GUIDED,
    "ranking": RANKING,
    "ranking-all": replace(RANKING, options={"directions": DIRECTIONS, "reduction": "none"}),
    "ranking-margin": replace(
        RANKING, options={"directions": DIRECTIONS, "false_negative_margin": 0.05, "reduction": "sum"}
    ),
    "ranking-each": replace(
        RANKING,
        options={"directions": DIRECTIONS[::2], "partition_mode": "per_direction", "normalize": False},
    ),
    "ranking-hard": replace(
        RANKING,
        options={"directions": DIRECTIONS, "hardness_mode": "hard_negatives", "hardness_strength": 2.0},
    ),
    "ranking-in-batch": replace(
        RANKING,
        options={
            **{"directions": DIRECTIONS, "reduction": "sum"},
            **{"hardness_mode": "in_batch_negatives", "hardness_strength": 2.0},
        },
    ),
    "prefixes": Case(
        "contrastive_loss",
        options={**PREFIXES, "normalize": True},
        given=("scale", "biases", "negatives", "row_negatives"),
    ),
    "prefixes-of-rows": Case(
        "sigmoid_loss", options={**PREFIXES, "reduction": "none"}, given=("scale", "bias", "row_scores")
    ),
    "prefixes-of-distances": Case(
        "contrastive_loss",
        options={**PAIRS, **PREFIXES, "similarity": "euclidean"},
        given=("scale", "negatives", "stacked"),
    ),
    "prefixes-clip": Case(
        "clip_loss", options={**PREFIXES, "label_smoothing": 0.3, "reduction": "none"}, given=("scale",)
    ),
    "prefixes-simcse-weighted": Case(
        "simcse_loss", options={**PREFIXES, "hard_negative_weight": 0.4}, given=("scale", "stacked_z3")
    ),
    "prefixes-ranking": replace(RANKING, options={**PREFIXES, "directions": DIRECTIONS}),
    "max-margin": Case("max_margin_loss"),
    "max-margin-rows": Case(
        "max_margin_loss", options={**KEEP, "normalize": True, "reduction": "none"}, given=("classes",)
    ),
}
# The losses and options that recipes combine.
RECIPES = [
    *("prefixes", "prefixes-of-rows", "prefixes-clip", "prefixes-ranking"),
    *("margin", "margin-of-pairs", "ranking-margin", "distillation", "dcl", "hcl", "cosface", "arcface"),
    "sigmoid-sparse",
]
# Numbers of rows of a group's ranks: one row, none, and fewer than a window reaches.
UNEVEN = {2: (9, 4), 3: (6, 0, 7), 4: (5, 1, 7, 2), 8: (3, 1, 0, 4, 2, 5, 1, 2)}
EXCHANGES = ("gather", "ring")
BY_EXCHANGE = [
    (name, exchange)
    for name in LOSSES
    for exchange in EXCHANGES
    if exchange == "gather" or name not in GUIDED
]


IN_TORCH_OPERATIONS = [
    name
    for name, case in LOSSES.items()
    if name not in GUIDED and "backend" in inspect.signature(getattr(fastqt, case.loss)).parameters
]


def sharded(case: Case, counts: tuple[int, ...], **group: object) -> Case:
    shards = "equal" if len(set(counts)) == 1 else "uneven"
    return replace(case, counts=counts, group={"shards": shards, **group})


def check(ranks, case: Case, tolerance: float | None = None) -> None:
    tolerance = tolerance or TOLERANCE[case.dtype]
    values = []
    for rank, (found,) in enumerate(ranks(len(case.counts)).run(compare_all, [case])):
        assert max(found.errors.values()) < tolerance, f"rank {rank}: {found.errors}"
        values.append(found.value)
    if values[0].dim() == 0:
        assert all(torch.equal(value, values[0]) for value in values), (
            "the value has other bits on other ranks"
        )


@pytest.mark.parametrize(("name", "exchange"), BY_EXCHANGE)
def test_uneven_shards(ranks, name, exchange):
    check(ranks, sharded(LOSSES[name], UNEVEN[3], exchange=exchange))


@pytest.mark.parametrize("name", IN_TORCH_OPERATIONS)
def test_a_ring_in_torch_operations(ranks, name):
    """As on a device without kernels, and of softmaxes on GPUs."""
    case = LOSSES[name]
    case = replace(case, options={**case.options, "backend": "torch"})
    check(ranks, sharded(case, UNEVEN[3], exchange="ring"))


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize(("name", "exchange"), BY_EXCHANGE)
def test_other_numbers_of_ranks(ranks, name, exchange, size):
    check(ranks, sharded(LOSSES[name], UNEVEN[size], exchange=exchange, gradients="sum"))
    check(ranks, sharded(LOSSES[name], (4,) * size, exchange=exchange))


@pytest.mark.slow
@pytest.mark.parametrize(("size", "machines"), [(4, 4), (8, 2), (8, 4)])
@pytest.mark.parametrize("name", sorted(LOSSES.keys() - GUIDED.keys()))
def test_ring_over_machines(ranks, name, size, machines):
    check(ranks, sharded(replace(LOSSES[name], machines=machines), UNEVEN[size], exchange="ring"))


@pytest.mark.parametrize("name", ["negatives", "sigmoid", "clip", "mixed-partners"])
def test_ring_over_two_machines(ranks, name):
    case = replace(LOSSES[name], machines=2)
    check(ranks, sharded(case, UNEVEN[4], exchange="ring"))
    check(ranks, sharded(replace(case, dtype=torch.float32), (5,) * 4, exchange="ring"))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "exchange"), BY_EXCHANGE)
def test_float32(ranks, name, exchange):
    case = replace(LOSSES[name], dtype=torch.float32)
    check(ranks, sharded(case, (5, 1, 7, 2), exchange=exchange))


@pytest.mark.parametrize("name", RECIPES)
def test_a_group_of_one_rank(ranks, name):
    check(ranks, sharded(LOSSES[name], (7,)))


@pytest.mark.parametrize("name", ["curl", "curl-complement", "binary-window"])
def test_bfloat16(ranks, name):
    """Both sides round their gradients once, and the ranks' parts of them once more."""
    case = replace(LOSSES[name], dtype=torch.bfloat16)
    check(ranks, sharded(case, UNEVEN[3]), 3 * UNIT_ROUNDOFF[torch.bfloat16])


@pytest.mark.parametrize("name", RECIPES)
def test_float16(ranks, name):
    """As of bfloat16, which some CPUs multiply as it is. Gradients of several walks are rounded each."""
    case = replace(LOSSES[name], dtype=torch.float16)
    walks = {"dcl": 2, "hcl": 2, "ranking-margin": len(DIRECTIONS)}.get(name, 1)
    check(ranks, sharded(case, UNEVEN[3]), 3 * walks * UNIT_ROUNDOFF[torch.float16])


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("name", ["pairs", "rows", "clip-rows", "sigmoid", "mixed", "smoothed", *RECIPES])
def test_learnt_pairs(ranks, name, exchange):
    converged = replace(LOSSES[name], converged=True)
    check(ranks, sharded(converged, UNEVEN[3], exchange=exchange), CONVERGED)
    single = replace(converged, dtype=torch.float32)
    # The gradients of CLIP's two directions, which nearly cancel, are rounded each.
    walks = 2 if name == "prefixes-clip" else 1
    check(ranks, sharded(single, UNEVEN[3], exchange=exchange), walks * TOLERANCE[torch.float32])


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("name", ["classes", "log-sum-exp", "sigmoid"])
def test_other_numbers_of_candidates_than_of_queries(ranks, name, exchange):
    kept = replace(LOSSES[name], options={**LOSSES[name].options, **KEEP}, candidates=(3, 9, 5))
    check(ranks, sharded(kept, (6, 0, 7), exchange=exchange))


def test_more_candidates_than_queries_with_a_replaced_diagonal(ranks):
    check(ranks, sharded(replace(LOSSES["window"], candidates=(3, 9, 5)), (6, 0, 7), exchange="gather"))


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_cut_windows_stay_within_a_rank(ranks, exchange):
    """As those of one process whose document_ids are the ranks."""
    cut = sharded(replace(LOSSES["wide-window"], cut=True), (6, 3, 5), exchange=exchange, edges="cut")
    check(ranks, cut)


@pytest.mark.parametrize("name", ["guided", "gist"])
def test_a_ring_with_a_guide_is_refused_on_all_ranks(ranks, name):
    with pytest.raises(RankError, match="exchange: want 'auto' or 'gather' with a guide, got 'ring'"):
        check(ranks, sharded(LOSSES[name], (3, 3), exchange="ring"))
