"""What losses refuse, and where no cell competes: derivatives are 0, also within.

There torch's anomaly mode finds no NaN.
"""

from functools import partial

import pytest
import torch

import fastqt

Z = torch.randn(6, 4)
IDS, STARTS = torch.tensor([0, 1]), torch.zeros(6).long()


REFUSED = {
    "z3 of others": (fastqt.simcse_loss, (Z, Z, Z[:5]), {}, "z3: want a row for each of the 6 rows of z1"),
    "one sentence": (fastqt.mixcse_loss, (Z[:1], Z[:1]), {}, "z2: want two views of at least 2 sentences"),
    "pairs": (fastqt.clip_loss, (Z, Z[:5]), {"scale": 1.0}, "b: want a row for each of the 6 rows"),
    "candidates": (fastqt.curl_block_loss, (Z, Z[:5]), {}, "candidates: want a row for each of the 6 rows"),
    "shift": (fastqt.curl_block_loss, (Z, Z), {"context_size": 2}, "context_size: want 2 k"),
    "complement": (
        fastqt.curl_block_loss,
        (Z, Z),
        {"context_size": 5, "negatives": "complement"},
        "context_size: leaves no sentence",
    ),
    "curl": (fastqt.curl_loss, (Z, Z, Z[:5]), {}, "negatives: want a row for each of the 6 rows of queries"),
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


NONE = torch.full((5,), -100)
ONE_CLASS = torch.zeros(5, dtype=torch.long)
OWN_CLASS = torch.arange(5)
LAST_ROW = torch.zeros(5, 5, dtype=torch.bool).index_fill(0, torch.tensor([4]), True)
GROUPS = {"exclude": fastqt.Same(ONE_CLASS)}
FALSE = {"exclude": fastqt.Margin(-9.0)}
KEEP = {"diagonal": "keep"}
BOTH_WAYS = {"directions": ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")}


def contrastive(q, c, *targets, **options):
    return fastqt.contrastive_loss(q, c, *targets, diagonal="keep", **options)


def of_labels(loss, labels, q, c, **options):
    return loss(q, labels[: len(q)], **options)


def gist(q, c, **options):
    return fastqt.gist_embed_loss(q, c, guide_anchors=q.detach(), guide_positives=c.detach(), **options)


def finite_cells(q, c, **options):
    """A logsumexp as losses use it: what is -inf has no weight."""
    return fastqt.log_sum_exp(q, c, **options).exp()


# A loss of queries and candidates, and how many rows they have.
CALLS = {
    "no targets": (lambda q, c, **o: contrastive(q, c, NONE, normalize=True, **o), 5),
    "no targets of prefixes": (lambda q, c, **o: contrastive(q, c, NONE, matryoshka=[2, 4], **o), 5),
    "an excluded row": (lambda q, c, **o: contrastive(q, c, NONE, exclude=LAST_ROW, **o), 5),
    "groups": (lambda q, c, **o: contrastive(q, c, fastqt.Diagonal(), **GROUPS, **o), 5),
    "all false negatives": (lambda q, c, **o: contrastive(q, c, fastqt.Diagonal(), **FALSE, **o), 5),
    "sigmoid of groups": (lambda q, c, **o: fastqt.sigmoid_loss(q, c, NONE, **GROUPS, **o), 5),
    "logsumexp of an excluded row": (partial(finite_cells, exclude=LAST_ROW), 5),
    "logsumexp of groups": (partial(finite_cells, **GROUPS), 5),
    "logsumexp of one row": (partial(finite_cells, diagonal="exclude"), 1),
    "NT-Xent of one class": (partial(of_labels, fastqt.ntxent_loss, ONE_CLASS), 5),
    "NT-Xent of a class a row": (partial(of_labels, fastqt.ntxent_loss, OWN_CLASS), 5),
    "SupCon of one class": (partial(of_labels, fastqt.supcon_loss, ONE_CLASS), 5),
    "SupCon of one row": (partial(of_labels, fastqt.supcon_loss, ONE_CLASS), 1),
    "InfoNCE of one row": (fastqt.info_nce_loss, 1),
    "CLIP of one row": (partial(fastqt.clip_loss, scale=3.0), 1),
    "ranking of one row": (
        partial(fastqt.multiple_negatives_ranking_loss, **BOTH_WAYS, partition_mode="joint"),
        1,
    ),
    "ranking, all false negatives": (
        partial(
            fastqt.multiple_negatives_ranking_loss,
            **BOTH_WAYS,
            partition_mode="joint",
            **FALSE,
        ),
        5,
    ),
    "GISTEmbed of one row": (gist, 1),
    "one class of a margin": (lambda q, c, **o: fastqt.cosface_loss(q, c[:1], ONE_CLASS[: len(q)], **o), 5),
    "DCL of two rows": (fastqt.dcl_loss, 2),
    "HCL of equal views": (lambda q, c, **o: fastqt.hcl_loss(q, q, **o), 2),
    "MixCSE of two rows": (partial(fastqt.mixcse_loss, form="released"), 2),
}


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("backend", ["cpu", "torch", "reference"])
@pytest.mark.parametrize("name", CALLS)
def test_no_derivative_is_nan(name, backend):
    loss, rows = CALLS[name]
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(2, rows, 4, generator=generator, dtype=torch.float64).requires_grad_()
    with torch.autograd.detect_anomaly():
        found = loss(*inputs, backend=backend).sum()
        (gradient,) = torch.autograd.grad(found, inputs, create_graph=backend == "reference")
        assert found.isfinite()
        assert gradient.isfinite().all()
        if backend == "reference":
            (second,) = torch.autograd.grad((gradient * inputs.detach()).sum(), inputs)
            assert second.isfinite().all()
