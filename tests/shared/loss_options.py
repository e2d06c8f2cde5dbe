"""Every option of every public loss, as its signature has it, with values that it may have."""

from __future__ import annotations

import itertools
import typing
from collections.abc import Callable, Iterator
from functools import cache
from inspect import Parameter, signature, unwrap
from typing import Any, Literal

import torch
from torch import Tensor

import fastqt
from tests.shared.every_loss import EVERY_LOSS, D
from tests.shared.filters import OF_IDS

N = 6  # rows
LOSSES = sorted(name for name in fastqt.__all__ if name.endswith("_loss") or name == "log_sum_exp")
Options = dict[str, Any]


def rows(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# Values that are not the default. Those of flags, choices and plain numbers follow from type and default.
VALUES: dict[str, Callable[[], list[Any]]] = {
    "beta": lambda: [0.0, 2.0],
    "bias": lambda: [-0.5, torch.tensor(0.5, dtype=torch.float64)],
    "candidate_labels": lambda: [torch.arange(N) // 3],
    "candidates": lambda: [rows(N, D, seed=1)],
    "context_size": lambda: [2],
    "directions": lambda: [
        ["query_to_doc", "query_to_query"],
        ["query_to_doc", "doc_to_query"],
        ["query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc"],
    ],
    "document_ids": lambda: [torch.tensor([0, 0, 0, 0, 1, 1])],
    "document_mask": lambda: [torch.arange(4) < torch.arange(2 * N)[:, None] % 3 + 1],
    "generator": lambda: [torch.Generator().manual_seed(1)],
    "guide_negatives": lambda: [rows(N, D, seed=9)],
    "hardness_strength": lambda: [3.0],
    "mask": lambda: [torch.arange(4) < torch.arange(N)[:, None] % 3 + 2],
    "matryoshka": lambda: [[3, 8], fastqt.Matryoshka([8, 3], [2.0, 0.5])],
    "memory": lambda: ["low"],
    "negatives": lambda: [rows(N, D, seed=2)],
    "query_mask": lambda: [torch.arange(4) < torch.arange(N)[:, None] % 3 + 1],
    "row_negatives": lambda: [rows(N, D, seed=3), rows(N, 2, D, seed=4), fastqt.Mixed(0.3)],
    "row_scores": lambda: [rows(N, seed=5), rows(N, 2, seed=6)],
    "samples": lambda: [3],
    "scale": lambda: [3.0, torch.tensor(2.5, dtype=torch.float64)],
    "targets": lambda: [torch.arange(N).roll(2), fastqt.Window(2), fastqt.smoothed(fastqt.Window(), 0.1)],
    "sigma": lambda: [0.5],
    "tau_plus": lambda: [0.02, torch.linspace(0.01, 0.05, N, dtype=torch.float64)],
    "teacher_candidates": lambda: [rows(N, D + 3, seed=11)],
    "z3": lambda: [None, rows(N, D, seed=13)],
}
# Engines that a CPU has without the extension.
BACKENDS = ("torch", "reference")
# Arguments beside those that a loss has to be given, without which some of its options do not count.
MORE: dict[str, Callable[[], Options]] = {
    "multiple_negatives_ranking_loss": lambda: {
        "documents": [rows(N, D, seed=15) / 16, rows(N, D, seed=16) / 16]
    },
    "simcse_loss": lambda: {"z3": rows(N, 2, D, seed=14)},
    "spread_out_loss": lambda: {"embeddings": rows(N, D, seed=17).abs()},
}
# What is given together or not at all.
TOGETHER = (
    ("candidates", "candidate_labels"),
    ("candidates", "teacher_candidates"),
    ("negatives", "guide_negatives"),
)


@cache
def filters(name: str) -> dict[str, Any]:
    """Values of `exclude` that a loss takes, each with its name, no two of which take out the same cells."""
    ids, M, K = torch.arange(N), 2 * N if name == "maxsim_loss" else N, N
    columns = torch.arange(M)
    found = {
        "Margin": fastqt.Margin(-0.2),
        "Margin, relative": fastqt.Margin(-0.7, "relative"),
        **{kind.__name__: kind(ids * 2 % 5, columns * 2 % 5 // 2) for kind in OF_IDS},
        "Same of other ids": fastqt.Same(ids // 2, columns.roll(2) // 2),
        **{
            f"{kind.__name__} of negatives": kind(ids // 3, columns // 3, torch.arange(K) % 2)
            for kind in OF_IDS
        },
        "Guide": fastqt.Guide(rows(N, 3, seed=7), rows(N, 3, seed=8)),
        "Above": fastqt.Above(rows(N, seed=12) - 1),
        "Padding": fastqt.Padding(torch.arange(2) < torch.arange(N)[:, None] % 3),
        "mask": torch.eye(N, M).roll(2, 0).bool(),
        "Same twice": [fastqt.Same(ids % 4, columns % 4), fastqt.Same(ids % 3, columns % 3)],
        "Same and Within": [fastqt.Same(ids % 2, columns % 2), fastqt.Within(ids // 4, columns // 4)],
        "Margin and Same": [fastqt.Margin(0.1), fastqt.Same(ids % 4, columns % 4)],
        "mask and Same": [torch.eye(N, M).roll(2, 0).bool(), fastqt.Same(ids % 3, columns % 3)],
    }
    if M == N:
        found |= {f"{kind.__name__} of pairs": kind(ids % 5 // 4 + ids % 2 * 2) for kind in OF_IDS}
    if "negatives" not in parameters(name):
        found = {what: x for what, x in found.items() if "of negatives" not in what}
    return {what: x for what, x in found.items() if _is_taken(name, x)}


def _is_taken(name: str, exclude: Any) -> bool:
    """Whether a loss has filters of this kind, whatever else it says of them."""
    try:
        getattr(fastqt, name)(**inputs(name), exclude=exclude)
    except ValueError as error:
        return not str(error).startswith("exclude: this loss takes ")
    return True


@cache
def parameters(name: str) -> dict[str, Parameter]:
    return dict(signature(getattr(fastqt, name)).parameters)


def option_names(name: str) -> list[str]:
    return [key for key, p in parameters(name).items() if p.default is not p.empty and key != "group"]


@cache
def types_of(name: str, argument: str) -> tuple[Any, ...]:
    function = unwrap(getattr(fastqt, name))
    hint = typing.get_type_hints(function, localns={"GroupLike": Any, "Negatives": Any})[argument]
    several = typing.get_origin(hint) not in (None, Literal) and type(None) in typing.get_args(hint)
    return typing.get_args(hint) if several else (hint,)


def values(name: str, option: str) -> list[Any]:
    """Values of an option of a loss, none of them the default."""
    default, kinds = parameters(name)[option].default, types_of(name, option)
    if option == "backend":
        return list(BACKENDS)
    if bool in kinds:
        return [not default]
    if option in ("negatives", "guide_negatives") and name == "gist_embed_loss":
        return [rows(N, D, seed=2)]
    if option == "exclude":
        return list(filters(name).values())
    choices = [x for kind in kinds if typing.get_origin(kind) is Literal for x in typing.get_args(kind)]
    if choices:
        return [x for x in choices if x != default]
    return VALUES[option]() if option in VALUES else [default * 0.7 or 0.3]


def inputs(name: str) -> Options:
    """The arguments that a loss has to be given, in float64."""
    given = EVERY_LOSS[name].inputs(N, torch.Generator().manual_seed(0), False)
    needed = {key: x for key, x in given.items() if parameters(name)[key].default is Parameter.empty}
    found: Options = {key: x.double() if x.is_floating_point() else x for key, x in needed.items()}
    return found | MORE.get(name, dict)()


def units(name: str) -> list[tuple[str, ...]]:
    """The options, where those that are given together are one."""
    names = option_names(name)
    pairs = [pair for pair in TOGETHER if set(pair) <= set(names)]
    return [*pairs, *[(x,) for x in names if not any(x in pair for pair in pairs)]]


def combinations(name: str, most: int, without: tuple[str, ...] = ()) -> Iterator[Options]:
    """All values of up to `most` options at once."""
    chosen_from = [unit for unit in units(name) if not set(unit) & set(without)]
    for count in range(most + 1):
        for chosen in itertools.combinations(chosen_from, count):
            pairs = [[(o, x) for x in values(name, o)] for unit in chosen for o in unit]
            yield from map(dict, itertools.product(*pairs))


def cut(given: Options, width: int) -> Options:
    """The same arguments with the first columns of all embeddings."""

    def narrow(x: Any) -> Any:
        if isinstance(x, list):
            return [narrow(y) for y in x]
        wide = isinstance(x, Tensor) and x.is_floating_point() and x.dim() >= 2 and x.shape[-1] == D
        return x[..., :width] if wide else x

    return {key: narrow(x) for key, x in given.items()}


def outcome(name: str, given: Options, prepare: Callable[[Options], Options] = dict) -> list[Tensor]:
    """The value of a loss, and the gradients of all of its arguments of floating point.

    Args:
        name: the loss.
        given: its arguments.
        prepare: makes of the leaves of a graph what the loss is called with.

    Raises:
        ValueError, TypeError: as of the loss.
    """
    wanted: list[Tensor] = []

    def leaf(x: Any) -> Any:
        if isinstance(x, list):
            return [leaf(y) for y in x]
        if isinstance(x, torch.Generator):
            return torch.Generator().manual_seed(1)
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return x
        wanted.append(x.detach().clone().requires_grad_())
        return wanted[-1]

    torch.manual_seed(3)  # of what is drawn without a generator
    value = getattr(fastqt, name)(**prepare({key: leaf(x) for key, x in given.items()}))
    if not value.requires_grad:
        return [value]
    weights = torch.linspace(0.5, 1.5, value.numel(), dtype=value.dtype).view(value.shape)
    found = torch.autograd.grad((value * weights).sum(), wanted, allow_unused=True, materialize_grads=True)
    return [value.detach(), *found]


def shown(options: Options) -> str:
    return ", ".join(
        f"{key}={tuple(x.shape) if isinstance(x, Tensor) else x!r}" for key, x in options.items()
    )
