"""The bases of the loss modules, which hold a loss's options and may learn its scale.

A module takes the options of its function when it is made, and the arguments that change with every batch
in each call. With the option `group` its loss is that of all ranks' rows; a learnt scale is a parameter like
others, which DDP or FSDP reduce.
"""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import Self

from fastqt.checks import check_flag, check_number, check_option, check_scale, check_size
from fastqt.distributed.group import as_group
from fastqt.engines import ENGINES
from fastqt.guide import MARGIN_STRATEGIES
from fastqt.losses.mixcse import BLOCKS, FORMS, MASKED_CELLS, PARTNERS
from fastqt.losses.ranking_options import (
    PARTITION_MODES,
    check_directions,
    check_hardness_mode,
    check_hardness_strength,
)
from fastqt.losses.smoothing import check_label_smoothing
from fastqt.negatives import Mixed
from fastqt.problem import DIAGONALS, REDUCTIONS, SIMILARITIES, check_memory
from fastqt.targets import Window

# What each option may be. The functions check most of it again in each call, with the same words.
CHOICES: dict[str, tuple[str, ...]] = {
    "reduction": REDUCTIONS,
    "diagonal": DIAGONALS,
    "form": FORMS,
    "partner": PARTNERS,
    "blocks": BLOCKS,
    "masked_cell": MASKED_CELLS,
    "similarity": SIMILARITIES,
    "margin_strategy": MARGIN_STRATEGIES,
    "partition_mode": PARTITION_MODES,
}
TEMPERATURES = ("temperature", "temp", "tau")  # what other libraries call 1 / scale
FLAGS = ("normalize", "stop_gradient", "contrast_anchors", "contrast_positives")
CHECKS: dict[str, Callable[[Any], object]] = {
    "backend": lambda backend: None if backend is None else check_option("backend", backend, tuple(ENGINES)),
    "context_size": Window,
    "label_smoothing": check_label_smoothing,
    "directions": check_directions,
    "group": lambda group: None if group is None else as_group(group),
    "hardness_mode": check_hardness_mode,
    "hardness_strength": check_hardness_strength,
    "memory": check_memory,
    "mix": Mixed,
    "samples": lambda samples: None if samples is None else check_size("samples", samples),
    "scale": check_scale,
    **{name: partial(check_number, name) for name in ("margin", "hard_negative_weight")},
    **{name: partial(check_flag, name) for name in FLAGS},
}


class NamedOptions(nn.Module):
    """A module that says what is wanted in place of an option that its constructor does not have."""

    batch_arguments: ClassVar[tuple[str, ...]] = ()

    def __new__(cls, *args: Any, **options: Any) -> Self:
        known = inspect.signature(cls.__init__).parameters
        if not any(p.kind is p.VAR_KEYWORD for p in known.values()):
            check_names(options, known, cls.__name__, cls.batch_arguments)
        return super().__new__(cls)


class Loss(NamedOptions):
    """Base of all loss modules: a loss function whose options are fixed.

    Args:
        **options: keyword arguments of the function, except those in `batch_arguments`.

    Raises:
        TypeError: an option that the function does not have, or that has a value of another type.
        ValueError: an option that has a value which the function refuses.

    Attributes:
        function: the loss function.
        choices: which values options may have that differ from those in other losses.
        batch_arguments: the function's keyword arguments that each call takes, because they belong to a
            batch.
    """

    function: ClassVar[Callable[..., Tensor]]
    choices: ClassVar[dict[str, tuple[str, ...]]] = {}

    def __init__(self, **options: Any) -> None:
        super().__init__()
        defaults = self._defaults()
        self.option_names = frozenset(defaults)
        check_names(options, defaults, type(self).__name__, self.batch_arguments)
        options = {name: value for name, value in options.items() if not _is_default(value, defaults[name])}
        self.check_values(options)
        if options.get("group") is not None:
            options["group"] = as_group(options["group"])  # Unlike a process group, it can be copied.
        self.options = options

    @classmethod
    def check_values(cls, options: Mapping[str, Any]) -> None:
        """Checks the values of options, as far as that is possible without a batch.

        Raises:
            TypeError, ValueError: naming the option, what is wanted and what came.
        """
        choices = CHOICES | cls.choices
        for name, value in options.items():
            if name in choices:
                check_option(name, value, choices[name])
            elif name in CHECKS:
                CHECKS[name](value)

    def forward(self, *data: Any, **batch_arguments: Any) -> Tensor:
        """The loss of a batch.

        Args:
            *data: the function's positional arguments.
            **batch_arguments: those of its keyword arguments that `batch_arguments` names.

        Returns:
            What the function returns.

        Raises:
            TypeError: an option, which has to be given when the module is made.
        """
        fixed = sorted(name for name in batch_arguments if name in self.option_names)
        if fixed:
            raise TypeError(f"{', '.join(fixed)}: want it when {type(self).__name__} is made, not in a call")
        return type(self).function(*data, **batch_arguments, **self.function_options())

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.options.items())

    def function_options(self) -> dict[str, Any]:
        """The options that are passed to the function in every call."""
        return self.options

    @classmethod
    def _defaults(cls) -> dict[str, Any]:
        """The names of all options, with the function's default values."""
        parameters = inspect.signature(cls.function).parameters.values()
        defaults = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
        return {name: defaults[name] for name in defaults.keys() - set(cls.batch_arguments)}


class ScaledLoss(Loss):
    """Base of the loss modules whose function scales the scores; the scale may be learnt.

    Args:
        scale: 1 / temperature, a number > 0. By default the function's own.
        learn_scale: learn the scale as the parameter `log_scale`, its logarithm, so that it stays positive.
        max_scale: the most that the scale may be. What an optimiser has added beyond it is taken off the
            parameter itself before the scale is next used, so that the steps are those of a training that
            clamps the parameter after each step, as those of CLIP do.
        **options: keyword arguments of the function, except those in `batch_arguments`.

    Raises:
        TypeError, ValueError: as in `Loss`, or a scale or max_scale that is no positive number, or a scale
            above max_scale.
    """

    log_scale: nn.Parameter | None

    def __init__(
        self,
        *,
        scale: float | None = None,
        learn_scale: bool = False,
        max_scale: float | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        scale = self._defaults()["scale"] if scale is None else scale
        check_scale(scale)
        check_flag("learn_scale", learn_scale)
        if max_scale is not None:
            _check_max_scale(max_scale, scale)
        self.initial_scale, self.max_scale = float(scale), max_scale
        self.log_scale = nn.Parameter(torch.tensor(math.log(scale))) if learn_scale else None

    @property
    def scale(self) -> float | Tensor:
        """The current scale, 1 / temperature: a number, or a 0-d tensor with a gradient if it is learnt."""
        if self.log_scale is None:
            return self.initial_scale
        if self.max_scale is not None:
            # Through `data`, so that autograd does not take it for a change of what a graph has saved.
            self.log_scale.data.clamp_(max=math.log(self.max_scale))
        return self.log_scale.exp()

    def extra_repr(self) -> str:
        learnt = ", learn_scale=True" if self.log_scale is not None else ""
        learnt += f", max_scale={self.max_scale}" if self.max_scale is not None else ""
        options = super().extra_repr()
        return f"scale={self.initial_scale}{learnt}" + (f", {options}" if options else "")

    def function_options(self) -> dict[str, Any]:
        return {"scale": self.scale, **super().function_options()}


def given(local_names: Mapping[str, Any], *others: str) -> dict[str, Any]:
    """The options among the local names of a constructor, but for some others that it takes itself."""
    return {name: x for name, x in local_names.items() if name not in ("self", "__class__", *others)}


def check_names(
    options: Iterable[str], known: Iterable[str], owner: str, batch_arguments: Sequence[str] = ()
) -> None:
    """Raises TypeError unless all options are known; it says what is wanted in place of the first.

    Args:
        options: names of keyword arguments.
        known: the names that there are.
        owner: what they are options of.
        batch_arguments: names that each call takes instead.
    """
    names = [name for name in known if name != "self"]
    unknown = sorted(set(options) - set(names))
    if not unknown:
        return
    meant = difflib.get_close_matches(unknown[0], TEMPERATURES, 1) if "scale" in names else []
    if meant:
        advice = "; want scale, which is 1 / temperature"
    elif unknown[0] in batch_arguments:
        advice = ", want it in each call"
    else:
        near = difflib.get_close_matches(unknown[0], names, 1)
        advice = f"; the nearest is {near[0]}" if near else ""
    raise TypeError(f"{', '.join(unknown)}: no option of {owner}{advice}")


def _is_default(value: object, default: object) -> bool:
    return value is default or (type(value) is type(default) and bool(value == default))


def _check_max_scale(max_scale: object, scale: float) -> None:
    """Raises ValueError or TypeError unless `max_scale` is a positive number of at least `scale`."""
    check_number("max_scale", max_scale)
    assert isinstance(max_scale, (int, float))
    if max_scale <= 0:
        raise ValueError(f"max_scale: want a positive number, got {max_scale}")
    if scale > max_scale:
        raise ValueError(f"scale: want at most max_scale={max_scale}, got {scale}")
