"""GLOSS's losses equal their definitions, written out with whole matrices, in value and gradients."""

import torch
import torch.nn.functional as F
from loss_views import by_backend, by_memory, check, views

import fastqt


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
