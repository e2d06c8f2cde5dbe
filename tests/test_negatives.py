"""Mixed negatives equal the oracle's on every engine; noise is drawn by its counts; bad input is refused."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import fastqt
from fastqt import devices
from fastqt.negatives import mixtures
from tests.shared import oracle
from tests.shared.tolerances import FLOAT32, FLOAT64, relative
from tests.shared.without_float64 import WithoutFloat64

N, D = 9, 6
by_backend = pytest.mark.parametrize("backend", ["cpu", "torch", "reference", "triton"])


@by_backend
@pytest.mark.parametrize("partners", [None, [3, 5, 0, 8, 1, 2, 7, 6, 4]], ids=["next", "given"])
@pytest.mark.parametrize("smoothed", [False, True])
def test_mixed_is_the_oracles(backend, partners, smoothed):
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(N, D, generator=generator, requires_grad=True) for _ in range(2)]
    unit = [F.normalize(x.detach().double(), dim=1).numpy() for x in inputs]
    others = np.roll(np.arange(N), -1) if partners is None else np.array(partners)
    mixed = 0.3 * unit[1] + 0.7 * unit[1][others]
    mixed /= np.linalg.norm(mixed, axis=1, keepdims=True)
    T = oracle.smoothed(np.eye(N), 0.1) if smoothed else np.eye(N)
    exact = oracle.contrastive(*unit, T, diagonal="keep", scale=5.0, row_negatives=mixed)

    given = None if partners is None else torch.tensor(partners)
    units = [F.normalize(x, dim=1) for x in inputs]
    targets = fastqt.smoothed(fastqt.Diagonal()) if smoothed else fastqt.Diagonal()
    options = {
        "diagonal": "keep",
        "scale": 5.0,
        "row_negatives": fastqt.Mixed(0.3, given),
        "backend": backend,
    }
    loss = fastqt.contrastive_loss(*units, targets, **options)
    assert relative(loss, exact.loss.mean()) < FLOAT32
    for gradient, name in zip(torch.autograd.grad(loss, units), ("queries", "candidates"), strict=True):
        assert relative(gradient, getattr(exact, name)) < FLOAT32
    normalized = fastqt.contrastive_loss(*inputs, targets, normalize=True, **options)
    assert relative(normalized, loss) < FLOAT32


def test_mixtures_of_zeros_are_zeros_in_float16():
    zeros = torch.zeros(3, 4, dtype=torch.float16)
    assert torch.equal(mixtures(zeros, zeros, 0.2), zeros)


def loss_with(mixed: fastqt.Mixed, M: int = N) -> torch.Tensor:
    return fastqt.contrastive_loss(torch.randn(N, D), torch.randn(M, D), row_negatives=mixed)


@pytest.mark.parametrize("without", [(), ("cpu",)], ids=["float64", "no float64"])
def test_noise_is_drawn_by_counts_to_a_power(without, monkeypatch):
    monkeypatch.setattr(devices, "NO_FLOAT64", without)
    counts = torch.tensor([8, 0, 1, 16, 0, 4])
    noise = fastqt.Noise(counts)
    wanted = np.array([8, 0, 1, 16, 0, 4]) ** 0.75
    wanted /= wanted.sum()
    assert relative(noise.shares, wanted) < (FLOAT32 if without else FLOAT64)
    drawn = noise.draw(300, 1000, generator=torch.Generator().manual_seed(0))
    assert drawn.shape == (300, 1000)
    share = np.bincount(drawn.flatten(), minlength=6) / drawn.numel()
    assert not share[[1, 4]].any()
    # Five standard deviations of a share of 300,000 draws.
    assert np.abs(share - wanted).max() < 5 * (0.25 / drawn.numel()) ** 0.5


def test_noise_of_equal_counts_and_of_power_0_is_uniform_over_what_occurs():
    assert relative(fastqt.Noise(torch.ones(4)).shares, np.full(4, 0.25)) < FLOAT64
    assert relative(fastqt.Noise(torch.tensor([5, 0, 1]), power=0).shares, [0.5, 0, 0.5]) < FLOAT64


def test_noise_without_float64_knows_shares_that_float32_has_no_sums_of(monkeypatch):
    """Of a million candidates with the same share, float32 would draw some by 6 % more often than others."""
    M = 2**20 - 2**10
    monkeypatch.setattr(devices, "NO_FLOAT64", ("cpu",))
    noise = fastqt.Noise(torch.ones(M))

    # The last of all places that a draw can have, and who is drawn at each.
    digits = iter((torch.arange(2**15 - 32, 2**15).repeat_interleave(2**15), torch.arange(2**15).repeat(32)))
    monkeypatch.setattr(torch, "randint", lambda *_, **__: next(digits).int())
    with WithoutFloat64():
        drawn = noise.draw(2**20)
    _, counts = drawn.unique(return_counts=True)
    places = 2**30 / M
    assert (counts[1:] - places).abs().max() <= 1
    assert abs(len(counts) - 2**20 / places) <= 1


def test_noise_without_float64_reaches_its_last_candidate_and_none_beyond(monkeypatch):
    monkeypatch.setattr(devices, "NO_FLOAT64", ("cpu",))
    noise = fastqt.Noise(torch.tensor([0.0, 3, 0, 1e-3, 0]))
    for digit, wanted in ((0, 1), (2**15 - 1, 3)):
        monkeypatch.setattr(
            torch, "randint", lambda *_, digit=digit, **__: torch.tensor([digit], dtype=torch.int32)
        )
        assert noise.draw(1).tolist() == [wanted]


def test_noise_never_draws_beyond_its_ends(monkeypatch):
    noise = fastqt.Noise(torch.tensor([0.0, 3, 0, 1e-3, 0]))
    for place, wanted in ((0.0, 1), (1 - 2.0**-53, 3)):
        monkeypatch.setattr(torch, "rand", lambda shape, place=place, **_: torch.tensor([place]).double())
        assert noise.draw(1).tolist() == [wanted]


REFUSED = [
    (lambda: fastqt.Mixed(1.5), "mix: want a number in 0..1, got 1.5"),
    (lambda: fastqt.Mixed(float("nan")), "mix: want a number"),
    (lambda: fastqt.Mixed(partners=torch.zeros(2, 2).long()), "partners: want a 1-D tensor of integers"),
    (lambda: loss_with(fastqt.Mixed(partners=torch.zeros(4).long())), "partners: want one for each of N=9"),
    (
        lambda: loss_with(fastqt.Mixed(partners=torch.arange(1, N + 1))),
        "partners: want values in 0..8, the candidates, got 1..9",
    ),
    (lambda: loss_with(fastqt.Mixed(), M=5), "Mixed wants a candidate for each of N=9 queries, got M=5"),
    (lambda: fastqt.Noise(torch.zeros(3)), "counts: want at least one above 0"),
    (lambda: fastqt.Noise(torch.tensor([1.0, -1])), "counts: want finite numbers >= 0"),
    (lambda: fastqt.Noise(torch.tensor([1.0, torch.inf])), "counts: want finite numbers >= 0"),
    (lambda: fastqt.Noise(torch.ones(2, 2)), "counts: want shape"),
    (lambda: fastqt.Noise(torch.ones(2, dtype=torch.bool)), "counts: want integers or"),
    (lambda: fastqt.Noise(torch.ones(2), power=-1), "power: want at least 0"),
]


@pytest.mark.parametrize(("make", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_refused(make, message):
    with pytest.raises((ValueError, TypeError), match=message):
        make()
