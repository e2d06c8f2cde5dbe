"""What leaves a loss, from the plain values that oracles read to those of the argument `exclude`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import fastqt


def excluding(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments with `exclude` in place of query_groups, candidate_groups, mask, guide, margin, strategy
    and thresholds, of which each may lack or be None."""
    given = dict(arguments)
    queries, candidates = given.pop("query_groups", None), given.pop("candidate_groups", None)
    margin, strategy = given.pop("margin", None), given.pop("margin_strategy", "absolute")
    thresholds = given.pop("thresholds", None)
    filters = [given.pop(name, None) for name in ("mask", "guide")]
    filters.append(None if queries is None else fastqt.Same(queries, candidates))
    filters.append(None if margin is None else fastqt.Margin(margin, strategy))
    filters.append(None if thresholds is None else fastqt.Above(thresholds))
    exclude = [x for x in filters if x is not None]
    return given | ({"exclude": exclude} if exclude else {})
