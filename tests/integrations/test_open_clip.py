"""open_clip's losses in one process: its values, signatures and methods. Ranks: tests/distributed."""

import copy
import inspect
import pickle

import pytest
import torch
import torch.nn.functional as F

from fastqt.integrations.open_clip import ClipLoss, DistillClipLoss, SigLipLoss
from tests.shared.loss_views import N, by_backend, check, views
from tests.shared.open_clip_checks import siglip_of_one_process
from tests.shared.open_clip_module import open_clip_losses
from tests.shared.tolerances import FLOAT64


def numbers(*shape):
    return [torch.full(shape, x, dtype=torch.float64, requires_grad=True) for x in (5.0, -3.0)]


@by_backend
@pytest.mark.parametrize("shape", [(), (1,)])
def test_clip(backend, shape):
    a, b = views(N, N)
    scale, bias = numbers(*shape)
    scores, own = scale * a @ b.T, torch.arange(N)
    wanted = (F.cross_entropy(scores, own) + F.cross_entropy(scores.T, own)) / 2
    loss = ClipLoss(backend=backend)
    check(loss(a, b, scale), wanted, [a, b, scale])
    found = loss(a, b, logit_scale=scale, logit_bias=bias, output_dict=True)
    assert list(found) == ["contrastive_loss"]
    check(found["contrastive_loss"], wanted + 0 * bias.sum(), [a, b, scale, bias])
    assert loss(a, b, 5.0, -3.0).shape == ()


def test_distillation():
    a, b, *teacher_sides = views(N, N, N, N)
    of_a, of_b = (x.detach() for x in teacher_sides)
    scale, _ = numbers()
    scores, teacher = scale * a @ b.T, 7 * of_a @ of_b.T
    wanted = sum(
        -(T.softmax(1) * S.log_softmax(1)).sum(1).mean() / 2
        for S, T in ((scores, teacher), (scores.T, teacher.T))
    )
    loss = DistillClipLoss()
    contrastive, distill = loss(a, b, scale, of_a, of_b, 7.0)
    check(distill, wanted, [a, b, scale])
    check(contrastive, ClipLoss()(a, b, scale), [a, b, scale])
    named = loss(a, b, scale, of_a, of_b, torch.tensor([7.0]), output_dict=True)
    assert list(named) == ["contrastive_loss", "distill_loss"]
    check(named["distill_loss"], wanted, [a, b, scale])


@by_backend
@pytest.mark.parametrize("shape", [(), (1,)])
def test_siglip(backend, shape):
    a, b = views(N, N)
    scale, bias = numbers(*shape)
    loss = SigLipLoss(backend=backend, chunk_size=4)
    wanted = siglip_of_one_process(a, b, scale, bias)
    check(loss(a, b, scale, bias, output_dict=True)["contrastive_loss"], wanted, [a, b, scale, bias])
    check(loss(a, b, scale, None), siglip_of_one_process(a, b, scale, 0 * bias), [a, b, scale])
    others = siglip_of_one_process(a, b, scale, bias, no_pairs=True)
    check(loss._loss(a, b, scale, bias, negative_only=True), others, [a, b, scale, bias])


@pytest.mark.parametrize("make", [ClipLoss, SigLipLoss])
@pytest.mark.parametrize("scale", [float("nan"), float("inf")])
def test_a_scale_that_is_not_finite_makes_the_loss_nan(make, scale):
    """As open_clip's, so that a training may skip the step; world_size=0 is one process there."""
    a, b = views(N, N)
    loss = make(world_size=0)(a, b, torch.tensor(scale, requires_grad=True), torch.tensor(0.0))
    assert not loss.isfinite()
    loss.backward()
    assert not a.grad.isfinite().all()


def test_scores_and_labels():
    a, b = views(N, N)
    clip, siglip = ClipLoss(cache_labels=True), SigLipLoss()
    per_image, per_text = clip.get_logits(a, b, 3.0, 0.5)
    torch.testing.assert_close(per_image, 3 * a @ b.T + 0.5, rtol=FLOAT64, atol=FLOAT64)
    assert torch.equal(per_text, 3 * b @ a.T + 0.5)
    assert torch.equal(siglip.get_logits(a, b, 3.0, 0.5), per_image)
    device = torch.device("cpu")
    assert clip.get_ground_truth(device, N).tolist() == list(range(N))
    assert clip.get_ground_truth(device, N) is clip.get_ground_truth(device, N)
    assert len(clip.get_ground_truth(device, N + 1)) == N + 1
    signs = 2 * torch.eye(N) - 1
    assert torch.equal(siglip.get_ground_truth(device, torch.float32, N), signs)
    assert torch.equal(
        siglip.get_ground_truth(device, torch.float32, N, negative_only=True), -torch.ones(N, N)
    )


@pytest.mark.parametrize("make", [ClipLoss, SigLipLoss])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_copies_and_state_dicts(make, copied):
    a, b = views(N, N)
    module = make()
    assert not module.state_dict()
    assert torch.equal(copied(module)(a, b, 2.0, 0.0), module(a, b, 2.0, 0.0))


@pytest.mark.skipif(
    open_clip_losses() is None, reason="open_clip is not installed: pip install --no-deps open_clip_torch"
)
@pytest.mark.parametrize("ours", [ClipLoss, DistillClipLoss, SigLipLoss])
def test_arguments_are_theirs(ours):
    """In their order and with their defaults. Further ones come after them, or by keyword."""
    theirs = getattr(open_clip_losses(), ours.__name__)
    for method in ("__init__", "forward", "get_logits", "get_ground_truth"):
        mine, wanted = (
            [(p.name, p.default) for p in inspect.signature(getattr(make, method)).parameters.values()]
            for make in (ours, theirs)
        )
        assert mine[: len(wanted)] == wanted


def test_refuses():
    a, b = views(N, N)
    for call, kind, message in (
        (lambda: SigLipLoss(rank=2, world_size=2), ValueError, r"rank: want 0\.\.1, got 2"),
        (lambda: ClipLoss(rank=0, world_size=2)(a, b, 1.0), RuntimeError, r"want torch\.distributed initial"),
        (lambda: ClipLoss()(a, b, torch.ones(2)), ValueError, "scale: want a number or a 0-d tensor"),
        (lambda: ClipLoss()(a, *views(N + 1), 1.0), ValueError, "b: want a row for each of the 9 rows"),
    ):
        with pytest.raises(kind, match=message):
            call()
