"""Options that meet: none is dropped beside another one, and none is taken that nothing reads."""

from __future__ import annotations

import itertools
import re
import zlib
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import fastqt
from fastqt import nn
from tests.shared.every_loss import D
from tests.shared.loss_options import (
    LOSSES,
    N,
    Options,
    combinations,
    cut,
    filters,
    inputs,
    option_names,
    outcome,
    parameters,
    rows,
    shown,
)
from tests.shared.tolerances import FLOAT64

CLOSE = {"rtol": 1e2 * FLOAT64, "atol": 1e2 * FLOAT64}
OF_PREFIXES = [name for name in LOSSES if "matryoshka" in option_names(name)]
PREFIXES = ("matryoshka",)
# How many combinations are tried, of up to how many options.
SAMPLE, SLOW = (8, 2), (120, 3)
# Of three options, two may have taken out all cells that another one would.
PAIRS = (120, 2)


def extents(slow: tuple[int, int]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("extent", [SAMPLE, pytest.param(slow, marks=pytest.mark.slow)])


def sampled(name: str, extent: tuple[int, int], without: tuple[str, ...]) -> list[Options]:
    """Some of the combinations of options. One more value of an option leaves most of them as they were."""
    count, most = extent
    return sorted(combinations(name, most, without), key=lambda x: zlib.crc32(shown(x).encode()))[:count]


def said(call: Any) -> Any:
    """What a call returns, or the text of its refusal."""
    try:
        return call()
    except (ValueError, TypeError) as error:
        return str(error)


@extents(SLOW)
@pytest.mark.parametrize("name", OF_PREFIXES)
def test_prefixes_beside_other_options(name, extent):
    """One of all columns changes nothing, and of two the loss is the weighted sum of the single ones."""
    for options in sampled(name, extent, PREFIXES):
        given = inputs(name) | options
        whole, prefix = (said(partial(outcome, name, given | dims)) for dims in ({}, {PREFIXES[0]: [D]}))
        if isinstance(whole, str) or isinstance(prefix, str):
            assert isinstance(whole, str) == isinstance(prefix, str), (shown(options), whole, prefix)
            continue
        two = outcome(name, given | {"matryoshka": fastqt.Matryoshka([3, 8], [0.5, 2.0])})
        parts = [outcome(name, given, partial(cut, width=width)) for width in (3, 8)]
        wanted = [0.5 * first + 2 * second for first, second in zip(*parts, strict=True)]
        name_options = shown(options).__add__
        torch.testing.assert_close([*prefix, *two], [*whole, *wanted], **CLOSE, msg=name_options)


def has_no_effect_by_its_meaning(name: str, option: str, value: object, beside: Options) -> bool:
    """Whether there is nothing to change: each row has a target, or what an option is of is 0."""
    a_constant_of_a_softmax = name == "contrastive_loss" and not (
        beside.get("diagonal", "zero") == "zero" and not has_a_guide(beside)
    )
    exclude = beside.get("exclude")
    same = [x for x in (exclude if isinstance(exclude, list) else [exclude]) if isinstance(x, fastqt.Same)]
    takes_the_diagonal = any(torch.equal(x.query_ids, x.columns) for x in same)
    return {
        "bias": a_constant_of_a_softmax,
        "diagonal": takes_the_diagonal,
        "generator": not ("samples" in beside or any(str(x) == "random" for x in beside.values())),
        "hardness_mode": not beside.get("hardness_strength"),
        "margin_strategy": not beside.get("margin"),
        "partition_mode": "directions" not in beside,
        "reduction": value == "mean_of_targets" and beside.get("reduction") is None,
    }.get(option, False)


@extents(PAIRS)
@pytest.mark.parametrize("name", LOSSES)
def test_each_option_counts_or_is_refused(name, extent):
    """Beside each combination of others, at some of their values: the outcome is another, or an error is."""
    how, counts = ("memory", "backend"), {}
    for beside in sampled(name, extent, how):
        before = said(partial(outcome, name, inputs(name) | beside))
        if isinstance(before, str):
            continue
        for added in combinations(name, 1, (*how, *beside)):
            option, value = next(iter(added.items()), ("", None))
            if not added or has_no_effect_by_its_meaning(name, option, value, beside):
                continue
            after = said(partial(outcome, name, inputs(name) | beside | added))
            pair = what(name, added), *sorted(beside)
            counts[pair] = counts.get(pair, False) or isinstance(after, str) or differs(before, after)
    assert not [pair for pair, has_effect in counts.items() if not has_effect]


def what(name: str, added: Options) -> str:
    """An option, and of `exclude` the kind of its filters, each of which has to count."""
    option, value = next(iter(added.items()))
    kinds = filters(name) if option == "exclude" else {}
    return next(
        (f"exclude={kind}" for kind, x in kinds.items() if shown({"": x}) == shown({"": value})), option
    )


def has_a_guide(options: Options) -> bool:
    return isinstance(options.get("exclude"), fastqt.Guide)


@pytest.mark.parametrize("name", [name for name in LOSSES if "exclude" in option_names(name)])
def test_each_part_of_a_filter_counts(name):
    """No two values of `exclude` have the same outcome: ids of each side and of negatives, each strategy."""
    beside = {"negatives": rows(N, D, seed=2)} if "negatives" in parameters(name) else {}
    found = {
        what: said(partial(outcome, name, inputs(name) | beside | {"exclude": x}))
        for what, x in filters(name).items()
    }
    found["nothing"] = outcome(name, inputs(name) | beside)
    found = {key: x for key, x in found.items() if not isinstance(x, str)}
    assert len(found) > 4
    same = [(a, b) for a, b in itertools.combinations(found, 2) if not differs(found[a], found[b])]
    assert not same


def differs(before: list[Tensor], after: list[Tensor]) -> bool:
    """Whether two outcomes differ; the second may have gradients of one more tensor."""
    same = zip(before, after[: len(before)], strict=True)
    return any(bool(x.any()) for x in after[len(before) :]) or not all(
        x.shape == y.shape and torch.allclose(x, y, rtol=1e-9, atol=1e-12) for x, y in same
    )


F, G = torch.randn(2, 6, 8)
IDS = torch.arange(6)
REFUSED = {
    "ids of negatives that are not there": (
        lambda: fastqt.info_nce_loss(F, G, exclude=fastqt.Same(IDS, negative_ids=IDS)),
        "exclude: want negative_ids with negatives alone",
    ),
    "thresholds of one direction": (
        lambda: fastqt.clip_loss(F, G, scale=3.0, exclude=fastqt.Above(F[:, 0])),
        "exclude: want a filter of both directions, got Above of thresholds or negatives",
    ),
    "a strength without a mode": (
        lambda: fastqt.multiple_negatives_ranking_loss(F, G, hardness_strength=5.0),
        "hardness_strength: want it with a hardness_mode alone, got 5.0",
    ),
    "a strategy beside thresholds": (
        lambda: fastqt.Guide(F, G, thresholds=F[:, 0], margin_strategy="relative"),
        "margin_strategy: want it where no thresholds are given, got 'relative'",
    ),
    "the most of a scale that is fixed": (
        lambda: nn.InfoNCELoss(max_scale=50.0),
        "max_scale: want it with learn_scale=True alone, got 50.0",
    ),
    "another most of a scale that is fixed": (
        lambda: nn.CLIPLoss(learn_scale=False, max_scale=50.0),
        "max_scale: want it with learn_scale=True alone, got 50.0",
    ),
    "a GRU's option of bags": (
        lambda: nn.MultiChannel(F, kind="bow", reset_after=False),
        "reset_after: want True with kind='bow', got False",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_nothing_reads_is_refused(name):
    call, message = REFUSED[name]
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        call()


def test_a_default_is_of_a_scale_that_is_learnt():
    for most in ({}, {"max_scale": None}, {"max_scale": 100.0}):
        module = nn.CLIPLoss(scale=200.0, learn_scale=False, **most)
        assert (module.scale, module.max_scale) == (200.0, None)
