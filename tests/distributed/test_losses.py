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
PREFIXES = {"matryoshka": fastqt.Matryoshka((3, 7, 12), (1.0, 0.5, 2.0))}
RELEASED = {"form": "released", "stop_gradient": False, "hard_negative_weight": 0.3}


def case(loss: str, given: str = "", **options: object) -> Case:
    """A loss with the arguments that are drawn for it, and its options."""
    return Case(loss, options=options, given=tuple(given.split()))


RANKING = "multiple_negatives_ranking_loss"
DIRECTIONS = ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")
# Losses whose guide or ids are gathered with the candidates, which a ring would not visit.
GATHERED = {
    "guided": case("contrastive_loss", "scale guide", guided={"margin": 0.05}),
    "guided-pairs": case(
        "contrastive_loss",
        "scale negatives biases guide",
        **PAIRS,
        reduction="none",
        guided={"margin": 0.1, "margin_strategy": "relative"},
    ),
    "guided-sum": case("log_sum_exp", "negatives guide", diagonal="exclude", guided={"normalize": False}),
    "gist": case("gist_embed_loss", "gist_guides", scale=5.0),
    "gist-rows": case(
        "gist_embed_loss", "scale gist_guides", margin=0.1, contrast_positives=False, reduction="none"
    ),
    # Ids of which there are several, or those of negatives: what leaves is found some rows at a time.
    "within": case("contrastive_loss", "scale negatives within"),
    "same-twice": case("info_nce_loss", "scale negatives same same_of_pairs", reduction="none"),
    "ids-of-negatives": case("info_nce_loss", "scale negatives same_of_negatives within_of_negatives"),
    "ids-and-margin": case(
        "info_nce_loss", "negatives same_of_pairs within", exclude=fastqt.Margin(-0.1), scale=4.0
    ),
    "log-sum-exp-within": case("log_sum_exp", "scale negatives within_of_negatives", diagonal="exclude"),
    "sigmoid-within": case("sigmoid_loss", "scale bias mask same within"),
    "clip-within": case("clip_loss", "scale same within", reduction="none"),
    "siglip-within": case("siglip_loss", "scale bias same within"),
    "mixcse-within": case("mixcse_loss", "scale within", exclude=fastqt.Margin(-0.1)),
    "simcse-within": case("simcse_loss", "scale stacked_z3 same within", exclude=fastqt.Margin(-0.1)),
    "simcse-weighted-within": case(
        "simcse_loss", "scale stacked_z3 same within", hard_negative_weight=0.4, reduction="none"
    ),
    "dcl-within": case("dcl_loss", "scale same within"),
    "hcl-within": case("hcl_loss", "scale same_of_pairs within", reduction="none"),
    "ranking-within": case(RANKING, "scale hard within same"),
    "ranking-all-within": case(
        RANKING, "scale hard same within", directions=DIRECTIONS, exclude=fastqt.Margin(-0.1)
    ),
    "ranking-each-within": case(
        RANKING,
        "scale hard same within",
        directions=DIRECTIONS[::2],
        partition_mode="per_direction",
        reduction="none",
    ),
    "ranking-hard-within": case(
        RANKING, "hard same_of_pairs within", hardness_mode="all_negatives", hardness_strength=2.0
    ),
}

# What is computed: a loss, its options, and the arguments that are drawn for it.
LOSSES = {
    "window": case("contrastive_loss"),
    "smoothing-window": case("contrastive_loss", window={"size": 2, "smoothing": 0.1}),
    "next": case("contrastive_loss", window={"offsets": [1], "normalize": False}, diagonal="exclude"),
    "documents": case("contrastive_loss", "document_ids", window={"size": 3}),
    "smoothed": case("contrastive_loss", "scale", smoothing=0.1),
    "pairs": case("contrastive_loss", "scale", **PAIRS, normalize=True),
    "classes": case("contrastive_loss", "classes scale", **KEEP),
    "mean-of-targets": case("contrastive_loss", "classes", **KEEP, reduction="mean_of_targets"),
    "sparse": case("contrastive_loss", "sparse"),
    "excluded": case("contrastive_loss", "scale bias", diagonal="exclude"),
    "negatives": case("contrastive_loss", "scale biases negatives row_negatives"),
    "row-scores": case("contrastive_loss", "scale negatives row_scores"),
    "several-row-cells": case("contrastive_loss", "scale stacked several_row_scores", reduction="none"),
    "mixed-and-row-scores": case("contrastive_loss", "row_scores partners", **PAIRS, mixed=0.2),
    "euclidean": case(
        "contrastive_loss", "scale biases negatives stacked row_scores", **PAIRS, similarity="euclidean"
    ),
    "exclusions": case("contrastive_loss", "same mask negatives"),
    "mixed": case("contrastive_loss", **PAIRS, normalize=True, mixed=0.2),
    "mixed-partners": case("contrastive_loss", "partners", **PAIRS, mixed=0.3),
    "rows": case("contrastive_loss", "scale", reduction="none"),
    "low": case("contrastive_loss", "scale negatives", memory="low"),
    "sigmoid": case("sigmoid_loss", "scale bias negatives row_negatives"),
    "sigmoid-rows": case("sigmoid_loss", "scale biases same", diagonal="zero", reduction="none"),
    "sigmoid-sparse": case("sigmoid_loss", "sparse scale bias", **KEEP),
    "sigmoid-several-row-cells": case("sigmoid_loss", "scale stacked several_row_scores"),
    "log-sum-exp-of-distances": case(
        "log_sum_exp", "scale negatives row_scores", diagonal="exclude", similarity="euclidean"
    ),
    "log-sum-exp": case("log_sum_exp", "scale biases negatives", diagonal="exclude", normalize=True),
    "info-nce": case("info_nce_loss", "scale negatives"),
    "info-nce-same": case("info_nce_loss", "scale negatives same_of_pairs"),
    "clip-same": case("clip_loss", "scale same"),
    "siglip-same": case("siglip_loss", "scale bias same_of_pairs"),
    "mixcse-same": case("mixcse_loss", "scale same"),
    "simcse-same": case("simcse_loss", "scale z3 same", hard_negative_weight=0.4),
    "dcl-same": case("dcl_loss", "scale same"),
    "hcl-same": case("hcl_loss", "scale same", tau_plus=0.0, reduction="none"),
    "ranking-same": case(RANKING, "scale hard same_of_pairs", directions=DIRECTIONS),
    "margin": case(
        "contrastive_loss", "scale biases negatives row_negatives", exclude=fastqt.Margin(0.1), normalize=True
    ),
    "margin-of-classes": case(
        "contrastive_loss",
        "classes stacked",
        **KEEP,
        exclude=fastqt.Margin(0.4, "relative"),
    ),
    "margin-of-pairs": case(
        "info_nce_loss", "scale negatives", exclude=fastqt.Margin(-0.1), reduction="none"
    ),
    "info-nce-rows": case(
        "info_nce_loss", "scale negatives stacked padding", exclude=fastqt.Margin(-0.1), reduction="none"
    ),
    "info-nce-debiased": case("info_nce_loss", "scale negatives stacked same tau_plus"),
    "info-nce-debiased-margin": case(
        "info_nce_loss", "scale stacked padding", exclude=fastqt.Margin(-0.1), tau_plus=0.02, reduction="none"
    ),
    "clip-debiased": case("clip_loss", "scale tau_plus", reduction="none"),
    "simcse-debiased": case("simcse_loss", "scale z3", hard_negative_weight=0.4, tau_plus=0.02),
    "info-nce-label-smoothing": case("info_nce_loss", "scale negatives", label_smoothing=0.2),
    "clip-rows": case("clip_loss", "scale", reduction="none", normalize=False),
    "clip-sum": case("clip_loss", "scale", reduction="sum", memory="low"),
    "clip-label-smoothing": case("clip_loss", "scale", label_smoothing=0.3, reduction="none"),
    "simcse": case("simcse_loss", "scale z3"),
    "simcse-weighted": case("simcse_loss", "scale z3", hard_negative_weight=0.4),
    "simcse-margin": case("simcse_loss", "z3", hard_negative_weight=0.4, exclude=fastqt.Margin(0.1)),
    "simcse-several-weighted": case("simcse_loss", "scale stacked_z3", hard_negative_weight=0.4),
    "mixcse-random": case("mixcse_loss", "scale generator", partner="random"),
    "mixcse-released-random": case(
        "mixcse_loss", "scale generator", **RELEASED, partner="random", masked_cell="exclude"
    ),
    "mixcse-candidates": case("mixcse_loss", form="released", blocks="candidates", reduction="none"),
    "hcl-debiased": case("hcl_loss", beta=0.0, tau_plus=0.01, reduction="sum"),
    "dcl-weighted": case("dcl_loss", "scale", sigma=0.4, reduction="none"),
    "arcface": case("arcface_loss", "labels", reduction="none", scale=3.0),
    "distillation-rows": case("distillation_loss", "teacher", reduction="none", normalize=False),
    "curl-random": case("curl_block_loss", "generator", negatives="random"),
    "binary-window-rows": case("binary_window_loss", reduction="none", context_size=2),
    **GATHERED,
    "ranking": case(RANKING, "scale hard"),
    "ranking-all": case(RANKING, "scale hard", directions=DIRECTIONS, reduction="none"),
    "ranking-margin": case(
        RANKING, "scale hard", directions=DIRECTIONS, exclude=fastqt.Margin(0.05), reduction="sum"
    ),
    "ranking-rows": case(
        RANKING,
        "scale hard stacked padding same",
        directions=DIRECTIONS,
        exclude=fastqt.Margin(0.05),
        hardness_mode="hard_negatives",
        hardness_strength=2.0,
    ),
    "ranking-debiased": case(
        RANKING, "scale hard stacked padding same tau_plus", directions=DIRECTIONS, reduction="none"
    ),
    "ranking-each": case(
        RANKING, "scale hard", directions=DIRECTIONS[::2], partition_mode="per_direction", normalize=False
    ),
    "ranking-hard": case(
        RANKING, "scale hard", directions=DIRECTIONS, hardness_mode="hard_negatives", hardness_strength=2.0
    ),
    "ranking-in-batch": case(
        RANKING,
        "scale hard",
        directions=DIRECTIONS,
        reduction="sum",
        hardness_mode="in_batch_negatives",
        hardness_strength=2.0,
    ),
    "prefixes": case("contrastive_loss", "scale biases negatives row_negatives", **PREFIXES, normalize=True),
    "prefixes-of-rows": case("sigmoid_loss", "scale bias row_scores", **PREFIXES, reduction="none"),
    "prefixes-of-distances": case(
        "contrastive_loss", "scale negatives stacked", **PAIRS, **PREFIXES, similarity="euclidean"
    ),
    "prefixes-clip": case("clip_loss", "scale", **PREFIXES, label_smoothing=0.3, reduction="none"),
    "prefixes-simcse-weighted": case("simcse_loss", "scale stacked_z3", **PREFIXES, hard_negative_weight=0.4),
    "prefixes-ranking": case(RANKING, "scale hard", **PREFIXES, directions=DIRECTIONS),
    "max-margin-rows": case("max_margin_loss", "classes", **KEEP, normalize=True, reduction="none"),
}
# The losses and options that recipes combine.
RECIPES = [
    *("prefixes", "prefixes-of-rows", "prefixes-clip", "prefixes-ranking"),
    *("margin", "margin-of-pairs", "ranking-margin", "sigmoid-sparse"),
]
# Numbers of rows of a group's ranks: one row, none, and fewer than a window reaches.
UNEVEN = {2: (9, 4), 3: (6, 0, 7), 4: (5, 1, 7, 2), 8: (3, 1, 0, 4, 2, 5, 1, 2)}
EXCHANGES = ("gather", "ring")
BY_EXCHANGE = [
    (name, exchange)
    for name in LOSSES
    for exchange in EXCHANGES
    if exchange == "gather" or name not in GATHERED
]


IN_TORCH_OPERATIONS = [
    name
    for name, case in LOSSES.items()
    if name not in GATHERED and "backend" in inspect.signature(getattr(fastqt, case.loss)).parameters
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
@pytest.mark.thinned(3)
def test_uneven_shards(ranks, name, exchange):
    check(ranks, sharded(LOSSES[name], UNEVEN[3], exchange=exchange))


@pytest.mark.parametrize("name", IN_TORCH_OPERATIONS)
@pytest.mark.thinned(4)
def test_a_ring_in_torch_operations(ranks, name):
    """As on a device without kernels, and of softmaxes on GPUs."""
    case = LOSSES[name]
    case = replace(case, options={**case.options, "backend": "torch"})
    check(ranks, sharded(case, UNEVEN[3], exchange="ring"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "name", "exchange"),
    [((2, 4, 8, 8, 2, 4)[place % 6], *case) for place, case in enumerate(BY_EXCHANGE)],  # each with any kind
)
def test_other_numbers_of_ranks(ranks, size, name, exchange):
    check(ranks, sharded(LOSSES[name], UNEVEN[size], exchange=exchange, gradients="sum"))
    check(ranks, sharded(LOSSES[name], (4,) * size, exchange=exchange))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "machines", "name"),
    [
        (*((4, 4), (8, 2), (8, 4))[place % 3], name)
        for place, name in enumerate(sorted(LOSSES.keys() - GATHERED.keys()))
    ],
)
def test_ring_over_machines(ranks, size, machines, name):
    check(ranks, sharded(replace(LOSSES[name], machines=machines), UNEVEN[size], exchange="ring"))


@pytest.mark.parametrize("name", ["negatives", "sigmoid", "clip-rows", "mixed-partners"])
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


@pytest.mark.parametrize("name", RECIPES)
def test_float16(ranks, name):
    """Not bfloat16, which some CPUs multiply as it is. Gradients of several walks are rounded each."""
    case = replace(LOSSES[name], dtype=torch.float16)
    walks = len(DIRECTIONS) if name == "ranking-margin" else 1
    check(ranks, sharded(case, UNEVEN[3]), 3 * walks * UNIT_ROUNDOFF[torch.float16])


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("name", ["pairs", "rows", "clip-rows", "sigmoid", "mixed", "smoothed", *RECIPES])
@pytest.mark.thinned(4)
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


# Tensors that are no dense matrices; no two numbers of a batch are equal, so that a scrambled row is seen.
LAYOUTS = ("transposed", "strided", "every third", "one row")
OF_ROWS = ["rows", "clip-rows", "simcse", "sigmoid-rows", "mixcse-candidates", "hcl-debiased", "info-nce"]


@pytest.mark.parametrize(
    "name", [*OF_ROWS[:2], *(pytest.param(x, marks=pytest.mark.slow) for x in OF_ROWS[2:])]
)
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_layouts(ranks, name, exchange):
    for layout in LAYOUTS:
        for counts in ((4, 4, 4), (5, 1, 7)):
            check(ranks, sharded(replace(LOSSES[name], layout=layout), counts, exchange=exchange))


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_cut_windows_stay_within_a_rank(ranks, exchange):
    """As those of one process whose document_ids are the ranks."""
    cut = sharded(
        replace(case("contrastive_loss", window={"size": 4}), cut=True),
        (6, 3, 5),
        exchange=exchange,
        edges="cut",
    )
    check(ranks, cut)


@pytest.mark.parametrize("name", ["guided", "gist", "within", "same-twice", "clip-within", "siglip-within"])
def test_a_ring_with_what_is_gathered_is_refused_on_all_ranks(ranks, name):
    with pytest.raises(RankError, match=r"exchange: want 'auto' or 'gather' with .*, got 'ring'"):
        check(ranks, sharded(LOSSES[name], (3, 3), exchange="ring"))
