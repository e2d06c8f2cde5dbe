"""That the ranks of a group agree on what they are about to do.

Ranks that disagree would wait for each other for ever, or read each other's bytes as something else: a
point-to-point message of a wrong size is received in part without an error. So what a call is made of is
compared between the ranks before anything else travels, when it is first made.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import socket
import threading
import zlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from numbers import Real
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from fastqt.arguments import COLUMNS, check_columns
from fastqt.checks import check_embeddings
from fastqt.distributed import collectives, faults, steps
from fastqt.distributed.batch import Batch
from fastqt.distributed.group import Group, GroupLike, as_group
from fastqt.distributed.local import local_rows, with_a_row
from fastqt.distributed.shards import Shards
from fastqt.torch_modes import input_dtype

# How many kinds of calls a group remembers: more are made only where an option differs in each.
AGREEMENTS = 256
# What ranks with uneven shards exchange at each call: a digest of what they call, and up to four sizes.
HEADER = 5


def agree(
    group: GroupLike | None,
    function: str,
    check: Callable[[Group | None], dict[str, int]],
    facts: Callable[[Group], Mapping[str, Hashable]],
) -> Batch:
    """Checks the arguments of a process, and that all ranks of a group make the same call.

    Args:
        group: what the user gave; None for one process.
        function: the public function.
        check: checks what this rank was given, and returns the number of rows of each argument. A rank may
            have no rows where `with_a_row` says so; None stands for one process.
        facts: by name what has to be the same on all ranks. Floats are compared when such a call is made for
            the first time and may change later, as those of a schedule do, but not between 0 and others. A
            group with check="always" compares everything at every call.

    Raises:
        ValueError, TypeError: what `check` raises at any rank, or ranks that differ. When a call is made for
            the first time all ranks raise the same error, which names the argument and the ranks.
    """
    if group is None:
        return Batch(check(None))
    ranks = as_group(group)
    if torch.compiler.is_compiling():
        return _traced(ranks, check(ranks))
    return _agreed(ranks.of_function(function), check, facts)


class PublicCall:
    """A call of a public loss by this thread; others may be a part of it.

    Attributes:
        path: the names of the functions, from the one that the user has called to this one.
        agreeing: whether it has come to where the ranks agree.
    """

    def __init__(self, *path: str) -> None:
        self.path, self.agreeing = path, False


_thread = threading.local()


def _current() -> PublicCall:
    call: PublicCall | None = getattr(_thread, "call", None)
    return PublicCall() if call is None else call


@contextlib.contextmanager
def public_call(name: str) -> Iterator[PublicCall]:
    """A context in which this thread is in a call of a public function."""
    around = _current()
    call = _thread.call = PublicCall(*around.path, name)
    try:
        yield call
    finally:
        _thread.call = around
        around.agreeing |= call.agreeing


def refuse(group: GroupLike, error: Exception) -> None:
    """Has the other ranks raise what this one has found wrong before it came to agree with them.

    Raises:
        ValueError, TypeError, RuntimeError: as of `agree`, where all ranks raise the same.
    """
    try:
        ranks = as_group(group)
    except (ValueError, TypeError, RuntimeError):
        return  # With no group there is nobody to tell.

    def check(_: Group | None) -> dict[str, int]:
        raise error

    path = _current().path
    _agreed(ranks.of_function(path[-1]), check, lambda ranks: {}, within=path)


def _traced(group: Group, sizes: dict[str, int]) -> Shards:
    """The shards of a call that torch.compile traces, whose graph compares nothing."""
    if group.shards != "equal":
        raise ValueError("group: want shards='equal' under torch.compile, got 'uneven'")
    if group.check == "always":
        raise ValueError(
            "check: want 'first' under torch.compile, whose graphs compare nothing, got 'always'"
        )
    counts = {name: (rows,) * group.size for name, rows in sizes.items()}
    check_columns(counts)
    return Shards(group, counts, False)


def _agreed(
    group: Group,
    check: Callable[[Group | None], dict[str, int]],
    facts_of: Callable[[Group], Mapping[str, Hashable]],
    within: tuple[str, ...]
    | None = None,  # of a call that agrees no more: what others may be about to agree on
) -> Shards:
    faults.forget(group)
    steps.begin(group)
    call = _current()
    call.agreeing = True
    fault: Exception | None = None
    sizes: dict[str, int] = {}
    facts: dict[str, Hashable] = {}
    try:
        sizes = check(group)
        facts = {"group": group.function, **facts_of(group), **group.options()}
    except Exception as error:  # which all ranks raise, whatever it is
        fault = error
    place = (*call.path, group.function)
    key = (place, *[(name, x != 0 if isinstance(x, float) else x) for name, x in facts.items()])
    known = None if fault is not None else group.agreed.get(key)

    if group.check == "always":
        agreed = _agreed_counts(group, fault, facts, sizes)
        if group.shards == "equal" and known is not None:
            _check_unchanged(group, known, sizes, facts)
        return _remembered(Shards(group, agreed, True, key), sizes, facts)

    # Other ranks may be in the midst of a call that is known to them, and do not wait for this rank's check.
    path = place if within is None else within
    before = [other for other in group.agreed if other[0][: len(path)] == path]
    practised = bool(before)
    if fault is not None and practised and group.shards == "equal":
        faults.leave_word(group, fault)
        raise fault
    if group.shards == "equal" and known is not None:
        _check_unchanged(group, known, sizes, facts)
        return Shards(group, {name: (rows,) * group.size for name, rows in sizes.items()}, False, key)

    counts = None
    if group.shards == "uneven" and practised:
        # What is wrong here is another digest, for which the ranks compare everything.
        digest = zlib.crc32(repr(key if fault is None else fault).encode())
        device = dict(before[0][1:])["device"]
        counts = _all_sizes(sizes, digest, group, str(device))
    first_use = known is None or counts is None
    if first_use:
        counts = _agreed_counts(group, fault, facts, sizes)
    assert counts is not None
    return _remembered(Shards(group, counts, first_use, key), sizes, facts)


def _remembered(shards: Shards, sizes: dict[str, int], facts: dict[str, Hashable]) -> Shards:
    """The shards of a call on which all ranks agree, and if they have just agreed, the agreement is kept.

    Raises:
        ValueError: no rank has rows, or a rank has a bool tensor of other columns than there are candidates.
    """
    check_columns(shards.counts)
    agreed = shards.group.agreed
    if shards.first_use:
        if shards.key not in agreed and len(agreed) >= AGREEMENTS:  # All ranks have agreed in the same order.
            del agreed[next(iter(agreed))]
        agreed[shards.key] = tuple(sizes.values())
    for name, rows in shards.counts.items():
        if name not in ("negatives", COLUMNS) and not any(rows):
            raise ValueError(
                f"{_argument(name, facts)}: want at least one row on some rank of the group, got none"
            )
    return shards


def agree_on_rows(
    group: GroupLike | None,
    function: str,
    check: Callable[[int], Mapping[str, Hashable]],
    leaves: Mapping[str, object] = MappingProxyType({}),
    /,
    **embeddings: Tensor,
) -> tuple[Batch, list[Tensor]]:
    """`agree` for a loss of embeddings of which each rank has as many rows; their number is of "rows".

    Args:
        group, function: as of `agree`.
        check: checks the options of so many rows here, and returns those which have to be the same on all
            ranks.
        leaves: by name, further arguments that gradients may flow to.
        **embeddings: this rank's; the first of them sets the rest's number of rows, width and dtype.

    Returns:
        The batch, and this rank's rows of the embeddings.
    """
    rows: dict[str, Tensor] = {}
    options: dict[str, Hashable] = {}

    def check_rows(ranks: Group | None) -> dict[str, int]:
        rows.update(embeddings)
        if ranks is not None:
            rows.update((name, local_rows(ranks, name, x)) for name, x in embeddings.items())
        check_embeddings(**{name: with_a_row(ranks, x) for name, x in rows.items()})

        first = next(iter(rows))
        n = rows[first].shape[0]
        for name, x in rows.items():
            if x.shape[0] != n:
                raise ValueError(f"{name}: want a row for each of the {n} rows of {first}, got {x.shape[0]}")
        options.update(check(n))
        return {"rows": n}

    def facts(ranks: Group) -> Mapping[str, Hashable]:
        return {
            **options,
            "given": tuple(rows),
            **facts_of_embeddings(next(iter(rows.values()))),
            **facts_of_leaves(ranks, {**rows, **leaves}),
        }

    batch = agree(group, function, check_rows, facts)
    return batch, list(rows.values())


def facts_of_embeddings(x: Tensor) -> dict[str, Hashable]:
    """What has to be the same on all ranks of embeddings: their width, dtype and kind of device."""
    return {"width": x.shape[1], "dtype": str(input_dtype(x)), "device": x.device.type}


def facts_of_leaves(group: Group, leaves: Mapping[str, object]) -> dict[str, Hashable]:
    """What has to be the same of arguments that gradients may flow to.

    These are the names of those that want one, since ranks that find none take no part in sums, and the
    values of those that are one number on every rank, such as scale and bias. A tensor's value is that of a
    parameter, which the ranks hold alike, and reading it waits for the device: it is compared only where the
    group compares every call.
    """
    enabled = torch.is_grad_enabled()
    wanting = [name for name, x in leaves.items() if enabled and isinstance(x, Tensor) and x.requires_grad]
    facts: dict[str, Hashable] = {"requires_grad": " and ".join(wanting) or "nothing"}
    for name, x in leaves.items():
        if isinstance(x, Tensor) and x.dim() == 0:
            facts[name] = _shown_alike(float(x)) if group.check == "always" else "a tensor"
        elif isinstance(x, Real):
            facts[name] = _shown_alike(float(x))
    return facts


def _shown_alike(number: float) -> Hashable:
    return "nan" if math.isnan(number) else number  # NaN differs from itself


def _argument(name: str, facts: dict[str, Hashable]) -> str:
    """The argument whose number of rows or columns is counted as `name`."""
    if name == COLUMNS:
        return "exclude"
    names = facts.get("given")
    return str(names[0]) if name == "rows" and isinstance(names, tuple) else name


def _check_unchanged(
    group: Group, known: tuple[int, ...], sizes: dict[str, int], facts: dict[str, Hashable]
) -> None:
    """Raises ValueError unless this rank has as many rows as in the calls before."""
    for before, (name, rows) in zip(known, sizes.items(), strict=True):
        if rows != before:
            counted = "columns" if name == COLUMNS else "rows"
            fault = ValueError(
                f"{_argument(name, facts)}: want {before} {counted} as in the calls before, got {rows}; "
                "give the rows of this process only, or Group(shards='uneven') if their number changes"
            )
            faults.leave_word(group, fault)
            raise fault


def _agreed_counts(
    group: Group, fault: Exception | None, facts: dict[str, Hashable], sizes: dict[str, int]
) -> dict[str, tuple[int, ...]]:
    """Each argument's number of rows at each rank, from ranks that agree on the facts."""
    mine = faults.described(fault), facts, sizes, socket.gethostname()
    everyone = steps.objects(group, "arguments", mine)
    group.machines[:] = [each[3] for each in everyone]
    faults.raise_first([each[0] for each in everyone], fault)
    _check_same([each[1] for each in everyone])
    if group.shards == "equal":
        rows = [
            {_argument(name, facts): size for name, size in each[2].items() if name != COLUMNS}
            for each in everyone
        ]
        _check_same(rows, "number of rows", "; Group(shards='uneven') takes others")
    return {name: tuple(each[2][name] for each in everyone) for name in sizes}


def _all_sizes(
    sizes: dict[str, int], digest: int, group: Group, device: str
) -> dict[str, tuple[int, ...]] | None:
    """Each argument's number of rows at each rank; None if ranks have other digests of the facts."""
    numbers = [digest, *sizes.values()]
    padding = [0] * (HEADER - len(numbers))  # Ranks that differ may have other arguments.
    mine = torch.tensor(numbers + padding, dtype=torch.int64, device=device)
    found = mine.new_empty(group.size * HEADER)
    steps.exchange(group, "numbers of rows", collectives.all_gather, found, mine, group=group.process_group)
    digests, *columns = found.view(group.size, HEADER).T.tolist()
    if any(other != digest for other in digests):
        return None
    return {name: tuple(column) for name, column in zip(sizes, columns, strict=False)}


def _check_same(given: Sequence[Mapping[str, Hashable]], what: str = "value", hint: str = "") -> None:
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
