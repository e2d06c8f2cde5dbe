"""cached_backward adds the gradients of a plain step, in the memory of a chunk, or says why it cannot."""

import copy
from typing import ClassVar

import pytest
import torch

import fastqt
from fastqt.cached import cached_embeddings
from fastqt.cached.encoding import MANY_CHUNKS
from tests.shared.small_encoders import batch, distance, encoded_in_chunks, encoder, gradients_of
from tests.shared.tolerances import FLOAT64

N = 11
CHUNKS = [1, 4, 11, 64]


@pytest.mark.parametrize("chunk_size", CHUNKS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, FLOAT64), (torch.float32, 1e-6)])
def test_two_views_of_dropout_equal_a_plain_step(chunk_size, dtype, tolerance):
    model, x = encoder(dtype=dtype), batch(dtype=dtype)
    torch.manual_seed(1)
    wanted = fastqt.simcse_loss(*(encoded_in_chunks(model, x, chunk_size) for _ in range(2)))
    wanted.backward()
    drawn, gradients = torch.rand(3), gradients_of(model)

    model.zero_grad()
    torch.manual_seed(1)
    options = {"chunk_size": chunk_size, "check": "always"}
    found = fastqt.cached_backward([model, model], [x, x], fastqt.simcse_loss, **options)
    assert not found.requires_grad
    assert found == wanted  # the same operations on the same embeddings
    assert distance(gradients_of(model), gradients) <= tolerance
    assert torch.equal(torch.rand(3), drawn)  # what comes next draws what it draws after a plain step


def test_one_chunk_runs_the_encoder_once_and_others_twice_but_for_one():
    calls = []
    model = encoder()
    model.register_forward_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    for chunk_size, with_graph, without in [(N, 1, 0), (4, 3, 2), (1, N, N - 1)]:
        calls.clear()
        fastqt.cached_backward(model, batch(), lambda z: z.square().sum(), chunk_size=chunk_size)
        assert (calls.count(True), calls.count(False)) == (with_graph, without)


def test_two_encoders_with_inputs_of_their_own_and_a_learnt_scale():
    first, second = encoder(), encoder().requires_grad_()
    loss = fastqt.nn.CLIPLoss().double()
    x, y, shift = batch(), batch(seed=1), batch(seed=2)
    second[0].bias.data += 1

    def towers(call):
        torch.manual_seed(2)
        return call(first, x), call(lambda t: second(t), y + shift)

    loss(*towers(lambda call, t: encoded_in_chunks(call, t, 4))).backward()
    wanted = gradients_of(first, second, loss)
    for module in (first, second, loss):
        module.zero_grad()
    torch.manual_seed(2)
    encoders = [first, lambda y, shift, sign: second(y + sign * shift)]
    fastqt.cached_backward(encoders, [(x,), {"y": y, "shift": shift, "sign": 1}], loss, chunk_size=4)
    assert distance(gradients_of(first, second, loss), wanted) <= FLOAT64
    assert loss.log_scale.grad is not None


def test_a_gradient_scaler_scales_all_gradients():
    model, loss = encoder(dtype=torch.float32), fastqt.nn.SimCSELoss(learn_scale=True)
    x = batch(dtype=torch.float32)
    results = []
    for scaler in (None, torch.amp.GradScaler("cpu", init_scale=2.0**12)):
        for module in (model, loss):
            module.zero_grad()
        torch.manual_seed(3)
        value = fastqt.cached_backward([model] * 2, [x, x], loss, chunk_size=4, scaler=scaler)
        results.append((value, gradients_of(model, loss)))
    (plain, gradients), (scaled, scaled_gradients) = results
    assert plain == scaled
    assert distance(scaled_gradients, [g * 2**12 for g in gradients]) <= 0  # powers of two lose nothing


def test_a_gradient_scaler_skips_a_step_that_overflows():
    """Embeddings that are not finite in both passes are no difference of the passes."""
    model, x = encoder(dtype=torch.float32), batch(dtype=torch.float32)
    model[-1].weight.data[0, 0] = torch.inf
    scaler, before = torch.amp.GradScaler("cpu"), copy.deepcopy(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    fastqt.cached_backward([model] * 2, [x, x], fastqt.simcse_loss, chunk_size=4, scaler=scaler)
    scaler.step(optimizer)
    scaler.update()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert scaler.get_scale() < 2.0**16


@pytest.mark.parametrize("order", [0, 1])
@pytest.mark.parametrize("hidden", [False, True], ids=["module", "function"])
def test_a_frozen_encoder_runs_once_a_chunk_without_graph(order, hidden):
    trained, frozen = encoder(), encoder().requires_grad_(False)
    calls = []
    frozen.register_forward_hook(lambda *_: calls.append(1))
    holder = {"frozen": frozen}
    towers = [trained, (lambda x: holder["frozen"](x)) if hidden else frozen][:: -1 if order else 1]
    torch.manual_seed(4)
    loss = fastqt.info_nce_loss(*(encoded_in_chunks(tower, batch(), 4) for tower in towers))
    loss.backward()
    wanted = gradients_of(trained)
    trained.zero_grad()
    calls.clear()
    torch.manual_seed(4)
    assert fastqt.cached_backward(towers, [batch()] * 2, fastqt.info_nce_loss, chunk_size=4) == loss
    assert distance(gradients_of(trained), wanted) <= FLOAT64
    assert all(p.grad is None for p in frozen.parameters())
    # Of a function after the first encoder, only its second pass can show that it has no graph.
    assert len(calls) == (4 if hidden and not order else 3)


def test_partly_frozen_encoders_and_a_loss_that_is_trained_alone():
    model, x, loss = encoder(), batch(), fastqt.nn.SimCSELoss(learn_scale=True).double()
    model[0].requires_grad_(False)
    fastqt.cached_backward([model] * 2, [x, x], loss, chunk_size=4)
    assert [p.grad is not None for p in model.parameters()] == [False, False, True, True]
    model.requires_grad_(False).zero_grad()
    loss.zero_grad()
    fastqt.cached_backward([model] * 2, [x, x], loss, chunk_size=4)
    assert all(p.grad is None for p in model.parameters())
    assert loss.log_scale.grad != 0


def test_embeddings_that_the_loss_does_not_use_leave_their_encoder_without_gradients():
    first, second = encoder(), encoder()
    fastqt.cached_backward([first, second], [batch()] * 2, lambda a, b: a.square().sum(), chunk_size=4)
    assert all(p.grad is not None for p in first.parameters())
    assert all(p.grad is None for p in second.parameters())


def test_gradients_of_leaf_inputs():
    model, x = encoder(dropout=0.0), batch().requires_grad_()
    model(x).square().sum().backward()
    wanted, x.grad = x.grad, None
    fastqt.cached_backward(model, x, lambda z: z.square().sum(), chunk_size=4)
    assert distance([x.grad], [wanted]) <= FLOAT64


@pytest.mark.parametrize("chunk_size", CHUNKS)
def test_under_autocast(chunk_size):
    """Weights that autocast rounded in a pass without graph and keeps must not cut the graph of the next."""
    model, x = encoder(dtype=torch.float32), batch(dtype=torch.float32)
    torch.manual_seed(6)
    # Without its cache of weights, autocast adds up gradients in float32, as cached_backward does.
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        fastqt.simcse_loss(*(encoded_in_chunks(model, x, chunk_size) for _ in range(2))).backward()
    wanted = gradients_of(model)
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad():
            model(x)
        torch.manual_seed(6)
        options = {"chunk_size": chunk_size, "check": "always"}
        fastqt.cached_backward([model] * 2, [x, x], fastqt.simcse_loss, **options)
    assert all(g.abs().max() > 0 for g in wanted)
    assert distance(gradients_of(model), wanted) <= 1e-6


def test_the_second_pass_has_the_autocast_of_the_first_wherever_it_runs():
    model, x = encoder(dtype=torch.float32), batch(dtype=torch.float32)
    dtypes = []
    model.register_forward_hook(lambda *called: dtypes.append(called[-1].dtype))
    with torch.autocast("cpu", torch.bfloat16):
        (embeddings,) = cached_embeddings(model, x, chunk_size=4)
    embeddings.float().square().sum().backward()
    assert dtypes == [torch.bfloat16] * 5
    dtypes.clear()
    (embeddings,) = cached_embeddings(model, x, chunk_size=4)
    with torch.autocast("cpu", torch.bfloat16):
        embeddings.square().sum().backward()
    assert dtypes == [torch.float32] * 5


class Watched(torch.autograd.Function):
    """The identity, which notes whether its backward runs under autocast."""

    seen: ClassVar[list[bool]] = []

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        Watched.seen.append(torch.is_autocast_enabled("cpu"))
        return gradient


def test_backward_passes_leave_autocast():
    model, x = encoder(dtype=torch.float32), batch(dtype=torch.float32)
    Watched.seen.clear()
    with torch.autocast("cpu", torch.bfloat16):
        fastqt.cached_backward(
            lambda t: Watched.apply(model(t)), x, lambda z: Watched.apply(z).float().sum(), chunk_size=4
        )
        assert torch.is_autocast_enabled("cpu")
    assert Watched.seen == [False] * 4  # the loss and three chunks


class Gauge:
    """Counts the bytes that graphs keep alive, and the most of them at once."""

    def __init__(self):
        self.live = self.most = 0

    def pack(self, x):
        gauge, size = self, x.nbytes

        class Held:
            def __init__(self):
                gauge.live += size
                gauge.most = max(gauge.most, gauge.live)

            def __del__(self):
                gauge.live -= size

        held = Held()
        held.tensor = x.detach()  # with its graph an output would keep itself alive
        return held

    def most_of(self, step) -> int:
        self.live = self.most = 0
        with torch.autograd.graph.saved_tensors_hooks(self.pack, lambda held: held.tensor):
            step()
        return self.most


@pytest.mark.parametrize("form", ["cached_backward", "cached_embeddings"])
def test_the_memory_of_graphs_is_that_of_one_chunk_whatever_the_batch(form):
    model, gauge = encoder(), Gauge()

    def total(*embeddings):
        return sum(z.sum() for z in embeddings)

    def step(rows):
        x = batch(rows)
        if form == "cached_backward":
            fastqt.cached_backward([model] * 2, [x, x], total, chunk_size=8)
        else:
            total(*cached_embeddings([model] * 2, [x, x], chunk_size=8)).backward()

    one_chunk = gauge.most_of(lambda: model(batch(8)).sum().backward())
    assert one_chunk > 0
    assert gauge.most_of(lambda: model(batch(64)).sum().backward()) > 4 * one_chunk
    for rows in (8, 64, 640):
        assert gauge.most_of(lambda rows=rows: step(rows)) == one_chunk


@pytest.mark.parametrize("towers", [1, 2])
def test_graphs_of_many_chunks_are_gone_while_the_loss_runs(towers):
    model, x, gauge, live, calls = encoder(), batch(MANY_CHUNKS), Gauge(), [], []

    def loss(*z):
        live.append(gauge.live)
        return fastqt.info_nce_loss(z[0], z[-1].roll(1, 0))

    torch.manual_seed(5)
    loss(*(encoded_in_chunks(model, x, 1) for _ in range(towers))).backward()
    wanted = gradients_of(model)

    def step(chunk_size):
        model.zero_grad()
        calls.clear()
        torch.manual_seed(5)
        gauge.most_of(
            lambda: fastqt.cached_backward([model] * towers, [x] * towers, loss, chunk_size=chunk_size)
        )
        return live[-1], calls.count(True), calls.count(False)

    model.register_forward_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    chunks = towers * MANY_CHUNKS
    assert step(1) == (0, chunks + 1, chunks - 1)
    assert distance(gradients_of(model), wanted) <= FLOAT64

    kept, *counts = step(2 * towers)
    assert kept > 0
    assert counts == [MANY_CHUNKS // 2, MANY_CHUNKS // 2 - 1]


def test_a_sparse_gradient_does_not_grow_with_the_batch():
    table = torch.nn.Embedding(10, 3, sparse=True, dtype=torch.float64)
    words = torch.randint(10, (400, 5), generator=torch.Generator().manual_seed(6))
    fastqt.info_nce_loss(table(words).sum(1), table(words).sum(1).roll(1, 0)).backward()
    wanted = table.weight.grad.to_dense()
    table.weight.grad = None

    def loss(z):
        return fastqt.info_nce_loss(z, z.roll(1, 0))

    fastqt.cached_backward(lambda x: table(x).sum(1), words, loss, chunk_size=4)
    assert table.weight.grad._nnz() <= 2 * 10 + 4 * 5
    assert distance([table.weight.grad.to_dense()], [wanted]) <= FLOAT64


def test_an_empty_batch_gives_gradients_of_zero():
    """A rank without rows takes part in the reduction with zeros."""
    model = encoder()
    assert fastqt.cached_backward(model, batch(0), lambda z: z.square().sum(), chunk_size=4) == 0
    assert all(torch.equal(p.grad, torch.zeros_like(p)) for p in model.parameters())
