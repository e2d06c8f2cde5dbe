"""docs/migrating.md: what is written after has the values and gradients of what is written before."""

from __future__ import annotations

import functools
import math
import re
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F

import fastqt
from tests.shared.migrating_on_ranks import RANKS_SECTION, differences_on_ranks, run
from tests.shared.page_blocks import PAGES, Block, blocks

PAGE = blocks(PAGES["migrating.md"])
N, D = 12, 32
# What the page promises.
FLOAT64, FLOAT32 = 1e-12, 1e-6
SCALE = 20.5
# In float64 the plain loss is exact to about 1e-7: it is the difference of numbers near 20, and about 1e-8.
# In float32 a score of 20 is wrong by 2**-24 of it for each rounding, some sixteen in its norms, its product
# and its scale, and the score's exponential by as much, relatively: this is 2e-5.
CONVERGED = {torch.float64: 1e-6, torch.float32: 2e-5}

LIBRARIES = {
    "SupConLoss of pytorch-metric-learning": "pytorch_metric_learning",
    "NTXentLoss of pytorch-metric-learning": "pytorch_metric_learning",
    "MultipleNegativesRankingLoss of sentence-transformers": "sentence_transformers",
}
CHECK = re.compile(r"assert difference\(before, (\w+), (.+)\) < 1e-12")


@dataclass(frozen=True)
class Pair:
    section: str
    ours: str  # the name of the function that is compared with `before`
    inputs: tuple[str, ...]


def pair(block: Block) -> Pair | None:
    match = CHECK.search(block.code)
    return match and Pair(block.section, match[1], tuple(match[2].split(", ")))


PAIRS = [found for block in PAGE if (found := pair(block)) and found.section != RANKS_SECTION]
each_pair = pytest.mark.parametrize(
    "pair",
    [pytest.param(p, marks=[pytest.mark.slow] if p.section in LIBRARIES else []) for p in PAIRS],
    ids=lambda p: f"{p.section}-{p.ours}",
)


@functools.cache
def functions(libraries: bool) -> tuple[dict, dict]:
    """The names of the page, and the two functions of each pair. Sections of libraries are optional."""
    names, found = {}, {}
    for block in PAGE:
        if block.language != "python" or block.section == RANKS_SECTION:
            continue
        if block.section in LIBRARIES and not libraries:
            continue
        run([block], names)
        if (compared := pair(block)) is not None:
            found[compared] = names["before"], names[compared.ours]
    return names, found


def of(pair: Pair) -> tuple[dict, list]:
    """The names of the page, and before and after of a pair."""
    if pair.section in LIBRARIES:
        for library in set(LIBRARIES.values()):
            pytest.importorskip(library, reason=f"{library} is not installed")
    names, found = functions(pair.section in LIBRARIES)
    return names, list(found[pair])


def leaf(x: torch.Tensor, like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x.detach().to(dtype).requires_grad_(like.requires_grad)


def results(loss, inputs):
    value = loss(*inputs)
    gradients = torch.autograd.grad(value, [x for x in inputs if x.requires_grad])
    return [x.detach().double() for x in (value, *gradients)]


def compare(found, wanted, tolerance, least=0.0):
    """Relative to the greatest number of each, or to `least`."""
    for a, b in zip(found, wanted, strict=True):
        assert b.abs().max() > 0
        assert (a - b).abs().max() <= tolerance * max(b.abs().max(), least)


@each_pair
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, FLOAT64), (torch.float32, FLOAT32)])
def test_before_and_after_agree(pair, dtype, tolerance):
    names, (before, after) = of(pair)
    given = [leaf(names[name], names[name], dtype) for name in pair.inputs]
    truth = [leaf(x, x, torch.float64) for x in given]
    compare(results(after, given), results(before, truth), tolerance)


def near(rows: torch.Tensor) -> torch.Tensor:
    return torch.eye(max(N + N, D))[rows, :D] + 0.01 * torch.randn(*rows.shape, D)


def converged(section: str) -> dict[str, torch.Tensor]:
    """Inputs whose positives have scores of 20 and more, by their names on the page; float32."""
    torch.manual_seed(1)
    pairs = torch.arange(N)
    of_labels = pairs // 3
    of_siglip = section.startswith("SigLIP")
    scale, bias = (2 * SCALE, -SCALE) if of_siglip else (SCALE, 0.0)
    return {
        **{name: near(pairs) for name in ("f", "g", "keys")},
        "h": near(pairs + N * (not of_siglip)),  # further positives, or negatives
        "weight": SCALE * near(torch.arange(20)),
        "bias": 0.01 * torch.randn(20),
        "x": near(of_labels),
        "views": near(of_labels[:, None].expand(N, 2)),
        "log_scale": torch.tensor(math.log(scale)),
        "pair_bias": torch.tensor(bias),
    }


def converged_settings() -> dict[str, object]:
    """What the functions of the page read beside their arguments."""
    labels = torch.arange(N)
    return {
        "temperature": 1 / SCALE,
        "labels": labels,
        "some": labels.masked_fill(labels % 3 == 0, -100),
        "probabilities": F.one_hot(labels, 20).double(),
        "queue": F.normalize(near(torch.arange(8) + N), dim=1).double(),
    }


@each_pair
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_after_is_exact_for_converged_inputs(pair, dtype, monkeypatch):
    names, (before, after) = of(pair)
    inputs = converged(pair.section)
    for name, value in converged_settings().items():
        monkeypatch.setitem(names, name, value)
    truth = [leaf(inputs[name], names[name], torch.float64) for name in pair.inputs]
    given = [leaf(inputs[name], names[name], dtype) for name in pair.inputs]
    # Where a row has several positives, their p - t vanish together: errors are those of a gradient whose
    # p - t is 1.
    least = SCALE / (2 * N) if pair.section.startswith("SupCon") else 0.0
    compare(results(after, given), results(before, truth), CONVERGED[dtype], least)


def test_variants_of_info_nce():
    torch.manual_seed(0)
    f, g = (torch.randn(N, D, dtype=torch.float64) for _ in range(2))
    r, ids, own, s = torch.randn(N, 3, D, dtype=torch.float64), torch.arange(N) // 3, torch.arange(N), 7.0
    cosines = F.normalize(f, dim=1) @ F.normalize(g, dim=1).T
    scores, itself = s * cosines, torch.eye(N, dtype=torch.bool)
    options = {"diagonal": "keep", "scale": s, "normalize": True}
    duplicates, groups = (ids[:, None] == ids) & ~itself, {"exclude": fastqt.Same(ids)}
    further = s * F.cosine_similarity(f[:, None], r, dim=-1)
    decoupled = fastqt.log_sum_exp(f, g, scale=s, normalize=True, diagonal="exclude")
    for found, wanted in (
        (
            (decoupled - s * F.cosine_similarity(f, g)).mean(),
            (scores.masked_fill(itself, -torch.inf).logsumexp(1) - scores.diagonal()).mean(),
        ),
        (
            fastqt.contrastive_loss(f, g, fastqt.Diagonal(), row_negatives=r, **options),
            F.cross_entropy(torch.cat([scores, further], 1), own),
        ),
        (
            fastqt.contrastive_loss(f, g, fastqt.Diagonal(), **groups, **options),
            F.cross_entropy(scores.masked_fill(duplicates, -torch.inf), own),
        ),
        (
            fastqt.info_nce_loss(f, g, scale=s, similarity="euclidean", normalize=False),
            F.cross_entropy(-s * (f[:, None] - g).square().sum(-1), own),
        ),
        (
            fastqt.info_nce_loss(f, g, scale=s, label_smoothing=0.1),
            F.cross_entropy(scores, own, label_smoothing=0.1),
        ),
    ):
        torch.testing.assert_close(found, wanted, rtol=FLOAT64, atol=0)


@pytest.mark.slow
def test_nt_xent_without_labels_compiles():
    (pair,) = [p for p in PAIRS if p.ours == "without_labels"]
    names, (_, ours) = of(pair)
    inputs = [names[name].detach() for name in pair.inputs]
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*inputs), ours(*inputs))


@pytest.mark.slow
@pytest.mark.parametrize("near_pairs", [False, True], ids=["random", "converged"])
def test_several_processes(two_ranks, near_pairs):
    """An own InfoNCE under DDP and its replacement: equal values, and gradients, the temperature's too."""
    for on_rank in two_ranks.run(differences_on_ranks, near_pairs):
        assert on_rank["float64"] <= (CONVERGED[torch.float64] if near_pairs else FLOAT64)
        assert on_rank["float32"] <= (CONVERGED[torch.float32] if near_pairs else FLOAT32)
