"""The Triton engine, interpreted: the oracle's values and gradients of products and cosines, in any dtype."""

from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import fastqt
from fastqt import problem
from fastqt.engines.triton import loop, operands, softmax, two_walks
from tests.shared import cosines, oracle
from tests.shared.cases import CASES, Case
from tests.shared.draws import converged, random_inputs
from tests.shared.excluding import excluding
from tests.shared.tolerances import (
    CUT_OFF,
    EAGER_FACTOR,
    FLOAT32,
    FLUSHED,
    HALF_ULP,
    REORDERED,
    THREE_ROUNDINGS,
    relative,
)

by_memory = pytest.mark.parametrize("memory", ["fast", "low"])
by_normalize = pytest.mark.parametrize("normalize", [False, True], ids=["products", "cosines"])
by_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
by_two_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
LARGE = ("all at once", "smoothed window", "biases of classes", "sigmoid, all at once", "sums, all at once")
LARGE_CASES = [c for c in cosines.ALL if c.name in LARGE]
by_large = pytest.mark.parametrize("case", LARGE_CASES, ids=lambda case: case.name)
NO_ROOM = {"ROW_MULTIPLE": 5, "FAST_BYTES": 0, "LOW_BYTES": 0}
# Upstream gradients of both signs, zeros and very different sizes.
WEIGHTS = torch.tensor([1.0, -2.0, 0.0, 1e-3, 0.5, 3.0, -1e-2, 1.0, 0.0, 2.0, -1.0, 1e-4, 1.0])


def named(name: str) -> Case:
    return next(case for case in CASES if case.name == name)


def value_and_gradients(case: Case, inputs: dict[str, torch.Tensor], **more) -> list[torch.Tensor]:
    loss = case.loss(inputs, backend="triton", **more)
    if case.link == "log_sum_exp":
        loss = loss.sum()
    return [loss.detach(), *torch.autograd.grad(loss, list(inputs.values()))]


def assert_oracles(case, inputs, memory="fast", *, each=False, normalize=False) -> None:
    """The scalar loss and its gradients, or with `each` the losses of rows with an upstream gradient each."""
    each = each or case.link == "log_sum_exp"
    weights = WEIGHTS.double().numpy() if each else None
    if normalize:
        exact = cosines.expected(case, inputs, weights)
    else:
        result = case.expected(inputs, row_weights=weights)
        exact = {name: np.asarray(getattr(result, name)) for name in ("loss", *inputs)}
    options = {"reduction": "none"} if each and case.link != "log_sum_exp" else {}
    loss = case.loss(inputs, normalize=normalize, memory=memory, backend="triton", **options)
    assert loss.dtype is torch.float32
    assert relative(loss, exact["loss"] if each else exact["loss"].mean()) < FLOAT32
    gradients = torch.autograd.grad(loss, list(inputs.values()), WEIGHTS if each else None)
    tolerance = FLOAT32 + THREE_ROUNDINGS[inputs["queries"].dtype]
    for name, gradient in zip(inputs, gradients, strict=True):
        assert gradient.dtype is inputs[name].dtype
        of_norms = cosines.error(name, inputs, gradient, exact[name]) if normalize else 0.0
        assert (of_norms or relative(gradient, exact[name])) < tolerance, name


def inputs_of(case: Case, dtype: torch.dtype, normalize: bool) -> dict[str, torch.Tensor]:
    """float16, which has too little range for inverse norms of 1e12, is given copies, and no row of zeros."""
    inputs = cosines.inputs_of(case, dtype) if normalize else case.inputs(dtype)
    if normalize and dtype is torch.float16:
        with torch.no_grad():
            for name in set(cosines.EMBEDDINGS) & set(inputs):
                inputs[name][inputs[name].norm(dim=1) == 0] = 1.0
    return inputs


@pytest.mark.parametrize("case", LARGE_CASES[:4], ids=lambda case: case.name)
@pytest.mark.thinned(6)
def test_bytes_choose_between_one_walk_and_two(case, monkeypatch):
    """One where the float32 sums and enough rows fit; the results are the same."""
    inputs = case.inputs(torch.bfloat16)
    monkeypatch.setattr(problem, "LEAST_MEMORY", 0)
    walks, genuine = [], two_walks.run
    monkeypatch.setattr(two_walks, "run", lambda walk: walks.append(walk) or genuine(walk))
    fast, low, enough, few = (
        value_and_gradients(case, inputs, memory=m) for m in ("fast", "low", 2**20, 999)
    )
    # A target of every cell takes whole rows in any memory, and the sums of 13 rows fit 40 MiB.
    assert len(walks) == {"smoothed window": 0, "sigmoid, all at once": 1}.get(case.name, 2)
    for found, same in ((enough, fast), (few, low)):
        for a, b in zip(found, same, strict=True):
            assert relative(a, b) < REORDERED[torch.float32] + THREE_ROUNDINGS[torch.bfloat16]


@by_memory
@by_large
@by_normalize
@pytest.mark.thinned(9)
def test_chunks_do_not_change_the_result(case, memory, normalize, monkeypatch):
    """With no room at all, dF comes from chunks of rows and dG from chunks of columns."""
    for name, value in NO_ROOM.items():
        monkeypatch.setattr(operands, name, value)
    monkeypatch.setattr(loop, "SUM_ROWS", 4)
    walks, genuine = [], two_walks.run
    monkeypatch.setattr(two_walks, "run", lambda given: walks.append(genuine(given)))
    # Of bfloat16 the sums over rows are kept beside the gradients, for which there is no room.
    dtype = torch.bfloat16 if case.link == "sigmoid" else torch.float32
    inputs = inputs_of(case, dtype, normalize)
    assert_oracles(case, inputs, memory, normalize=normalize)
    assert len(walks) == (memory == "low" and case.name != "smoothed window")
    with torch.no_grad():
        loss = case.loss(inputs, backend="triton", normalize=normalize)
    assert relative(loss, case.loss(inputs, backend="reference", normalize=normalize)) < FLOAT32


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_tiles_in_the_memory_of_a_gradient(dtype, monkeypatch):
    """Where memory is short, E lies in the buffer that later takes the candidates' gradient."""
    N, D = 70, 40
    for name, value in NO_ROOM.items():
        monkeypatch.setattr(operands, name, value)
    kept, genuine = [], two_walks._matrix

    def matrix(o, height, length, lent):
        E = genuine(o, height, length, lent)
        gradient = o.blocks[0].gradient
        begins = (E.data_ptr() - gradient.data_ptr()) / (gradient.element_size() * D)
        kept.append((begins if 0 <= begins < N else None, E.shape))
        return E

    monkeypatch.setattr(two_walks, "_matrix", matrix)
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(N, D, generator=generator).to(dtype).requires_grad_() for _ in range(2)]
    T = oracle.window(N, N, [-1, 1])
    exact = oracle.contrastive(*(x.detach().double().numpy() for x in inputs), T)
    loss = fastqt.contrastive_loss(*inputs, backend="triton", memory="low")
    found = torch.autograd.grad(loss, inputs)
    # First rows against all columns, then columns: 38 rows of the gradient are free after the first 32, 6
    # are after the next, which are too few.
    assert kept == [(0, (5, 96)), (32, (20, 64)), (None, (5, 64)), (None, (5, 64))]
    for gradient, wanted in zip(found, (exact.queries, exact.candidates), strict=True):
        assert relative(gradient, wanted) < FLOAT32 + THREE_ROUNDINGS[dtype]


def test_runs_repeat_bit_for_bit():
    case = named("all at once")
    inputs = case.inputs(torch.bfloat16)
    first, second = (value_and_gradients(case, inputs) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def far_apart(N: int, D: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows whose targets score 0, far below others: no reference from the targets can do."""
    generator = torch.Generator().manual_seed(0)
    queries, candidates = (torch.randn(N, D, generator=generator) for _ in range(2))
    queries[:, 0], candidates[:, 0] = 0, 0
    queries[::3, 0] = 12.0  # some rows only
    candidates[5, 0], candidates[9, 0] = 11.0, 10.9  # scores about 130: exp overflows float32
    return queries, candidates


@pytest.fixture
def overflowed(monkeypatch) -> list[int]:
    """The rows whose shift has overflowed, in the order in which they were found."""
    rows, genuine = [], softmax.row_stats

    def row_stats(sums, tiles, queries, scale, cells, state, *more):
        genuine(sums, tiles, queries, scale, cells, state, *more)
        first = tiles[0].first_row
        found = state.shift_overflowed[first : first + tiles[0].rows].nonzero().flatten() + first
        rows.extend(found.tolist())

    monkeypatch.setattr(softmax, "row_stats", row_stats)
    return rows


@by_memory
@by_dtype
@pytest.mark.parametrize("sample", [None, 4], ids=["", "sample"])
@pytest.mark.thinned(6)
def test_rows_whose_shift_overflowed_are_computed_again(dtype, memory, sample, overflowed, monkeypatch):
    """Row shifts from a sample of candidates spare most rows the second try, and change nothing else."""
    if sample is not None:
        monkeypatch.setattr(softmax, "SAMPLE", sample)
    queries, candidates = (x.to(dtype).requires_grad_() for x in far_apart(20, 5))
    T = oracle.window(20, 20, [-1, 1])
    exact = oracle.contrastive(*(x.detach().double().numpy() for x in (queries, candidates)), T)
    loss = fastqt.contrastive_loss(queries, candidates, backend="triton", memory=memory)
    found = torch.autograd.grad(loss, (queries, candidates))
    # All that point at candidates 5 and 9, but row 6, whose target is candidate 5.
    if sample is None:
        assert set(overflowed) == {row for row in range(0, 20, 3) if row != 6}
    assert relative(loss, exact.loss.mean()) < FLOAT32
    for gradient, wanted in zip(found, (exact.queries, exact.candidates), strict=True):
        assert relative(gradient, wanted) < 10 * FLOAT32 + 2 * THREE_ROUNDINGS[dtype]


OVERFLOWING = {
    "none": [],
    "the first chunk's": list(range(5)),
    "one of a middle chunk": [7],
    "the last row": [19],
    "all": list(range(20)),
}


@pytest.mark.parametrize("loud", OVERFLOWING.values(), ids=OVERFLOWING)
@pytest.mark.parametrize("memory", ["fast", pytest.param("low", marks=pytest.mark.slow)])
@pytest.mark.thinned(5)
def test_rows_of_any_chunk_overflow_against_candidates_or_negatives(loud, memory, overflowed, monkeypatch):
    """With all that the repair has to leave out or to add: groups, a mask, a bias, row negatives."""
    for name, value in NO_ROOM.items():
        monkeypatch.setattr(operands, name, value)
    N, K, D = 20, 9, 5
    generator = torch.Generator().manual_seed(0)
    queries, candidates, row_negatives = (torch.randn(N, D, generator=generator) for _ in range(3))
    negatives = torch.randn(K, D, generator=generator)
    for x in (queries, candidates, negatives, row_negatives):
        x[:, :2] = 0
    queries[loud[::2], 0], queries[loud[1::2], 1] = 12.0, 12.0
    candidates[3, 0], negatives[6, 1] = 11.0, 10.9  # scores about 130
    groups = torch.arange(N) % 7, (torch.arange(N) + 3) % 7
    mask = torch.zeros(N, N, dtype=torch.bool)
    mask[torch.arange(N), (torch.arange(N) + 5) % N] = True
    mask[:, 3] = False
    groups[1][3] = 9  # the loud candidate is of no query's group
    inputs = {"queries": queries, "candidates": candidates, "negatives": negatives}
    inputs |= {"row_negatives": row_negatives, "bias": torch.linspace(-1, 1, N)}
    inputs = {name: x.requires_grad_() for name, x in inputs.items()}
    T = oracle.window(N, N, [6])
    options = {"query_groups": groups[0], "candidate_groups": groups[1], "mask": mask}
    exact = oracle.contrastive(
        *(x.detach().double().numpy() for x in (queries, candidates)),
        T,
        **{name: inputs[name].detach().double().numpy() for name in ("negatives", "row_negatives", "bias")},
        **{name: x.numpy() for name, x in options.items()},
    )
    targets = fastqt.Window(offsets=[6])
    loss = fastqt.contrastive_loss(
        **inputs, targets=targets, **excluding(options), memory=memory, backend="triton"
    )
    found = torch.autograd.grad(loss, list(inputs.values()))
    # Row 17 has no target, and the shift of row 3 does not see the diagonal's score, which is 0.
    assert set(overflowed) == {i for i in loud if T[i].any() and not (i == 3 and i in loud[::2])}
    assert relative(loss, exact.loss.mean()) < FLOAT32
    for name, gradient in zip(inputs, found, strict=True):
        wanted = getattr(exact, name)
        difference = np.abs(gradient.double().numpy() - wanted).max()
        assert difference < 10 * FLOAT32 * np.abs(wanted).max() + FLUSHED[torch.float32], name


@by_memory
@pytest.mark.thinned(5)
def test_shifts_that_are_too_low(memory):
    """A shift is that of a row's target, whose cosine is -1 where all others are 0, at a scale of 70.

    A row of zeros then has E = exp(70), which times its inverse norm of 1e12 is beyond float32. Where another
    cosine is 1, E itself is, among the candidates or the negatives.
    """
    queries, candidates = 3 * torch.eye(13, 16), torch.zeros(17, 16)
    candidates[:13] = -2 * queries
    candidates[13:16] = queries[:3]
    negatives = 7 * queries[4:8]
    inputs = {
        "queries": queries.requires_grad_(),
        "candidates": candidates.requires_grad_(),
        "negatives": negatives.requires_grad_(),
        "scale": torch.tensor(70.0, requires_grad=True),
    }
    own = {"targets": fastqt.Diagonal(), "diagonal": "keep"}
    case = Case("opposite", own, np.eye(13, 17), {"diagonal": "keep"}, ("negatives", "scale"), square=False)
    assert_oracles(case, inputs, memory, normalize=True)


@by_memory
@by_two_dtypes
@pytest.mark.thinned(5)
def test_rows_wider_than_a_block(memory, dtype):
    """The gradients' kernels go through such rows twice."""
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "queries": (5, 1100),
        "candidates": (7, 1100),
        "negatives": (2, 1100),
        "row_negatives": (5, 1100),
    }
    inputs = {
        name: (3 * torch.randn(shape, generator=generator)).to(dtype).requires_grad_()
        for name, shape in shapes.items()
    }
    inputs["scale"] = torch.tensor(5.0, requires_grad=True)
    T = oracle.window(5, 7, [1])
    case = Case("wide", {"targets": fastqt.Window(offsets=[1])}, T, {}, tuple(inputs)[2:], square=False)
    assert_oracles(case, inputs, memory, normalize=True)


@by_memory
@by_two_dtypes
@pytest.mark.parametrize(("long", "short"), [("queries", "candidates"), ("candidates", "queries")])
@pytest.mark.thinned(6)
@pytest.mark.pairwise
def test_norms_near_the_ends_of_the_range(long, short, memory, dtype):
    """Rows of 1e-20 count as short ones, and the squares of 1e20 are beyond float32."""
    case = named("diagonal targets")
    inputs = cosines.inputs_of(case, torch.float64)
    with torch.no_grad():
        for rows in (slice(3, 6), slice(-2, None)):
            inputs[long][rows] *= 1e18
        inputs[short][2] *= 1e-20
        inputs[long][7] *= 1e-20
        for x in (inputs[long][8], inputs[short][8]):  # of length 0.3 after the division by 1e-12
            x *= 3e-13 / x.norm()
    inputs = {name: x.detach().to(dtype).requires_grad_() for name, x in inputs.items()}
    assert_oracles(case, inputs, memory, normalize=True)


def test_which_problems_are_given_copies():
    """float16 has too little range, and scores that are written as a matrix make copies a trifle."""
    seen = {}
    for name, dtype, targets in (
        ("float32", torch.float32, None),
        ("bfloat16", torch.bfloat16, None),
        ("float16", torch.float16, None),
        ("dense", torch.float32, torch.eye(9).roll(1, 1)),
    ):
        queries, candidates = (torch.randn(9, 4).to(dtype) for _ in range(2))
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(
                operands.Operands,
                "__init__",
                lambda self, p, *more, name=name: seen.update({name: p.normalize}) or 1 / 0,
            )
            with pytest.raises(ZeroDivisionError):
                fastqt.contrastive_loss(queries, candidates, targets, normalize=True, backend="triton")
    assert seen == {"float32": True, "bfloat16": True, "float16": False, "dense": False}


def test_autocast_to_float16_is_given_copies():
    """The dtype of the computation decides, not that of the tensors."""
    queries, candidates = (torch.randn(9, 4).requires_grad_() for _ in range(2))
    with torch.no_grad():
        candidates[4] = 0
    with torch.autocast("cpu", dtype=torch.float16):
        loss = fastqt.contrastive_loss(queries, candidates, normalize=True, backend="triton")
    loss.backward()
    assert loss.isfinite()
    assert queries.grad.isfinite().all()


def error(a: torch.Tensor, exact: np.ndarray) -> float:
    return float(np.linalg.norm(a.double().numpy() - exact) / np.linalg.norm(exact))


# Of each kind the scale, the bias of a learnt score, and the score of learnt pairs.
KINDS = {"softmax": (1.0, 0.0, 24.0), "sigmoid": (1.0, -0.5, 40.0), "cosines": (40.0, 0.0, 1.0)}


@by_memory
@by_dtype
@pytest.mark.parametrize("learnt", [None, 0.5, 1.0], ids=["random", "p > 0.99", "p > 1 - 1e-8"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.thinned(10)
@pytest.mark.pairwise
def test_error_is_at_most_eagers(kind, learnt, dtype, memory):
    """Eager PyTorch in the same dtype, which forms its scores, probabilities and p - t in it.

    A sigmoid's bias is -score / 2, so that pairs and all others are equally certain. Of cosines eager PyTorch
    normalises in float32, rounds to the dtype, and multiplies and sums up in float32.
    """
    N, (scale, of_score, most) = 24, KINDS[kind]
    normalize, score = kind == "cosines", (learnt or 0) * most
    dtype = torch.bfloat16 if normalize and dtype is torch.float16 else dtype
    link = "sigmoid" if kind == "sigmoid" else "softmax"
    options = {"scale": scale, **({"bias": of_score * score} if kind == "sigmoid" else {})}
    case = Case("pairs", {}, np.eye(N), {"diagonal": "keep", **options}, link=link)
    ours, eagers = [], []
    for seed in range(2):
        made = random_inputs(N, seed) if learnt is None else converged(N, score, seed)
        lengths = torch.randn(2, N, 1, generator=torch.Generator().manual_seed(seed)).exp()
        given = [(x * y).to(dtype) if normalize else x.to(dtype) for x, y in zip(made, lengths, strict=True)]
        leaves = {name: x.requires_grad_() for name, x in zip(("queries", "candidates"), given, strict=True)}
        if normalize:
            exact = cosines.expected(case, leaves)
        else:
            result = case.expected(leaves)
            exact = {name: getattr(result, name) for name in ("loss", *leaves)}
        if score and link == "softmax":
            assert np.exp(-exact["loss"]).min() > {0.5: 0.999, 1.0: 1 - 1e-8}[learnt]

        def errors(loss, leaves=leaves, exact=exact):
            norms = cosines.norms_of if normalize else lambda x: 1.0
            sizes = [norms(x.detach().double().numpy()) for x in leaves.values()]
            pairs = zip(torch.autograd.grad(loss, list(leaves.values())), leaves, sizes, strict=True)
            of_loss = relative(loss, exact["loss"].mean())
            return [of_loss, *(error(x * torch.as_tensor(y), exact[name] * y) for x, name, y in pairs)]

        function = fastqt.sigmoid_loss if link == "sigmoid" else fastqt.contrastive_loss
        how = {"diagonal": "keep", "normalize": normalize, "backend": "triton", "memory": memory}
        ours.append(errors(function(*leaves.values(), fastqt.Diagonal(), **options, **how)))
        f, g = (F.normalize(x.float(), dim=1).to(dtype) if normalize else x for x in leaves.values())
        scores = scale * (f @ g.T).float() if normalize else f @ g.T + options.get("bias", 0.0)
        if link == "sigmoid":
            labels = torch.eye(N, dtype=dtype)
            eagers.append(errors(F.binary_cross_entropy_with_logits(scores, labels, reduction="sum") / N))
        else:
            eagers.append(errors(F.cross_entropy(scores, torch.arange(N))))
    cut_off = 1.0 if kind == "softmax" else CUT_OFF[dtype]
    bound = cut_off * EAGER_FACTOR * np.mean(eagers, axis=0) + HALF_ULP[torch.float32]
    # Eager PyTorch's loss has no digit left where all is learnt.
    assert max(loss for loss, *_ in ours) < FLOAT32
    assert (np.mean(ours, axis=0) <= bound)[1:].all(), (np.mean(ours, axis=0), np.mean(eagers, axis=0))


@pytest.mark.parametrize(
    ("dtype", "options", "reason"),
    [
        (torch.float16, {"normalize": True, "targets": torch.arange(3)}, "rounded to float16"),
        (torch.float32, {"targets": torch.eye(3)}, "where any candidate may be a target"),
    ],
)
def test_refuses_thresholds_that_its_scores_do_not_fit(dtype, options, reason):
    x, above = torch.randn(2, 3, 4, dtype=dtype), fastqt.Above(torch.zeros(3))
    with pytest.raises(ValueError, match=reason):
        fastqt.contrastive_loss(*x, **options, diagonal="keep", exclude=above, backend="triton")
    assert fastqt.contrastive_loss(*x, **options, diagonal="keep", exclude=above).isfinite()


def test_refuses_float64():
    queries = torch.randn(4, 3, dtype=torch.float64)
    with pytest.raises(ValueError, match="'triton' is not available: it has no float64"):
        fastqt.contrastive_loss(queries, queries, backend="triton")


@pytest.mark.parametrize(
    "loss",
    [
        fastqt.contrastive_loss,
        partial(fastqt.sigmoid_loss, targets=fastqt.Diagonal(), diagonal="keep"),
        partial(fastqt.clip_loss, normalize=False),
        partial(fastqt.mixcse_loss, form="released"),
    ],
    ids=["rows", "sigmoid", "rows and columns", "released"],
)
def test_a_gradient_scaler_saves_digits_that_float16_has_not(loss):
    """The gradients are about 5e-6, where float16 has few digits unless they are scaled up."""
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(20, 8, generator=generator).half().requires_grad_() for _ in range(2)]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    upstream = torch.tensor(2.0**16)
    found = torch.autograd.grad(loss(*inputs, scale=1e-4, backend="triton"), inputs, upstream)
    value = loss(*exact, scale=1e-4, backend="reference")
    for a, b in zip(found, torch.autograd.grad(value, exact, upstream.double()), strict=True):
        assert relative(a, b) < THREE_ROUNDINGS[torch.float16]
