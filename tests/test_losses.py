"""Each loss of the family equals its definition, written out with whole matrices, in value and gradients."""

import math
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from tolerances import EAGER_FACTOR, FLOAT64, HALF_ULP, relative

import fastqt
from fastqt import released_mixcse

N, D, K = 9, 5, 4
BACKENDS = ("cpu", "reference")
by_backend = pytest.mark.parametrize("backend", BACKENDS)
by_memory = pytest.mark.parametrize("memory", ["fast", "low"])


def views(*rows: int, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(n, D, generator=generator, dtype=torch.float64, requires_grad=True) for n in rows]


def cosines(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a @ b.T) / a.norm(dim=1)[:, None] / b.norm(dim=1)


def check(loss: torch.Tensor, expected: torch.Tensor, inputs: list[torch.Tensor], tolerance=FLOAT64) -> None:
    assert relative(loss, expected) < tolerance
    found = torch.autograd.grad(loss.sum(), inputs, allow_unused=True)
    wanted = torch.autograd.grad(expected.sum(), inputs, allow_unused=True, retain_graph=True)
    for a, b in zip(found, wanted, strict=True):
        assert (a is None or not a.any()) if b is None else relative(a, b) < tolerance


@by_backend
@by_memory
def test_info_nce(backend, memory):
    q, c, negatives = inputs = views(N, N + 3, K)
    scale = torch.tensor(7.0, dtype=torch.float64, requires_grad=True)
    expected = F.cross_entropy(scale * cosines(q, torch.cat([c, negatives])), torch.arange(N))
    loss = fastqt.info_nce_loss(q, c, scale=scale, negatives=negatives, backend=backend, memory=memory)
    check(loss, expected, [*inputs, scale])
    raw = fastqt.info_nce_loss(q, c, scale=2.0, normalize=False, backend=backend, memory=memory)
    check(raw, F.cross_entropy(2 * q @ c.T, torch.arange(N)), inputs[:2])


@by_backend
@by_memory
@pytest.mark.parametrize("weight", [None, 0.0, 1.5, -2.0])
def test_simcse(backend, memory, weight):
    z1, z2, z3 = inputs = views(N, N, N)
    scores = 20 * cosines(z1, z2)
    if weight is None:
        expected = F.cross_entropy(scores, torch.arange(N))
        check(fastqt.simcse_loss(z1, z2, backend=backend, memory=memory), expected, inputs[:2])
        return
    hard = 20 * cosines(z1, z3) + weight * torch.eye(N, dtype=torch.float64)
    expected = F.cross_entropy(torch.cat([scores, hard], 1), torch.arange(N))
    loss = fastqt.simcse_loss(z1, z2, z3, hard_negative_weight=weight, backend=backend, memory=memory)
    check(loss, expected, inputs)


def mixed(z: torch.Tensor, mix: float, partners: torch.Tensor) -> torch.Tensor:
    return torch.stack([mix * z[i] + (1 - mix) * z[j] for i, j in enumerate(partners.tolist())])


def released(z1, z2, mix, partners, *, blocks, masked_cell, weight, stop_gradient) -> torch.Tensor:
    """mean_i [logsumexp - S_ii] over the 3 N columns of the authors' code."""
    a, m = mixed(z1, mix, partners), mixed(z2, mix, partners)
    if stop_gradient:
        a, m = a.detach(), m.detach()
    first, second, third = 20 * cosines(z1, z2), 20 * cosines(z1, m), 20 * cosines(a, z2)
    masked = torch.zeros(N, N, dtype=torch.bool)
    masked[torch.arange(N), partners] = True  # (i, j) of the third block, (j, i) of the second
    value = 0.0 if masked_cell == "zero" else -math.inf
    second = second.masked_fill(masked.T, value) + weight * torch.eye(N, dtype=torch.float64)
    third = third.masked_fill(masked, value) + weight * torch.eye(N, dtype=torch.float64)
    columns = [first, second, third] if blocks == "both" else [first, second]
    return (torch.cat(columns, 1).logsumexp(1) - first.diagonal()).mean()


@by_backend
@by_memory
@pytest.mark.parametrize("masked_cell", ["zero", "exclude"])
@pytest.mark.parametrize("weight", [0.0, 0.7])
@pytest.mark.parametrize(("blocks", "stop_gradient"), [("both", True), ("both", False), ("candidates", True)])
def test_mixcse_as_released(backend, memory, masked_cell, weight, blocks, stop_gradient):
    z1, z2 = inputs = views(N, N)
    options = {"blocks": blocks, "masked_cell": masked_cell, "stop_gradient": stop_gradient}
    expected = released(z1, z2, 0.2, torch.arange(1, N + 1) % N, weight=weight, **options)
    loss = fastqt.mixcse_loss(
        *(z1, z2), form="released", hard_negative_weight=weight, backend=backend, memory=memory, **options
    )
    check(loss, expected, inputs)


@pytest.mark.parametrize("rows", [1, 4, N - 1])
@pytest.mark.parametrize(
    ("blocks", "stop_gradient"),
    [("both", True), ("both", False), ("candidates", True), ("candidates", False)],
)
@pytest.mark.parametrize("masked_cell", ["zero", "exclude"])
def test_mixcse_as_released_in_chunks(monkeypatch, rows, blocks, stop_gradient, masked_cell):
    """Chunks meet where a mixture has its halves; the scale, too, hears of every block."""
    monkeypatch.setattr(released_mixcse, "CHUNK_BYTES", 1)
    monkeypatch.setattr(released_mixcse, "MIN_ROWS", rows)
    z1, z2 = views(N, N)
    scale = torch.tensor(20.0, dtype=torch.float64, requires_grad=True)
    options = {"blocks": blocks, "masked_cell": masked_cell, "stop_gradient": stop_gradient}
    shared = {"form": "released", "partner": "random", "hard_negative_weight": 0.4, **options}

    def loss(backend, **more):
        generator = torch.Generator().manual_seed(2)
        return fastqt.mixcse_loss(z1, z2, scale=scale, generator=generator, backend=backend, **shared, **more)

    weights = torch.arange(1.0, N + 1, dtype=torch.float64)
    for reduction, w in (("mean", 1.0), ("sum", 1.0), ("none", weights)):
        ours, wanted = (w * loss(backend, reduction=reduction) for backend in ("cpu", "reference"))
        check(ours, wanted, (z1, z2, scale))


def test_mixcse_as_released_twice_and_not_twice():
    z1, z2 = views(N, N)
    options = {"form": "released", "backend": "cpu"}
    loss = fastqt.mixcse_loss(z1, z2, **options)
    first = torch.autograd.grad(loss, z1, torch.tensor(2.0, dtype=torch.float64), retain_graph=True)[0]
    assert relative(first, 2 * torch.autograd.grad(loss, z1)[0]) < FLOAT64
    with pytest.raises(RuntimeError, match="mixcse_loss is differentiable once"):
        torch.autograd.grad(fastqt.mixcse_loss(z1, z2, **options), z1, create_graph=True)
    with pytest.raises(ValueError, match="scale: want a finite number, got nan"):
        fastqt.mixcse_loss(z1, z2, scale=torch.tensor(math.nan), **options)


@by_backend
@by_memory
@pytest.mark.parametrize("stop_gradient", [True, False])
def test_mixcse_of_the_slides(backend, memory, stop_gradient):
    z1, z2 = inputs = views(N, N)
    h, h2 = F.normalize(z1), F.normalize(z2)
    m = F.normalize(mixed(h2, 0.3, torch.arange(1, N + 1) % N))
    if stop_gradient:
        m = m.detach()
    scores = torch.cat([h @ h2.T, (h * m).sum(1, keepdim=True)], 1)
    expected = F.cross_entropy(20 * scores, torch.arange(N))
    loss = fastqt.mixcse_loss(z1, z2, mix=0.3, stop_gradient=stop_gradient, backend=backend, memory=memory)
    check(loss, expected, inputs)


def test_mixcse_gradients_of_the_slides():
    """What the slides say of them, for unit vectors."""
    z1, z2 = (F.normalize(z.detach()) for z in views(N, N))
    mix, s = 0.2, 20.0
    m = F.normalize(mixed(z2, mix, torch.arange(1, N + 1) % N))
    e, e_m = (s * z1 @ z2.T).exp(), (s * (z1 * m).sum(1)).exp()
    total = e.sum(1) + e_m

    def gradient(row: int, stop_gradient: bool) -> torch.Tensor:
        # Normalising is the identity to first order only along the sphere: compare tangents.
        z = z2.clone().requires_grad_()
        loss = fastqt.mixcse_loss(z1, z, mix=mix, stop_gradient=stop_gradient, reduction="none")[row]
        return torch.autograd.grad(loss, z)[0]

    def tangent(x: torch.Tensor) -> torch.Tensor:
        return x - (x * z2).sum(1, keepdim=True) * z2

    for i in range(N):
        j = (i + 1) % N
        others = e[i].sum() - e[i, i] + e_m[i]
        with_stop = torch.zeros_like(z2)
        with_stop[i] = -s / total[i] * others * z1[i]
        for k in range(N):
            if k != i:
                with_stop[k] = s / total[i] * e[i, k] * z1[i]
        assert relative(gradient(i, True), tangent(with_stop)) < FLOAT64
        norm = (mix * z2[i] + (1 - mix) * z2[j]).norm()
        through = s * e_m[i] / total[i] / norm * (z1[i] - (z1[i] @ m[i]) * m[i])
        without = with_stop.clone()
        without[i] += mix * through
        without[j] += (1 - mix) * through
        assert relative(gradient(i, False), tangent(without)) < 1e-11


def test_mixed_score_at_alignment():
    """With h' = h and all else orthogonal it is mix / sqrt(mix^2 + (1 - mix)^2): 0.2425 for 0.2."""
    h = torch.eye(6, dtype=torch.float64)
    rows = fastqt.mixcse_loss(h, h, scale=1.0, reduction="none")
    mixed_score = torch.log(rows.exp() * math.e - math.e - 5)
    assert torch.allclose(mixed_score, torch.tensor(0.2425, dtype=torch.float64), atol=5e-5)


def test_random_partners_are_seeded_and_nobodys_own():
    z1, z2 = views(N, N)
    options = {"form": "released", "partner": "random"}
    first, again, other = (
        fastqt.mixcse_loss(z1, z2, generator=torch.Generator().manual_seed(seed), **options)
        for seed in (1, 1, 2)
    )
    assert first == again != other
    order = torch.randperm(N, generator=torch.Generator().manual_seed(1)).tolist()
    partners = torch.empty(N, dtype=torch.long)
    for place, row in enumerate(order):
        partners[row] = order[(place + 1) % N]
    expected = released(
        z1, z2, 0.2, partners, blocks="both", masked_cell="zero", weight=0, stop_gradient=True
    )
    assert relative(first, expected) < FLOAT64


@by_backend
@by_memory
@pytest.mark.parametrize("normalize", [True, False])
def test_clip(backend, memory, normalize):
    a, b = inputs = views(N, N)
    scale = torch.tensor(3.0, dtype=torch.float64, requires_grad=True)
    scores = scale * (cosines(a, b) if normalize else a @ b.T)
    own = torch.arange(N)
    expected = (F.cross_entropy(scores, own) + F.cross_entropy(scores.T, own)) / 2
    loss = fastqt.clip_loss(a, b, scale=scale, normalize=normalize, backend=backend, memory=memory)
    check(loss, expected, [*inputs, scale])


@by_backend
@by_memory
def test_siglip(backend, memory):
    a, b = inputs = views(N, N)
    scale = torch.tensor(10.0, dtype=torch.float64, requires_grad=True)
    bias = torch.tensor(-10.0, dtype=torch.float64, requires_grad=True)
    signs = 2 * torch.eye(N, dtype=torch.float64) - 1
    expected = -F.logsigmoid(signs * (scale * cosines(a, b) + bias)).sum() / N
    loss = fastqt.siglip_loss(a, b, scale=scale, bias=bias, backend=backend, memory=memory)
    check(loss, expected, [*inputs, scale, bias])


def test_curl():
    f, positives, negatives = inputs = views(N, N, N)
    margins = torch.stack([f[i] @ positives[i] - f[i] @ negatives[i] for i in range(N)])
    expected = torch.log1p(torch.exp(-margins))
    check(fastqt.curl_loss(*inputs, reduction="none"), expected, inputs)
    check(fastqt.curl_loss(*inputs), expected.mean(), inputs)


def block_means(g: torch.Tensor, k: int, row: int, shift: int = 0) -> torch.Tensor:
    around = [row + o for o in range(-k, k + 1) if o and 0 <= row + o < len(g)]
    return torch.stack([g[(j + shift) % len(g)] for j in around]).mean(0)


@pytest.mark.parametrize("negatives", ["shift", "complement", "random"])
def test_curl_blocks(negatives):
    f, g = inputs = views(14, 14)
    k = 2
    order = torch.randperm(14, generator=torch.Generator().manual_seed(3))
    expected = []
    for i in range(14):
        if negatives == "shift":
            other = block_means(g, k, i, 7)
        elif negatives == "complement":
            other = torch.stack([g[j] for j in range(14) if abs(i - j) > k]).mean(0)
        else:
            other = block_means(g[order], k, i)
        expected.append(F.softplus(-f[i] @ (block_means(g, k, i) - other)))
    generator = torch.Generator().manual_seed(3)
    loss = fastqt.curl_block_loss(
        f, g, context_size=k, negatives=negatives, generator=generator, reduction="none"
    )
    check(loss, torch.stack(expected), inputs)


@pytest.mark.parametrize("k", [1, 2])
def test_shifted_blocks_are_taken_where_they_share_no_sentence_and_refused_elsewhere(k):
    for N in range(k + 1, 4 * k + 6):
        inputs = views(N, N)
        around = {o % N for o in range(-k, k + 1)}
        if around & {(o + N // 2) % N for o in range(-k, k + 1)}:
            with pytest.raises(ValueError, match="context_size: want"):
                fastqt.curl_block_loss(*inputs, context_size=k)
        else:
            assert fastqt.curl_block_loss(*inputs, context_size=k).isfinite()


def test_a_block_bounds_its_pairs():
    """softplus is convex: the loss of the means is at most the mean of the losses."""
    for seed in range(20):
        f, positives, negatives = (x.detach() for x in views(1, K, K, seed=seed))
        block = fastqt.curl_loss(f, positives.mean(0, keepdim=True), negatives.mean(0, keepdim=True))
        assert block <= fastqt.curl_loss(f.expand(K, D), positives, negatives)


def test_altered_targets_bound_a_block():
    """With K positives and K negatives, -f mu+ + log sum exp - log K is at least the block's loss."""
    for seed in range(20):
        f, positives, negatives = (x.detach() for x in views(1, K, K, seed=seed))
        candidates = torch.cat([positives, negatives])
        targets = torch.tensor([[1 / K] * K + [0.0] * K], dtype=torch.float64)
        # The KL divergence is the altered loss less log K, as the targets' entropy is log K.
        altered = fastqt.contrastive_loss(f, candidates, targets, diagonal="keep")
        explicit = -f @ positives.mean(0) + (candidates @ f[0]).logsumexp(0) - math.log(K)
        assert relative(altered, explicit) < FLOAT64
        block = fastqt.curl_loss(f, positives.mean(0, keepdim=True), negatives.mean(0, keepdim=True))
        assert altered >= block


@by_backend
@by_memory
def test_gloss_bow(backend, memory):
    V = 11
    latents, weight = views(4, V)
    bias = torch.randn(V, dtype=torch.float64, requires_grad=True)
    token_ids, offsets = torch.tensor([3, 1, 3, 10, 0, 7, 7]), torch.tensor([0, 4, 4, 6])
    words = [{3, 1, 10}, set(), {0, 7}, {7}]
    T = torch.tensor([[float(v in named) for v in range(V)] for named in words], dtype=torch.float64)
    expected = F.binary_cross_entropy_with_logits(latents @ weight.T + bias, T, reduction="none").sum(1)
    inputs = [latents, weight, bias]
    options = {"backend": backend, "memory": memory}
    rows = fastqt.gloss_bow_loss(*inputs, token_ids, offsets, reduction="none", **options)
    check(rows, expected, inputs)
    check(fastqt.gloss_bow_loss(*inputs, token_ids, offsets, **options), expected.mean(), inputs)


@by_backend
@by_memory
def test_gloss_pos(backend, memory):
    V, L = 11, 5
    latents, positions, weight = views(4, L, V)
    bias = torch.randn(V, dtype=torch.float64, requires_grad=True)
    token_ids, lengths = torch.randint(0, V, (4, L)), torch.tensor([3, 0, 5, 1])
    expected = []
    for b in range(4):
        logits = (latents[b] + positions[: lengths[b]]) @ weight.T + bias
        expected.append(F.cross_entropy(logits, token_ids[b, : lengths[b]], reduction="sum"))
    expected = torch.stack(expected)
    inputs = [latents, positions, weight, bias]
    token_ids = token_ids.where(torch.arange(L) < lengths[:, None], -1)  # padding may be anything
    options = {"backend": backend, "memory": memory}
    rows = fastqt.gloss_pos_loss(*inputs, token_ids, lengths, reduction="none", **options)
    check(rows, expected, inputs)
    check(fastqt.gloss_pos_loss(*inputs, token_ids, lengths, **options), expected.mean(), inputs)
    check(
        fastqt.gloss_pos_loss(*inputs, token_ids, lengths, reduction="sum", **options), expected.sum(), inputs
    )
    assert fastqt.gloss_pos_loss(*inputs, token_ids, lengths * 0) == 0


@by_memory
def test_no_matrix_of_scores(memory):
    """At N = 16,384 one would take a GiB, which a process may not have grown by."""
    script = f"""
import resource, torch, fastqt
def losses(N):
    z = [(torch.randn(N, 16) * 0.1).requires_grad_() for _ in range(3)]
    words = torch.arange(N)
    yield fastqt.simcse_loss(*z, hard_negative_weight=1.0, memory={memory!r})
    yield fastqt.mixcse_loss(*z[:2], form="released", memory={memory!r})
    yield fastqt.mixcse_loss(*z[:2], memory={memory!r})
    yield fastqt.clip_loss(*z[:2], scale=10.0, memory={memory!r})
    yield fastqt.siglip_loss(*z[:2], scale=10.0, bias=-10.0, memory={memory!r})
    yield fastqt.curl_block_loss(*z[:2])
    yield fastqt.gloss_bow_loss(*z[:2], torch.zeros(N), words, words, memory={memory!r})
    yield fastqt.gloss_pos_loss(z[0], z[1][:1], z[2], torch.zeros(N), words[:, None], words * 0 + 1,
                                memory={memory!r})
for loss in losses(64):
    loss.backward()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for loss in losses(16384):
    loss.backward()
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert int(run.stdout) < 256


def alike(seed: int, noise: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Two views of 64 sentences that differ by `noise`, relatively."""
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(64, 48, generator=generator)
    return z, z + noise * torch.randn(64, 48, generator=generator)


@pytest.mark.parametrize("noise", [0.03, 1.0])
@pytest.mark.parametrize("loss", ["simcse", "released"])
def test_error_is_at_most_eagers(loss, noise):
    """Also where views are all but equal, and the loss is what little the others hold against them."""

    def ours(z1, z2):
        if loss == "simcse":
            return fastqt.simcse_loss(z1, z2, z1.detach().flip(0), hard_negative_weight=1.0, scale=50.0)
        return fastqt.mixcse_loss(z1, z2, form="released", scale=50.0, mix=0.6, masked_cell="exclude")

    def eager(z1, z2):
        eye, scores = torch.eye(len(z1), dtype=z1.dtype), 50 * cosines(z1, z2)
        if loss == "simcse":
            columns = [scores, 50 * cosines(z1, z1.detach().flip(0)) + eye]
        else:
            after = eye.roll(1, 1).bool()
            a, m = (0.6 * z + 0.4 * z.roll(-1, 0) for z in (z1.detach(), z2.detach()))
            blocks = ((50 * cosines(z1, m), after.T), (50 * cosines(a, z2), after))
            columns = [scores, *(block.masked_fill(cells, -math.inf) for block, cells in blocks)]
        return F.cross_entropy(torch.cat(columns, 1), torch.arange(len(z1)))

    errors = {ours: [], eager: []}
    for seed in range(5):
        views = alike(seed, noise)
        exact_inputs = [z.double().requires_grad_() for z in views]
        exact = eager(*exact_inputs)
        wanted = [exact.detach(), *torch.autograd.grad(exact, exact_inputs)]
        for function, found in errors.items():
            inputs = [z.clone().requires_grad_() for z in views]
            value = function(*inputs)
            results = [value.detach(), *torch.autograd.grad(value, inputs)]
            found.append([float((a - b).norm() / b.norm()) for a, b in zip(results, wanted, strict=True)])
    a, b = (torch.tensor(x).mean(0) for x in errors.values())
    assert (a <= EAGER_FACTOR * b + HALF_ULP[torch.float32]).all(), (a, b)


Z = torch.randn(6, 4)
IDS, STARTS = torch.tensor([0, 1]), torch.zeros(6).long()
REFUSED = {
    "z3 of others": (fastqt.simcse_loss, (Z, Z, Z[:5]), {}, "z3: want a hard negative for each of N=6"),
    "weight": (
        fastqt.simcse_loss,
        (Z, Z, Z),
        {"hard_negative_weight": math.inf},
        "hard_negative_weight: want",
    ),
    "one sentence": (fastqt.mixcse_loss, (Z[:1], Z[:1]), {}, "z2: want two views of at least 2 sentences"),
    "form": (fastqt.mixcse_loss, (Z, Z), {"form": "paper"}, "form: want one of 'slides', 'released'"),
    "mix": (fastqt.mixcse_loss, (Z, Z), {"form": "released", "mix": 1.5}, "mix: want a number in 0..1"),
    "pairs": (fastqt.clip_loss, (Z, Z[:5]), {"scale": 1.0}, "b: want a row for each of the 6 rows"),
    "candidates": (fastqt.curl_block_loss, (Z, Z[:5]), {}, "candidates: want one for each of N=6"),
    "shift": (fastqt.curl_block_loss, (Z, Z), {"context_size": 2}, "context_size: want 2 k"),
    "complement": (
        fastqt.curl_block_loss,
        (Z, Z),
        {"context_size": 5, "negatives": "complement"},
        "context_size: leaves no sentence",
    ),
    "curl": (fastqt.curl_loss, (Z, Z, Z[:5]), {}, "want a row for each query, got 6, 6 and 5"),
    "places": (fastqt.gloss_pos_loss, (Z, Z, Z, Z[:, 0], STARTS, STARTS), {}, "token_ids: want shape"),
    "lengths": (
        fastqt.gloss_pos_loss,
        (Z, Z, Z, Z[:, 0], STARTS.expand(6, 6), STARTS + 7),
        {},
        "lengths: want one in 0..6",
    ),
    "ids": (fastqt.gloss_bow_loss, (Z, Z, Z[:, 0], IDS + 5, STARTS), {}, "token_ids: want integers in 0..5"),
    "offsets": (fastqt.gloss_bow_loss, (Z, Z, Z[:, 0], IDS, STARTS[:5]), {}, "offsets: want one for each"),
    "falling": (fastqt.gloss_bow_loss, (Z, Z, Z[:, 0], IDS, 5 - torch.arange(6)), {}, "offsets: want rising"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refuses(name):
    function, inputs, options, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        function(*inputs, **options)
