"""cached_backward finds the modules of what it is given, or refuses what it cannot look into."""

import copy
import functools
import operator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fastqt
from tests.shared.hidden_modules import HIDDEN
from tests.shared.small_encoders import WIDTH, batch, distance, gradients_of
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
    "function that names one": (lambda x: F.normalize(torch.tanh(PLAIN(x)), dim=1), None),
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
    for encoder, kind in [(compiled, "methodcaller"), (text, "function")]:
        with pytest.raises(TypeError, match=rf"encoders: want a module, or .*, got {kind} .*; give modules="):
            fastqt.cached_backward(encoder, batch(), torch.sum)


def test_a_module_of_the_call_is_refused_unless_others_are_given():
    with pytest.raises(ValueError, match=r"want no BatchNorm1d in training mode.*give modules= without it"):
        fastqt.cached_backward(lambda x: SYSTEM.encoder(x), batch(), torch.sum)


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


def test_a_compiled_module():
    fastqt.cached_backward(torch.jit.script(PLAIN), batch(), torch.sum, chunk_size=4)
