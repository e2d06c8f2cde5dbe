"""GISTEmbed's loss equals its definition with whole matrices of scores."""

import pytest
import torch
import torch.nn.functional as F

import fastqt
from tests.shared.loss_views import N, by_backend, check, cosines, views
from tests.shared.tolerances import FLOAT64, relative

E = 4
MARGINS = {"none": (0.0, "absolute"), "absolute": (0.1, "absolute"), "relative": (0.2, "relative")}


def guides(*rows: int, seed: int = 5) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(n, E, generator=generator) for n in rows]


def rows_of(texts, of_guide, *, scale, margin=0.0, strategy="absolute", anchors=True, positives=True):
    """The loss of each row from its cells without the positive, in which nothing cancels."""
    (a, p, *negatives), (ga, gp, *guide_negatives) = texts, [x.detach().double() for x in of_guide]
    own = cosines(ga, gp).diagonal()
    thresholds = own - (margin if strategy == "absolute" else own.abs() * margin)
    blocks = [(a, p, ga, gp)]
    blocks += [(a, a, ga, ga)] if anchors else []
    blocks += [(p, p, gp, gp)] if positives else []
    blocks += [(a, n, ga, g) for n, g in zip(negatives, guide_negatives, strict=True)]
    cells = []
    for x, y, gx, gy in blocks:
        # Equal embeddings have equal scores: those of float64 differ by their last digits.
        leaves = cosines(gx, gy) > thresholds[:, None] + 1e-9
        if not cells:
            leaves |= torch.eye(len(a), dtype=torch.bool)
        cells.append((scale * cosines(x, y)).masked_fill(leaves, -torch.inf))
    others = torch.cat(cells, 1).logsumexp(1)
    return F.softplus(others - scale * cosines(a, p).diagonal(), threshold=700)


def ours(texts, of_guide, *, strategy="absolute", anchors=True, positives=True, **options):
    a, p, *negatives = texts
    ga, gp, *guide_negatives = of_guide
    return fastqt.gist_embed_loss(
        *(a, p, negatives),
        guide_anchors=ga,
        guide_positives=gp,
        guide_negatives=guide_negatives,
        margin_strategy=strategy,
        contrast_anchors=anchors,
        contrast_positives=positives,
        **options,
    )


@by_backend
@pytest.mark.parametrize("positives", [True, False])
@pytest.mark.parametrize("anchors", [True, False])
@pytest.mark.parametrize("margin", MARGINS)
@pytest.mark.parametrize("negatives", [(), (N,), (3, N)])
@pytest.mark.pairwise
def test_is_the_definition(negatives, margin, anchors, positives, backend):
    texts, of_guide = views(N, N, *negatives), guides(N, N, *negatives)
    value, strategy = MARGINS[margin]
    options = {
        "scale": 7.0,
        "margin": value,
        "strategy": strategy,
        "anchors": anchors,
        "positives": positives,
    }
    expected = rows_of(texts, of_guide, **options)
    check(ours(texts, of_guide, backend=backend, **options), expected.mean(), texts)
    check(ours(texts, of_guide, backend=backend, reduction="none", **options), expected, texts)


@pytest.mark.parametrize("positives", [True, False])
def test_texts_that_are_their_own_positives_stay_among_the_candidates(positives):
    """As the guide finds an anchor no closer to itself than to its positive."""
    (z, n), (g, gn) = views(N, N), guides(N, N)
    expected = rows_of((z, z, n), (g, g, gn), scale=3.0, positives=positives).mean()
    check(ours((z, z, n), (g, g, gn), scale=3.0, positives=positives), expected, [z, n])


@pytest.mark.parametrize("negatives", [0, 1])
def test_one_pair_that_has_nothing_beside_it(negatives):
    """Its anchor and its positive are closer to themselves than to each other, and leave."""
    texts, of_guide = views(*(1,) * (2 + negatives)), guides(*(1,) * (2 + negatives))
    expected = rows_of(texts, of_guide, scale=3.0, margin=3.0).mean()
    assert expected == 0
    check(ours(texts, of_guide, scale=3.0, margin=3.0), expected, texts)


def test_the_module_is_the_function():
    (a, p, n), (ga, gp, gn) = views(N, N, N), guides(N, N, N)
    module = fastqt.nn.GISTEmbedLoss(scale=5.0, margin=0.1, contrast_positives=False)
    found = module(a, p, n, guide_anchors=ga, guide_positives=gp, guide_negatives=gn)
    assert relative(found, ours((a, p, n), (ga, gp, gn), scale=5.0, margin=0.1, positives=False)) < FLOAT64
    with pytest.raises(ValueError, match="margin_strategy: want one of 'absolute', 'relative'"):
        fastqt.nn.GISTEmbedLoss(margin_strategy="half")
    with pytest.raises(TypeError, match="contrast_anchors: want True or False"):
        fastqt.nn.GISTEmbedLoss(contrast_anchors=1)


A, G = torch.randn(N, 5), torch.randn(N, E)
REFUSED = {
    "pairs": ({"positives": A[:3]}, ValueError, "positives: want a row for each of the 9 rows of anchors"),
    "guide": ({"guide_anchors": G[:3]}, ValueError, "guide_anchors: want a row for each of the 9 rows of"),
    "columns": ({"negatives": A}, ValueError, "guide_negatives: want as many tensors as negatives"),
    "rows": ({"negatives": (A, A), "guide_negatives": (G, G[:2])}, ValueError, r"guide_negatives\[1\]: want"),
    "width": ({"negatives": G, "guide_negatives": G}, ValueError, "negatives: want D=5 columns as anchors"),
    "strategy": ({"margin_strategy": "wide"}, ValueError, "margin_strategy: want one of"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_it_refuses_in_words(name):
    changed, kind, message = REFUSED[name]
    given = {"anchors": A, "positives": A, "guide_anchors": G, "guide_positives": G}
    with pytest.raises(kind, match=message):
        fastqt.gist_embed_loss(**{**given, **changed})
