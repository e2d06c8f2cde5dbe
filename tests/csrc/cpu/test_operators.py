"""The operators of csrc/cpu refuse malformed arguments, because they read and write raw memory.

And what they make of targets that are repeated, tiny, huge or infinite.
"""

from __future__ import annotations

import itertools
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
N, M, K, D = 4, 7, 2, 3
NEEDS = [True] * 7
INTEGERS = torch.arange(N + 1)
NOT_FINITE = 5  # as in csrc/cpu/score_tile.h
Arguments = dict[str, Any]


def problem(dtype: torch.dtype = torch.float32, **changes: Any) -> Arguments:
    """What the three operators of a contrastive loss have in common: row i's target is candidate i + 1."""
    generator = torch.Generator().manual_seed(0)
    embeddings = [torch.randn(rows, D, generator=generator, dtype=dtype) for rows in (N, M, K, N)]
    absent = ("dense", "background", "query_groups", "candidate_groups", "mask")
    return {
        **dict(zip(("queries", "candidates", "negatives", "row_negatives"), embeddings, strict=True)),
        "bias": torch.zeros(M, dtype=dtype),
        "scale": 2.0,
        "link": 0,
        "diagonal": 0,
        "starts": INTEGERS,
        "columns": INTEGERS[1:],
        "weights": rows(),
        **dict.fromkeys(absent),
        "normalize": False,
        "row_scores": torch.linspace(-1, 1, N, dtype=dtype),
        "thresholds": torch.linspace(-1, 2, N, dtype=dtype),
        "tile_rows": 2,
        **changes,
    }


def rows(size: int = N, value: float = 1.0) -> Tensor:
    return torch.full((size,), value, dtype=torch.float64)


def twice(numbers: Tensor) -> Tensor:
    """The same numbers for each of two multiples of the scores."""
    return numbers.repeat(2, 1)


OF_BACKWARD = {"row_weights": rows(), "logsumexp": rows(), "mass": rows()}
SCORES = {"scores": torch.zeros(N, M)}
OPERATORS: dict[str, Arguments] = {
    "contrastive_loss_rows": {"tile_columns": 4, "scores": None},
    "contrastive_loss_with_gradients": {"tile_columns": None, "row_weight": 1.0, "needs": NEEDS},
    "contrastive_loss_backward": {"tile_columns": 4, **OF_BACKWARD, "scores": None, "needs": NEEDS},
}
EMBEDDINGS = {"queries": torch.ones(N, D), "candidates": torch.ones(N, D)}
TILES = {"scale": 2.0, "normalize": False, "tile_rows": 2, "tile_columns": 4}
GRADIENTS = {
    "dqueries": torch.zeros(N, D),
    "dcandidates": torch.zeros(N, D),
    "dscale": torch.zeros((), dtype=torch.float64),
}
OF_CLIP = {"sums": torch.zeros(3, N).double(), "loss": rows(), "weights": rows(), **GRADIENTS}
OF_BLOCKS = {
    **{"shares": torch.ones(4, N), "dshares": torch.zeros(4, N), "loss": rows(), "weights": rows()},
    **GRADIENTS,
}
TWICE = {"multiples": [1.0, 2.0]}
OF_SUMS = {
    "positive": rows(),
    "row_others": twice(rows()),
    "column_others": twice(rows(M)),
    **SCORES,
    **TWICE,
}
OF_RECTANGLES = {
    **{"row_logsumexp": twice(rows()), "row_weights": twice(rows()), "pairs": rows()},
    **{"column_logsumexp": twice(rows(M)), "column_weights": twice(rows(M)), **SCORES, **TWICE},
    **{**GRADIENTS, "dcandidates": torch.zeros(M, D)},
}
RECTANGLE = {**EMBEDDINGS, "candidates": torch.ones(M, D), **TILES}
WALKS: dict[str, Arguments] = {
    "clip_walk_": {**EMBEDDINGS, **TILES, "kept_tiles": 2, "known": False, **OF_CLIP},
    "clip_sums_": {**RECTANGLE, **OF_SUMS},
    "clip_gradients_": {**RECTANGLE, **OF_RECTANGLES},
    "three_block_walk_": {
        **{**EMBEDDINGS, **OF_BLOCKS, "scale": 2.0, "third_block": True, "masks_excluded": False},
        **{"own_mixture_weight": 0.0, "stop_gradient": False, "chunk_rows": 2},
    },
}


def call(operator: str, changes: Arguments) -> Any:
    """The operators write into copies of what the tables hold."""
    given = WALKS[operator] if operator in WALKS else {**problem(), **OPERATORS[operator]}
    copies = {name: x.clone() if isinstance(x, Tensor) else x for name, x in given.items()}
    return getattr(torch.ops.fastqt, operator)(**{**copies, **changes})


def shape_of(x: Tensor) -> str:
    return f"({', '.join(map(str, x.shape))})"


def strided(x: Tensor) -> Tensor:
    """The same values with a gap after each."""
    return torch.stack([x, x], -1)[..., 0]


Refusals = dict[str, tuple[Arguments, str, str]]  # what is changed, what the error wants, and what it got


def malformed(right: Arguments, strides: bool = True) -> Refusals:
    """Each tensor in another dtype, one row longer, as a tensor of one dimension more, and with gaps."""
    found: Refusals = {}
    for name, x in right.items():
        if not isinstance(x, Tensor):
            continue
        other = {torch.float64: torch.float32, torch.float32: torch.float64, torch.int64: torch.int32}[
            x.dtype
        ]
        found[f"{name} in another dtype"] = ({name: x.to(other)}, f"{name}: want", str(other)[6:])
        found[f"{name} of more dimensions"] = ({name: x[..., None]}, f"{name}: want", "")
        if x.dim():
            longer = torch.cat([x, x[:1]])
            found[f"{name} longer"] = ({name: longer}, f"{name}: want", shape_of(longer))
        if strides and x.dim():
            found[f"{name} strided"] = ({name: strided(x)}, f"{name}: want a contiguous", "strided")
    return found


def of_embeddings(rows_of_candidates: int) -> Refusals:
    wider = torch.ones(rows_of_candidates, D + 1)
    return {
        "queries in 16 bits": (
            {"queries": torch.ones(N, D).half()},
            "queries: want dtype float32",
            "float16",
        ),
        "queries of integers": ({"queries": torch.ones(N, D).long()}, "queries: want dtype float32", "int64"),
        "a vector of queries": ({"queries": torch.ones(D)}, "queries: want a float32", "(3)"),
        "no queries": ({"queries": torch.ones(0, D)}, "(at least ", "0"),
        "wider candidates": ({"candidates": wider}, "candidates: want", shape_of(wider)),
        "candidates in 64 bits": ({"candidates": wider[:, :D].double()}, "float32", "float64"),
        "no candidates": ({"candidates": torch.ones(0, D)}, "candidates: want", "(0, 3)"),
    }


COUNTS = {
    f"{name} {value}": ({name: value}, f"{name}: want at least 1", str(value))
    for name in ("tile_rows", "tile_columns", "kept_tiles", "chunk_rows")
    for value in (0, -4)
}
GROUPS = {"query_groups": INTEGERS[:N], "candidate_groups": torch.arange(M)}
OF_PROBLEMS = {
    **{"negatives": torch.ones(K, D), "row_negatives": torch.ones(N, D)},
    **{"bias": torch.ones(M), "row_scores": torch.ones(N), "thresholds": torch.ones(N)},
    **{"starts": INTEGERS, "columns": INTEGERS[1:], "weights": rows(), "background": rows()},
}
PROBLEMS = {
    **of_embeddings(M),
    # Longer negatives are others; rows of embeddings may lie apart; columns count the weights.
    **{
        name: refusal
        for name, refusal in malformed(OF_PROBLEMS).items()
        if name not in ("negatives longer", "negatives strided", "row_negatives strided", "columns longer")
    },
    **{name: ({**GROUPS, **x[0]}, *x[1:]) for name, x in malformed(GROUPS).items() if "strided" not in name},
    **{name: refusal for name, refusal in COUNTS.items() if name.startswith("tile_rows")},
    **{
        name: ({**refusal[0], "link": 1}, *refusal[1:])
        for name, refusal in COUNTS.items()
        if name.startswith("tile_columns")
    },
    "an unknown link": ({"link": 3}, "link: want 0 (softmax), 1 (sigmoid) or 2 (logsumexp)", "3"),
    "an unknown diagonal": ({"diagonal": -1}, "diagonal: want 0 (zero), 1 (exclude) or 2 (keep)", "-1"),
    "no targets": ({"starts": None}, "want either starts or dense", "neither"),
    "two kinds of targets": ({"dense": torch.zeros(N, M)}, "want either starts or dense", "both"),
    "starts that decrease": (
        {"starts": torch.tensor([0, 1, 4, 3, 4])},
        "starts: want numbers that do not decrease",
        "4 and then 3 at row 2",
    ),
    "starts that rise and fall far": (
        {"starts": torch.tensor([0, 1, 10**12, 3, 4])},
        "starts: want numbers that do not decrease",
        "1000000000000 and then 3",
    ),
    "starts after the last column": ({"starts": INTEGERS + 1}, "starts: want", f"1 first and {N + 1} last"),
    "starts before the first column": ({"starts": INTEGERS - 1}, "starts: want", "-1 first"),
    "starts without columns": ({"columns": None}, "columns: want it with starts", "None"),
    "starts without weights": ({"weights": None}, "weights: want it with starts", "None"),
    "a background of one number": ({"background": rows()[:1].expand(N)}, "contiguous", "strided"),
    "query groups alone": ({"query_groups": INTEGERS[:N]}, "candidate_groups: want", "None"),
    "candidate groups alone": ({"candidate_groups": torch.arange(M)}, "query_groups: want", "None"),
    "dense targets of another shape": (
        {"starts": None, "dense": torch.zeros(N, M + 1)},
        "dense: want a float32 tensor of shape (4, 7)",
        "(4, 8)",
    ),
    "dense targets in 64 bits": (
        {"starts": None, "dense": torch.zeros(N, M).double()},
        "dense: want",
        "float64",
    ),
    "a mask of another shape": ({"mask": torch.zeros(M, N, dtype=torch.bool)}, "(4, 7)", "(7, 4)"),
    "a mask of bytes": ({"mask": torch.zeros(N, M, dtype=torch.uint8)}, "mask: want a bool", "Byte"),
}
NEEDED = {
    "five needs": ({"needs": NEEDS[:5]}, "needs: want 7 booleans", "5"),
    **{
        f"a gradient of no {name}": ({name: None}, f"{name}: want a tensor", "None")
        for name in ("negatives", "bias", "row_scores")
    },
}
NO_WEIGHTS: Refusals = {"no weights": ({"weights": None}, "weights: want them with gradients", "None")}


def counts(*names: str) -> Refusals:
    return {name: refusal for name, refusal in COUNTS.items() if name.startswith(names)}


NO_MULTIPLES: Refusals = {"no multiples": ({"multiples": []}, "multiples: want at least 1", "none")}

OF_OPERATORS: dict[str, Refusals] = {
    **dict.fromkeys(OPERATORS, PROBLEMS),
    "contrastive_loss_rows": {**PROBLEMS, **malformed(SCORES)},
    "contrastive_loss_with_gradients": {**PROBLEMS, **NEEDED},
    "contrastive_loss_backward": {**PROBLEMS, **NEEDED, **malformed(OF_BACKWARD), **malformed(SCORES)},
    "clip_walk_": {**of_embeddings(N), **malformed(OF_CLIP), **counts("tile", "kept"), **NO_WEIGHTS},
    "clip_sums_": {**of_embeddings(M), **malformed(OF_SUMS), **counts("tile"), **NO_MULTIPLES},
    "clip_gradients_": {**of_embeddings(M), **malformed(OF_RECTANGLES), **counts("tile"), **NO_MULTIPLES},
    "three_block_walk_": {
        **{**of_embeddings(N), **malformed(OF_BLOCKS), **counts("chunk"), **NO_WEIGHTS},
        "one row": ({"queries": torch.ones(1, D)}, "queries: want at least 2 rows", "1"),
    },
}
REFUSED = [(operator, name) for operator, refusals in OF_OPERATORS.items() for name in refusals]


def refused(operator: str, changes: Arguments, wanted: str, got: str) -> None:
    """The error names the argument, what was wanted and what came."""
    with pytest.raises(RuntimeError, match=f"{re.escape(wanted)}.*, got .*{re.escape(got)}"):
        call(operator, changes)


@pytest.mark.parametrize(("operator", "name"), REFUSED)
def test_malformed_arguments_are_refused(operator, name):
    refused(operator, *OF_OPERATORS[operator][name])


def test_a_softmax_with_gradients_in_the_forward_pass_takes_whole_rows():
    refused("contrastive_loss_with_gradients", {"tile_columns": 4}, "tile_columns: want None", "4")
    assert call("contrastive_loss_with_gradients", {"tile_columns": 4, "link": 1})


@pytest.mark.parametrize("operator", WALKS)
def test_what_the_cases_change_is_accepted(operator):
    """Also without gradients, and with tiles that are larger than any matrix: no sum of sizes overflows."""
    given = WALKS[operator]
    call(operator, {})
    call(operator, {name: None for name in (*GRADIENTS, *SCORES, "dshares") if name in given})
    call(operator, {name: 2**63 - 1 for name in ("tile_rows", "tile_columns") if name in given})
    for pairs in (0, 1, N):
        call(operator, {name: rows(pairs) for name in ("positive", "pairs") if name in given})


def test_the_three_operators_agree():
    """The problem that the cases above change is accepted, and has the loss that users get for it."""
    given = problem(torch.float64, columns=INTEGERS[:N], diagonal=2, thresholds=None)
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
    of_rows = {"logsumexp": logsumexp, "mass": mass}
    again, *_ = call("contrastive_loss_backward", {**given, **of_rows})
    assert all(relative(a, b) < FLOAT64 for a, b in zip(once, again, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("normalize", [False, True])
def test_kept_scores_are_those_that_would_be_computed_again(dtype, normalize):
    """Tiles of other sizes read them, and none of the embeddings' products is taken again."""
    given = problem(dtype, columns=INTEGERS[:N], diagonal=2, normalize=normalize)
    for name in ("bias", "row_scores", "thresholds"):
        given[name] = given[name].to(torch.promote_types(dtype, torch.float32))
    columns = len(given["candidates"]) + len(given["negatives"]) + 1
    scores = torch.full((N, columns), torch.nan, dtype=dtype)
    kept = call("contrastive_loss_rows", {**given, "scores": scores})
    plain = call("contrastive_loss_rows", given)
    assert all(torch.equal(a, b) for a, b in zip(kept[:3], plain[:3], strict=True))
    assert scores.isfinite().all()

    found = {**given, "logsumexp": kept[0], "mass": kept[1], "tile_rows": 3, "tile_columns": 5}
    again, *_ = call("contrastive_loss_backward", found)
    reused, *_ = call("contrastive_loss_backward", {**found, "scores": scores})
    assert all(torch.equal(a, b) for a, b in zip(reused, again, strict=True))
    other, *_ = call("contrastive_loss_backward", {**found, "scores": scores - 1})
    assert not torch.equal(other[0], again[0])


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


def of_targets(of_rows: list[list[tuple[int, float]]], **changes: Any) -> Arguments:
    """The arguments for targets that are given as the columns and weights of each row."""
    columns, weights = zip(*itertools.chain(*of_rows), strict=True)
    starts = torch.tensor([0, *itertools.accumulate(map(len, of_rows))])
    targets = {
        "starts": starts,
        "columns": torch.tensor(columns),
        "weights": torch.tensor(weights, dtype=torch.float64),
    }
    absent = dict.fromkeys(("row_negatives", "bias", "row_scores", "thresholds"))
    return problem(torch.float64, diagonal=2, tile_rows=3, **targets, **{**absent, **changes})


def results(given: dict[str, Any], tile_columns: int) -> tuple[list[Tensor], list[tuple[int, ...]]]:
    """The losses and gradients that the operators find, and the faults that each reports."""
    needs = [True, True, True, False, True, False, False]
    call = torch.ops.fastqt
    columns = len(given["candidates"]) + len(given["negatives"])
    scores = torch.empty(N, columns, dtype=torch.float64)
    logsumexp, mass, loss, *first = call.contrastive_loss_rows(
        **given, tile_columns=tile_columns, scores=scores
    )
    tiles = tile_columns if given["link"] == 1 else None
    total, once, *second = call.contrastive_loss_with_gradients(
        **given, tile_columns=tiles, row_weight=1.0, needs=needs
    )
    again, *third = call.contrastive_loss_backward(
        **given,
        tile_columns=tile_columns,
        row_weights=torch.ones(N, dtype=torch.float64),
        logsumexp=logsumexp,
        mass=mass,
        scores=scores,
        needs=needs,
    )
    return [loss, total, *once, *again], [tuple(first), tuple(second), tuple(third)]


SUMMED = [[(1, 0.75), (5, 2.0)], [(0, 1.0)], [], [(6, 1.5), (2, 0.25)]]
REPEATED = [
    [(1, 0.5), (5, 2.0), (1, 0.25)],
    [(0, 1.0), (3, 0.0), (3, 0.0)],
    [],
    [(6, 0.5), (6, 0.5), (2, 0.25), (6, 0.5)],
]


@pytest.mark.parametrize("tile_columns", [1, 3, 100])
@pytest.mark.parametrize("background", [None, 0.125], ids=["sparse", "smoothed"])
@pytest.mark.parametrize("link", [0, 1], ids=["softmax", "sigmoid"])
def test_the_weights_of_a_repeated_column_are_summed(link, background, tile_columns):
    changes = {"link": link}
    if background is not None:
        changes["background"] = torch.full((N,), background, dtype=torch.float64)
    expected, _ = results(of_targets(SUMMED, **changes), tile_columns)
    found, faults = results(of_targets(REPEATED, **changes), tile_columns)
    assert faults == [(0, 0, 0)] * 3
    for a, b in zip(found, expected, strict=True):
        assert relative(a, b) < FLOAT64


@pytest.mark.parametrize("link", [0, 1], ids=["softmax", "sigmoid"])
def test_a_repeated_column_whose_score_is_minus_infinity_counts_once(link):
    bias = torch.zeros(M, dtype=torch.float64)
    bias[6] = -torch.inf
    expected, _ = results(of_targets(SUMMED, link=link, bias=bias), 3)
    found, _ = results(of_targets(REPEATED, link=link, bias=bias), 3)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=0, equal_nan=True)
    assert found[0][3] == torch.inf
    assert found[0][:3].isfinite().all()


def test_a_background_on_a_score_of_minus_infinity_gives_an_infinite_loss():
    bias = torch.zeros(M, dtype=torch.float64)
    bias[6] = -torch.inf
    background = torch.full((N,), 0.125, dtype=torch.float64)
    found, _ = results(of_targets(SUMMED, bias=bias, background=background), 3)
    assert (found[0] == torch.inf).all()


@pytest.mark.parametrize("tile_columns", [1, 3, 100])
@pytest.mark.parametrize("row", [[(2, torch.inf)], [(2, 1e308), (4, 1e308)], [(3, 1e308), (3, 1e308)]])
def test_targets_that_are_not_finite_are_reported(row, tile_columns):
    last = row[-1][0]
    _, faults = results(of_targets([[(1, 1.0)], row, [], []]), tile_columns)
    # The backward pass is given the mass, so that it sees weights that are infinite by themselves only.
    assert faults[:2] == [(NOT_FINITE, 1, last)] * 2
    if row == [(2, torch.inf)]:
        assert faults[2] == (NOT_FINITE, 1, last)


def test_the_first_row_at_fault_is_reported():
    """Whichever thread finds its fault first; a sanitizer sees whether they take turns."""
    _, faults = results(of_targets([[(1, 1.0)], *[[(row, torch.inf)] for row in range(1, N)]]), 3)
    assert faults == [(NOT_FINITE, 1, 1)] * 3


@pytest.mark.parametrize("weight", [1e300, 1e30, 1e-30, 1e-300])
def test_the_loss_of_extreme_weights(weight):
    """With one target of weight w the loss is w (log w - log P), and its gradient w times that of -log P."""
    one, _ = results(of_targets([[(1, 1.0)]] * N), 3)
    found, faults = results(of_targets([[(1, weight)]] * N), 3)
    assert faults == [(0, 0, 0)] * 3
    log = torch.tensor(weight, dtype=torch.float64).log()
    assert relative(found[0] / weight, one[0] + log) < FLOAT64
    for a, b in zip(found[2:], one[2:], strict=True):
        assert relative(a / weight, b) < FLOAT64


def test_a_subnormal_weight_is_right_up_to_the_least_normal_number():
    least = torch.finfo(torch.float64).tiny
    one, _ = results(of_targets([[(1, 1.0)]] * N), 3)
    found, _ = results(of_targets([[(1, 1e-309)]] * N), 3)
    for a, b in zip(found[2:], one[2:], strict=True):
        assert ((a - 1e-309 * b).abs() < 100 * least).all()
