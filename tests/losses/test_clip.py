"""CLIP's loss equals its definition, also in the C++ engine's tiles, with weights and on threads."""

import pytest
import torch
import torch.nn.functional as F

import fastqt
from fastqt.engines.cpu import clip, contrastive
from fastqt.problem import ClipProblem
from tests.shared.loss_views import N, by_memory, check, cosines, views
from tests.shared.tolerances import REORDERED, UNIT_ROUNDOFF, relative


def expected(a: torch.Tensor, b: torch.Tensor, scale: torch.Tensor, reduction: str) -> torch.Tensor:
    scores, own = scale * a @ b.T, torch.arange(len(a))
    return sum(F.cross_entropy(s, own, reduction=reduction) for s in (scores, scores.T)) / 2


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("kept", [1, 2, 3])
@pytest.mark.parametrize(("rows", "columns"), [(4, 20), (5, 10), (20, 5)])
def test_kept_tiles_do_not_change_the_result(monkeypatch, rows, columns, kept, normalize):
    """The second walk finds the scores of the first one's last tiles, and computes those of the others."""
    monkeypatch.setattr(contrastive, "CHUNK_BYTES", kept * rows * columns * 8)
    monkeypatch.setattr(contrastive, "TILE_ROWS", rows)
    monkeypatch.setattr(contrastive, "TILE_COLUMNS", columns)
    a, b = views(20, 20)
    scale = torch.tensor(10.0, dtype=torch.float64, requires_grad=True)
    p = ClipProblem(a, b, scale)
    assert clip._tiles(p)[2] == kept
    ours = fastqt.clip_loss(a, b, scale=scale, normalize=normalize, backend="cpu")
    scores = scale * (cosines(a, b) if normalize else a @ b.T)
    wanted = sum(F.cross_entropy(s, torch.arange(20)) for s in (scores, scores.T)) / 2
    check(ours, wanted, [a, b, scale])


@by_memory
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (3, 5), (4, 100), (100, 4), (100, 100)])
def test_tiles_do_not_change_the_result(monkeypatch, memory, reduction, rows, columns):
    """Scores are up to 80: pairs are nearly certain in one direction and not in the other."""
    monkeypatch.setattr(contrastive, "CHUNK_BYTES", 1)
    monkeypatch.setattr(contrastive, "TILE_ROWS", rows)
    monkeypatch.setattr(contrastive, "TILE_COLUMNS", columns)
    a, b = views(N, N)
    scale = torch.tensor(10.0, dtype=torch.float64, requires_grad=True)
    weights = torch.arange(1.0, N + 1, dtype=torch.float64) if reduction == "none" else 3.0
    ours = fastqt.clip_loss(
        a, b, scale=scale, normalize=False, reduction=reduction, memory=memory, backend="cpu"
    )
    check((weights * ours).sum(), (weights * expected(a, b, scale, reduction)).sum(), [a, b, scale])


@pytest.mark.parametrize("width", [255, 256, 257, 600])
def test_columns_beyond_a_stripe(width):
    """Threads sum columns in stripes of 256."""
    a, b = views(width, width)
    scale = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    ours = fastqt.clip_loss(a, b, scale=scale, normalize=False, backend="cpu")
    check(ours, expected(a, b, scale, "mean"), [a, b, scale])


def test_gradients_are_made_where_they_are_wanted(monkeypatch):
    made, known = [], []

    def walk(*args, **options):
        gradients = original(*args, **options)
        made.append([g is not None for g in (gradients.queries, gradients.candidates, gradients.scale)])
        known.append(options["known"])
        return gradients

    original = clip._walk
    monkeypatch.setattr(clip, "_walk", walk)
    a, b = views(N, N)
    fastqt.clip_loss(a, b.detach(), scale=2.0, backend="cpu")
    fastqt.clip_loss(a, b.detach(), scale=2.0, reduction="none", backend="cpu").sum().backward()
    with torch.no_grad():
        fastqt.clip_loss(a, b, scale=2.0, backend="cpu")
    assert made == [[True, False, False], [False] * 3, [True, False, False], [False] * 3]
    # A backward pass finds the sums where the forward one left them.
    assert known == [False, False, True, False]


def test_tiles_of_the_memory_modes():
    def tiles(N: int, memory: str | int) -> tuple[int, int, int]:
        return clip._tiles(ClipProblem(torch.empty(N, 1), torch.empty(N, 1), 1.0, memory))

    for memory in ("fast", "low", 2**24):
        assert tiles(2000, memory) == (2000, 2000, 1)
    assert tiles(2100, "low") == tiles(2100, 2**24) == (700, 2100, 2)
    assert tiles(4096, "fast") == (1024, 4096, 3)
    assert tiles(4096, "low") == (1024, 4096, 1)
    assert tiles(4096, 2**26) == (1024, 4096, 4)  # all
    assert tiles(5000, "low") == (1000, 2500, 1)
    assert tiles(10**6, "fast")[2] == 3


def test_threads_agree():
    """Rows and columns are shared out among threads."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(700, 48, generator=generator).requires_grad_() for _ in range(2))
    threads, found = torch.get_num_threads(), []
    try:
        for count in (2, 2, 1):
            torch.set_num_threads(count)
            loss = fastqt.clip_loss(a, b, scale=5.0, backend="cpu")
            found.append([loss.detach(), *torch.autograd.grad(loss, (a, b))])
    finally:
        torch.set_num_threads(threads)
    two, again, one = found
    assert all(torch.equal(x, y) for x, y in zip(two, again, strict=True))
    assert all(relative(x, y) < REORDERED[torch.float32] for x, y in zip(one, two, strict=True))


def test_under_autocast():
    a, b = (x.detach().float().requires_grad_() for x in views(N, N))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = fastqt.clip_loss(a, b, scale=2.0)
    assert rounded.dtype == torch.float32
    units = (F.normalize(x.bfloat16().double(), dim=1) for x in (a, b))
    # A CPU may round the scores, which are at most 2, and not those of the pairs.
    rounding = 2 * UNIT_ROUNDOFF[torch.bfloat16]
    assert abs(rounded - expected(*units, torch.tensor(2.0), "mean")) < rounding
