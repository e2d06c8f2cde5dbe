"""A loss module equals its function with the options fixed."""

import copy
import pickle

import pytest
import torch
import torch.distributed as dist

from fastqt import nn
from fastqt.nn import ContrastiveLoss
from tests.shared.loss_modules import (
    CANDIDATES,
    MODULES,
    QUERIES,
    D,
    N,
    each,
)


@each
def test_module_equals_its_function(name):
    make, function, options, data, named = MODULES[name]
    assert torch.equal(make(**options)(*data, **named), function(*data, **named, **options))


@each
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_copies_are_equal_and_share_no_parameters(name, copied):
    make, _, options, data, named = MODULES[name]
    module = make(**options)
    twin = copied(module)
    assert repr(twin) == repr(module)
    assert torch.equal(twin(*data, **named), module(*data, **named))
    assert not {id(p) for p in twin.parameters()} & {id(p) for p in module.parameters()}


@each
def test_default_parameters_are_those_of_the_paper(name):
    make, _, options, _, _ = MODULES[name]
    learnt = {"clip": ["log_scale"], "siglip": ["log_scale", "bias"]}
    assert list(make(**options).state_dict()) == learnt.get(name, [])


@each
def test_unknown_or_misplaced_option_raises(name):
    make, _, options, data, named = MODULES[name]
    instead = "; want scale, which is 1 / temperature" if hasattr(make, "scale") else ""
    for unknown in ("temperature", "temprature"):
        with pytest.raises(TypeError, match=rf"^{unknown}: no option of {make.__name__}{instead}$"):
            make(**options, **{unknown: 0.05})
    with pytest.raises(TypeError, match=f"^grop: no option of {make.__name__}; the nearest is group$"):
        make(**options, grop=None)
    for argument in named:
        where = ", want it in each call" if argument in make.batch_arguments else ""
        with pytest.raises(TypeError, match=f"^{argument}: no option of {make.__name__}{where}$"):
            make(**options, **{argument: named[argument]})
    with pytest.raises(TypeError, match=r"^group: want it when .* is made, not in a call$"):
        make(**options)(*data, **named, group=None)


# What no function takes for an option of this name.
WRONG = {
    "backend": "cudnn",
    "beta": -0.5,
    "bias": "none",
    "blocks": "first",
    "context_size": 0,
    "cross_entropy": "no",
    "diagonal": "none",
    "directions": ("query_to_doc", "up"),
    "false_negative_margin": float("inf"),
    "false_negative_margin_strategy": "each",
    "form": "paper",
    "group": "all",
    "hard_negative_weight": float("nan"),
    "hardness_mode": "soft",
    "hardness_strength": -1.0,
    "hinge": "yes",
    "label_smoothing": 1.5,
    "margin": float("inf"),
    "masked_cell": "keep",
    "matryoshka_dims": (2, 1),
    "matryoshka_weights": 1.0,
    "mean_weight": -1.0,
    "memory": "none",
    "mix": 1.5,
    "negatives": "hard",
    "normalize": "no",
    "partition_mode": "each",
    "partner": "last",
    "position_loss": "max",
    "reduction": "avg",
    "samples": 0,
    "scale": 0.0,
    "sigma": 0.0,
    "second_moment_weight": -1.0,
    "similarity": "cosine",
    "stop_gradient": "no",
    "tau_plus": 1.0,
    "teacher_scale": 0.0,
}


@each
def test_a_wrong_option_is_refused_when_the_module_is_made(name):
    """With the words of the function, but for flags, which functions take for true."""
    make, function, options, data, named = MODULES[name]
    for option in make().option_names:
        with pytest.raises((ValueError, TypeError), match=f"^{option}.*: want .*|^size") as at_construction:
            make(**{**options, option: WRONG[option]})
        if option not in ("normalize", "stop_gradient"):
            with pytest.raises((ValueError, TypeError)) as in_call:
                function(*data, **named, **{**options, option: WRONG[option]})
            if option not in ("backend", "bias"):
                assert str(at_construction.value) == str(in_call.value)


@pytest.fixture
def process_group():
    """A group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_modules_take_a_group(process_group):
    """Copies talk to the same processes, and a state dict knows nothing of them."""
    for make, function, options, data, named in MODULES.values():
        module = make(**options, group=process_group)
        wanted = function(*data, **named, **options)
        assert torch.allclose(module(*data, **named), wanted, rtol=1e-6)
        twin = copy.deepcopy(module)
        assert twin.options["group"] is module.options["group"]
        assert twin.options["group"].process_group is process_group
        assert module.state_dict() == make(**options).state_dict()
        assert "group=Group(rank 0 of 1, " in repr(module)


@pytest.mark.parametrize("model", [nn.SimCSE, nn.MixCSE])
def test_models_pass_a_group_to_their_loss(process_group, model):
    made = model(nn.BagOfWords(N, D), group=process_group)
    assert copy.deepcopy(made).loss.options["group"].process_group is process_group


def test_a_group_is_checked_when_a_module_is_made(process_group):
    with pytest.raises(
        ValueError, match="group: want one that holds this process, rank 0 of all, got another"
    ):
        nn.CLIPLoss(group=dist.GroupMember.NON_GROUP_MEMBER)
    mesh = dist.init_device_mesh("cpu", (1, 1), mesh_dim_names=("data", "model"))
    with pytest.raises(ValueError, match="group: want a mesh of one dimension"):
        nn.SimCSELoss(group=mesh)
    assert nn.SimCSELoss(group=mesh["data"]).options["group"].size == 1


def test_a_group_wants_torch_distributed_initialised():
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    group = dist.group.WORLD
    dist.destroy_process_group()
    with pytest.raises(RuntimeError, match=r"group: want torch\.distributed initialised first"):
        nn.SimCSELoss(group=group)


def test_flags_of_modules_are_bools():
    for flags in ({"learn_scale": "no"}, {"learn_bias": 1}):
        with pytest.raises(TypeError, match=r"^learn_.*: want True or False"):
            nn.SigLIPLoss(**flags)


@pytest.mark.slow
def test_module_compiles_into_one_graph():
    module = nn.CLIPLoss()
    compiled = torch.compile(module, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(QUERIES, CANDIDATES), module(QUERIES, CANDIDATES))


def test_invalid_option_raises():
    with pytest.raises(TypeError, match="temperature: no option"):
        ContrastiveLoss(temperature=0.05)
    with pytest.raises(ValueError, match="scale: want a positive number"):
        ContrastiveLoss(scale=-1.0, learn_scale=True)
    with pytest.raises(ValueError, match="scale: want a finite number"):
        ContrastiveLoss(scale=float("inf"))
    with pytest.raises(ValueError, match="bias: want a finite number"):
        nn.SigLIPLoss(bias=float("nan"))
