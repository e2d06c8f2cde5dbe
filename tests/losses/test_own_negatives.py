"""Negatives that a query has alone, beside what else a loss takes: padding, margins, prefixes, a prior."""

import math

import pytest
import torch
import torch.nn.functional as F

import fastqt
from tests.shared.every_loss import cosines, of_rows, own
from tests.shared.tolerances import FLOAT64

N, D, SCALE = 9, 6, 4.0
SIDES = ("query_to_doc", "query_to_query", "doc_to_doc")


def drawn(K: int | None) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(K or 0)
    shapes = ((N, D), (N, D), (N, D) if K is None else (N, K, D))
    return [torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes]


def padding(K: int) -> torch.Tensor:
    return torch.arange(K) >= (torch.arange(N) % (K + 1))[:, None]


def check(ours, eager, *inputs: torch.Tensor) -> None:
    """Values and gradients are equal."""
    sides = []
    for loss in (ours, eager):
        leaves = [x.clone().requires_grad_() for x in inputs]
        value = loss(*leaves)
        sides.append([value, *torch.autograd.grad(value.sum(), leaves)])
    for a, b in zip(*sides, strict=True):
        torch.testing.assert_close(a, b, rtol=10 * FLOAT64, atol=10 * FLOAT64)


def cells_of(q, c, rows, leaves, spares=True, margin=None):
    """Scores with all candidates and with the query's own rows, of which some leave, (N, N + K)."""
    rows = rows[:, None] if rows.dim() == 2 else rows
    similar = torch.cat([cosines(q, c), of_rows(q, rows)], 1)
    left = F.pad(leaves, (N, 0))
    if margin is not None:
        above = similar > similar.diagonal()[:, None] + margin
        above[:, N:] &= not spares
        left = left | above
    return (SCALE * similar).masked_fill(left, -math.inf)


@pytest.mark.parametrize("loss", [fastqt.info_nce_loss, fastqt.multiple_negatives_ranking_loss])
@pytest.mark.parametrize("K", [None, 1, 3])
def test_padding(loss, K):
    """One negative a row, which an engine would score itself, may be padding as well."""
    leaves = padding(K or 1)
    exclude = fastqt.Padding(leaves)
    check(
        lambda q, c, r: loss(q, c, row_negatives=r, exclude=exclude, scale=SCALE, reduction="none"),
        lambda q, c, r: F.cross_entropy(cells_of(q, c, r, leaves), own(q), reduction="none"),
        *drawn(K),
    )


@pytest.mark.parametrize("K", [1, 2])
def test_prefixes_have_cells_of_their_own(K):
    leaves = padding(K)
    how = {"exclude": fastqt.Padding(leaves), "scale": SCALE, "matryoshka": (2, 4, D)}

    def eager(q, c, r):
        prefixes = (cells_of(q[:, :d], c[:, :d], r[..., :d], leaves) for d in (2, 4, D))
        return sum(F.cross_entropy(x, own(q)) for x in prefixes)

    check(lambda q, c, r: fastqt.info_nce_loss(q, c, row_negatives=r, **how), eager, *drawn(K))


@pytest.mark.parametrize("spares", [True, False])
@pytest.mark.parametrize("tau_plus", [0.0, 0.01])
@pytest.mark.parametrize("directions", [SIDES[:1], SIDES])
def test_a_margin_may_spare_them(spares, tau_plus, directions):
    leaves, margin = padding(3), -0.2
    exclude = [fastqt.Margin(margin, spare_own_negatives=spares), fastqt.Padding(leaves)]
    how = {"directions": directions, "scale": SCALE, "tau_plus": tau_plus, "reduction": "none"}

    def eager(q, c, r):
        pair, itself = cosines(q, c).diagonal()[:, None], torch.eye(N, dtype=torch.bool)
        blocks = [cells_of(q, c, r, leaves, spares, margin).masked_fill(F.pad(itself, (0, 3)), -math.inf)]
        for x in (q, c) if len(directions) > 1 else ():
            similar = cosines(x, x)
            blocks.append((SCALE * similar).masked_fill(itself | (similar > pair + margin), -math.inf))
        negatives = torch.cat(blocks, 1)
        R, count, p = negatives.exp().sum(1), (negatives > -math.inf).sum(1), (SCALE * pair[:, 0]).exp()
        G = ((R - tau_plus * count.double() * p) / (1 - tau_plus)).maximum(count * math.exp(-SCALE))
        return torch.log1p(G / p)

    check(
        lambda q, c, r: fastqt.multiple_negatives_ranking_loss(q, c, row_negatives=r, exclude=exclude, **how),
        eager,
        *drawn(3),
    )


def test_a_prior_counts_what_margin_and_thresholds_leave():
    """Each row has the lower one of both limits."""
    q, c, r = drawn(2)
    limits = torch.linspace(-0.6, 0.9, N, dtype=torch.float64)
    exclude = [fastqt.Margin(0.1), fastqt.Above(limits)]

    def eager(q, c, r):
        similar = torch.cat([cosines(q, c), of_rows(q, r)], 1)
        pair = similar.diagonal()
        left = similar > torch.minimum(pair + 0.1, limits)[:, None]
        left |= torch.eye(N, N + 2, dtype=torch.bool)
        negatives = (SCALE * similar).masked_fill(left, -math.inf)
        R, count, p = negatives.exp().sum(1), (~left).sum(1).double(), (SCALE * pair).exp()
        G = ((R - 0.02 * count * p) / 0.98).maximum(count * math.exp(-SCALE))
        return torch.log1p(G / p)

    how = {"exclude": exclude, "scale": SCALE, "tau_plus": 0.02, "reduction": "none"}
    check(lambda q, c, r: fastqt.info_nce_loss(q, c, row_negatives=r, **how), eager, q, c, r)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "exclude: want Padding with row_negatives that are a tensor, got no row_negatives"),
        ({"row_negatives": fastqt.Mixed()}, "exclude: want Padding with row_negatives .* tensor, got Mixed"),
        (
            {"row_negatives": torch.zeros(N, 4, D, dtype=torch.float64)},
            r"exclude: want padding of shape \(9, 4\) as row_negatives, got \(9, 3\)",
        ),
    ],
)
def test_padding_of_nothing_is_refused(options, message):
    q, c, _ = drawn(3)
    with pytest.raises(ValueError, match=f"^{message}$"):
        fastqt.info_nce_loss(q, c, exclude=fastqt.Padding(padding(3)), **options)


def test_a_prior_is_of_cosines():
    q, c, _ = drawn(3)
    for loss in (fastqt.info_nce_loss, fastqt.multiple_negatives_ranking_loss):
        with pytest.raises(
            ValueError, match=r"^tau_plus: want 0 with normalize=False, since it is of cosines$"
        ):
            loss(q, c, normalize=False, tau_plus=0.1)
    with pytest.raises(ValueError, match=r"^tau_plus: want numbers of 0 <= tau_plus < 1$"):
        fastqt.info_nce_loss(q, c, tau_plus=torch.ones(N))
