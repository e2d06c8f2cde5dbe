"""GLOSS's losses equal their definitions, written out with whole matrices, in value and gradients."""

import pytest
import torch
import torch.nn.functional as F

import fastqt
from fastqt.losses import gloss, gloss_factored
from tests.shared.loss_views import by_backend, by_memory, check, views
from tests.shared.tolerances import FLOAT64, relative


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
@pytest.mark.parametrize("position_loss", ["sum", "mean"])
def test_gloss_pos(position_loss, backend, memory):
    V, L = 11, 5
    latents, positions, weight = views(4, L, V)
    bias = torch.randn(V, dtype=torch.float64, requires_grad=True)
    token_ids, lengths = torch.randint(0, V, (4, L)), torch.tensor([3, 0, 5, 1])
    expected = []
    for b in range(4):
        logits = (latents[b] + positions[: lengths[b]]) @ weight.T + bias
        loss = F.cross_entropy(logits, token_ids[b, : lengths[b]], reduction="sum")
        expected.append(loss / max(int(lengths[b]), 1) if position_loss == "mean" else loss)
    expected = torch.stack(expected)
    inputs = [latents, positions, weight, bias]
    token_ids = token_ids.where(torch.arange(L) < lengths[:, None], -1)  # padding may be anything
    options = {"backend": backend, "memory": memory, "position_loss": position_loss}
    rows = fastqt.gloss_pos_loss(*inputs, token_ids, lengths, reduction="none", **options)
    check(rows, expected, inputs)
    check(fastqt.gloss_pos_loss(*inputs, token_ids, lengths, **options), expected.mean(), inputs)
    check(
        fastqt.gloss_pos_loss(*inputs, token_ids, lengths, reduction="sum", **options), expected.sum(), inputs
    )
    assert fastqt.gloss_pos_loss(*inputs, token_ids, lengths * 0) == 0


def test_a_wrong_position_loss_is_refused():
    x, ids = torch.ones(2, 3), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match="position_loss: want one of 'sum', 'mean', got 'max'"):
        fastqt.gloss_pos_loss(x, x[:1], x, x[:, 0], ids[:, None], ids, position_loss="max")


B, L, V, D = 9, 5, 23, 6
LENGTHS = torch.tensor([5, 0, 3, 1, 5, 2, 4, 5, 3])


def parameters_of(dtype):
    generator = torch.Generator().manual_seed(0)
    shapes = (B, D), (L, D), (V, D), (V,)
    parameters = [torch.randn(*shape, generator=generator).to(dtype) for shape in shapes]
    tokens = torch.randint(0, V, (B, L), generator=generator)
    tokens[torch.arange(L) >= LENGTHS[:, None]] = -7  # padding may be anything
    return [x.requires_grad_() for x in parameters], tokens


def each_score(latents, positions, weight, bias, tokens, lengths=LENGTHS):
    """The losses of the sentences from all (B, L, V) scores."""
    logits = (latents[:, None] + positions) @ weight.T + bias
    within = torch.arange(L) < lengths[:, None]
    losses = logits.new_zeros(within.shape)
    losses[within] = F.cross_entropy(logits[within], tokens[within], reduction="none")
    return losses.sum(1)


@pytest.fixture
def only_factored(monkeypatch):
    """The general loss, which forms each score, must not be what answers."""
    monkeypatch.setattr(gloss, "contrastive_loss", None)


@pytest.mark.usefixtures("only_factored")
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("chunk", [1, 2**20])
@pytest.mark.parametrize("needs", [(0,), (1,), (2,), (3,), (0, 1, 2, 3)])
@pytest.mark.parametrize("position_loss", ["sum", "mean"])
def test_the_factored_loss_and_its_gradients(monkeypatch, chunk, needs, reduction, position_loss):
    """In chunks of 16 sentences, the last one of them smaller, and in one chunk."""
    monkeypatch.setattr(gloss_factored, "CHUNK_BYTES", chunk)
    parameters, tokens = parameters_of(torch.float64)
    tokens, lengths = tokens.repeat(5, 1), LENGTHS.repeat(5)
    many = [torch.cat([parameters[0].detach() * k for k in range(1, 6)]).requires_grad_(), *parameters[1:]]
    rows = each_score(*many, tokens.clamp(min=0), lengths)
    if position_loss == "mean":
        rows = rows / lengths.clamp(min=1)
    wanted = {"mean": rows.mean(), "sum": rows.sum(), "none": rows}[reduction]
    given = [x if i in needs else x.detach() for i, x in enumerate(many)]
    loss = fastqt.gloss_pos_loss(*given, tokens, lengths, reduction=reduction, position_loss=position_loss)
    assert relative(loss, wanted) < FLOAT64
    chosen = [many[i] for i in needs]
    upstream = torch.linspace(-1, 3, len(rows), dtype=torch.float64) if reduction == "none" else 3.0
    gradients = torch.autograd.grad((upstream * loss).sum(), chosen)
    for ours, theirs in zip(gradients, torch.autograd.grad((upstream * wanted).sum(), chosen), strict=True):
        assert relative(ours, theirs) < FLOAT64


@pytest.mark.usefixtures("only_factored")
def test_scores_far_apart_are_formed_one_by_one(monkeypatch):
    """Where every word that a sentence favours is one that a position rules out, and the reverse."""
    asked = []
    monkeypatch.setattr(gloss, "contrastive_loss", lambda *_, **__: asked.append(1) or torch.ones(()))
    (latents, positions, weight, bias), tokens = parameters_of(torch.float32)
    with torch.no_grad():
        latents.zero_()
        positions.zero_()
        weight.zero_()
        latents[:, 0] = positions[:, 1] = 1
        weight[:11, 0] = weight[11:, 1] = 50
    fastqt.gloss_pos_loss(latents, positions, weight, bias, tokens, LENGTHS)
    assert not asked
    with torch.no_grad():
        weight *= 1.5
    fastqt.gloss_pos_loss(latents, positions, weight, bias, tokens, LENGTHS)
    assert asked
    # A sentence without words has no scores to be lost.
    assert fastqt.gloss_pos_loss(latents, positions, weight, bias, tokens, LENGTHS * 0) == 0


@pytest.mark.usefixtures("only_factored")
def test_ids_outside_the_vocabulary_are_refused():
    parameters, tokens = parameters_of(torch.float64)
    tokens[0, 0] = V
    with pytest.raises(ValueError, match=r"token_ids: want integers in 0\.\.22, got \d+\.\.23"):
        fastqt.gloss_pos_loss(*parameters, tokens, LENGTHS)
