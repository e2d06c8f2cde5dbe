"""Cells leave the softmax by a margin above the similarity of their row's target, and its copies do not.

Values and gradients are those of test_random_problems.py and of tests/losses/test_every_loss.py.
"""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

import fastqt
from fastqt.engines import cpu
from fastqt.functional import false_negatives
from tests.shared import oracle
from tests.shared.ring_memory import Live
from tests.shared.tolerances import (
    FLOAT32,
    FLOAT64,
    UNIT_ROUNDOFF,
    relative,
)

N, M, D, K = 13, 17, 6, 4
STRATEGIES = ["absolute", "relative"]


def drawn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize(
    ("backend", "dtype", "tolerance"),
    [
        ("cpu", torch.float64, FLOAT64),
        ("cpu", torch.float32, FLOAT32),
        ("torch", torch.float32, FLOAT32),
        ("reference", torch.float64, FLOAT64),
        # Inputs are read and gradients are written in 16 bits, once each.
        *((name, torch.bfloat16, 2 * UNIT_ROUNDOFF[torch.bfloat16]) for name in ("cpu", "torch")),
    ],
    ids=str,
)
def test_thresholds_of_a_logsumexp(backend, dtype, tolerance, monkeypatch):
    monkeypatch.setattr(cpu, "has_bfloat16_products", lambda: False)
    queries, candidates, negatives = (drawn(n, D, seed=k).to(dtype) for k, n in enumerate((N, M, K)))
    leaves = [x.requires_grad_() for x in (queries, candidates, negatives)]
    exact = [x.detach().double().numpy() for x in leaves]
    similar = exact[0] @ np.concatenate(exact[1:]).T
    # In the middle of a row's widest gap among its middle cells: none is within rounding.
    middle = np.sort(similar, 1)[:, 6:15]
    at = np.diff(middle, axis=1).argmax(1)
    thresholds = np.take_along_axis(middle, np.stack([at, at + 1], 1), 1).mean(1)
    thresholds[:4] = np.inf, np.nan, -np.inf, 0
    truth = oracle.contrastive(
        *(*exact[:2], np.zeros((N, M))),
        **{"diagonal": "keep", "negatives": exact[2], "link": "log_sum_exp"},
        row_weights=np.linspace(-1, 2, N),
        thresholds=np.where(np.isnan(thresholds), np.inf, thresholds),
    )
    exclude = fastqt.Above(torch.from_numpy(thresholds))
    options = {"negatives": negatives, "exclude": exclude, "backend": backend}
    rows = fastqt.log_sum_exp(*leaves[:2], **options)
    assert rows[2] == -torch.inf
    finite = torch.arange(N) != 2
    assert relative(rows[finite], truth.loss[finite]) < tolerance
    found = torch.autograd.grad(rows, leaves, torch.linspace(-1, 2, N, dtype=torch.float64).to(rows.dtype))
    for gradient, name in zip(found, ("queries", "candidates", "negatives"), strict=True):
        assert relative(gradient, getattr(truth, name)) < tolerance, name


# Similarities, the positive's first: numbers that each dtype has exactly.
TIES = [2.0, 2.0, 2.25, 1.75, 2.0, 3.0, -2.0, 2.5]


@pytest.mark.parametrize("backend", ["cpu", "torch", "reference"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("strategy", "margin", "limit"),
    [("absolute", 0.0, 2.0), ("absolute", 0.25, 2.25), ("relative", 0.125, 2.25), ("relative", -0.125, 1.75)],
)
def test_a_similarity_that_equals_the_threshold_stays(strategy, margin, limit, dtype, backend):
    """The loss of one query whose scores are powers of two of its similarities."""
    queries = torch.tensor([[1.0, 0.0]], dtype=dtype, requires_grad=True)
    candidates = torch.tensor([[x, 1.0] for x in TIES], dtype=dtype)
    negatives = torch.tensor([[x, -1.0] for x in TIES], dtype=dtype)
    loss = fastqt.contrastive_loss(
        queries,
        candidates,
        fastqt.Diagonal(),
        diagonal="keep",
        scale=4.0,
        negatives=negatives,
        exclude=fastqt.Margin(margin, strategy),
        backend=backend,
    )
    staying = [TIES[0], *(x for x in (*TIES[1:], *TIES) if x <= limit)]
    assert len(staying) < 2 * len(TIES)
    wanted = np.logaddexp.reduce(4 * np.array(staying)) - 4 * TIES[0]
    assert loss.item() == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize("backend", ["cpu", "torch", "reference"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_a_cosine_that_equals_the_threshold_stays(dtype, backend):
    """A copy of a positive with one element other than 0, of any length, has its cosine exactly."""
    queries = torch.tensor([[0.0, 4.0]], dtype=dtype)
    candidates = torch.tensor([[0.0, 8.0], [0.0, 2.0], [1.0, 0.0]], dtype=dtype)
    loss = fastqt.info_nce_loss(queries, candidates, scale=2.0, exclude=fastqt.Margin(0.0), backend=backend)
    assert loss.item() == pytest.approx(np.log(2 * np.exp(2) + 1) - 2, rel=1e-6)


ROWS = 33  # and copies


def with_copies(place: str, width: int, dtype: torch.dtype) -> tuple[list[torch.Tensor], dict, int]:
    """Queries and candidates, a copy of each row's target at a place, and how many copies a row has there."""
    queries = drawn(ROWS, width, seed=0)
    candidates = (0.7 * queries + drawn(ROWS, width, seed=1)).to(dtype)
    match place:
        case "candidates":
            return [queries.to(dtype), torch.cat([candidates, candidates])], {}, 1
        case "negatives":
            return [queries.to(dtype), candidates], {"negatives": candidates}, 1
        case "row_negatives":
            return [queries.to(dtype), candidates], {"row_negatives": candidates}, 1
    rows = candidates[:, None].expand(-1, 3, -1)
    return [queries.to(dtype), candidates], {"row_negatives": rows}, 3


def copies_that_leave(
    rows: list[torch.Tensor], more: dict, copies: int, margin: fastqt.Margin, **options
) -> int:
    """In how many rows the target's probability is that of less than all copies; no other cell counts."""
    is_copy = torch.arange(ROWS)[:, None] == torch.arange(len(rows[1])) % ROWS
    if "negatives" in more:  # which no mask excludes: they are so few that each is a problem of its own
        found = [
            fastqt.info_nce_loss(q, c, negatives=c, exclude=margin, scale=1e-3, reduction="none", **options)
            for q, c in zip(*(x.split(1) for x in rows), strict=True)
        ]
        losses = torch.cat(found)
    else:
        losses = fastqt.contrastive_loss(
            *rows,
            fastqt.Diagonal(),
            diagonal="keep",
            scale=1e-3,
            reduction="none",
            exclude=[margin, ~is_copy],
            **more,
            **options,
        )
    return int((losses < np.log(1 + copies) - 1e-2).sum())


@pytest.mark.thinned(7)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("backend", ["cpu", "torch", "reference"])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("width", [7, 700])
@pytest.mark.parametrize("place", ["candidates", "negatives", "row_negatives", "several cells a row"])
def test_copies_of_a_target_stay(place, width, strategy, normalize, backend, dtype):
    """Also where the products of a target and of its copy are added up in other orders."""
    options = {"backend": backend, "normalize": normalize}
    assert copies_that_leave(*with_copies(place, width, dtype), fastqt.Margin(0.0, strategy), **options) == 0
    # Similarities of about `width`, which some processors round to bfloat16.
    margin = fastqt.Margin(-0.5 if normalize or strategy == "relative" else -width / 20, strategy)
    assert copies_that_leave(*with_copies(place, width, dtype), margin, **options) == ROWS


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("width", [7, 64, 700])
def test_copies_stay_where_a_cpu_multiplies_bfloat16(width, normalize, monkeypatch):
    monkeypatch.setattr(cpu, "has_bfloat16_products", lambda: True)
    monkeypatch.setattr(cpu, "CELLS_PER_TARGET", 0)
    for place in ("candidates", "row_negatives"):
        given = with_copies(place, width, torch.bfloat16)
        options = {"normalize": normalize, "backend": "cpu"}
        assert copies_that_leave(*given, fastqt.Margin(0.0), **options) == 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("backend", ["cpu", "torch", "reference"])
def test_what_is_above_by_more_than_rounding_leaves(backend, dtype):
    """For products at most 2 (D + 8) roundings of the product of the norms, as the docstring has it."""
    (queries, candidates), width = (drawn(2, ROWS, 50, seed=0)), 50
    queries, candidates = (F.normalize(x, dim=1) for x in (queries, candidates + queries))
    similar = (queries * candidates).sum(1, keepdim=True)
    above = candidates * (1 + 2 * (width + 8) * UNIT_ROUNDOFF[dtype] / similar)
    leaves = copies_that_leave(
        [x.to(dtype) for x in (queries, torch.cat([candidates, above]))],
        {},
        1,
        fastqt.Margin(0.0),
        backend=backend,
    )
    assert leaves == ROWS


@pytest.mark.parametrize("backend", ["cpu", "torch", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_copies_stay_in_the_losses_that_take_a_margin(strategy, dtype, backend):
    """Of documents that are all alike none leaves, in any direction."""
    queries = drawn(ROWS, 96, seed=0).to(dtype)
    documents = drawn(1, 96, seed=1).to(dtype).expand(ROWS, -1)
    options = {"exclude": fastqt.Margin(0.0, strategy), "backend": backend}
    wanted = np.log(2 * ROWS)
    for found in (
        fastqt.info_nce_loss(queries, documents, negatives=documents, **options),
        fastqt.simcse_loss(queries, documents, documents, **options),
        fastqt.simcse_loss(queries, documents, documents, hard_negative_weight=1e-9, **options),
        fastqt.multiple_negatives_ranking_loss(queries, [documents, documents], **options),
    ):
        assert found.item() == pytest.approx(wanted, rel=1e-3)
    # Of queries that are alike too, none leaves the direction to them.
    ranked = fastqt.multiple_negatives_ranking_loss(
        queries[:1].expand(ROWS, -1),
        documents,
        directions=("query_to_doc", "doc_to_query"),
        partition_mode="joint",
        **options,
    )
    assert ranked.item() == pytest.approx(wanted, rel=1e-3)


@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_no_part_of_the_memory_grows_with_both_sides(backend):
    """At 3,072 rows a mask would take 9 MiB more than the loss without a margin, and similarities 36."""
    rows, most = 3072, {}
    leaves = [torch.randn(rows, 8, requires_grad=True) for _ in range(2)]
    for margin in (None, fastqt.Margin(0.1)):

        def step(margin: fastqt.Margin | None = margin) -> None:
            loss = fastqt.info_nce_loss(*leaves, exclude=margin, memory="low", backend=backend)
            torch.autograd.grad(loss, leaves)

        step()
        with Live(*leaves) as live:
            step()
        most[margin] = live.most
    # The positives' rows, their products and thresholds; in the engine torch which cells of a chunk leave.
    of_chunk = 0 if backend == "cpu" else 12 * 2**20 // 4
    assert most[fastqt.Margin(0.1)] < most[None] + rows * (8 * 4 * 4 + 64) + of_chunk


def test_targets_are_scored_in_blocks_as_at_once(monkeypatch):
    x, y = (drawn(N, D, seed=k) for k in range(2))

    def losses():
        options = {"exclude": fastqt.Margin(-0.1), "negatives": y[:K], "reduction": "none"}
        raw = fastqt.contrastive_loss(x, y, fastqt.Window(2), scale=0.5, diagonal="keep", **options)
        return torch.stack([fastqt.info_nce_loss(x, y, **options), raw])

    whole = losses()
    monkeypatch.setattr(false_negatives, "BLOCK_BYTES", {"cpu": 100})
    assert torch.equal(losses(), whole)


def test_no_further_product_is_taken():
    x, y = (torch.randn(N, D, requires_grad=True) for _ in range(2))
    counts = []
    for margin in (None, fastqt.Margin(0.1)):
        with FlopCounterMode(display=False) as products:
            loss = fastqt.info_nce_loss(x, y, exclude=margin, backend="torch")
            torch.autograd.grad(loss, (x, y))
        counts.append(products.get_total_flops())
    assert counts[0] == counts[1] > 0


X = torch.randn(4, 3, generator=torch.Generator().manual_seed(1))
OF_MATRICES = "exclude: want no Margin with smoothed targets or a matrix of them"
REFUSALS = {
    "too large": ({"exclude": fastqt.Margin(1e39)}, ValueError, "exclude: want a margin that float32 holds"),
    "a number": ({"exclude": 0.1}, TypeError, "exclude: want Margin, .* got 0.1"),
    "distances": ({"similarity": "euclidean"}, ValueError, "exclude: want no Margin with similarity='eucl"),
    "a matrix of targets": ({"targets": torch.eye(4)}, ValueError, OF_MATRICES),
    "smoothed targets": ({"targets": fastqt.smoothed(fastqt.Diagonal(), 0.1)}, ValueError, OF_MATRICES),
    "a scale that is not positive": (
        {"scale": torch.tensor(-1.0)},
        ValueError,
        "scale: want a positive number where false negatives are filtered",
    ),
    "an engine that does not know it": ({"backend": "cuda"}, ValueError, "backend: 'cuda' is not available"),
    "a target that there is not": (
        {"targets": torch.tensor([0, 1, 2, 9])},
        ValueError,
        "row 3's target column 9 is outside the M=4 candidates",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_misuse_is_an_error(name):
    options, error, message = REFUSALS[name]
    options = {"targets": fastqt.Diagonal(), "diagonal": "keep", "exclude": fastqt.Margin(0.1), **options}
    for backend in [options.pop("backend")] if "backend" in options else ["cpu", "torch", "reference"]:
        with pytest.raises(error, match=message):
            fastqt.contrastive_loss(X, X + 1, backend=backend, **options)


@pytest.mark.parametrize(
    ("margin", "error", "message"),
    [
        (("0.1",), TypeError, "margin: want a number, got str"),
        ((torch.tensor(0.1),), ValueError, "margin: want a"),
        ((float("nan"),), ValueError, "margin: want a finite number, got nan"),
        ((10**400,), ValueError, "margin: want a finite number"),
        ((0.1, "percent"), ValueError, "strategy: want one of 'absolute', 'relative', got 'percent'"),
    ],
)
def test_a_margin_that_is_none_is_an_error(margin, error, message):
    with pytest.raises(error, match=message):
        fastqt.Margin(*margin)


@pytest.mark.parametrize(
    ("thresholds", "error", "message"),
    [
        ([0.1] * 4, TypeError, "thresholds: want a tensor"),
        (torch.zeros(3), ValueError, "exclude: want 4 thresholds, got 3"),
        (torch.zeros(4, dtype=torch.long), TypeError, r"thresholds: want \(N,\) numbers of floating point"),
        (torch.zeros(4, device="meta"), ValueError, "thresholds: want a tensor with values"),
    ],
)
def test_misuse_of_thresholds_is_an_error(thresholds, error, message):
    with pytest.raises(error, match=message):
        fastqt.log_sum_exp(X, X, exclude=fastqt.Above(thresholds))


def test_with_label_smoothing_it_is_refused():
    with pytest.raises(ValueError, match="exclude: want None with label_smoothing"):
        fastqt.info_nce_loss(X, X, label_smoothing=0.1, exclude=fastqt.Margin(0.1))
