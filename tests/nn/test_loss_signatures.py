"""The signatures of the loss modules are those of their functions, with the same defaults."""

import inspect
from typing import ClassVar, Literal

import pytest
import torch

from fastqt import nn
from fastqt.nn.losses import ScaledLoss
from tests.shared.loss_stub import MODULES


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


@pytest.mark.parametrize("make", MODULES, ids=lambda make: make.__name__)
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
