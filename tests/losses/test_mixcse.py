"""Both forms of MixCSE equal their definitions, written out with whole matrices, in value and gradients."""

import math

import pytest
import torch
import torch.nn.functional as F

import fastqt
from fastqt.engines.cpu import contrastive
from fastqt.engines.triton import operands, three_block
from tests.shared.loss_views import N, by_backend, by_memory, check, cosines, views
from tests.shared.tolerances import FLOAT32, relative


def mixed(z: torch.Tensor, mix: float, partners: torch.Tensor) -> torch.Tensor:
    return torch.stack([mix * z[i] + (1 - mix) * z[j] for i, j in enumerate(partners.tolist())])


def released(z1, z2, mix, partners, *, blocks, masked_cell, weight, stop_gradient) -> torch.Tensor:
    """mean_i [logsumexp - S_ii] over the 3 N columns of the authors' code."""
    a, m = mixed(z1, mix, partners), mixed(z2, mix, partners)
    if stop_gradient:
        a, m = a.detach(), m.detach()
    first, second, third = (20 * F.normalize(x) @ F.normalize(y).T for x, y in ((z1, z2), (z1, m), (a, z2)))
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
@pytest.mark.parametrize("weight", [0.0, 0.7, -20.0, 90.0, -800.0, 800.0])
@pytest.mark.parametrize(("blocks", "stop_gradient"), [("both", True), ("both", False), ("candidates", True)])
@pytest.mark.parametrize("partner", ["next", "random"])
@pytest.mark.pairwise
def test_mixcse_as_released(partner, backend, memory, masked_cell, weight, blocks, stop_gradient):
    """Random partners are those of a cycle that the generator draws."""
    z1, z2 = inputs = views(N, N)
    partners, cycle = (
        torch.arange(1, N + 1) % N,
        torch.randperm(N, generator=torch.Generator().manual_seed(1)),
    )
    if partner == "random":
        partners = torch.empty_like(cycle).scatter_(0, cycle, cycle.roll(-1))
    options = {"blocks": blocks, "masked_cell": masked_cell, "stop_gradient": stop_gradient}
    expected = released(z1, z2, 0.2, partners, weight=weight, **options)
    how = {"partner": partner, "generator": torch.Generator().manual_seed(1), "backend": backend}
    loss = fastqt.mixcse_loss(
        *(z1, z2), form="released", hard_negative_weight=weight, memory=memory, **how, **options
    )
    check(loss, expected, inputs)


@pytest.mark.parametrize("rows", [1, 4, N - 1])
@pytest.mark.parametrize(
    ("blocks", "stop_gradient"),
    [("both", True), ("both", False), ("candidates", True), ("candidates", False)],
)
@pytest.mark.parametrize("masked_cell", ["zero", "exclude"])
def test_mixcse_as_released_in_chunks(monkeypatch, rows, blocks, stop_gradient, masked_cell):
    """A mixture has its parts in two chunks, and every block adds to the gradient of the scale."""
    monkeypatch.setattr(contrastive, "CHUNK_BYTES", 1)
    monkeypatch.setattr(contrastive, "MIN_CHUNK_ROWS", rows)
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


@pytest.mark.parametrize(("memory", "room", "walks"), [("fast", 0, 1), ("low", 2**20, 1), ("low", 2**12, 0)])
def test_mixcse_as_released_in_low_memory_of_a_gpu(monkeypatch, memory, room, walks):
    """Where too few rows would fit in memory at once, three losses are computed instead."""
    monkeypatch.setattr(operands, "LOW_BYTES", room)
    walked, genuine = [], three_block.forward_with_gradients
    noted = lambda *args: walked.append(1) or genuine(*args)  # noqa: E731
    monkeypatch.setattr(three_block, "forward_with_gradients", noted)
    z1, z2 = inputs = [z.detach().float().requires_grad_() for z in views(N, N)]
    options = {"form": "released", "memory": memory}
    loss, expected = (
        fastqt.mixcse_loss(z1, z2, backend=backend, **options) for backend in ("triton", "reference")
    )
    assert len(walked) == walks
    check(loss, expected, inputs, 2 * FLOAT32)


@pytest.mark.parametrize("partner", ["next", "random"])
def test_mixcse_as_released_under_autocast(partner):
    """Autocast rounds the embeddings and not their norms."""
    z1, z2 = (z.detach().float().requires_grad_() for z in views(N, N))
    options = {"form": "released", "partner": partner, "backend": "triton"}
    with torch.autocast("cpu", dtype=torch.float16):
        rounded = fastqt.mixcse_loss(z1, z2, generator=torch.Generator().manual_seed(2), **options)
    exact = fastqt.mixcse_loss(z1, z2, generator=torch.Generator().manual_seed(2), **options)
    assert rounded.dtype is torch.float32
    assert 0 < relative(rounded, exact) < 20 * 2.0**-11
    for a, b in zip(*(torch.autograd.grad(loss, (z1, z2)) for loss in (rounded, exact)), strict=True):
        assert a.dtype is torch.float32
        assert relative(a, b) < 40 * 2.0**-11


@pytest.mark.slow
def test_compiled_partners_are_others():
    """A random cycle is drawn in each call: no sentence is its own partner, and each is somebody's."""
    z1, z2 = (z.detach() for z in views(N, N))

    def loss(z1, z2):
        return fastqt.mixcse_loss(z1, z2, partner="random", mix=0.3, reduction="none")

    torch.compiler.reset()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    others = []  # by partner, the loss of each row that has it
    for shift in range(N):
        mixtures = F.normalize(0.3 * F.normalize(z2) + 0.7 * F.normalize(z2).roll(-shift, 0))
        columns = torch.cat([cosines(z1, z2), (F.normalize(z1) * mixtures).sum(1, keepdim=True)], 1)
        others.append(F.cross_entropy(20 * columns, torch.arange(N), reduction="none"))
    cycles = set()
    for _ in range(20):
        apart = (torch.stack(others) - compiled(z1, z2)).abs()
        assert (apart.amin(0) < 1e-10).all()
        partners = (torch.arange(N) + apart.argmin(0)) % N
        assert (apart.argmin(0) > 0).all()
        assert partners.sort().values.tolist() == list(range(N))
        cycles.add(tuple(partners.tolist()))
    assert len(cycles) > 1


def test_mixed_score_at_alignment():
    """With h' = h and all else orthogonal it is mix / sqrt(mix^2 + (1 - mix)^2): 0.2425 for 0.2."""
    h = torch.eye(6, dtype=torch.float64)
    rows = fastqt.mixcse_loss(h, h, scale=1.0, reduction="none")
    mixed_score = torch.log(rows.exp() * math.e - math.e - 5)
    assert torch.allclose(mixed_score, torch.tensor(0.2425, dtype=torch.float64), atol=5e-5)


def by_definition(z1: torch.Tensor, z2: torch.Tensor, mix: float, stop_gradient: bool) -> torch.Tensor:
    """The form of the slides, with `F.normalize` as the meaning of a norm of 1."""
    u, v = F.normalize(z1, dim=1), F.normalize(z2, dim=1)
    mixtures = F.normalize(mix * v + (1 - mix) * v.roll(-1, 0), dim=1)
    mixtures = mixtures.detach() if stop_gradient else mixtures
    scores = 20 * torch.cat([u @ v.T, (u * mixtures).sum(1, keepdim=True)], 1)
    return F.cross_entropy(scores, torch.arange(len(z1)), reduction="none")


@by_backend
@pytest.mark.parametrize("stop_gradient", [True, False])
@pytest.mark.parametrize("form", ["slides", "released"])
@pytest.mark.parametrize("norm", [4e-25, 2e-12])
@pytest.mark.parametrize("shorter", ["both", "one row"])
@pytest.mark.parametrize("mix", [0.2, 0.5])
def test_rows_and_mixtures_that_are_shorter_than_what_they_are_divided_by(
    backend, stop_gradient, form, norm, shorter, mix
):
    """A row is divided by 1e-12 at least, and so is a mixture, which is not brought to norm 1 once more."""
    z1, z2 = (F.normalize(z.detach(), dim=1) for z in views(N, N))
    lengths = torch.full((N, 1), norm, dtype=torch.float64)
    z2 = z2 * (lengths if shorter == "both" else lengths.where(torch.arange(N)[:, None] == 2, 1.0))
    z1 = z1 * lengths if shorter == "both" else z1
    inputs = [z1.requires_grad_(), z2.requires_grad_()]
    options = {"mix": mix, "stop_gradient": stop_gradient}
    if form == "slides":
        expected = by_definition(*inputs, **options).mean()
    else:
        how = {"blocks": "both", "masked_cell": "zero", "weight": 0.0, "stop_gradient": stop_gradient}
        expected = released(*inputs, mix, torch.arange(1, N + 1) % N, **how)
    loss = fastqt.mixcse_loss(*inputs, form=form, backend=backend, **options)
    check(loss, expected, inputs)


@by_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_short_mixtures_in_other_dtypes(backend, dtype):
    inputs = [
        (norm * z.detach()).to(dtype).requires_grad_()
        for norm, z in zip((1, 4e-25), views(N, N), strict=True)
    ]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    loss = fastqt.mixcse_loss(*inputs, backend=backend)
    expected = by_definition(*exact, 0.2, True).mean()
    check(loss, expected, inputs, FLOAT32 if dtype is torch.float32 else 2**-7, exact)


@pytest.mark.parametrize(
    "more", [{}, {"row_scores": torch.zeros(N, dtype=torch.float64)}], ids=["alone", "joined"]
)
@by_backend
def test_mixed_negatives_of_short_candidates(backend, more):
    """Also where they are joined with other cells that a row has alone."""
    q, c = inputs = [
        (norm * z.detach()).requires_grad_() for norm, z in zip((1, 4e-25), views(N, N), strict=True)
    ]
    options = {"diagonal": "keep", "scale": 20.0, "normalize": True, "row_negatives": fastqt.Mixed(0.2)}
    loss = fastqt.contrastive_loss(q, c, fastqt.Diagonal(), backend=backend, **options, **more)
    v = F.normalize(c, dim=1)
    mixtures = F.normalize(0.2 * v + 0.8 * v.roll(-1, 0), dim=1).detach()
    u = F.normalize(q, dim=1)
    cells = [20 * u @ v.T, 20 * (u * mixtures).sum(1, keepdim=True)] + [x[:, None] for x in more.values()]
    check(loss, F.cross_entropy(torch.cat(cells, 1), torch.arange(N)), inputs)
