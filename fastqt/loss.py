"""The declaration of a loss: of its signature follow its checks, what ranks agree on, and its prefixes.

A loss is a function that is called with the checked arguments of a call before its own:

    @loss
    def my_loss(call: Arguments, a: Rows, b: Rows, *, scale: Scale = 20.0, group: GroupLike | None = None):
        ...

What a user calls has the signature without `call`. Its arguments are checked by what `fastqt.arguments`
declares of their types, and by the loss's own functions `check` where some of them have to fit each other.
With a group all ranks check before any goes on, and all raise what one has found wrong. The body is called
with arguments that are right, once, or with `matryoshka` once for each prefix.
"""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable, Hashable, Mapping, Sequence
from inspect import Parameter
from typing import Any, Concatenate, ParamSpec

import torch
from torch import Tensor

from fastqt.arguments import (
    NO_BATCH,
    Argument,
    Known,
    argument_of,
    is_given,
    kinds_of,
    may_be_none,
    shown_type,
)
from fastqt.checks import check_embeddings, check_paired
from fastqt.distributed.agreement import (
    agree,
    facts_of_embeddings,
    facts_of_leaves,
    public_call,
    refuse,
)
from fastqt.distributed.batch import Batch
from fastqt.distributed.group import Group, as_group
from fastqt.distributed.local import local_rows, with_a_row
from fastqt.matryoshka import Matryoshka
from fastqt.signatures import check_names, plain_numbers
from fastqt.torch_modes import PLAIN

P = ParamSpec("P")
MOST_FITTING = 1024  # shapes of embeddings that are known to fit each other; after so many all are forgotten

# The declarations of the public losses, by the function that a user calls.
DECLARED: dict[Callable[..., Tensor], Declaration] = {}


class Arguments:
    """The checked arguments of one call of a loss.

    Attributes:
        values: by name; embeddings are this process's rows, and prefixes a `Matryoshka`.
        batch: the rows that the loss is of, those of all ranks of a group.
        known: what is known of the embeddings; its shapes are None where they are not those of the call.
        function: the public function, which errors name.
    """

    def __init__(self, declaration: Declaration, values: dict[str, Any], batch: Batch, known: Known) -> None:
        self.declaration, self.values, self.batch, self.known = declaration, values, batch, known

    @property
    def function(self) -> str:
        return self.declaration.title

    @property
    def embeddings(self) -> dict[str, Any]:
        """The embeddings, by name."""
        return {name: self.values[name] for name in self.declaration.embeddings}

    def to(
        self,
        other: Callable[..., Tensor],
        rows: Mapping[str, str | tuple[str, int]] | None = None,
        /,
        **values: Any,
    ) -> Tensor:
        """Another loss of the same batch, with these values, and those of arguments that both losses take.

        Args:
            other: a declared loss. Its arguments are not checked once more, but for how they fit each other.
            rows: by names of the other loss's embeddings, those under which this loss's rows are counted.
            **values: what differs from this loss's arguments of the same names.
        """
        declared = DECLARED[other]
        options = self._options_of(declared, {"group": self.values.get("group"), **values})
        known, batch = self.known, self.batch
        if rows is not None:
            batch = batch.of(**rows)
        if rows is not None or any(options[x] is not self.values.get(x) for x in declared.embeddings):
            known = known._replace(shapes=None)
        return declared.loss_of(options, batch, known)

    def here(self, other: Callable[..., Tensor], /, **values: Any) -> Tensor:
        """Another loss as `to` has it, but of rows that this process has, as one without a group has."""
        declared = DECLARED[other]
        options = self._options_of(declared, values)
        sizes = declared.sizes_of(options)
        return declared.loss_of(options, Batch(sizes), self.known._replace(shapes=None, sizes=sizes))

    def _options_of(self, declared: Declaration, values: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of another loss: these, and those that both losses take, which have to fit there."""
        shared, compared = declared.shared_with(self.declaration)
        options = {**declared.defaults, **{name: self.values[name] for name in shared}, **values}
        for name in compared:
            if options[name] is not declared.defaults.get(name):
                declared.fit(options, self.known)
                break
        return options

    def sum_over_prefixes(self, loss: Callable[[int | None], Tensor]) -> Tensor:
        """The sum over the prefixes of a loss of so many columns, None for all if there are no prefixes."""
        prefixes: Matryoshka | None = self.values["matryoshka"]
        return loss(None) if prefixes is None else prefixes.sum(loss)


class Declaration:
    """A loss, and what its signature says of its arguments."""

    function: Callable[..., Tensor]  # what a user calls

    def __init__(
        self,
        body: Callable[..., Tensor],
        module: str | None,
        checks: Sequence[Callable[..., Any]],
        sums_prefixes: bool,
    ) -> None:
        hints = typing.get_type_hints(body, localns={"GroupLike": Any}, include_extras=True)
        parameters = list(inspect.signature(body).parameters.values())[1:]
        self.body, self.name, self.title = body, body.__name__, f"fastqt.{body.__name__}"
        self.module, self.sums_prefixes = module, sums_prefixes
        self.signature = inspect.Signature(
            [_shown(p, hints[p.name]) for p in parameters], return_annotation="Tensor"
        )
        self.names = [p.name for p in parameters]
        self.name_set = frozenset(self.names)
        self.positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
        self.defaults = {p.name: p.default for p in parameters if p.default is not p.empty}

        known = {p.name: argument_of(hints[p.name]) for p in parameters if p.name != "group"}
        self.embeddings = {name: x for name, x in known.items() if x.rows is not None}
        self.foreign = {name: x for name, x in known.items() if x.like is not None}
        self.others = {name: x for name, x in known.items() if x.rows is None and x.like is None}
        self.optional = {name for name in known if may_be_none(hints[name])}
        self.facts = {
            f"{name} given" if x.fact is is_given else name: (name, x.fact)
            for name, x in self.others.items()
            if x.fact is not None
        } | {f"{name} given": (name, is_given) for name in self.embeddings if name in self.optional}
        self.local = [name for name, x in self.others.items() if x.is_local]
        self.leaves = [*self.embeddings, *(name for name, x in self.others.items() if x.is_leaf)]
        self.checks = [(check, list(inspect.signature(check).parameters)) for check in checks]
        self.together = list(dict.fromkeys(name for _, names in self.checks for name in names))
        # Where none of the arguments that a check compares is given, their defaults fit each other. It may
        # read the first embeddings beside them.
        wanted = [name for name in self.together if name in known and name not in self.defaults]
        self.read_together = set(self.together) - set(wanted[:1])
        self._fitting: dict[Hashable, Known] = {}
        self._shared: dict[Declaration, tuple[list[str], list[str]]] = {}

    def shared_with(self, other: Declaration) -> tuple[list[str], list[str]]:
        """The arguments beside embeddings that both losses take, and those of them that have to fit."""
        # A graph of torch.compile would be one for what is kept at the moment.
        kept = None if torch.compiler.is_compiling() else self._shared.get(other)
        if kept is not None:
            return kept
        shared = [name for name in self.others if name in other.others]
        pair = shared, [name for name in shared if name in self.read_together]
        if not torch.compiler.is_compiling():
            self._shared[other] = pair
        return pair

    def begun(
        self, arguments: tuple[Any, ...], options: dict[str, Any]
    ) -> tuple[dict[str, Any], Batch, Known]:
        """What a user has given, checked, the batch on which all ranks agree, and what is known of it."""
        named = {**dict(zip(self.positional, arguments, strict=False)), **options}
        values = {**self.defaults, **named}
        complete = len(values) == len(self.names) and self.name_set.issuperset(named)
        if not complete or len(named) != len(arguments) + len(options):
            check_names(options, self.names, self.name)
            self.signature.bind(*arguments, **options)  # says what is missing or too many
        group = values.get("group")
        if group is None:
            known = self.checked(values, named, None)
            return values, Batch(known.sizes), known

        of_rank: list[Known] = []

        def check(ranks: Group | None) -> dict[str, int]:
            of_rank.append(self.checked(values, named, ranks))
            return dict(of_rank[0].sizes)

        batch = agree(group, self.title, check, lambda ranks: self.facts_of(values, ranks))
        return values, batch, of_rank[0]

    def loss_of_ranks(self, arguments: tuple[Any, ...], options: dict[str, Any]) -> Tensor:
        """The loss of what a user has given on a rank of a group."""
        with public_call(self.title) as call:
            try:
                begun = self.begun(arguments, options)
            except Exception as error:  # raised again, whatever it is
                if not call.agreeing:
                    refuse(options["group"], error)
                raise
            return self.loss_of(*begun)

    def loss_of(self, values: dict[str, Any], batch: Batch, known: Known) -> Tensor:
        """The loss of checked arguments; with prefixes the weighted sum of their losses."""
        prefixes: Matryoshka | None = values.get("matryoshka") if self.sums_prefixes else None
        if prefixes is None:
            return self.body(Arguments(self, values, batch, known), **values)

        def of_prefix(dim: int) -> Tensor:
            cut = {name: _columns(values[name], dim) for name in self.embeddings}
            narrow = known._replace(columns=dim, shapes=None)
            return self.loss_of(values | cut | {"matryoshka": None}, batch, narrow)

        return prefixes.sum(of_prefix)

    def checked(self, values: dict[str, Any], named: Mapping[str, Any], ranks: Group | None) -> Known:
        """Checks the arguments of this process, and puts what the loss reads in place of them."""
        known = self._known(values, ranks)
        for name in named:
            if (argument := self.others.get(name)) is None:
                continue
            value = values[name]
            if value is self.defaults.get(name, Parameter.empty) or (value is None and name in self.optional):
                continue
            if argument.check is not None:
                values[name] = argument.check(name, value, known)
        if ranks is not None:
            sizes = dict(known.sizes)
            for name, argument in self.others.items():
                if argument.counts is not None:
                    sizes.update(argument.counts(values[name]))
            known = known._replace(sizes=sizes)
        compares = ranks is not None or not self.read_together.isdisjoint(named)
        if compares:
            self.fit(values, known)
        return known

    def sizes_of(self, values: Mapping[str, Any]) -> dict[str, int]:
        """The numbers of rows of the embeddings."""
        rows = self._matrices(self.embeddings, values)
        sizes = {"rows": next(iter(rows.values())).shape[0]}
        for name, argument in self.embeddings.items():
            if argument.rows != "rows" and values[name] is not None:
                sizes[name] = sum(x.shape[0] for x in self._matrices({name: argument}, values).values())
        return sizes

    def fit(self, values: dict[str, Any], known: Known) -> None:
        """Checks that arguments fit each other, and puts what the loss reads in place of them."""
        for check, names in self.checks:
            read = {name: known if name == "known" else values[name] for name in names}
            values.update(check(**read) or {})

    @property
    def of_batch(self) -> set[str]:
        """The arguments that belong to a batch, which a module takes in each call."""
        return {*self.embeddings, *self.foreign, *(name for name, x in self.others.items() if x.is_of_batch)}

    def check_values(self, options: Mapping[str, Any]) -> None:
        """Checks the values of options, as far as that is possible without a batch.

        Raises:
            ValueError, TypeError: as of the loss.
        """
        values = {name: self.defaults.get(name) for name in self.names} | dict(options)
        for name, value in options.items():
            argument = self.others.get(name)
            if argument is None or argument.check is None or argument.is_of_batch:
                continue
            if value is not None or name not in self.optional:
                values[name] = argument.check(name, value, NO_BATCH)
        if not self.of_batch.intersection(self.together):
            self.fit(values, NO_BATCH)
        if options.get("group") is not None:
            as_group(options["group"])

    def _known(self, values: dict[str, Any], ranks: Group | None) -> Known:
        """What is known of the embeddings, of which DTensors become this rank's rows."""
        shapes = None if ranks is not None or self.foreign else self._shapes(values)
        if shapes is not None and (kept := self._fitting.get(shapes)) is not None:
            return kept
        known = self._known_anew(values, ranks)._replace(shapes=shapes)
        if shapes is not None:
            if len(self._fitting) >= MOST_FITTING:
                self._fitting.clear()
            self._fitting[shapes] = known
        return known

    def _shapes(self, values: Mapping[str, Any]) -> Hashable | None:
        """What tells embeddings that fit each other from others; None unless they are plain and on a CPU."""
        if torch.compiler.is_compiling():
            return None
        shapes: list[Hashable] = []
        dtype = None
        for name in self.embeddings:
            value = values[name]
            if value is None:
                shapes.append(None)
                continue
            for x in value if type(value) in (list, tuple) else (value,):
                if type(x) not in PLAIN or not x.is_cpu or x.layout is not torch.strided or x.is_nested:
                    return None
                shapes.append(x.shape)
                # Whether other dtypes fit depends on autocast.
                if x.dtype is not dtype:
                    if dtype is not None:
                        return None
                    dtype = x.dtype

        shapes.append(dtype)
        return tuple(shapes)

    def _known_anew(self, values: dict[str, Any], ranks: Group | None) -> Known:
        if ranks is not None:
            for name in (*self.embeddings, *self.foreign, *self.local):
                values[name] = _local(ranks, name, values[name])
        rows = self._matrices(self.embeddings, values)
        self._check_embeddings(rows, ranks)
        if self.foreign:
            self._check_foreign(values, ranks)
        first, x = next(iter(rows.items()))
        sizes = self.sizes_of(values)
        for name, argument in self.embeddings.items():
            if argument.counts is not None:
                sizes.update(argument.counts(values[name]))
        return Known(x.dtype, x.device, x.shape[1], sizes, first, ranks is not None)

    def _matrices(self, arguments: Mapping[str, Argument], values: Mapping[str, Any]) -> dict[str, Tensor]:
        """The embeddings that are given, each with its name."""
        matrices: dict[str, Tensor] = {}
        for name, argument in arguments.items():
            value = values[name]
            if value is None and name in self.optional:
                continue
            matrices.update({name: value} if argument.matrices is None else argument.matrices(name, value))
        return matrices

    def _check_embeddings(self, rows: Mapping[str, Tensor], ranks: Group | None) -> None:
        check_embeddings(**{name: with_a_row(ranks, x) for name, x in rows.items()})
        first, n = next((name, x.shape[0]) for name, x in rows.items())
        for name, x in rows.items():
            kind = self.embeddings[name.partition("[")[0]].rows  # of several matrices that of all
            if kind == "rows" and x.shape[0] != n:
                raise ValueError(f"{name}: want a row for each of the {n} rows of {first}, got {x.shape[0]}")
            if kind == "paired" and ranks is None:
                check_paired(first, n, name, x.shape[0])

    def _check_foreign(self, values: Mapping[str, Any], ranks: Group | None) -> None:
        """Checks another model's embeddings, which have a width and a dtype of their own."""
        for name, argument in self.foreign.items():
            assert argument.like is not None
            for missing, present in ((name, argument.like), (argument.like, name)):
                if values[missing] is None and values[present] is not None:
                    raise ValueError(
                        f"{missing}: want it together with {present}, got None; give both or neither"
                    )

        named = {name: x for name, x in self.foreign.items() if values[name] is not None}
        foreign = self._matrices(named, values)
        check_embeddings(**{name: with_a_row(ranks, x) for name, x in foreign.items()})
        for name, argument in named.items():
            assert argument.like is not None
            theirs = self._matrices({name: argument}, values)
            ours = self._matrices({argument.like: self.embeddings[argument.like]}, values)
            if len(theirs) != len(ours):
                raise ValueError(
                    f"{name}: want as many tensors as {argument.like}, {len(ours)}, got {len(theirs)}"
                )
            for (of, x), (like, y) in zip(theirs.items(), ours.items(), strict=True):
                if x.shape[0] != y.shape[0]:
                    raise ValueError(
                        f"{of}: want a row for each of the {y.shape[0]} rows of {like}, got {x.shape[0]}"
                    )
                if x.device != y.device:
                    raise ValueError(
                        f"{of}: want device {y.device} as {like}, got {x.device}; move it by to()"
                    )

    def facts_of(self, values: Mapping[str, Any], ranks: Group) -> dict[str, Hashable]:
        """What has to be the same of a call on all ranks."""
        rows = self._matrices(self.embeddings, values)
        foreign = next(iter(self._matrices(self.foreign, values).items()), None)
        first = next(iter(rows))
        leaves = {name: values[name] for name in self.leaves}
        return {
            "given": tuple(rows),
            **{what: fact(values[name]) for what, (name, fact) in self.facts.items()},
            **facts_of_embeddings(rows[first]),
            **({} if foreign is None else _facts_of_foreign(*foreign)),
            **facts_of_leaves(ranks, {**rows, **leaves}),
        }


def loss(
    module: str | None = None,
    /,
    *,
    check: Callable[..., Mapping[str, Any] | None] | Sequence[Callable[..., Any]] = (),
    sums_prefixes: bool = True,
) -> Callable[[Callable[Concatenate[Arguments, P], Tensor]], Callable[P, Tensor]]:
    """Makes a public loss of a body that takes `Arguments` before its own.

    Args:
        module: the name of its module in `fastqt.nn`, if it has one.
        check: raises for arguments that do not fit each other, or several functions that do. Their parameters
            are names of the loss's, of which they are given the values, and `known`, what is known of the
            embeddings. They may return values that the body reads in place of those.
        sums_prefixes: whether the body is called for each prefix of `matryoshka`, with the first columns of
            all embeddings; otherwise it is given the prefixes.
    """

    def declare(body: Callable[Concatenate[Arguments, P], Tensor]) -> Callable[P, Tensor]:
        checks = (check,) if callable(check) else check
        declaration = Declaration(body, module, checks, sums_prefixes)

        def called(*arguments: P.args, **options: P.kwargs) -> Tensor:
            if torch.compiler.is_compiling():
                return declaration.loss_of(*declaration.begun(arguments, options))
            if options.get("group") is not None:
                return declaration.loss_of_ranks(arguments, plain_numbers(options))
            try:
                begun = declaration.begun(arguments, plain_numbers(options))
            except (ValueError, TypeError) as error:
                # So that what the user reads ends here, in a frame that has the loss's name.
                raise error.with_traceback(None) from error.__cause__
            return declaration.loss_of(*begun)

        called.__code__ = called.__code__.replace(co_name=body.__name__)
        functools.update_wrapper(called, body)
        called.__signature__ = declaration.signature  # type: ignore[attr-defined]
        DECLARED[called], declaration.function = declaration, called
        return called

    return declare


def _facts_of_foreign(name: str, x: Tensor) -> dict[str, Hashable]:
    return {f"width of {name}": x.shape[1], f"dtype of {name}": str(x.dtype)}


def _shown(parameter: Parameter, hint: Any) -> Parameter:
    """A parameter as users read it, without what is declared beside its type."""
    if any(typing.get_origin(kind) is typing.Annotated for kind in kinds_of(hint)):
        return parameter.replace(annotation=shown_type(hint))
    return parameter


def _local(ranks: Group, name: str, value: Any) -> Any:
    if isinstance(value, list | tuple):
        return tuple(local_rows(ranks, f"{name}[{i}]" if i else name, x) for i, x in enumerate(value))
    return local_rows(ranks, name, value)


def _columns(value: Any, dim: int) -> Any:
    """The first columns of embeddings."""
    if isinstance(value, list | tuple):
        return tuple(x[..., :dim] for x in value)
    return value[..., :dim] if isinstance(value, Tensor) else value
