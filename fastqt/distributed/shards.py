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
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from numbers import Real
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from fastqt.checks import check_embeddings
from fastqt.distributed import collectives, faults, steps
from fastqt.distributed.batch import Batch
from fastqt.distributed.group import Group, GroupLike, as_group
from fastqt.options import Reduction
from fastqt.targets import Rolled, ShardRows, Targets
from fastqt.torch_modes import input_dtype

# How many kinds of calls a group remembers: more are made only where an option differs in each.
AGREEMENTS = 256
# What ranks with uneven shards exchange at each call: a digest of what they call, and up to three sizes.
HEADER = 4
# The errors of arguments, which all ranks raise alike.
SHARED_ERRORS: dict[str, type[Exception]] = {"TypeError": TypeError, "ValueError": ValueError}


# The errors of an exchange, after which the ranks exchange nothing more of the call.
IN_VAIN = faults.ExchangeError, faults.OutOfStepError


class Shards(Batch):
    """The rows of all ranks of a group, of which this rank has some.

    Attributes:
        group: the ranks.
        counts: by the argument's name, the number of its rows at each rank.
        first_use: whether the ranks have agreed on such a call just now.
        key: what they have agreed on.
    """

    is_of_process = False

    def __init__(
        self, group: Group, counts: Mapping[str, tuple[int, ...]], first_use: bool, key: Hashable = None
    ) -> None:
        super().__init__({name: rows[group.rank] for name, rows in counts.items()})
        self.group, self.counts, self.first_use, self.key = group, counts, first_use, key

    def of(self, **names: str) -> Shards:
        counts = {new: self.counts[old] for new, old in names.items()}
        return Shards(self.group, counts, self.first_use, self.key)

    def total(self, of: str = "rows") -> int:
        return sum(self.counts[of])

    def first(self, of: str = "rows") -> int:
        return sum(self.counts[of][: self.group.rank])

    def local(self, name: str, x: Tensor) -> Tensor:
        return local_rows(self.group, name, x)

    def leaving_word(self) -> contextlib.AbstractContextManager[None]:
        return faults.leaving_word(self.group)

    def gather(self, x: Tensor, of: str = "rows", dtype: torch.dtype | None = None) -> Tensor:
        return collectives.gather(x, self.counts[of], self.group, dtype)

    def rolled(self, x: Tensor, of: str = "rows") -> Tensor:
        return x.roll(-self.first(of), 0)

    def gather_own_first(self, x: Tensor, of: str = "rows", dtype: torch.dtype | None = None) -> Tensor:
        return self.rolled(self.gather(x, of, dtype), of)

    def gather_constant(self, x: Tensor, of: str = "rows") -> Tensor:
        return collectives.gather_constant(x, self.counts[of], self.group)

    def gather_constant_own_first(self, x: Tensor, of: str = "rows") -> Tensor:
        return self.rolled(self.gather_constant(x, of), of)

    def log_add_up(self, x: Tensor, of: str = "rows") -> Tensor:
        first = self.first(of)
        return collectives.log_add_up(x.roll(first, 0), self.group).roll(-first, 0)

    def of_first_rank(self, x: Tensor) -> Tensor:
        return collectives.of_first_rank(x, self.group)

    def sum_over_ranks(self, x: Tensor) -> Tensor:
        return collectives.gather(x[None], (1,) * self.group.size, self.group).sum(0)

    def sum_of_constants(self, x: Tensor) -> Tensor:
        return collectives.gather_constant(x[None], (1,) * self.group.size, self.group).sum(0)

    def sum_of_lengths(self, length: int, device: torch.device) -> int | Tensor:
        if self.group.shards == "equal":
            return length * self.group.size
        return collectives.add_up(torch.tensor(length, device=device), self.group)

    def sum_of_counts(self, count: int | Tensor, device: torch.device) -> int | Tensor:
        return collectives.add_up(torch.as_tensor(count, device=device), self.group).clamp(min=1)

    def targets(self, targets: Targets, queries: str = "rows", candidates: str = "rows") -> Targets:
        own = self.first(candidates), self.first(candidates) + self.sizes[candidates]
        within = own if self.group.edges == "cut" else (0, self.total(candidates))
        gather = partial(self.gather_constant, of=queries)
        rows = ShardRows(self.first(queries), self.total(queries), self.total(candidates), within, gather)
        return targets.of_shard(rows)

    def own_first(
        self, targets: Targets, diagonal: str, queries: str = "rows", candidates: str = "rows"
    ) -> Targets:
        N, M, first = self.total(queries), self.total(candidates), self.first(queries)
        if diagonal != "keep" and N > M:
            raise ValueError(
                f"diagonal: want 'keep' in a group with more queries (N={N}) than candidates (M={M}), "
                f"got {diagonal!r}"
            )
        return Rolled(targets, first) if first else targets

    def loss(
        self,
        reduction: Reduction,
        leaves: Iterable[object],
        compute: Callable[[str], Tensor],
        of: str = "rows",
    ) -> Tensor:
        with self.agreeing():
            if self.sizes[of]:
                local = compute(self.local_reduction(reduction))
            else:
                local = collectives.nothing(leaves, reduction)
        return self.whole(local, reduction, of)

    def local_reduction(self, reduction: Reduction) -> Reduction:
        return "none" if reduction == "none" else "sum"

    def whole(self, local: Tensor, reduction: Reduction, of: str = "rows") -> Tensor:
        return collectives.reduced(local, reduction, self.total(of), self.group)

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


def _traced(group: Group, sizes: dict[str, int]) -> Shards:
    """The shards of a call that torch.compile traces, whose graph compares nothing."""
    if group.shards != "equal":
        raise ValueError("group: want shards='equal' under torch.compile, got 'uneven'")
    if group.check == "always":
        raise ValueError(
            "check: want 'first' under torch.compile, whose graphs compare nothing, got 'always'"
        )
    return Shards(group, {name: (rows,) * group.size for name, rows in sizes.items()}, False)


def _agreed(
    group: Group,
    check: Callable[[Group | None], dict[str, int]],
    facts_of: Callable[[Group], Mapping[str, Hashable]],
) -> Shards:
    faults.forget(group)
    steps.begin(group)
    fault: Exception | None = None
    sizes: dict[str, int] = {}
    facts: dict[str, Hashable] = {}
    try:
        sizes = check(group)
        facts = {"group": group.function, **facts_of(group), **group.options()}
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
    practised = known is not None or any(other[0] == ("group", group.function) for other in group.agreed)
    if fault is not None and practised:
        faults.leave_word(group, fault)
        raise fault
    if group.shards == "equal" and known is not None:
        _check_unchanged(group, known, sizes, facts)
        return Shards(group, {name: (rows,) * group.size for name, rows in sizes.items()}, False, key)

    counts = None
    if group.shards == "uneven" and practised:
        counts = _all_sizes(sizes, zlib.crc32(repr(key).encode()), group, str(facts["device"]))
    first_use = known is None or counts is None
    if first_use:
        counts = _agreed_counts(group, fault, facts, sizes)
    assert counts is not None
    return _remembered(Shards(group, counts, first_use, key), sizes, facts)


def _remembered(shards: Shards, sizes: dict[str, int], facts: dict[str, Hashable]) -> Shards:
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


def with_a_row(ranks: Group | None, x: Any) -> Any:
    """A matrix without rows, which a rank of uneven shards may have, with one row; others as they are."""
    if ranks is None or ranks.shards != "uneven":
        return x
    empty = isinstance(x, Tensor) and x.dim() > 1 and not len(x)
    return x.new_empty(1, *x.shape[1:]) if empty else x


def _shown_alike(number: float) -> Hashable:
    return "nan" if math.isnan(number) else number  # NaN differs from itself


def _argument(name: str, facts: dict[str, Hashable]) -> str:
    """The argument whose number of rows is counted as `name`."""
    names = facts.get("given")
    return str(names[0]) if name == "rows" and isinstance(names, tuple) else name


def _check_unchanged(
    group: Group, known: tuple[int, ...], sizes: dict[str, int], facts: dict[str, Hashable]
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
    group: Group, fault: Exception | None, facts: dict[str, Hashable], sizes: dict[str, int]
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


def local_rows(ranks: Group | None, name: str, x: Tensor) -> Tensor:
    """A rank's own rows of a tensor, of which a DTensor holds a part; in one process the tensor itself.

    Raises:
        ValueError: a DTensor that is not sharded by its rows alone.
    """
    # Whoever has made a DTensor has imported its module, which takes a second.
    module = sys.modules.get("torch.distributed.tensor")
    if ranks is None or module is None or not isinstance(x, module.DTensor):
        return x
    if len(x.placements) != 1 or not x.placements[0].is_shard(0):
        raise ValueError(f"{name}: want a DTensor of placements (Shard(0),), got {tuple(x.placements)}")
    local: Tensor = x.to_local()
    return local
