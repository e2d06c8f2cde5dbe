"""cached_backward finds the modules of what it is given, and refuses in words what it cannot compute."""

import copy
import functools
import operator

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fastqt
from tests.shared.hidden_modules import HIDDEN
from tests.shared.small_encoders import WIDTH, batch, distance, encoder, gradients_of
from tests.shared.tolerances import FLOAT64


def normalised():
    """An encoder with batch normalisation, in training mode."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 4)).double()


def equals_a_plain_step(call, *modules, given=None):
    """Whether a step in chunks has the gradients of one without."""
    x = batch()
    fastqt.info_nce_loss(call(x), call(x + 1)).backward()
    wanted = gradients_of(*modules)
    for module in modules:
        module.zero_grad()
    fastqt.cached_backward([call] * 2, [x, x + 1], fastqt.info_nce_loss, chunk_size=4, modules=given)
    assert sum(float(g.abs().sum()) for g in wanted) > 0
    return distance(gradients_of(*modules), wanted) <= FLOAT64


@pytest.mark.parametrize("form", HIDDEN)
def test_batch_normalisation_is_found_wherever_it_is(form):
    model = normalised()
    call, before = HIDDEN[form](model), copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=r"encoders\[0\]\S*1: want no BatchNorm1d in training mode"):
        fastqt.cached_backward([call] * 2, [batch()] * 2, fastqt.info_nce_loss, chunk_size=4)
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("form", [form for form in HIDDEN if "C function" not in form])
def test_the_same_callables_equal_a_plain_step_once_it_is_in_evaluation_mode(form):
    model = normalised().eval()
    assert equals_a_plain_step(HIDDEN[form](model), model)


def test_a_module_trains_beside_another_what_it_has_not_registered():
    """Where it is not alone, nothing else would say that it has parameters."""
    hidden, plain, x = nn.Linear(WIDTH, 4).double(), nn.Linear(WIDTH, 4).double(), batch()
    encoder = HIDDEN["list in a module"](hidden)
    fastqt.info_nce_loss(encoder(x), plain(x)).backward()
    wanted = gradients_of(hidden, plain)
    for module in (hidden, plain):
        module.zero_grad()
    fastqt.cached_backward([encoder, plain], [x, x], fastqt.info_nce_loss, chunk_size=4)
    assert distance(gradients_of(hidden, plain), wanted) <= FLOAT64


class System(nn.Module):
    """An encoder beside a module that is for something else."""

    def __init__(self):
        super().__init__()
        self.encoder, self.discriminator = nn.Linear(WIDTH, 4).double(), normalised()


SYSTEM, PLAIN = System(), nn.Linear(WIDTH, 4).double()
# Callables, and `modules=` of them.
ACCEPTED = {
    "function within a function": (lambda x: sum(PLAIN(y) for y in [x]), None),
    "function that uses a part": (lambda x: SYSTEM.encoder(x), [SYSTEM.encoder]),
    "function that finds it by a text": (lambda x: globals()["PL" + "AIN"](x), [PLAIN]),
    "function without any": (functools.partial(F.linear, weight=PLAIN.weight), []),
}


@pytest.mark.parametrize("form", ACCEPTED)
def test_what_is_found_or_given_equals_a_plain_step(form):
    call, modules = ACCEPTED[form]
    for module in (SYSTEM.encoder, PLAIN):
        module.zero_grad()
    assert equals_a_plain_step(call, SYSTEM.encoder, PLAIN, given=modules)


def test_modules_that_are_not_found_are_to_be_given():
    compiled = operator.methodcaller("double")
    text = ACCEPTED["function that finds it by a text"][0]
    for call, kind in [(compiled, "methodcaller"), (text, "function")]:
        with pytest.raises(TypeError, match=rf"encoders: want a module, or .*, got {kind} .*; give modules="):
            fastqt.cached_backward(call, batch(), torch.sum)


def test_looking_changes_nothing():
    class Counting:
        read = 0

        def __init__(self):
            self.held = PLAIN

        @property
        def model(self):
            type(self).read += 1
            return self.held

        def encode(self, x):
            return self.model(x)

    with pytest.raises(ValueError, match="inputs: want at least one tensor with rows"):
        fastqt.cached_backward(Counting().encode, (), fastqt.info_nce_loss)
    assert Counting.read == 0


MODEL, X = encoder(), batch()
LEAF = batch().requires_grad_()


def total_of(*embeddings):
    return sum(z.square().sum() for z in embeddings)


class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, 4).double()

    def forward(self, x):
        return self.linear(x.mul_(2))


class OtherDraws(InPlace):
    """Dropout by a generator that is not torch's."""

    def __init__(self):
        super().__init__()
        self.generator = np.random.default_rng(0)

    def forward(self, x):
        return self.linear(x * torch.from_numpy(self.generator.random(x.shape)))


class Counting(InPlace):
    def forward(self, x):
        self.linear.bias.data += 1
        return self.linear(x)


@pytest.mark.parametrize("check", ["first", "always"])
@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (InPlace, r"got a difference of \d\S* of the largest value; it changes its inputs in place"),
        (OtherDraws, "does it draw from a generator that is not torch's own"),
        (Counting, "or change its parameters or buffers"),
    ],
)
def test_a_second_pass_with_other_embeddings_is_an_error(make, reason, check):
    model = make()
    torch.manual_seed(7)
    with pytest.raises(RuntimeError, match="encoders: want the same embeddings.*" + reason):
        fastqt.cached_backward(model, batch(), total_of, chunk_size=4, check=check)
    drawn = torch.rand(2)
    torch.manual_seed(7)
    assert torch.equal(torch.rand(2), drawn)


def test_what_each_check_looks_at():
    """One chunk of each encoder, or all."""
    linear = nn.Linear(WIDTH, 4).double()

    def last_differs(x):
        return linear(x)[:, : 3 if torch.is_grad_enabled() and len(x) < 4 else 4].square().sum(1)

    def other_shape(x):
        return linear(x)[:, : 3 if torch.is_grad_enabled() and len(x) < 4 else 4]

    def step(call, check):
        fastqt.cached_backward([linear, call], [batch()] * 2, total_of, chunk_size=4, check=check)

    step(last_differs, "first")
    with pytest.raises(
        RuntimeError, match=r"encoders\[1\]: .* rows 8 to 10 in both passes, got a difference"
    ):
        step(last_differs, "always")
    with pytest.raises(RuntimeError, match=r"got \(3, 4\) of torch.float64, then \(3, 3\) of torch.float64"):
        step(other_shape, "always")
    with pytest.raises(RuntimeError, match=r"encoders\[1\]: .* rows 0 to 3"):
        step(OtherDraws(), "first")


def test_without_a_check_nothing_is_compared():
    fastqt.cached_backward(OtherDraws(), batch(), total_of, chunk_size=4, check="never")


def test_inputs_that_change_without_effect_on_the_embeddings_are_no_error():
    """Some poolings set to zero in place what is zero after the first time."""
    linear = nn.Linear(WIDTH, 4).double()

    def call(x):
        x[:, 0] = 0
        return linear(x)

    fastqt.cached_backward(call, batch(), total_of, chunk_size=4, check="always")


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.SyncBatchNorm])
def test_batch_normalisation_in_training_mode_is_refused(kind):
    model = nn.Sequential(nn.Linear(WIDTH, 4), nn.Sequential(kind(4))).double()
    message = rf"encoders\[1\]\.1\.0: want no {kind.__name__} in training mode"
    for second in (model, lambda x: model(x), functools.partial(model), model.forward):
        with pytest.raises(ValueError, match=message):
            fastqt.cached_backward([encoder(), second], [batch()] * 2, fastqt.simcse_loss)
    model.eval()
    fastqt.cached_backward([encoder(), model], [batch()] * 2, fastqt.simcse_loss, chunk_size=4)


@pytest.mark.parametrize(
    ("encoders", "inputs", "kind", "message"),
    [
        ([], [], ValueError, "encoders: want at least one, got none"),
        ([MODEL, 3], [X, X], TypeError, r"encoders\[1\]: want a module or a function, got int"),
        ([MODEL], X, ValueError, "inputs: want a list of 1, one for each encoder, got Tensor"),
        ([MODEL, MODEL], [X], ValueError, "inputs: want a list of 2, one for each encoder, got 1"),
        (MODEL, "text", TypeError, "inputs: want a tensor, or a tuple or dict of tensors, got 'text'"),
        (MODEL, (), ValueError, "inputs: want at least one tensor with rows, got none"),
        (MODEL, {"a": X, "b": X[:3]}, ValueError, r"inputs\['b'\]: want 11 rows as inputs\['a'\] has, got 3"),
        ([MODEL], [(X, X[:3])], ValueError, r"inputs\[0\]\[1\]: want 11 rows as inputs\[0\]\[0\] has, got 3"),
        (MODEL, LEAF * 2, ValueError, "inputs: want a tensor without a history of autograd, got .*MulBack"),
        (lambda x: (x,), X, TypeError, "encoders: want an encoder that returns a tensor, got tuple"),
        (lambda x: x.sum(), X, ValueError, r"encoders: want a row .* each of 11 rows .*, got shape \(\)"),
        (lambda x: x[:2], X, ValueError, r"encoders: want a row .* got shape \(2, 6\)"),
        (lambda x: x.long(), X, ValueError, r"encoders: want a row .* of torch.int64"),
    ],
)
def test_wrong_encoders_and_inputs_are_named(encoders, inputs, kind, message):
    with pytest.raises(kind, match=message):
        fastqt.cached_backward(encoders, inputs, total_of, modules=None if encoders is MODEL else [])


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"chunk_size": 0}, ValueError, "chunk_size: want at least 1, got 0"),
        ({"chunk_size": 2.0}, TypeError, "chunk_size: want an integer, got 2.0"),
        ({"check": True}, ValueError, "check: want one of 'first', 'always', 'never', got True"),
        ({"scaler": 2.0}, TypeError, "scaler: want a torch.amp.GradScaler, got float"),
        ({"ddp": MODEL}, TypeError, "ddp: want a module that reduces gradients, .* got Sequential"),
        ({"ddp": [MODEL]}, TypeError, r"ddp\[0\]: want a module that reduces gradients, .* got Sequential"),
        ({"ddp": [None] * 2}, ValueError, "ddp: want one module, or one for each of 1 encoders, got 2"),
        ({"loss": "clip"}, TypeError, "loss: want a function of embeddings, got str"),
        ({"loss": lambda z: z}, ValueError, r"loss: want .* a scalar tensor, got shape \(11, 4\)"),
        ({"loss": lambda z: 3.0}, ValueError, "loss: want .* a scalar tensor, got float"),
        ({"loss": lambda z: z.detach().sum()}, ValueError, "loss: want one that depends on a parameter"),
    ],
)
def test_wrong_options_are_named(options, kind, message):
    with pytest.raises(kind, match=message):
        fastqt.cached_backward(MODEL, X, **{"loss": total_of, **options})


def test_gradients_must_be_enabled():
    with torch.no_grad(), pytest.raises(RuntimeError, match="cached_backward: want gradients enabled"):
        fastqt.cached_backward(MODEL, X, total_of)
