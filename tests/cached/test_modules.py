"""cached_backward finds the modules of what it is given, or refuses what it cannot look into."""

import copy
import functools
import operator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fastqt
from tests.shared.hidden_modules import HIDDEN, Trainer
from tests.shared.small_encoders import WIDTH, batch, distance, gradients_of
from tests.shared.tolerances import FLOAT64


def normalised():
    """An encoder with batch normalisation, in training mode."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 4)).double()


def equals_a_plain_step(call, *modules):
    """Whether a step in chunks has the gradients of one without."""
    x = batch()
    fastqt.info_nce_loss(call(x), call(x + 1)).backward()
    wanted = gradients_of(*modules)
    for module in modules:
        module.zero_grad()
    fastqt.cached_backward([call] * 2, [x, x + 1], fastqt.info_nce_loss, chunk_size=4)
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
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

    @property
    def used(self):
        return self.encoder


SYSTEM, PLAIN = System(), nn.Linear(WIDTH, 4).double()
UNUSED = normalised()
TRAINER = Trainer(PLAIN, UNUSED)
NOT_REFUSED = {
    "lambda": lambda x: PLAIN(x),
    "function that normalises": lambda x: F.normalize(torch.tanh(PLAIN(x)), dim=1),
    "part of a module": lambda x: SYSTEM.encoder(x) * SYSTEM.scale,
    "property of a module": lambda x: SYSTEM.used(x),
    "method that uses another attribute": TRAINER.encode,
    "method in a lambda": lambda x: TRAINER.encode(x),
    "attribute": lambda x: TRAINER.model(x),
    "partial of a function of torch": functools.partial(F.linear, weight=PLAIN.weight),
}


@pytest.mark.parametrize("form", NOT_REFUSED)
def test_modules_that_are_not_used_are_no_reason_to_refuse(form):
    modules = SYSTEM.encoder, PLAIN
    for module in modules:
        module.zero_grad()
    assert equals_a_plain_step(NOT_REFUSED[form], *modules)


def test_looking_changes_nothing():
    class Counting:
        read = 0

        @property
        def model(self):
            type(self).read += 1
            return PLAIN

        def encode(self, x):
            return self.model(x)

    encoder = Counting().encode
    with pytest.raises(ValueError, match="inputs: want at least one tensor with rows"):
        fastqt.cached_backward(encoder, (), fastqt.info_nce_loss)
    assert Counting.read == 0


def test_what_cannot_be_looked_into_is_refused():
    with pytest.raises(
        TypeError, match=r"encoders: want a module, a Python function or .*, got methodcaller"
    ):
        fastqt.cached_backward(operator.methodcaller("double"), batch(), torch.sum)
    scripted = torch.jit.script(PLAIN)
    fastqt.cached_backward(scripted, batch(), torch.sum, chunk_size=4)
