"""How a batch lies on the ranks of a group, and that the ranks agree on what they are about to do.

Ranks that disagree would wait for each other for ever, or read each other's bytes as something else: a
point-to-point message of a wrong size is received in part without an error. So what a call is made of is
compared between the ranks before anything else travels, when it is first made.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import socket
import sys
import zlib
from collections.abc import Callable, Hashable, Iterator, Mapping
from numbers import Real
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastqt.checks import check_embeddings, input_dtype
from fastqt.distributed import faults, steps
from fastqt.distributed.collectives import all_gather, gather_constant
from fastqt.distributed.group import Group
from fastqt.targets import ShardRows

# How many kinds of calls a group remembers: more are made only where an option differs in each.
AGREEMENTS = 256
# What ranks with uneven shards exchange at each call: a digest of what they call, and up to three sizes.
HEADER = 4
# The errors of arguments, which all ranks raise alike.
SHARED_ERRORS: dict[str, type[Exception]] = {"TypeError": TypeError, "ValueError": ValueError}


# The errors of an exchange, after which the ranks exchange nothing more of the call.
IN_VAIN = faults.ExchangeError, faults.OutOfStepError


class Shards(NamedTuple):
    """How many rows of each argument each rank has.

    Attributes:
        group: the ranks.
        counts: by the argument's name, the number of its rows at each rank.
        first_use: whether the ranks have agreed on such a call just now.
        key: what they have agreed on.
    """

    group: Group
    counts: dict[str, tuple[int, ...]]
    first_use: bool
    key: Hashable = None

    def total(self, name: str) -> int:
        """The number of rows of all ranks."""
        return sum(self.counts[name])

    def first(self, name: str) -> int:
        """The index of this rank's first row in the batch."""
        return sum(self.counts[name][: self.group.rank])

    @contextlib.contextmanager
    def agreeing(self) -> Iterator[None]:
        """A context whose errors all ranks raise, on first use.

        Raises:
            ValueError, TypeError: what a rank raises in the context; the message names the ranks.
            RuntimeError: a rank raises another error.
        """
        fault: Exception | None = None
        try:
            yield
        except Exception as error:
            if not self.first_use or isinstance(error, IN_VAIN):
                faults.leave_word(self.group, error)
                raise
            fault = error
        if self.first_use:
            found = steps.objects(self.group, "errors", _fault(fault))
            if any(found):
                self.group.agreed.pop(self.key, None)  # The next such call is checked on all ranks again.
            _raise_faults(found, fault)


def agree(
    group: Group,
    function: str,
    check: Callable[[], tuple[dict[str, int], Mapping[str, Hashable]]],
) -> Shards:
    """Checks a rank's arguments, and that all ranks make the same call.

    Args:
        group: the ranks.
        function: the public function.
        check: checks what this rank was given, and returns the number of rows of each argument, and by name
            what has to be the same on all ranks. Floats are compared when such a call is made for the first
            time and may change later, as those of a schedule do, but not between 0 and others. A group with
            check="always" compares everything at every call.

    Raises:
        ValueError, TypeError: what `check` raises at any rank, or ranks that differ. When a call is made for
            the first time all ranks raise the same error, which names the argument and the ranks.
    """
    if torch.compiler.is_compiling():
        sizes, _ = check()
        if group.shards != "equal":
            raise ValueError("group: want shards='equal' under torch.compile, got 'uneven'")
        if group.check == "always":
            raise ValueError(
                "check: want 'first' under torch.compile, whose graphs compare nothing, got 'always'"
            )
        return Shards(group, {name: (rows,) * group.size for name, rows in sizes.items()}, False)
    group = group.of_function(function)
    faults.forget(group)
    steps.begin(group)
    fault: Exception | None = None
    sizes, facts = {}, {}
    try:
        sizes, given = check()
        facts = {"group": function, **given, **group.options()}
    except (ValueError, TypeError) as error:
        fault = error
    key = tuple((name, x != 0 if isinstance(x, float) else x) for name, x in facts.items())
    known = None if fault is not None else group.agreed.get(key)
    if group.check == "always":
        agreed = _agreed_counts(group, fault, facts, sizes)
        if group.shards == "equal" and known is not None:
            _check_unchanged(group, known, sizes, facts)
        return _remembered(Shards(group, agreed, True, key), sizes, facts)
    # Other ranks may be in the midst of a call that is known to them, and do not wait for this rank's check.
    practised = known is not None or any(other[0] == ("group", function) for other in group.agreed)
    if fault is not None and practised:
        faults.leave_word(group, fault)
        raise fault
    if group.shards == "equal" and known is not None:
        _check_unchanged(group, known, sizes, facts)
        return Shards(group, {name: (rows,) * group.size for name, rows in sizes.items()}, False, key)
    counts = None
    if group.shards == "uneven" and practised:
        counts = _all_sizes(sizes, zlib.crc32(repr(key).encode()), group, facts["device"])
    first_use = known is None or counts is None
    if first_use:
        counts = _agreed_counts(group, fault, facts, sizes)
    assert counts is not None
    return _remembered(Shards(group, counts, first_use, key), sizes, facts)


def _remembered(shards: Shards, sizes: dict[str, int], facts: dict[str, Any]) -> Shards:
    """The shards of a call on which all ranks agree, and if they have just agreed, the agreement is kept.

    Raises:
        ValueError: no rank has rows.
    """
    agreed = shards.group.agreed
    if shards.first_use:
        if shards.key not in agreed and len(agreed) >= AGREEMENTS:  # All ranks have agreed in the same order.
            del agreed[next(iter(agreed))]
        agreed[shards.key] = tuple(sizes.values())
    for name, rows in shards.counts.items():
        if name != "negatives" and not any(rows):
            raise ValueError(
                f"{_argument(name, facts)}: want at least one row on some rank of the group, got none"
            )
    return shards


def agree_on_rows(
    group: Group,
    function: str,
    check: Callable[[], Mapping[str, Hashable]],
    leaves: Mapping[str, object] = MappingProxyType({}),
    /,
    **embeddings: Tensor | None,
) -> Shards:
    """`agree` for a loss of embeddings of which each rank has as many rows; the counts are of "rows".

    Args:
        group, function: as of `agree`.
        check: checks the options, and returns those which have to be the same on all ranks.
        leaves: by name, further arguments that gradients may flow to.
        **embeddings: this rank's; the first of them sets the rest's number of rows, width and dtype.
    """

    def checked() -> tuple[dict[str, int], Mapping[str, Hashable]]:
        given = {name: local_rows(name, x) for name, x in embeddings.items() if x is not None}
        check_embeddings(**{name: with_a_row(group, x) for name, x in given.items()})
        first, *rest = given.items()
        for name, x in rest:
            if len(x) != len(first[1]):
                raise ValueError(
                    f"{name}: want a row for each of the {len(first[1])} rows of {first[0]}, got {len(x)}"
                )
        return {"rows": len(first[1])}, {
            **check(),
            "given": tuple(given),
            "width": first[1].shape[1],
            "dtype": str(input_dtype(first[1])),
            "device": first[1].device.type,
            "requires_grad": wanting_gradients({**given, **leaves}),
            **numbers(group, leaves),
        }

    return agree(group, function, checked)


def shard_rows(shards: Shards, queries: str, candidates: str) -> ShardRows:
    """This rank's rows of the batch as targets know them; the names are of `Shards.counts`."""
    first, M = shards.first(candidates), shards.total(candidates)
    own = first, first + shards.counts[candidates][shards.group.rank]

    def gather(ids: Tensor) -> Tensor:
        return gather_constant(ids, shards.counts[queries], shards.group)

    within = own if shards.group.edges == "cut" else (0, M)
    return ShardRows(shards.first(queries), shards.total(queries), M, within, gather)


def with_a_row(group: Group, x: Any) -> Any:
    """A matrix without rows, which a rank of uneven shards may have, with one row; others as they are."""
    empty = isinstance(x, Tensor) and x.dim() > 1 and not len(x) and group.shards == "uneven"
    return x.new_empty(1, *x.shape[1:]) if empty else x


def numbers(group: Group, given: Mapping[str, object]) -> dict[str, Hashable]:
    """By name, the arguments that are one number on every rank, such as scale and bias, to be compared.

    A tensor's value is that of a parameter, which the ranks hold alike, and reading it waits for the device:
    it is compared only where the group compares every call.
    """
    found: dict[str, Hashable] = {}
    for name, x in given.items():
        if isinstance(x, Tensor) and x.dim() == 0:
            found[name] = _shown_alike(float(x)) if group.check == "always" else "a tensor"
        elif isinstance(x, Real):
            found[name] = _shown_alike(float(x))
    return found


def _shown_alike(number: float) -> Hashable:
    return "nan" if math.isnan(number) else number  # NaN differs from itself


def wanting_gradients(leaves: Mapping[str, object]) -> str:
    """The names of leaves whose gradient is to be found: ranks that find none take no part in sums."""
    enabled = torch.is_grad_enabled()
    wanting = [name for name, x in leaves.items() if enabled and isinstance(x, Tensor) and x.requires_grad]
    return " and ".join(wanting) or "nothing"


def _argument(name: str, facts: dict[str, Any]) -> str:
    """The argument whose number of rows is counted as `name`."""
    return str(facts["given"][0]) if name == "rows" else name


def _check_unchanged(
    group: Group, known: tuple[int, ...], sizes: dict[str, int], facts: dict[str, Any]
) -> None:
    """Raises ValueError unless this rank has as many rows as in the calls before."""
    for before, (name, rows) in zip(known, sizes.items(), strict=True):
        if rows != before:
            fault = ValueError(
                f"{_argument(name, facts)}: want {before} rows as in the calls before, got {rows}; "
                "give the rows of this process only, or Group(shards='uneven') if their number changes"
            )
            faults.leave_word(group, fault)
            raise fault


def _agreed_counts(
    group: Group, fault: Exception | None, facts: dict[str, Any], sizes: dict[str, int]
) -> dict[str, tuple[int, ...]]:
    """Each argument's number of rows at each rank, from ranks that agree on the facts."""
    mine = _fault(fault), facts, sizes, socket.gethostname()
    everyone = steps.objects(group, "arguments", mine)
    group.machines[:] = [each[3] for each in everyone]
    _raise_faults([each[0] for each in everyone], fault)
    _check_same([each[1] for each in everyone])
    if group.shards == "equal":
        given = [{_argument(name, facts): rows for name, rows in each[2].items()} for each in everyone]
        _check_same(given, "number of rows", "; Group(shards='uneven') takes others")
    return {name: tuple(each[2][name] for each in everyone) for name in sizes}


def _all_sizes(
    sizes: dict[str, int], digest: int, group: Group, device: Any
) -> dict[str, tuple[int, ...]] | None:
    """Each argument's number of rows at each rank; None if ranks have other digests of the facts."""
    numbers = [digest, *sizes.values()]
    padding = [0] * (HEADER - len(numbers))  # Ranks that differ may have other arguments.
    mine = torch.tensor(numbers + padding, dtype=torch.int64, device=device)
    found = mine.new_empty(group.size * HEADER)
    steps.exchange(group, "numbers of rows", all_gather, found, mine, group=group.process_group)
    digests, *columns = found.view(group.size, HEADER).T.tolist()
    if any(other != digest for other in digests):
        return None
    return {name: tuple(column) for name, column in zip(sizes, columns, strict=False)}


def _fault(error: Exception | None) -> tuple[str, str] | None:
    """The kind of an error and its message, for the other ranks."""
    if error is None:
        return None
    kind = next((kind for kind in SHARED_ERRORS if isinstance(error, SHARED_ERRORS[kind])), None)
    return (kind, str(error)) if kind else ("RuntimeError", f"{type(error).__name__}: {error}")


def _raise_faults(given: list[tuple[str, str] | None], own: Exception | None) -> None:
    """Raises the first rank's error, and says on which ranks it is, if not on all.

    Args:
        given: of each rank, the kind and the message of its error.
        own: this rank's.
    """
    first = next((fault for fault in given if fault is not None), None)
    if first is None:
        return
    kind, text = first
    if kind == "RuntimeError" and own is not None:
        raise own
    ranks = [rank for rank, fault in enumerate(given) if fault == first]
    if len(ranks) < len(given):
        text += f" (on {faults.named(ranks)} of {len(given)})"
    raise SHARED_ERRORS.get(kind, RuntimeError)(text) from own


def _check_same(given: list[dict[str, Any]], what: str = "value", hint: str = "") -> None:
    """Raises ValueError for the first name under which not all ranks have the same."""
    for name in dict.fromkeys(itertools.chain(*given)):
        values = [each.get(name) for each in given]
        if all(value == values[0] for value in values):
            continue
        having: dict[Any, list[int]] = {}
        for rank, value in enumerate(values):
            having.setdefault(value, []).append(rank)
        shown = " and ".join(f"{value} on {faults.named(ranks)}" for value, ranks in having.items())
        raise ValueError(f"{name}: want the same {what} on all ranks of the group, got {shown}{hint}")


def local_rows(name: str, x: Tensor) -> Tensor:
    """A rank's own rows of a tensor, of which a DTensor holds a part.

    Raises:
        ValueError: a DTensor that is not sharded by its rows alone.
    """
    # Whoever has made a DTensor has imported its module, which takes a second.
    module = sys.modules.get("torch.distributed.tensor")
    if module is None or not isinstance(x, module.DTensor):
        return x
    if len(x.placements) != 1 or not x.placements[0].is_shard(0):
        raise ValueError(f"{name}: want a DTensor of placements (Shard(0),), got {tuple(x.placements)}")
    local: Tensor = x.to_local()
    return local
