"""The operators of csrc/cpu refuse malformed arguments, because they read and write raw memory."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from fastqt import Diagonal, contrastive_loss
from fastqt.engines import ops
from fastqt.problem import LINKS
from tests.shared.tolerances import FLOAT64, relative

pytestmark = pytest.mark.skipif(ops.native_error is not None, reason=str(ops.native_error))
N, M, K, D = 5, 6, 2, 3
NEEDS = [True] * 7
Arguments = dict[str, Any]


def problem(dtype: torch.dtype = torch.float32) -> Arguments:
    """What the three operators of a contrastive loss have in common: row i's target is candidate i + 1."""
    generator = torch.Generator().manual_seed(0)
    queries, candidates, negatives, row_negatives = (
        torch.randn(rows, D, generator=generator, dtype=dtype) for rows in (N, M, K, N)
    )
    return {
        "queries": queries,
        "candidates": candidates,
        "negatives": negatives,
        "row_negatives": row_negatives,
        "bias": torch.zeros(M, dtype=dtype),
        "scale": 2.0,
        "link": 0,
        "diagonal": 0,
        "starts": torch.arange(N + 1),
        "columns": torch.arange(1, N + 1),
        "weights": torch.ones(N, dtype=torch.float64),
        "dense": None,
        "background": None,
        "query_groups": None,
        "candidate_groups": None,
        "mask": None,
        "normalize": False,
        "row_scores": torch.linspace(-1, 1, N, dtype=dtype),
        "thresholds": torch.linspace(-1, 2, N, dtype=dtype),
        "tile_rows": 2,
    }


def rows(value: float = 1.0) -> Tensor:
    return torch.full((N,), value, dtype=torch.float64)


OPERATORS: dict[str, Arguments] = {
    "contrastive_loss_rows": {"tile_columns": 4},
    "contrastive_loss_with_gradients": {"tile_columns": None, "row_weight": 1.0, "needs": NEEDS},
    "contrastive_loss_backward": {
        "tile_columns": 4,
        "row_weights": rows(),
        "logsumexp": rows(),
        "mass": rows(),
        "needs": NEEDS,
    },
}


def clip() -> Arguments:
    generator = torch.Generator().manual_seed(0)
    return {
        "queries": torch.randn(N, D, generator=generator),
        "candidates": torch.randn(N, D, generator=generator),
        "scale": 2.0,
        "normalize": False,
        "tile_rows": 2,
        "tile_columns": 4,
        "kept_tiles": 2,
        "known": False,
        "sums": torch.zeros(3, N, dtype=torch.float64),
        "loss": rows(),
        "weights": rows(),
        "dqueries": torch.zeros(N, D),
        "dcandidates": torch.zeros(N, D),
        "dscale": torch.zeros((), dtype=torch.float64),
    }


def three_blocks() -> Arguments:
    given = clip()
    return {
        **{name: given[name] for name in ("queries", "candidates", "scale", "loss", "weights")},
        **{name: given[name] for name in ("dqueries", "dcandidates", "dscale")},
        "shares": torch.ones(4, N),
        "dshares": torch.zeros(4, N),
        "third_block": True,
        "masks_excluded": False,
        "own_mixture_weight": 0.0,
        "stop_gradient": False,
        "chunk_rows": 2,
    }


def clip_rectangle() -> Arguments:
    """What both operators of a rectangle have in common: N queries and M candidates."""
    common = ("queries", "scale", "normalize", "tile_rows", "tile_columns")
    given = clip()
    return {**{name: given[name] for name in common}, "candidates": torch.ones(M, D)}


def clip_sums() -> Arguments:
    positive, row_others, column_others = (torch.zeros(size).double() for size in (N, N, M))
    given = {"positive": positive, "row_others": row_others, "column_others": column_others}
    return {**clip_rectangle(), **given}


def clip_gradients() -> Arguments:
    numbers = {"row_logsumexp": N, "row_weights": N, "column_logsumexp": M, "column_weights": M, "pairs": N}
    return {
        **clip_rectangle(),
        **{name: torch.ones(size).double() for name, size in numbers.items()},
        "dqueries": torch.zeros(N, D),
        "dcandidates": torch.zeros(M, D),
        "dscale": torch.zeros((), dtype=torch.float64),
    }


WALKS = {
    "clip_walk_": clip,
    "clip_sums_": clip_sums,
    "clip_gradients_": clip_gradients,
    "three_block_walk_": three_blocks,
}


def call(operator: str, changes: Arguments) -> Any:
    make = WALKS.get(operator)
    arguments = {**problem(), **OPERATORS[operator]} if make is None else make()
    return getattr(torch.ops.fastqt, operator)(**{**arguments, **changes})


def refused(operator: str, changes: Arguments, wanted: str, got: str) -> None:
    """The error names the argument, what was wanted and what came."""
    with pytest.raises(RuntimeError, match=f"{re.escape(wanted)}.*, got .*{re.escape(got)}"):
        call(operator, changes)


def strided(x: Tensor) -> Tensor:
    """The same values with a gap after each."""
    return torch.stack([x, x], -1)[..., 0]


INTEGERS = torch.arange(N + 1)
# What is changed of a problem that is accepted, what the error wants, and what it says that it got.
PROBLEMS = {
    "queries in 16 bits": ({"queries": torch.ones(N, D).half()}, "queries: want dtype float32", "float16"),
    "queries of integers": ({"queries": torch.ones(N, D).long()}, "queries: want dtype float32", "int64"),
    "a vector of queries": ({"queries": torch.ones(D)}, "queries: want a float32", "(3)"),
    "no queries": ({"queries": torch.ones(0, D)}, "(at least 1, at least 1)", "(0, 3)"),
    "wider candidates": ({"candidates": torch.ones(M, D + 1)}, "candidates: want", "(6, 4)"),
    "candidates in another dtype": ({"candidates": torch.ones(M, D).double()}, "float32", "float64"),
    "no candidates": ({"candidates": torch.ones(0, D)}, "candidates: want", "(0, 3)"),
    "wider negatives": ({"negatives": torch.ones(K, D + 1)}, "negatives: want", "(2, 4)"),
    "negatives in another dtype": ({"negatives": torch.ones(K, D).double()}, "float32", "float64"),
    "fewer row negatives": ({"row_negatives": torch.ones(N - 1, D)}, "row_negatives: want", "(4, 3)"),
    "a shorter bias": ({"bias": torch.ones(M - 1)}, "bias: want", "(5)"),
    "a bias in another dtype": ({"bias": torch.ones(M).double()}, "bias: want", "float64"),
    "a strided bias": ({"bias": strided(torch.ones(M))}, "contiguous", "strided"),
    "fewer row scores": ({"row_scores": torch.ones(N - 1)}, "row_scores: want", "(4)"),
    "row scores in another dtype": ({"row_scores": torch.ones(N).double()}, "row_scores: want", "float64"),
    "strided row scores": ({"row_scores": strided(torch.ones(N))}, "contiguous", "strided"),
    "fewer thresholds": ({"thresholds": torch.ones(N - 1)}, "thresholds: want", "(4)"),
    "thresholds in another dtype": ({"thresholds": torch.ones(N).double()}, "thresholds: want", "float64"),
    "strided thresholds": ({"thresholds": strided(torch.ones(N))}, "contiguous", "strided"),
    "an unknown link": ({"link": 3}, "link: want 0 (softmax), 1 (sigmoid) or 2 (logsumexp)", "3"),
    "an unknown diagonal": ({"diagonal": -1}, "diagonal: want 0 (zero), 1 (exclude) or 2 (keep)", "-1"),
    "no targets": ({"starts": None}, "want either starts or dense", "neither"),
    "two kinds of targets": ({"dense": torch.zeros(N, M)}, "want either starts or dense", "both"),
    "short starts": ({"starts": INTEGERS[:N]}, "starts: want a contiguous int64", "(5)"),
    "long starts": ({"starts": torch.arange(N + 2)}, "starts: want", "(7)"),
    "starts in 32 bits": ({"starts": INTEGERS.int()}, "starts: want", "int32"),
    "strided starts": ({"starts": strided(INTEGERS)}, "contiguous", "strided"),
    "starts that decrease": (
        {"starts": torch.tensor([0, 1, 4, 3, 4, 5])},
        "starts: want numbers that do not decrease",
        "4 and then 3 at row 2",
    ),
    "starts that rise and fall far": (
        {"starts": torch.tensor([0, 1, 10**12, 3, 4, 5])},
        "starts: want numbers that do not decrease",
        "1000000000000 and then 3",
    ),
    "starts after the last column": (
        {"starts": INTEGERS + 1},
        "starts: want",
        "1 first and 6 last",
    ),
    "starts before the first column": ({"starts": INTEGERS - 1}, "starts: want", "-1 first"),
    "starts without columns": ({"columns": None}, "columns: want it with starts", "None"),
    "starts without weights": ({"weights": None}, "weights: want it with starts", "None"),
    "columns in 32 bits": ({"columns": INTEGERS[1:].int()}, "columns: want", "int32"),
    "columns as a matrix": ({"columns": INTEGERS[1:, None]}, "columns: want 1 dimension", "2"),
    "strided columns": ({"columns": strided(INTEGERS[1:])}, "contiguous", "strided"),
    "weights in 32 bits": ({"weights": torch.ones(N)}, "weights: want a contiguous float64", "float32"),
    "short weights": ({"weights": rows()[1:]}, "weights: want", "(4)"),
    "dense targets of another shape": (
        {"starts": None, "dense": torch.zeros(N, M + 1)},
        "dense: want a float32 tensor of shape (5, 6)",
        "(5, 7)",
    ),
    "dense targets in 64 bits": (
        {"starts": None, "dense": torch.zeros(N, M).double()},
        "dense: want",
        "float64",
    ),
    "a background in 32 bits": ({"background": torch.ones(N)}, "background: want", "float32"),
    "a short background": ({"background": rows()[1:]}, "background: want", "(4)"),
    "a background of one number": ({"background": rows()[:1].expand(N)}, "contiguous", "strided"),
    "query groups alone": ({"query_groups": INTEGERS[:N]}, "candidate_groups: want", "None"),
    "candidate groups alone": ({"candidate_groups": INTEGERS}, "query_groups: want", "None"),
    "query groups of another length": (
        {"query_groups": INTEGERS, "candidate_groups": INTEGERS},
        "query_groups: want",
        "(6)",
    ),
    "candidate groups of another length": (
        {"query_groups": INTEGERS[:N], "candidate_groups": INTEGERS[:N]},
        "candidate_groups: want",
        "(5)",
    ),
    "groups in 32 bits": (
        {"query_groups": INTEGERS[:N].int(), "candidate_groups": INTEGERS.int()},
        "query_groups: want",
        "int32",
    ),
    "a mask of another shape": ({"mask": torch.zeros(M, N, dtype=torch.bool)}, "(5, 6)", "(6, 5)"),
    "a mask of bytes": ({"mask": torch.zeros(N, M, dtype=torch.uint8)}, "mask: want a bool", "Byte"),
    "tiles without rows": ({"tile_rows": 0}, "tile_rows: want at least 1", "0"),
    "tiles of negative rows": ({"tile_rows": -1}, "tile_rows: want at least 1", "-1"),
    "tiles without columns": ({"tile_columns": 0, "link": 1}, "tile_columns: want at least 1", "0"),
    "tiles of negative columns": ({"tile_columns": -4, "link": 1}, "tile_columns: want at least 1", "-4"),
}
SAVED = {
    f"{name}, {kind}": ({name: value}, f"{name}: want a contiguous float64", got)
    for name in ("row_weights", "logsumexp", "mass")
    for kind, value, got in (
        ("short", rows()[1:], "(4)"),
        ("in 32 bits", torch.ones(N), "float32"),
        ("strided", strided(rows()), "strided"),
    )
}
NEEDED = {
    "five needs": ({"needs": NEEDS[:5]}, "needs: want 7 booleans", "5"),
    "a gradient of no negatives": ({"negatives": None}, "negatives: want a tensor", "None"),
    "a gradient of no bias": ({"bias": None}, "bias: want a tensor", "None"),
    "a gradient of no row scores": ({"row_scores": None}, "row_scores: want a tensor", "None"),
}
CLIP = {
    "queries in 16 bits": ({"queries": torch.ones(N, D).half()}, "queries: want dtype float32", "float16"),
    "fewer candidates": ({"candidates": torch.ones(N - 1, D)}, "candidates: want", "(4, 3)"),
    "wider candidates": ({"candidates": torch.ones(N, D + 1)}, "candidates: want", "(5, 4)"),
    "candidates in another dtype": ({"candidates": torch.ones(N, D).double()}, "float32", "float64"),
    "tiles without rows": ({"tile_rows": 0}, "tile_rows: want at least 1", "0"),
    "tiles of negative columns": ({"tile_columns": -4}, "tile_columns: want at least 1", "-4"),
    "no kept tiles": ({"kept_tiles": 0}, "kept_tiles: want at least 1", "0"),
    "two sums": ({"sums": torch.zeros(2, N).double()}, "sums: want", "(2, 5)"),
    "sums in 32 bits": ({"sums": torch.zeros(3, N)}, "sums: want a contiguous float64", "float32"),
    "strided sums": ({"sums": torch.zeros(N, 3).double().T}, "contiguous", "strided"),
    "a short loss": ({"loss": rows()[1:]}, "loss: want", "(4)"),
    "weights in 32 bits": ({"weights": torch.ones(N)}, "weights: want", "float32"),
    "short weights": ({"weights": rows()[1:]}, "weights: want", "(4)"),
    "gradients without weights": ({"weights": None}, "weights: want them with gradients", "None"),
    "a narrow gradient": ({"dqueries": torch.zeros(N, D - 1)}, "dqueries: want", "(5, 2)"),
    "a gradient in 64 bits": ({"dcandidates": torch.zeros(N, D).double()}, "dcandidates: want", "float64"),
    "a strided gradient": ({"dqueries": torch.zeros(D, N).T}, "contiguous", "strided"),
    "a scale gradient in 32 bits": ({"dscale": torch.zeros(())}, "dscale: want", "float32"),
    "a scale gradient for each row": ({"dscale": rows()}, "dscale: want", "(5)"),
}
RECTANGLES = {
    name: CLIP[name]
    for name in (
        *("queries in 16 bits", "candidates in another dtype"),
        *("tiles without rows", "tiles of negative columns"),
    )
} | {
    "wider candidates": ({"candidates": torch.ones(M, D + 1)}, "candidates: want", "(6, 4)"),
    "no candidates": ({"candidates": torch.ones(0, D)}, "(at least 1, 3)", "(0, 3)"),
    "no queries": ({"queries": torch.ones(0, D)}, "(at least 1, at least 1)", "(0, 3)"),
}


def _of_numbers(sizes: dict[str, int]) -> dict[str, tuple[Arguments, str, str]]:
    return {
        f"{name}, {kind}": ({name: value}, f"{name}: want", got)
        for name, size in sizes.items()
        for kind, value, got in (
            ("long", torch.ones(size + 1).double(), f"({size + 1})"),
            ("in 32 bits", torch.ones(size), "float32"),
            ("strided", strided(torch.ones(size).double()), "strided"),
            ("a matrix", torch.ones(size, 1).double(), f"({size}, 1)"),
        )
    }


CLIP_SUMS = RECTANGLES | _of_numbers({"positive": N, "row_others": N, "column_others": M})
CLIP_GRADIENTS = {
    **RECTANGLES,
    **_of_numbers(
        {"row_logsumexp": N, "row_weights": N, "column_logsumexp": M, "column_weights": M, "pairs": N}
    ),
    **{
        name: case
        for name, case in CLIP.items()
        if "gradient" in name and name != "gradients without weights"
    },
    "a gradient of other rows": ({"dcandidates": torch.zeros(N, D)}, "dcandidates: want", "(5, 3)"),
}
OF_CLIP_ALONE = ("tiles", "no kept", "two sums", "sums in", "strided sums")
THREE_BLOCKS = {name: case for name, case in CLIP.items() if not name.startswith(OF_CLIP_ALONE)} | {
    "one row": ({"queries": torch.ones(1, D)}, "queries: want at least 2 rows", "1"),
    "three shares": ({"shares": torch.ones(3, N)}, "shares: want", "(3, 5)"),
    "shares in 64 bits": (
        {"shares": torch.ones(4, N).double()},
        "shares: want a contiguous float32",
        "float64",
    ),
    "strided shares": ({"shares": torch.ones(N, 4).T}, "contiguous", "strided"),
    "short gradients of shares": ({"dshares": torch.zeros(4, N - 1)}, "dshares: want", "(4, 4)"),
    "no rows in a chunk": ({"chunk_rows": 0}, "chunk_rows: want at least 1", "0"),
}


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("case", PROBLEMS)
def test_malformed_problems_are_refused(operator, case):
    refused(operator, *PROBLEMS[case])


@pytest.mark.parametrize("case", SAVED)
def test_malformed_rows_are_refused_in_backward(case):
    refused("contrastive_loss_backward", *SAVED[case])


@pytest.mark.parametrize("operator", ["contrastive_loss_with_gradients", "contrastive_loss_backward"])
@pytest.mark.parametrize("case", NEEDED)
def test_gradients_that_cannot_be_are_refused(operator, case):
    refused(operator, *NEEDED[case])


def test_a_softmax_with_gradients_in_the_forward_pass_takes_whole_rows():
    refused("contrastive_loss_with_gradients", {"tile_columns": 4}, "tile_columns: want None", "4")
    assert call("contrastive_loss_with_gradients", {"tile_columns": 4, "link": 1})


@pytest.mark.parametrize("case", CLIP)
def test_malformed_pairs_are_refused(case):
    refused("clip_walk_", *CLIP[case])


@pytest.mark.parametrize("case", CLIP_SUMS)
def test_malformed_sums_of_a_rectangle_are_refused(case):
    refused("clip_sums_", *CLIP_SUMS[case])


@pytest.mark.parametrize("case", CLIP_GRADIENTS)
def test_malformed_gradients_of_a_rectangle_are_refused(case):
    refused("clip_gradients_", *CLIP_GRADIENTS[case])


@pytest.mark.parametrize("pairs", [0, 1, N])
def test_rectangles_that_the_cases_change_are_accepted(pairs):
    call("clip_sums_", {"positive": torch.zeros(pairs).double()})
    call("clip_gradients_", {"pairs": torch.zeros(pairs).double()})
    call("clip_gradients_", {"dqueries": None, "dcandidates": None, "dscale": None})


@pytest.mark.parametrize("operator", ["clip_walk_", "clip_sums_", "clip_gradients_"])
def test_tiles_may_be_larger_than_any_matrix(operator):
    """No sum of such sizes overflows, which the sanitizers would see."""
    call(operator, {"tile_rows": 2**63 - 1, "tile_columns": 2**63 - 1})


@pytest.mark.parametrize("case", THREE_BLOCKS)
def test_malformed_blocks_are_refused(case):
    refused("three_block_walk_", *THREE_BLOCKS[case])


def test_the_three_operators_agree():
    """The problem that the cases above change is accepted, and has the loss that users get for it."""
    given = {**problem(torch.float64), "columns": torch.arange(N), "diagonal": 2, "thresholds": None}
    names = ("queries", "candidates", "negatives", "row_negatives", "row_scores", "scale")
    expected = contrastive_loss(
        *(given[name] for name in names[:2]),
        Diagonal(),
        **{name: given[name] for name in names[2:]},
        diagonal="keep",
        reduction="none",
        backend="reference",
    )
    logsumexp, mass, loss, *at_fault = call("contrastive_loss_rows", given)
    assert at_fault == [0, 0, 0]
    assert relative(loss, expected) < FLOAT64
    total, once, *_ = call("contrastive_loss_with_gradients", given)
    assert relative(total, expected.sum()) < FLOAT64
    again, *_ = call("contrastive_loss_backward", {**given, "logsumexp": logsumexp, "mass": mass})
    assert all(relative(a, b) < FLOAT64 for a, b in zip(once, again, strict=True))


def test_pairs_that_the_cases_change_are_accepted():
    call("clip_walk_", {})
    call("clip_walk_", {"weights": None, "dqueries": None, "dcandidates": None, "dscale": None})


def test_blocks_that_the_cases_change_are_accepted():
    call("three_block_walk_", {})
    wanted = ("weights", "dqueries", "dcandidates", "dshares", "dscale")
    call("three_block_walk_", dict.fromkeys(wanted))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("operator", OPERATORS)
def test_opcheck(operator, link, dtype):
    arguments = {**problem(dtype), "link": LINKS.index(link), **OPERATORS[operator]}
    torch.library.opcheck(
        getattr(torch.ops.fastqt, operator),
        (),
        arguments,
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prefix_dims": [2, 2]}, r"prefix_dims: want ascending numbers in 1\.\.3, got 2"),
        ({"prefix_dims": [2, 4]}, r"prefix_dims: want ascending numbers in 1\.\.3, got 4"),
        ({"prefix_dims": [0, 3]}, r"prefix_dims: want ascending numbers in 1\.\.3, got 0"),
        ({"prefix_weights": [1.0]}, "prefix_weights: want one for each of the 2 prefix_dims"),
        ({"row_negatives": torch.zeros(N, D)}, "row_negatives: want None with prefixes"),
        ({"row_weights": rows().float()}, "row_weights: want"),
        ({"tile_rows": 0}, "tile_rows: want"),
        ({"needs": NEEDS[1:]}, "needs: want 7 booleans"),
    ],
    ids=str,
)
def test_prefixes_of_wrong_sizes_are_refused(change, message):
    """As they are, the loss is that of both prefixes."""
    right = {
        **problem(),
        "row_negatives": None,
        "prefix_dims": [2, 3],
        "prefix_weights": [1.0, 2.0],
        "row_weights": rows(),
        "needs": [False] * 7,
    }
    loss, *_ = torch.ops.fastqt.prefix_loss(**right)
    assert loss.isfinite().all()
    with pytest.raises(RuntimeError, match=message):
        torch.ops.fastqt.prefix_loss(**{**right, **change})
