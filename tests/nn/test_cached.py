"""CachedContrastive is a plain step for a loop that calls backward() itself."""

import copy

import pytest
import torch
from torch import nn

import fastqt
from fastqt.nn import CachedContrastive
from tests.shared.small_encoders import batch, distance, encoded_in_chunks, encoder, gradients_of
from tests.shared.tolerances import FLOAT64


@pytest.mark.parametrize("chunk_size", [1, 4, 64])
def test_a_scaled_sum_of_losses(chunk_size):
    """What arrives at the loss from above reaches the encoders, and so do other losses."""
    model, loss, x = encoder(), fastqt.nn.SimCSELoss(learn_scale=True).double(), batch()
    torch.manual_seed(1)
    wanted = loss(*(encoded_in_chunks(model, x, chunk_size) for _ in range(2)))
    (3 * wanted + model[0].weight.square().sum()).backward()
    gradients, drawn = gradients_of(model, loss), torch.rand(2)

    cached = CachedContrastive([model, model], loss, chunk_size=chunk_size, check="always")
    cached.zero_grad()
    torch.manual_seed(1)
    found = cached(x, x)
    assert found == wanted
    (3 * found + model[0].weight.square().sum()).backward()
    assert distance(gradients_of(model, loss), gradients) <= FLOAT64
    assert torch.equal(torch.rand(2), drawn)


def test_two_batches_before_their_backward_passes():
    model, parts = encoder(), [batch(), batch(7, seed=1)]
    cached = CachedContrastive([model] * 2, fastqt.simcse_loss, chunk_size=4)
    torch.manual_seed(2)
    sum(fastqt.simcse_loss(*(encoded_in_chunks(model, x, 4) for _ in range(2))) for x in parts).backward()
    wanted = gradients_of(model)
    model.zero_grad()
    torch.manual_seed(2)
    losses = [cached(x, x) for x in parts]
    torch.rand(5)
    sum(losses).backward()
    assert distance(gradients_of(model), wanted) <= FLOAT64


def test_arguments_of_the_loss_belong_to_the_call():
    model, x, documents = encoder(0.0), batch(), torch.arange(11) // 4
    cached = CachedContrastive([model] * 2, fastqt.nn.ContrastiveLoss(), chunk_size=4)
    z = model(x)
    found = cached(x, x, document_ids=documents)
    wanted = fastqt.contrastive_loss(z, z, document_ids=documents)
    assert distance([found.detach()], [wanted.detach()]) <= FLOAT64


def test_parameters_and_state_are_held_once_and_copies_share_nothing():
    model, loss = encoder(), fastqt.nn.SimCSELoss(learn_scale=True)
    cached = CachedContrastive([model, model, lambda x: x], loss)
    assert len(list(cached.parameters())) == 5
    assert len(cached.state_dict()) == 5
    x = batch()
    twin = copy.deepcopy(CachedContrastive([model] * 2, fastqt.simcse_loss))
    twin(x, x).backward()
    assert all(p.grad is None for p in model.parameters())
    assert all(p.grad is not None for p in twin.parameters())


@pytest.mark.parametrize(
    "wrap",
    [
        lambda _: encoder(0.0).requires_grad_(),
        lambda module: nn.Sequential(module, nn.Linear(4, 4).double()),
        lambda module: torch.compile(module, backend="eager"),
    ],
    ids=["another", "wrapped", "compiled"],
)
def test_a_module_that_takes_an_encoders_place_is_used(wrap):
    """In both views, as its state dict says."""
    first, x = encoder(0.0), batch()
    with torch.no_grad():
        first[0].bias.add_(1)
    options = {"chunk_size": 4, "modules": []}  # the function in the middle has none
    cached = CachedContrastive([first, lambda x: x[:, :4], first], fastqt.simcse_loss, **options)
    cached.encoders[0] = wrap(cached.encoders[0])
    new, calls = cached.encoders[0], []
    new.register_forward_hook(lambda *_: calls.append(1))
    plain = fastqt.simcse_loss(new(x), x[:, :4], new(x))
    plain.backward()
    wanted = gradients_of(new)
    new.zero_grad()
    calls.clear()

    loss = cached(x, x, x)
    assert distance([loss.detach()], [plain.detach()]) <= FLOAT64
    assert len(calls) == 6  # three chunks of two views
    loss.backward()
    assert distance(gradients_of(new), wanted) <= FLOAT64
    other = CachedContrastive([new, lambda x: x[:, :4], new], fastqt.simcse_loss, **options)
    other.load_state_dict(cached.state_dict())
    assert other(x, x, x) == loss


def test_another_list_of_modules_is_used_and_another_number_refused():
    first, second, third, x = encoder(0.0), encoder(0.0), encoder(0.0), batch()
    with torch.no_grad():
        second[0].bias.add_(1)
    cached = CachedContrastive([first, third], fastqt.info_nce_loss)
    cached.encoders = nn.ModuleList([second, third])
    assert cached(x, x) == fastqt.info_nce_loss(second(x), third(x))
    cached.encoders.append(first)
    with pytest.raises(ValueError, match="encoders: want 2 modules, as when this was made, got 3"):
        cached(x, x)


def test_a_second_backward_pass_is_refused():
    loss = CachedContrastive(encoder(), lambda z: z.square().sum(), chunk_size=4)(batch())
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="backward: want one call for each forward pass, got a second one"):
        loss.backward()


def test_a_double_backward_is_refused():
    loss = CachedContrastive(encoder(), lambda z: z.square().sum(), chunk_size=4)(batch())
    with pytest.raises(RuntimeError, match="differentiable once"):
        loss.backward(create_graph=True)


def test_an_error_of_the_second_pass_leaves_the_generators_as_they_were():
    model, calls = encoder(), []

    def failing(x):
        calls.append(torch.is_grad_enabled())
        if calls.count(True) == 3:
            raise KeyError("no such word")
        return model(x)

    loss = CachedContrastive(failing, lambda z: z.square().sum(), chunk_size=4)(batch())
    state = torch.get_rng_state()
    with pytest.raises(KeyError, match="no such word"):
        loss.backward()
    assert torch.equal(torch.get_rng_state(), state)


def test_wrong_options_are_refused_when_the_module_is_made():
    for option, value in {"loss": 3, "chunk_size": 0, "check": "last"}.items():
        with pytest.raises((TypeError, ValueError), match=f"^{option}: want"):
            CachedContrastive(nn.Identity(), **{"loss": fastqt.simcse_loss, option: value})
