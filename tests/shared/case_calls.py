"""The cases as records of calls, from which `problem_of` makes the problems that engines are given."""

from __future__ import annotations

from typing import Any

from torch import Tensor

import fastqt
from fastqt.exclusions import Same
from fastqt.functional.call import Call
from fastqt.targets import as_targets
from tests.shared.cases import Case


def call_of(case: Case, inputs: dict[str, Tensor], arguments: dict[str, Any]) -> Call:
    """A case as the record of a call."""
    options = {
        "diagonal": "keep" if case.link != "softmax" else "zero",
        "scale": 1.0,
        "bias": 0.0,
        **arguments,
    }
    size, ids = options.pop("context_size", 1), options.pop("document_ids", None)
    window = fastqt.Window(size, normalize=case.link == "softmax", document_ids=ids)
    targets = as_targets(options.pop("targets", window))
    of_queries, of_candidates = (options.pop(name, None) for name in ("query_groups", "candidate_groups"))
    if of_queries is not None:
        options["ids"] = (Same(of_queries, of_candidates),)
    fixed = {"normalize": False, "reduction": "mean", "memory": "fast", "backend": None}
    return Call(link=case.link, targets=targets, **{**options, **inputs}, **fixed)
