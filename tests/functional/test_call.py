"""The lists of a call's fields, which follow from their types: a new field is in the right ones by itself."""

from dataclasses import fields
from types import SimpleNamespace

import torch

import fastqt
from fastqt.functional.call import LEAVES, MAY_LACK, WITH_ROWS, Call
from fastqt.functional.ranks import OF_QUERIES, facts_of
from fastqt.problem import ROW_CELLS, Problem

# What ranks may have otherwise: how a loss is computed, and which loss it is, which they compare before.
OF_EACH_RANK = {"link", "memory", "backend"}
TENSORS = {field.name for field in fields(Call) if "Tensor" in str(field.type)}


def test_fields_are_in_the_lists_that_their_types_say():
    assert set(LEAVES) <= TENSORS
    assert set(WITH_ROWS) == set(LEAVES) - {"scale", "bias"}
    assert set(MAY_LACK) == TENSORS - {"queries", "candidates", "scale", "bias"}
    assert set(ROW_CELLS) == {"row_negatives", "row_scores"}
    assert set(OF_QUERIES) == {*ROW_CELLS, "query_groups", "mask", "thresholds"}


def test_each_tensor_of_a_call_is_one_of_the_problem():
    assert {field.name for field in fields(Problem)} >= TENSORS


def test_ranks_compare_each_field():
    queries, candidates = torch.randn(2, 4, 3)
    call = Call(
        "softmax",
        queries,
        candidates,
        fastqt.Diagonal(),
        diagonal="keep",
        scale=1.0,
        bias=0.0,
        normalize=False,
        reduction="mean",
        memory="fast",
        backend=None,
    )
    compared = {name.removesuffix(" given") for name in facts_of(call, SimpleNamespace(check="first"))}
    of_embeddings = {"queries", "candidates"}  # by their width, dtype and device
    assert {field.name for field in fields(Call)} - OF_EACH_RANK - of_embeddings <= compared
