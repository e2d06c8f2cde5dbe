"""What docs/migrating.md has in place of the library's losses of a teacher's scores is equal to them."""

import pytest
import torch
from torch import nn

import fastqt
from tests.shared.tolerances import FLOAT64, relative

pytest.importorskip("sentence_transformers", reason="the extra st is not installed")

from sentence_transformers import util
from sentence_transformers.sentence_transformer import losses

B, D = 6, 8
SIMILARITIES = {
    util.pairwise_dot_score: False,
    util.pairwise_cos_sim: True,
}  # and whether rows are normalised


def columns(candidates):
    generator = torch.Generator().manual_seed(0)
    shape = 1 + candidates, B, D
    labels = 2 * torch.randn(B, candidates, generator=generator, dtype=torch.float64)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_(), labels


def ours(embeddings, normalize):
    return fastqt.candidate_scores(embeddings[0], embeddings[1:].transpose(0, 1), normalize=normalize)


def compare(ours, theirs, embeddings):
    for a, b in zip(*((x, *torch.autograd.grad(x, embeddings)) for x in (ours, theirs)), strict=True):
        assert relative(a, b) < FLOAT64


@pytest.mark.parametrize("candidates", [2, 5])
@pytest.mark.parametrize("similarity", SIMILARITIES)
@pytest.mark.parametrize("temperatures", [(1.0, 1.0), (0.05, 0.3)])
def test_the_divergence_is_theirs(similarity, candidates, temperatures):
    embeddings, labels = columns(candidates)
    student, teacher = temperatures
    options = {"student_temperature": student, "teacher_temperature": teacher}
    theirs = losses.DistillKLDivLoss(nn.Identity(), similarity, **options)
    scales = {"scale": 1 / student, "teacher_scale": 1 / teacher}
    loss = fastqt.score_distillation_loss(ours(embeddings, SIMILARITIES[similarity]), labels, **scales)
    of_library = theirs.compute_loss_from_embeddings(list(embeddings), labels)
    compare(student**2 * loss, of_library, embeddings)


@pytest.mark.parametrize("as_margins", [False, True])
@pytest.mark.parametrize("candidates", [2, 5])
@pytest.mark.parametrize("similarity", SIMILARITIES)
def test_the_margins_are_theirs(similarity, candidates, as_margins):
    embeddings, labels = columns(candidates)
    theirs = losses.MarginMSELoss(nn.Identity(), similarity)
    if as_margins:
        labels = labels[:, 1:]
    teacher = nn.functional.pad(-labels, (1, 0)) if as_margins else labels
    loss = fastqt.margin_mse_loss(ours(embeddings, SIMILARITIES[similarity]), teacher)
    compare(loss, theirs.compute_loss_from_embeddings(list(embeddings), labels), embeddings)
