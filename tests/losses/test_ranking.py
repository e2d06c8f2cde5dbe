"""Multiple negatives ranking equals its definition in float64, also once the positives are learnt."""

from itertools import product

import numpy as np
import pytest
import torch

import fastqt
from fastqt.engines import cpu, cpu_clip
from tests.shared.draws import LAYOUTS, Draws, Seeded
from tests.shared.loss_views import BACKENDS, by_backend, by_memory
from tests.shared.ranking_oracle import DIRECTIONS, HARDNESS, ranking, settings
from tests.shared.ring_memory import Live
from tests.shared.tolerances import EAGER_FACTOR, FLOAT32, FLOAT64, HALF_ULP, relative

N, D = 7, 5
ALL = {"directions": DIRECTIONS}
# A learnt positive's gradient is 1e-6 of the numbers that float64 subtracts for it, whose own last digit is
# 1e-15. Problems in float32 do not lose these digits, as what is subtracted is float64 there, too.
CONVERGED_FLOAT64 = 1e-8


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
        queries, documents, scale=scale, reduction="none", **options
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


@pytest.mark.parametrize("converged", [False, True])
@pytest.mark.parametrize("K", [0, 2])
def test_is_the_definition_without_false_negatives(K, converged):
    """In all directions what is above the similarity of the pair by more than a margin leaves."""
    dtype, tolerance = (torch.float32, FLOAT32) if converged else (torch.float64, FLOAT64)
    given, weights = inputs(K, converged, dtype=dtype), weights_of(N)
    for number, ((directions, mode), hardness) in enumerate(product(settings(), HARDNESS)):
        options = {"directions": directions, "partition_mode": mode, "normalize": number % 3 > 0}
        options |= {"hardness_mode": hardness, "hardness_strength": 0.0 if hardness is None else 2.5}
        without = expected(given, weights, **options)[0]
        strategy = ("absolute", "relative")[number % 2]
        margin = 0.5 if number % 2 else -0.9 if converged else 0.1
        options |= {"false_negative_margin": margin, "false_negative_margin_strategy": strategy}
        wanted = expected(given, weights, **options)
        assert converged or (wanted[0] < without).any()
        check(ours(given, weights, **options, backend="cpu"), wanted, tolerance, options)


@pytest.mark.slow
@pytest.mark.parametrize("converged", [False, True])
@pytest.mark.parametrize("K", [0, 2])
def test_is_the_definition_in_the_reference_engine(K, converged):
    given, weights = inputs(K, converged), weights_of(N)
    for (directions, mode), hardness in product(settings(), HARDNESS):
        options = {"directions": directions, "partition_mode": mode, "normalize": True}
        options |= {"hardness_mode": hardness, "hardness_strength": 0.0 if hardness is None else 2.5}
        wanted = expected(given, weights, **options)
        tolerance = CONVERGED_FLOAT64 if converged else FLOAT64
        check(ours(given, weights, **options, backend="reference"), wanted, tolerance, options)


SAMPLE = {
    "forward": {"directions": DIRECTIONS[:1]},
    "forward and queries": {"directions": DIRECTIONS[:2]},
    "all": ALL,
    "each": {"directions": DIRECTIONS[::2], "partition_mode": "per_direction"},
    "hard": {**ALL, "hardness_mode": "hard_negatives", "hardness_strength": 5.0},
    "in batch": {**ALL, "hardness_mode": "in_batch_negatives", "hardness_strength": 9.0},
    "margin": {**ALL, "false_negative_margin": 0.1},
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
        **SAMPLE[name],
    )
    (2 * loss).backward()
    assert relative(loss, (rows @ weights.numpy())) < FLOAT64
    check([x.grad for x in given], [2 * x for x in wanted], FLOAT64)


@by_sample
def test_tiles_do_not_change_the_result(monkeypatch, name):
    monkeypatch.setattr(cpu, "CHUNK_BYTES", 1)
    monkeypatch.setattr(cpu, "TILE_ROWS", 3)
    monkeypatch.setattr(cpu, "TILE_COLUMNS", 4)
    given, weights = inputs(2, False), weights_of(N)
    wanted = expected(given, weights, normalize=True, **SAMPLE[name])
    check(ours(given, weights, **SAMPLE[name]), wanted, FLOAT64)


@by_sample
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("K", [0, 1])
def test_one_row_and_two(name, n, K):
    """A single row has no others: its negatives are its own alone."""
    given, weights = inputs(K, False, n), torch.ones(n, dtype=torch.float64)
    for backend in BACKENDS:
        wanted = expected(given, weights, normalize=True, **SAMPLE[name])
        check(ours(given, weights, **SAMPLE[name], backend=backend), wanted, FLOAT64)


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
        options["false_negative_margin"] = draws.choice((-0.21, 0.013, 0.1))
        options["false_negative_margin_strategy"] = draws.choice(("absolute", "relative"))
    generator = torch.Generator().manual_seed(seed)
    given = []
    for _ in range(K + 2):
        layout = draws.choice(LAYOUTS[:4])
        x = torch.randn(n * 2, width * 2, generator=generator, dtype=dtype)
        x = {
            "plain": lambda x: x[:n, :width].contiguous(),
            "transposed": lambda x: x.T[: 2 * width, : 2 * n].reshape(2 * width, 2 * n)[:width, :n].T,
            "spread": lambda x: x[::2, ::2],
            "sliced": lambda x: x[:n, :width],
        }[layout](x)
        given.append(x.requires_grad_(draws.flag()))
    scale = torch.tensor(draws.choice((0.3, 1.0, 4.0)), dtype=dtype)
    given.append(scale.requires_grad_(draws.flag()))
    weights = torch.randn(n, generator=generator, dtype=torch.float64)
    queries, *documents, scale = given
    memory = draws.choice(("fast", "low"))
    loss = fastqt.multiple_negatives_ranking_loss(
        queries, documents, scale=scale, reduction="none", memory=memory, **options
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


@pytest.mark.parametrize("converged", [False, True])
@by_sample
def test_float32_is_as_near_to_the_truth_as_eager_pytorch(name, converged):
    options, errors = SAMPLE[name], {"ours": [], "eager": []}
    weights = torch.ones(N)
    for seed in range(48):
        given = inputs(1, converged, seed=seed, dtype=torch.float32)
        wanted = expected(given, weights, normalize=True, **options)
        for kind, found in (("ours", ours(given, weights, **options)), ("eager", eager(given, options))):
            # Relative to the truth of the seed: learnt pairs differ by orders of magnitude between seeds.
            errors[kind].append(
                [
                    np.linalg.norm(a.double().numpy() - b) / np.linalg.norm(b)
                    for a, b in zip(found, wanted, strict=True)
                ]
            )
    a, b = (np.mean(x, 0) for x in errors.values())
    assert (a <= EAGER_FACTOR * b + 4 * HALF_ULP[torch.float32]).all(), (a, b)


def eager(given: list[torch.Tensor], options: dict) -> list[torch.Tensor]:
    """The usual formula of one row each, in the dtype of the inputs."""
    q, *documents, scale = given
    unit = [torch.nn.functional.normalize(x, dim=1) for x in (q, *documents)]
    q, d, columns = unit[0], unit[1], torch.cat(unit[1:])
    eye = torch.eye(len(q), dtype=torch.bool)
    own = eye.repeat(1, len(documents))
    cosines = q @ columns.T
    cells = ~own
    if options.get("hardness_mode") == "hard_negatives":
        cells = own & (torch.arange(len(columns)) >= len(q))
    strength = options.get("hardness_strength", 0.0)
    scores = {"query_to_doc": scale * cosines + strength * cells * cosines.detach()}
    scores["query_to_query"] = (scale * q @ q.T).masked_fill(eye, -torch.inf)
    scores["doc_to_query"] = scale * d @ q.T
    scores["doc_to_doc"] = (scale * d @ columns.T).masked_fill(own, -torch.inf)
    if "false_negative_margin" in options:
        most = (q * d).sum(1, keepdim=True).detach() + options["false_negative_margin"]
        others = {"query_to_doc": ~(own & (torch.arange(len(columns)) < len(q))), "doc_to_query": ~eye}
        for name, x in scores.items():
            scores[name] = x.masked_fill((x / scale > most) & others.get(name, True), -torch.inf)
    taken = [scores[name] for name in options["directions"]]
    sums = [torch.cat(taken, 1)] if options.get("partition_mode", "joint") == "joint" else taken
    loss = sum(x.logsumexp(1) for x in sums) / len(sums) - scores["query_to_doc"].diagonal()
    return [loss.detach(), *torch.autograd.grad(loss.sum(), given)]


def test_number_of_products(monkeypatch):
    """Both directions of pairs take two walks, and rows among themselves one product for the gradient."""
    walks = []

    def sums(p):
        walks.append("sums")
        return genuine_sums(p)

    def gradients_from(p, rows, columns, pairs, needs):
        walks.append("gradients of " + " and ".join(x for x, need in needs._asdict().items() if need))
        return genuine_gradients(p, rows, columns, pairs, needs)

    genuine_sums, genuine_gradients = cpu_clip.sums, cpu_clip.gradients_from
    monkeypatch.setattr(cpu_clip, "sums", sums)
    monkeypatch.setattr(cpu_clip, "gradients_from", gradients_from)
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
        loss = fastqt.multiple_negatives_ranking_loss(queries, documents, scale=scale, **how, **SAMPLE[name])
        torch.autograd.grad(loss, given)
    return live.most


@by_sample
def test_peak_memory_has_no_matrix(name):
    """That of the engine is measured in tests/losses/test_family.py."""
    n = 1024
    assert peak(name, n) < 4 * n * n / 2 < peak(name, n, backend="reference")


def test_backward_runs_twice_and_double_backward_is_refused():
    given = inputs(1, False)
    queries, *documents, scale = given
    loss = fastqt.multiple_negatives_ranking_loss(queries, documents, scale=scale, **ALL)
    first = torch.autograd.grad(loss, given, retain_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(first, torch.autograd.grad(loss, given), strict=True))
    loss = fastqt.multiple_negatives_ranking_loss(queries, documents, scale=scale, **ALL)
    with pytest.raises(RuntimeError, match="multiple_negatives_ranking_loss is differentiable once"):
        torch.autograd.grad(loss, queries, create_graph=True)
    loss = fastqt.multiple_negatives_ranking_loss(queries, documents, scale=scale, backend="reference", **ALL)
    (g,) = torch.autograd.grad(loss, scale, create_graph=True)
    assert torch.isfinite(torch.autograd.grad(g, scale)[0])


def of_four(name):
    def loss(queries, positives, negatives, scale):
        documents = [positives, negatives]
        return fastqt.multiple_negatives_ranking_loss(queries, documents, scale=scale, **SAMPLE[name])

    return loss


@by_sample
def test_torch_func(name):
    given, loss = inputs(1, False), of_four(name)
    wanted = torch.autograd.grad(loss(*given), given)
    found = torch.func.grad(loss, argnums=(0, 1, 2, 3))(*(x.detach() for x in given))
    assert max(relative(a, b) for a, b in zip(found, wanted, strict=True)) < FLOAT64
    batches = [torch.stack([x.detach(), x.detach() * 0.9]) for x in given]
    found = torch.func.vmap(loss)(*batches)
    wanted = torch.stack([loss(*(x[i] for x in batches)) for i in range(2)])
    assert relative(found, wanted) < FLOAT64


@pytest.mark.slow
@by_sample
def test_torch_compile(name):
    given, loss = inputs(1, False), of_four(name)
    wanted = torch.autograd.grad(loss(*given), given)
    torch.compiler.reset()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")(*given)
    found = torch.autograd.grad(compiled, given)
    assert max(relative(a, b) for a, b in zip(found, wanted, strict=True)) < FLOAT64


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_and_autocast_are_near(dtype):
    given = inputs(1, False, dtype=torch.float32)
    queries, *documents, scale = given
    wanted = expected(given, torch.full((N,), 1 / N), normalize=True, **ALL)
    with torch.autocast("cpu", dtype):
        loss = fastqt.multiple_negatives_ranking_loss(queries, documents, scale=scale, **ALL)
    assert loss.dtype is torch.float32
    loss.backward()
    halves = [x.detach().to(dtype).requires_grad_() for x in (queries, *documents)]
    of_halves = fastqt.multiple_negatives_ranking_loss(halves[0], halves[1:], scale=3.0, **ALL)
    of_halves.backward()
    for found in (loss, of_halves):
        assert abs(found.item() - wanted[0].mean()) < 0.02
    for x, half, g in zip(given, halves, wanted[1:], strict=False):
        assert relative(x.grad, g) < 0.03
        assert half.grad.dtype is dtype
        assert relative(half.grad, g) < 0.03


X = torch.randn(4, 3)
REFUSED = [
    ({"directions": "query_to_doc"}, TypeError, "directions: want a sequence of names, got 'query_to_doc'"),
    (
        {"directions": ("query_to_doc", "up")},
        ValueError,
        "directions: want one of 'query_to_doc', .* got 'up'",
    ),
    ({"directions": ("doc_to_doc",)}, ValueError, "directions: want 'query_to_doc' among them"),
    (
        {"partition_mode": "all"},
        ValueError,
        "partition_mode: want one of 'joint', 'per_direction', got 'all'",
    ),
    (
        {"directions": ("query_to_doc", "query_to_query"), "partition_mode": "per_direction"},
        ValueError,
        "partition_mode: want 'joint' with 'query_to_query'",
    ),
    ({"false_negative_margin": "much"}, TypeError, "false_negative_margin: want a number, got str"),
    (
        {"false_negative_margin_strategy": "soft", "directions": ALL["directions"]},
        ValueError,
        "false_negative_margin_strategy: want one of",
    ),
    ({"hardness_mode": "soft"}, ValueError, "hardness_mode: want one of"),
    ({"hardness_strength": -1.0}, ValueError, "hardness_strength: want a number >= 0, got -1.0"),
    ({"hardness_strength": "much"}, TypeError, "hardness_strength: want a number"),
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
    ({"scale": 0.0}, ValueError, "scale: want a positive number"),
    ({"normalize": 1}, TypeError, "normalize: want True or False"),
    ({"reduction": "max"}, ValueError, "reduction: want one of"),
    ({"memory": "none"}, ValueError, "memory: want one of"),
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


def test_the_module_refuses_options_when_it_is_made():
    module = fastqt.nn.MultipleNegativesRankingLoss(**ALL, learn_scale=True)
    assert module(X, [X, X]).requires_grad
    for options, kind, message in REFUSED:
        known_without_a_batch = "documents" not in options and "float32" not in message
        if known_without_a_batch and options.get("scale") is None:
            with pytest.raises(kind, match=f"^{message}"):
                fastqt.nn.MultipleNegativesRankingLoss(**options)
