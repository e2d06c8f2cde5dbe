"""The bases of the loss modules, which hold a loss's options and may learn its scale.

A module takes the options of its function when it is made, and the arguments that change with every batch
in each call. Names, types and defaults are read from the function's signature, so that a class says only what
differs. With the option `group` its loss is that of all ranks' rows; a learnt scale is a parameter like
others, which DDP or FSDP reduce.
"""

from __future__ import annotations

import functools
import inspect
import math
import typing
from collections.abc import Callable, Mapping, Sequence
from inspect import Parameter
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from typing_extensions import Self

from fastqt.checks import check_flag, check_number, check_scale, shown
from fastqt.distributed.group import as_group
from fastqt.exclusions import as_exclusions
from fastqt.loss import DECLARED, Declaration
from fastqt.signatures import check_names, plain_numbers

Constructor = TypeVar("Constructor", bound=Callable[..., None])


def _kinds(function: Callable[..., Any]) -> set[object]:
    return {parameter.kind for parameter in inspect.signature(function).parameters.values()}


def _names_of(constructor: Callable[..., Any]) -> tuple[str, ...] | None:
    """The names of a constructor's arguments; None if it takes any."""
    return (
        None
        if Parameter.VAR_KEYWORD in _kinds(constructor)
        else tuple(inspect.signature(constructor).parameters)
    )


class NamedOptions(nn.Module):
    """A module that says what is wanted in place of an option that its constructor does not have."""

    batch_arguments: ClassVar[tuple[str, ...]] = ()
    # Found when a class is made: torch.compile, which may trace a constructor, knows no signatures.
    _known_options: ClassVar[tuple[str, ...] | None] = None  # None where the constructor takes any

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        cls._known_options = _names_of(cls.__init__)

    def __new__(cls, *args: Any, **options: Any) -> Self:
        if cls._known_options is not None:
            check_names(options, cls._known_options, cls.__name__, cls.batch_arguments)
        return super().__new__(cls)


class Loss(NamedOptions):
    """Base of all loss modules: a loss function whose options are fixed.

    A class that sets `function` gets a constructor whose signature lists the options: keyword arguments of
    the function, except those in `batch_arguments`, which each call takes because they belong to a batch.
    Unless a class sets them, these are the arguments that may be tensors, guides or generators.
    """

    function: ClassVar[Callable[..., Tensor]]
    # The values that options have by default, where it is not the function that says it.
    defaults: ClassVar[Mapping[str, Any]] = {}
    _function_defaults: ClassVar[dict[str, Any]] = {}
    _declared: ClassVar[Declaration]

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        if "function" not in vars(cls):
            return
        cls._declared = DECLARED.get(cls.function) or _declared_by_types(cls.function)

        constructors = [
            inspect.unwrap(vars(base)["__init__"])
            for base in reversed(cls.__mro__)
            if issubclass(base, Loss) and "__init__" in vars(base)
        ]
        added = [keyword_only(constructor) for constructor in constructors]
        if "batch_arguments" not in vars(cls):
            held = {option.name for group in added for option in group}
            of_batch = declaration_of(cls).of_batch
            cls.batch_arguments = tuple(
                option.name
                for option in keyword_only(cls.function)
                if option.name not in held and option.name in of_batch
            )

        options = cls._function_options()
        cls._function_defaults = {option.name: option.default for option in options}
        if Parameter.VAR_KEYWORD not in _kinds(constructors[-1]):
            return  # It takes options of its own, and decides on the function's.
        for group in added:
            options = _with_added(options, group)
        options = [p.replace(default=cls.defaults.get(p.name, p.default)) for p in options]
        cls.__init__ = with_options(constructors[-1], options)  # type: ignore[method-assign]
        cls._known_options = _names_of(cls.__init__)

    def __init__(self, **options: Any) -> None:
        super().__init__()
        defaults = self._function_defaults
        self.option_names = frozenset(defaults)

        # In the order of the signature, in which `repr` shows them.
        changed = [
            name for name in defaults if not _is_default(options.get(name, defaults[name]), defaults[name])
        ]
        options = {name: options[name] for name in changed}
        self.check_values(options)
        if options.get("group") is not None:
            options["group"] = as_group(options["group"])  # Unlike a process group, it can be copied.
        self.options = options

    @classmethod
    def check_values(cls, options: Mapping[str, Any]) -> None:
        """Checks the values of options, as far as that is possible without a batch."""
        declaration_of(cls).check_values(options)

    def forward(self, *data: Any, **batch_arguments: Any) -> Tensor:
        """The loss of a batch: what the function returns for its positional arguments and those of the batch.

        TypeError for an option, which has to be given when the module is made.
        """
        fixed = sorted(name for name in batch_arguments if name in self.option_names - {"exclude"})
        if fixed:
            raise TypeError(f"{', '.join(fixed)}: want it when {type(self).__name__} is made, not in a call")
        options = self.function_options()
        if "exclude" in batch_arguments and "exclude" in options:
            filters = (as_exclusions("exclude", x["exclude"]).filters for x in (options, batch_arguments))
            batch_arguments["exclude"] = [x for each in filters for x in each]
        return type(self).function(*data, **{**options, **batch_arguments})

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.options.items())

    def function_options(self) -> dict[str, Any]:
        """The options that are passed to the function in every call."""
        return self.options

    @classmethod
    def _function_options(cls) -> list[Parameter]:
        """The function's options, with its own defaults."""
        return [option for option in keyword_only(cls.function) if option.name not in cls.batch_arguments]


class ScaledLoss(Loss):
    """Base of the loss modules whose function scales the scores; the scale may be learnt.

    Args:
        scale: 1 / temperature, a number > 0. By default the function's own.
        learn_scale: learn the scale as the parameter `log_scale`, its logarithm, so that it stays positive.
        max_scale: the most that the scale may be. What an optimiser has added beyond it is taken off the
            parameter itself before the scale is next used, so that the steps are those of a training that
            clamps the parameter after each step, as those of CLIP do. It is at least the scale.
        **options: as of `Loss`.
    """

    log_scale: nn.Parameter | None
    # The module's own parameter, in whose place `torch.func.functional_call` puts the caller's tensor. In a
    # list, as an attribute it would be registered once more.
    _own: list[nn.Parameter | None]

    def __init__(
        self,
        *,
        scale: float,
        learn_scale: bool = False,
        max_scale: float | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        check_scale(scale)
        check_flag("learn_scale", learn_scale)
        if not learn_scale and max_scale not in (None, self.defaults.get("max_scale")):
            raise ValueError(f"max_scale: want it with learn_scale=True alone, got {shown(max_scale)}")
        if not learn_scale:
            max_scale = None  # A default is of a scale that is learnt.
        if max_scale is not None:
            _check_max_scale(max_scale, scale)
        self.initial_scale, self.max_scale = float(scale), max_scale
        # Of one dimension, as FSDP2 shards no others.
        self.log_scale = nn.Parameter(torch.full((1,), math.log(scale))) if learn_scale else None

    def reset_parameters(self) -> None:
        """Sets what is learnt to what it was at first, as after `to_empty` of a module made on "meta"."""
        if self.log_scale is not None:
            nn.init.constant_(self.log_scale, math.log(self.initial_scale))

    @property
    def scale(self) -> float | Tensor:
        """The current scale, 1 / temperature: a number, or a 0-d tensor with a gradient if it is learnt."""
        if self.log_scale is None:
            return self.initial_scale
        if self.max_scale is None:
            return self._number(self.log_scale.exp())
        most = math.log(self.max_scale)
        if self.log_scale is self._own[0] or hasattr(self.log_scale, "full_tensor"):
            # Through `data`, so that autograd does not take it for a change of what a graph has saved.
            self.log_scale.data.clamp_(max=most)
            return self._number(self.log_scale.exp())
        # The caller's tensor keeps its value, and has the gradient that the parameter would have.
        passed = self.log_scale - self.log_scale.detach()
        return self._number((self.log_scale.detach().clamp(max=most) + passed).exp())

    def _number(self, learnt: Tensor) -> Tensor:
        """What is learnt, (1,), as a 0-d tensor; outside of a forward pass FSDP2 leaves a DTensor of it."""
        whole: Tensor = learnt.full_tensor() if hasattr(learnt, "full_tensor") else learnt
        return whole.reshape(())

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """As of `nn.Module`, through which each assignment goes."""
        super().register_parameter(name, param)
        if name == "log_scale":
            self._own = [param]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """As of `nn.Module`; a move to another device may make another parameter."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._own = [self.log_scale]
        return self

    def extra_repr(self) -> str:
        learnt = ", learn_scale=True" if self.log_scale is not None else ""
        learnt += f", max_scale={self.max_scale}" if self.max_scale is not None else ""
        options = super().extra_repr()
        return f"scale={self.initial_scale}{learnt}" + (f", {options}" if options else "")

    def function_options(self) -> dict[str, Any]:
        return {"scale": self.scale, **super().function_options()}

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Also takes numbers of shape (), which what is learnt had at first."""
        for name in self._parameters:
            number = state_dict.get(prefix + name)
            if isinstance(number, Tensor) and not number.dim():
                state_dict[prefix + name] = number.reshape(1)
        super()._load_from_state_dict(state_dict, prefix, *rest)


class BiasedLoss(ScaledLoss):
    """Base of the loss modules whose function also adds a bias, a finite number, which may be learnt."""

    bias: nn.Parameter | float

    def __init__(self, *, bias: float, learn_bias: bool = False, **options: Any) -> None:
        super().__init__(**options)
        check_number("bias", bias)
        check_flag("learn_bias", learn_bias)
        self.initial_bias = float(bias)
        self.bias = nn.Parameter(torch.full((1,), self.initial_bias)) if learn_bias else self.initial_bias

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if isinstance(self.bias, nn.Parameter):
            nn.init.constant_(self.bias, self.initial_bias)

    def extra_repr(self) -> str:
        bias = "learn_bias=True" if isinstance(self.bias, nn.Parameter) else f"bias={self.bias}"
        return f"{super().extra_repr()}, {bias}"

    def function_options(self) -> dict[str, Any]:
        bias = self._number(self.bias) if isinstance(self.bias, Tensor) else self.bias
        return {"bias": bias, **super().function_options()}


def declaration_of(module: type[Loss]) -> Declaration:
    """What the function of a module declares of its arguments; of a user's function what its types say."""
    return module._declared


def _declared_by_types(function: Callable[..., Tensor]) -> Declaration:
    """What the types say of the arguments of a function that is no loss of this library."""

    def body(call: Any, *arguments: Any, **options: Any) -> Tensor:
        return function(*arguments, **options)

    functools.update_wrapper(body, function)
    signature = inspect.signature(function)
    call = Parameter("call", Parameter.POSITIONAL_ONLY)
    of_body = signature.replace(parameters=[call, *signature.parameters.values()])
    body.__signature__ = of_body  # type: ignore[attr-defined]
    body.__annotations__ = dict.fromkeys(signature.parameters, Any) | function.__annotations__
    return Declaration(body, None, (), sums_prefixes=False)


def keyword_only(function: Callable[..., Any]) -> list[Parameter]:
    """The parameters of a function that are given by name alone."""
    return [p for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY]


def with_options(constructor: Constructor, options: Sequence[Parameter]) -> Constructor:
    """A constructor in whose signature some options take the place of its `**options`."""
    signature = inspect.signature(constructor)
    names = {option.name for option in options}
    first = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD and p.name not in names]
    signature = signature.replace(parameters=[*first, *options])

    defaults = {p.name: p.default for p in options if p.default is not p.empty}
    most = sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in first) - 1  # without self

    @functools.wraps(constructor)
    def construct(self: object, *arguments: Any, **values: Any) -> None:
        if len(arguments) > most:
            raise TypeError(f"{type(self).__name__}: too many positional arguments")
        constructor(self, *arguments, **plain_numbers({**defaults, **values}))

    construct.__signature__ = signature  # type: ignore[attr-defined]
    return typing.cast("Constructor", construct)


def takes_options_of(module: type[Loss]) -> Callable[[Constructor], Constructor]:
    """Marks a constructor that takes the options of a loss module by its `**options`."""
    return functools.partial(with_options, options=keyword_only(module.__init__))


def _with_added(options: list[Parameter], added: list[Parameter]) -> list[Parameter]:
    """The function's options, of which a constructor takes the first of `added`, together with the others."""
    names = [option.name for option in options]
    if not added or added[0].name not in names:
        return options
    default = options[names.index(added[0].name)].default
    first = [added[0].replace(default=default), *added[1:]]
    rest = {option.name for option in added[1:]}
    place = names.index(added[0].name)
    return [*options[:place], *first, *(p for p in options[place + 1 :] if p.name not in rest)]


def check_options(function: Callable[..., Tensor], options: Mapping[str, Any]) -> None:
    """Checks the keyword arguments that a loss function is to be called with, before there is a batch.

    TypeError for a name that the function does not have. Values are checked if it is one of this library.
    """
    if Parameter.VAR_KEYWORD not in _kinds(function):
        parameters = inspect.signature(function).parameters
        check_names(options, parameters, getattr(function, "__name__", str(function)))
    if function in DECLARED:
        DECLARED[function].check_values(options)


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
