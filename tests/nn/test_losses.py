"""A loss module equals its function with the options fixed, has its signature, and learns its scale."""

import copy
import inspect
import math
import pickle
import re
from typing import ClassVar, Literal

import pytest
import torch
import torch.distributed as dist

import fastqt
from fastqt import nn
from fastqt.nn import ContrastiveLoss
from fastqt.nn.losses import ScaledLoss
from tests.shared.loss_modules import OF_LOSSES, case, each
from tests.shared.loss_stub import MODULES as CLASSES
from tests.shared.wrong_options import wrong_values

QUERIES = torch.randn(9, 4, generator=torch.Generator().manual_seed(0))


@each
def test_module_equals_its_function(name):
    make, function, options, data, named = case(name)
    found = drawn(make(**options), *data, **named)
    assert torch.equal(found, drawn(function, *data, **named, **options))


def drawn(call, *data, **named):
    """What a call returns that may draw from torch's own generator."""
    torch.manual_seed(0)
    return call(*data, **named)


@each
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_copies_are_equal_and_share_no_parameters(name, copied):
    make, _, options, data, named = case(name)
    module = make(**options)
    twin = copied(module)
    assert repr(twin) == repr(module)
    assert torch.equal(*(drawn(each, *data, **named) for each in (twin, module)))
    assert not {id(p) for p in twin.parameters()} & {id(p) for p in module.parameters()}


@each
def test_unknown_or_misplaced_option_raises(name):
    make, _, options, data, named = case(name)
    instead = "; want scale, which is 1 / temperature" if hasattr(make, "scale") else ""
    for unknown in ("temperature", "temprature"):
        with pytest.raises(TypeError, match=rf"^{unknown}: no option of {make.__name__}{instead}$"):
            make(**options, **{unknown: 0.05})
    with pytest.raises(TypeError, match=f"^grop: no option of {make.__name__}; the nearest is group$"):
        make(**options, grop=None)
    is_held = {"exclude"} - set(make.batch_arguments)
    if is_held & named.keys():  # an option too, which holds a margin alone
        with pytest.raises(ValueError, match=r"^exclude: want filters of a batch in each call, got "):
            make(**options, exclude=named["exclude"])
    for argument in named.keys() - is_held:
        where = ", want it in each call" if argument in make.batch_arguments else ""
        with pytest.raises(TypeError, match=f"^{argument}: no option of {make.__name__}{where}$"):
            make(**options, **{argument: named[argument]})
    with pytest.raises(TypeError, match=r"^group: want it when .* is made, not in a call$"):
        make(**options)(*data, **named, group=None)


@each
def test_a_wrong_option_is_refused_when_the_module_is_made(name):
    """With the words of the function."""
    make, function, options, data, named = case(name)
    for option in make().option_names:
        texts = []
        for _, value in wrong_values(options.get(option, make._function_defaults.get(option))):
            wrong = {**options, option: value}
            try:
                function(*data, **{**named, **wrong})
            except (ValueError, TypeError) as error:
                texts.append(str(error))
                # A module may not hold all that a call takes, and does not know the devices of a batch.
                other = option in ("backend", "bias", "exclude", "tau_plus")
                same = "" if other else f"{re.escape(str(error))}$"
                with pytest.raises((ValueError, TypeError), match=f"^{same or option}"):
                    make(**wrong)
        assert texts, option


@pytest.fixture
def process_group():
    """A group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_modules_take_a_group(process_group):
    """Copies talk to the same processes, and a state dict knows nothing of them."""
    for make, function, options, data, named in map(case, OF_LOSSES):
        module = make(**options, group=process_group)
        wanted = drawn(function, *data, **named, **options)
        assert torch.allclose(drawn(module, *data, **named), wanted, rtol=1e-6)
        twin = copy.deepcopy(module)
        assert twin.options["group"] is module.options["group"]
        assert twin.options["group"].process_group is process_group
        assert module.state_dict() == make(**options).state_dict()
        assert "group=Group(rank 0 of 1, " in repr(module)


def test_a_group_is_checked_when_a_module_is_made(process_group):
    with pytest.raises(
        ValueError, match="group: want one that holds this process, rank 0 of all, got another"
    ):
        nn.CLIPLoss(group=dist.GroupMember.NON_GROUP_MEMBER)
    mesh = dist.init_device_mesh("cpu", (1, 1), mesh_dim_names=("data", "model"))
    with pytest.raises(ValueError, match="group: want a mesh of one dimension"):
        nn.SimCSELoss(group=mesh)
    assert nn.SimCSELoss(group=mesh["data"]).options["group"].size == 1


@pytest.mark.parametrize("name", ["contrastive_loss", "siglip_loss", "multiple_negatives_ranking_loss"])
def test_gradient_of_log_scale_equals_finite_difference(name):
    """d loss / d log scale = scale * d loss / d scale, compared with a central difference of the function."""
    make, function, options, data, named = case(name)
    options = {**options, "reduction": "sum"}
    data = [x.double() for x in data]
    named = {k: x.double() if torch.is_tensor(x) and x.is_floating_point() else x for k, x in named.items()}
    module = make(**{**options, "scale": 2.0}, learn_scale=True).double()
    module(*data, **named).backward()
    up, down = (
        function(*data, **named, **{**options, "scale": 2.0 * math.exp(step)}) for step in (1e-5, -1e-5)
    )
    assert module.log_scale.grad.item() == pytest.approx((up - down).item() / 2e-5, rel=1e-6)


def test_a_state_with_numbers_of_no_dimension_is_read():
    """Earlier versions stored them so. The state itself stays as it was."""
    state = {"0.log_scale": torch.tensor(1.5), "0.bias": torch.tensor(-3.0)}
    outer = torch.nn.Sequential(nn.SigLIPLoss())
    outer.load_state_dict(state)
    assert (outer[0].log_scale.shape, outer[0].scale.shape) == ((1,), ())
    assert (outer[0].log_scale.item(), outer[0].bias.item()) == (1.5, -3.0)
    assert all(x.dim() == 0 for x in state.values())


@pytest.mark.parametrize("rate", [0.1, 2.0])
def test_learnt_scale_is_clamped_as_clip_does_it(rate):
    """The steps of an optimiser with momentum are those of a parameter that is clamped after each step."""
    module = nn.InfoNCELoss(scale=4.0, learn_scale=True, max_scale=5.0)
    clamped = torch.nn.Parameter(torch.tensor(math.log(4.0)))
    optimizer = torch.optim.SGD([module.log_scale], lr=rate, momentum=0.9)
    of_clamped = torch.optim.SGD([clamped], lr=rate, momentum=0.9)
    found = []
    for step in range(12):
        candidates = QUERIES if step < 6 else -QUERIES  # The scale first wants to grow, and then to shrink.
        optimizer.zero_grad()
        of_clamped.zero_grad()
        penalty = module.log_scale**2  # whose graph has saved the parameter
        (module(QUERIES, candidates) + 0 * penalty).backward()
        fastqt.info_nce_loss(QUERIES, candidates, scale=clamped.exp()).backward()
        optimizer.step()
        of_clamped.step()
        with torch.no_grad():
            clamped.clamp_(max=math.log(5.0))
        found.append(module.scale.item())
        assert torch.equal(module.scale, clamped.exp())
        assert torch.equal(module.log_scale[0], clamped)
    assert max(found) == pytest.approx(5.0)
    assert found[-1] < 4.9


def test_max_scale_of_modules():
    assert nn.CLIPLoss().max_scale == 100.0
    assert nn.InfoNCELoss(learn_scale=True).max_scale is None
    assert repr(nn.SimCSELoss(learn_scale=True, max_scale=30.0)) == (
        "SimCSELoss(scale=20.0, learn_scale=True, max_scale=30.0)"
    )
    with pytest.raises(ValueError, match=r"scale: want at most max_scale=100\.0, got 200"):
        nn.CLIPLoss(scale=200)
    with pytest.raises(ValueError, match="scale: want a positive number"):
        ContrastiveLoss(scale=-1.0, learn_scale=True)
    with pytest.raises(ValueError, match="max_scale: want a positive number, got 0"):
        nn.InfoNCELoss(learn_scale=True, max_scale=0)
    with pytest.raises(TypeError, match="max_scale: want a number, got str"):
        nn.InfoNCELoss(learn_scale=True, max_scale="100")


@pytest.mark.parametrize("kind", [torch.Tensor.requires_grad_, torch.nn.Parameter])
def test_functional_call_leaves_the_scale_that_it_is_given(kind):
    """Beyond max_scale, too: value and gradient are those of the module's own parameter, which is clamped."""
    own, other, (a, b) = nn.CLIPLoss(), nn.CLIPLoss(), torch.randn(2, 6, 4)
    given = kind(torch.full((1,), 9.0))
    loss = torch.func.functional_call(other, {"log_scale": given}, (a, b))
    own.log_scale.data.fill_(9.0)
    torch.testing.assert_close(loss, own(a, b))
    loss.backward()
    own(a, b).backward()
    torch.testing.assert_close(given.grad, own.log_scale.grad)
    assert given.item() == 9.0
    assert own.log_scale.item() == pytest.approx(math.log(100.0))


@pytest.mark.parametrize(
    "replace",
    [
        lambda module: module.load_state_dict({"log_scale": torch.tensor(9.0)}, assign=True),
        lambda module: module.to("meta").to_empty(device="cpu"),
        lambda module: setattr(module, "log_scale", torch.nn.Parameter(torch.full((1,), 9.0))),
    ],
)
def test_another_parameter_in_its_place_is_clamped(replace):
    for module in (nn.CLIPLoss(), copy.deepcopy(nn.CLIPLoss())):
        replace(module)
        module.log_scale.data.fill_(9.0)
        assert module.scale.item() == pytest.approx(100.0)
        assert module.log_scale.item() == pytest.approx(math.log(100.0))


def explicit(made: type) -> dict[str, inspect.Parameter]:
    """The options in a constructor's signature, by name."""
    parameters = inspect.signature(made.__init__).parameters.values()
    assert not [p for p in parameters if p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    return {p.name: p for p in parameters if p.kind is p.KEYWORD_ONLY}


# What modules have beside the options of their functions, and the defaults of the papers.
LEARNT = {
    "scale": ("float", None),
    "learn_scale": ("bool", False),
    "max_scale": ("float | None", None),
    "bias": ("float", -10.0),
    "learn_bias": ("bool", True),
}
OF_PAPERS = {
    nn.CLIPLoss: {"scale": 1 / 0.07, "learn_scale": True, "max_scale": 100.0},
    nn.SigLIPLoss: {"scale": 10.0, "learn_scale": True},
}


@pytest.mark.parametrize("make", CLASSES, ids=lambda make: make.__name__)
def test_the_signature_of_a_module_is_that_of_its_function(make):
    """The same names, types and defaults in the same order, without what belongs to a batch."""
    wanted = {
        name: (p.annotation, p.default)
        for name, p in inspect.signature(make.function).parameters.items()
        if p.kind is p.KEYWORD_ONLY and name not in make.batch_arguments
    }
    found = {name: (p.annotation, p.default) for name, p in explicit(make).items()}
    assert [name for name in found if name in wanted or name not in LEARNT] == list(wanted)
    for name, (annotation, default) in found.items():
        of_function = wanted.get(name, (None, inspect.Parameter.empty))
        if name in LEARNT:
            annotated, default_of_all = LEARNT[name]
            value = OF_PAPERS.get(make, {}).get(
                name, default_of_all if of_function[1] is inspect.Parameter.empty else of_function[1]
            )
            assert (annotation, default) == (annotated, value), name
        else:
            assert (annotation, default) == of_function, name
    assert {"learn_scale", "max_scale"} <= set(found) if "scale" in wanted else "learn_scale" not in found


@pytest.mark.parametrize(("model", "loss"), [(nn.SimCSE, nn.SimCSELoss), (nn.MixCSE, nn.MixCSELoss)])
def test_the_signature_of_a_model_has_the_options_of_its_loss(model, loss):
    found, wanted = explicit(model), explicit(loss)
    assert [*found] == ["dropout", "head", *wanted]
    assert all(found[name] == wanted[name] for name in wanted)


def test_a_default_that_is_given_is_no_option_that_differs():
    """A module holds, shows and passes on what differs from the defaults, which are the function's own."""
    assert nn.SimCSELoss(reduction="mean", scale=20.0).options == {}
    assert nn.InfoNCELoss(normalize=False, memory="fast").options == {"normalize": False}
    assert repr(nn.InfoNCELoss(memory="low", scale=5)) == "InfoNCELoss(scale=5.0, memory='low')"


def margin_loss(
    queries: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    scale: float | torch.Tensor = 2.0,
    kind: Literal["hard", "soft"] = "hard",
    smooth: bool = False,
) -> torch.Tensor:
    scores = queries if mask is None else queries.where(mask, 0)
    return (scale * scores).sum() * (1 if kind == "hard" else 2)


def test_a_module_of_a_users_function_has_its_options():
    """Their names, types and defaults, without those that belong to a batch."""

    class MarginLoss(ScaledLoss):
        function = staticmethod(margin_loss)
        defaults: ClassVar = {"kind": "soft"}

    assert MarginLoss.batch_arguments == ("mask",)
    shown = {name: p.default for name, p in explicit(MarginLoss).items()}
    learnt = {"scale": 2.0, "learn_scale": False, "max_scale": None}
    assert shown == {**learnt, "kind": "soft", "smooth": False}
    assert MarginLoss()(torch.ones(3), mask=torch.tensor([True, False, True])) == 8
    assert MarginLoss(kind="hard").options == {}
    with pytest.raises(ValueError, match=r"^kind: want one of 'hard', 'soft', got 'firm'$"):
        MarginLoss(kind="firm")
    with pytest.raises(TypeError, match=r"^smooth: want True or False, got 1$"):
        MarginLoss(smooth=1)
    with pytest.raises(TypeError, match=r"^MarginLoss: too many positional arguments$"):
        MarginLoss(3.0)

    class Weighted(MarginLoss):
        function = staticmethod(margin_loss)

        def __init__(self, weight: float) -> None:
            super().__init__(scale=weight)

    assert list(inspect.signature(Weighted).parameters) == ["weight"]
    assert Weighted(5.0)(torch.ones(1)) == 10


def test_a_class_that_is_derived_may_have_options_of_its_own():
    class Named(nn.CLIPLoss):
        def __init__(self, name: str, *, weight: float = 1.0) -> None:
            super().__init__(scale=5.0)
            self.name = name

    assert Named("of captions", weight=2.0).initial_scale == 5.0
    with pytest.raises(TypeError, match=r"^wieght: no option of Named; the nearest is weight$"):
        Named("of captions", wieght=2.0)
