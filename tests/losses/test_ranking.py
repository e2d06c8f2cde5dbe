"""Multiple negatives ranking equals its definition in float64, also once the positives are learnt."""

from itertools import product

import numpy as np
import pytest
import torch

import fastqt
from fastqt.engines.cpu import clip, contrastive
from tests.shared.draws import Draws, Seeded
from tests.shared.excluding import excluding
from tests.shared.loss_views import by_backend, by_memory
from tests.shared.pair_oracle import DIRECTIONS, HARDNESS, ranking, settings
from tests.shared.ring_memory import Live
from tests.shared.tolerances import FLOAT32, FLOAT64, relative

N, D = 7, 5
ALL = {"directions": DIRECTIONS}


def inputs(K: int, converged: bool, n: int = N, seed: int = 0, dtype=torch.float64) -> list[torch.Tensor]:
    """Queries, positives and K hard negatives, and a scale; learnt ones have positives over 0.999."""
    generator = torch.Generator().manual_seed(seed)
    width = 24 if converged else D
    x = [torch.randn(n, width, generator=generator, dtype=torch.float64) for _ in range(K + 2)]
    if converged:
        x = [y / y.norm(dim=1, keepdim=True) for y in x]
        x[1] = x[0] + 0.001 * x[1]
    scale = torch.tensor(22.0 if converged else 3.0, dtype=torch.float64)
    return [y.to(dtype).requires_grad_() for y in (*x, scale)]


def expected(given: list[torch.Tensor], weights: torch.Tensor, **options) -> list[np.ndarray]:
    """The losses of the rows, and the gradients of their weighted sum."""
    queries, *documents, scale = (x.detach().double().numpy() for x in given)
    found = ranking(queries, documents, scale=float(scale), weights=weights.double().numpy(), **options)
    return [found.loss, found.queries, *found.documents, np.asarray(found.scale)]


def ours(given: list[torch.Tensor], weights: torch.Tensor, **options) -> list[torch.Tensor]:
    queries, *documents, scale = given
    loss = fastqt.multiple_negatives_ranking_loss(
        queries, documents, scale=scale, reduction="none", **excluding(options)
    )
    return [loss.detach(), *torch.autograd.grad(loss @ weights.to(loss.dtype), given)]


def check(found: list, wanted: list, tolerance: float, context: object = None) -> None:
    for i, (a, b) in enumerate(zip(found, wanted, strict=True)):
        # A loss is a difference of scores near 20; a gradient may be 0 but for rounding.
        least = 1e-3 * max(np.abs(x).max() for x in wanted[1:]) if i else 1e-3
        assert np.abs(a.double().numpy() - b).max() <= tolerance * max(np.abs(b).max(), least), context


def weights_of(n: int) -> torch.Tensor:
    return torch.linspace(-0.5, 1.5, n, dtype=torch.float64)


@pytest.mark.parametrize("converged", [False, True])
@pytest.mark.parametrize("K", range(4))
def test_is_the_definition(K, converged):
    """Learnt positives are in float32, in which the usual formula has no correct digit of their gradient."""
    dtype, tolerance = (torch.float32, FLOAT32) if converged else (torch.float64, FLOAT64)
    given, weights = inputs(K, converged, dtype=dtype), weights_of(N)
    for (directions, mode), hardness, normalize in product(settings(), HARDNESS, (True, False)):
        options = {"directions": directions, "partition_mode": mode, "normalize": normalize}
        options |= {"hardness_mode": hardness, "hardness_strength": 0.0 if hardness is None else 2.5}
        wanted = expected(given, weights, **options)
        check(ours(given, weights, **options, backend="cpu"), wanted, tolerance, options)


SAMPLE = {
    "forward": {"directions": DIRECTIONS[:1]},
    "forward and queries": {"directions": DIRECTIONS[:2]},
    "all": ALL,
    "each": {"directions": DIRECTIONS[::2], "partition_mode": "per_direction"},
    "hard": {**ALL, "hardness_mode": "hard_negatives", "hardness_strength": 5.0},
    "in batch": {**ALL, "hardness_mode": "in_batch_negatives", "hardness_strength": 9.0},
    "margin": {**ALL, "margin": 0.1},
}
by_sample = pytest.mark.parametrize("name", SAMPLE)


@by_backend
@by_memory
@by_sample
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_reductions_and_memory(backend, memory, name, reduction):
    given = inputs(1, False)
    weights = torch.full((N,), 1 / N if reduction == "mean" else 1.0, dtype=torch.float64)
    rows, *wanted = expected(given, weights, normalize=True, **SAMPLE[name])
    queries, *documents, scale = given
    loss = fastqt.multiple_negatives_ranking_loss(
        *(queries, documents),
        scale=scale,
        reduction=reduction,
        memory=memory,
        backend=backend,
        **excluding(SAMPLE[name]),
    )
    (2 * loss).backward()
    assert relative(loss, (rows @ weights.numpy())) < FLOAT64
    check([x.grad for x in given], [2 * x for x in wanted], FLOAT64)


@by_sample
def test_tiles_do_not_change_the_result(monkeypatch, name):
    monkeypatch.setattr(contrastive, "CHUNK_BYTES", 1)
    monkeypatch.setattr(contrastive, "TILE_ROWS", 3)
    monkeypatch.setattr(contrastive, "TILE_COLUMNS", 4)
    given, weights = inputs(2, False), weights_of(N)
    wanted = expected(given, weights, normalize=True, **SAMPLE[name])
    check(ours(given, weights, **SAMPLE[name]), wanted, FLOAT64)


def random_problem(seed: int, most: int) -> None:
    """A problem of drawn sizes, strides, dtype and options, against the oracle."""
    draws = Draws(Seeded(seed))
    n, width, K = draws.source.integer(1, most), draws.source.integer(1, 9), draws.source.integer(0, 3)
    directions, mode = draws.choice(settings())
    options = {"directions": directions, "partition_mode": mode, "normalize": draws.flag()}
    mode, strength = draws.choice(HARDNESS), draws.choice((0.0, 0.5, 9.0))
    options |= {"hardness_mode": mode, "hardness_strength": 0.0 if mode is None else strength}
    dtype = draws.choice((torch.float32, torch.float64))
    if dtype is torch.float64 and draws.flag():  # which rounds less than any two similarities differ by
        options["margin"] = draws.choice((-0.21, 0.013, 0.1))
        options["margin_strategy"] = draws.choice(("absolute", "relative"))
    rng, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    given = [
        draws.laid_out(rng.normal(size=(n, width)), dtype).detach().requires_grad_(draws.flag())
        for _ in range(K + 2)
    ]
    scale = torch.tensor(draws.choice((0.3, 1.0, 4.0)), dtype=dtype)
    given.append(scale.requires_grad_(draws.flag()))
    weights = torch.randn(n, generator=generator, dtype=torch.float64)
    queries, *documents, scale = given
    memory = draws.choice(("fast", "low"))
    loss = fastqt.multiple_negatives_ranking_loss(
        queries, documents, scale=scale, reduction="none", memory=memory, **excluding(options)
    )
    # Directions or a strength that the oracle would still add a constant for.
    rows, *wanted = expected(given, weights, **options)
    tolerance = FLOAT64 if dtype is torch.float64 else FLOAT32
    assert loss.dtype is dtype
    assert np.abs(loss.detach().double().numpy() - rows).max() <= tolerance * max(1, np.abs(rows).max())
    leaves = [x for x in given if x.requires_grad]
    if not leaves:
        assert not loss.requires_grad
        return
    found = torch.autograd.grad(loss @ weights.to(dtype), leaves, allow_unused=True)
    largest = max(1.0, *(np.abs(x).max() for x in wanted))
    for x, g in zip(given, wanted, strict=True):
        if x.requires_grad:
            i = next(i for i, leaf in enumerate(leaves) if leaf is x)
            got = np.zeros(x.shape) if found[i] is None else found[i].double().numpy()
            assert np.abs(got - g).max() <= 10 * tolerance * largest


@pytest.mark.parametrize("first", [0, 40])
def test_random_problems(first):
    for seed in range(first, first + 40):
        random_problem(seed, 12)


@pytest.mark.slow
def test_many_random_problems():
    for seed in range(100, 1100):
        random_problem(seed, 40)


def test_number_of_products(monkeypatch):
    """Both directions of pairs take two walks, and rows among themselves one product for the gradient."""
    walks = []

    def sums(p):
        walks.append("sums")
        return genuine_sums(p)

    def gradients_from(p, rows, columns, pairs, needs):
        walks.append("gradients of " + " and ".join(x for x, need in needs._asdict().items() if need))
        return genuine_gradients(p, rows, columns, pairs, needs)

    genuine_sums, genuine_gradients = clip.sums, clip.gradients_from
    monkeypatch.setattr(clip, "sums", sums)
    monkeypatch.setattr(clip, "gradients_from", gradients_from)
    ours(inputs(0, False), weights_of(N), **ALL)
    assert walks[:3] == ["sums"] * 3
    assert sorted(walks[3:]) == [
        "gradients of queries and candidates and scale",
        *["gradients of queries and scale"] * 2,
    ]


def peak(name: str, n: int, **how) -> int:
    """The bytes of the tensors that the loss and its gradients make, beside the engine's own tiles."""
    given = [x.detach().requires_grad_() for x in inputs(2, False, n, dtype=torch.float32)]
    queries, *documents, scale = given
    with Live(*given) as live:
        loss = fastqt.multiple_negatives_ranking_loss(
            queries, documents, scale=scale, memory="low", **how, **excluding(SAMPLE[name])
        )
        torch.autograd.grad(loss, given)
    return live.most


@by_sample
def test_peak_memory_has_no_matrix(name):
    """That of the engine is measured in tests/losses/test_family.py."""
    n = 1024
    assert peak(name, n) < 4 * n * n / 2 < peak(name, n, backend="reference")


X = torch.randn(4, 3)
REFUSED = [
    ({"directions": "query_to_doc"}, TypeError, "directions: want a sequence of names, got 'query_to_doc'"),
    ({"directions": ("query_to_doc", "up")}, ValueError, "directions: want one of 'query_to_doc', .* got"),
    ({"directions": ("doc_to_doc",)}, ValueError, "directions: want 'query_to_doc' among them"),
    ({"partition_mode": "all"}, ValueError, "partition_mode: want one of 'joint', 'per_direction', got"),
    (
        {"directions": ("query_to_doc", "query_to_query"), "partition_mode": "per_direction"},
        ValueError,
        "partition_mode: want 'joint' with 'query_to_query'",
    ),
    (
        {"exclude": fastqt.Above(X[:, 0]), "directions": ALL["directions"]},
        ValueError,
        "exclude: this loss takes Margin, Same, Within or Padding, got Above",
    ),
    (
        {"hardness_strength": 1e308, "hardness_mode": "all_negatives"},
        ValueError,
        r"hardness_strength: want a number that float32 holds, at most 3.403e\+38, got 1e\+308",
    ),
    (
        {"hardness_strength": 3e38, "scale": 1e38, "hardness_mode": "all_negatives"},
        ValueError,
        r"hardness_strength: want at most 3.403e\+38 together with the scale, which is 1e\+38, got 3e\+38",
    ),
    ({"documents": []}, ValueError, "documents: want at least the positives"),
    ({"documents": 3}, TypeError, "documents: want a tensor or a sequence of them, got int"),
    ({"documents": X[:3]}, ValueError, "documents: want a row for each of the 4 rows"),
    ({"documents": [X, X[:3]]}, ValueError, r"documents\[1\]: want a row for each of the 4 rows"),
    ({"documents": [X, X[:, :2]]}, ValueError, r"documents\[1\]: want"),
    ({"documents": [X, 3]}, TypeError, r"documents\[1\]: want a tensor, got int"),
]


@pytest.mark.parametrize(("options", "kind", "message"), REFUSED)
def test_what_is_refused(options, kind, message):
    with pytest.raises(kind, match=f"^{message}"):
        fastqt.multiple_negatives_ranking_loss(X, **{"documents": X, **options})
