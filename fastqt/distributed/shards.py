"""How a batch lies on the ranks of a group, and that the ranks agree on what they are about to do.

Ranks that disagree would wait for each other for ever, or read each other's bytes as something else: a
point-to-point message of a wrong size is received in part without an error. So what a call is made of is
compared between the ranks before anything else travels, when it is first made.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fastqt.checks import check_embeddings, input_dtype
from fastqt.distributed.collectives import all_gather, gather_constant
from fastqt.distributed.group import Group
from fastqt.targets import ShardRows


class Shards(NamedTuple):
    """How many rows of each argument each rank has.

    Attributes:
        group: the ranks.
        counts: by the argument's name, the number of its rows at each rank.
        first_use: whether the ranks have agreed on such a call just now.
    """

    group: Group
    counts: dict[str, tuple[int, ...]]
    first_use: bool

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
        """
        fault: Exception | None = None
        try:
            yield
        except (ValueError, TypeError) as error:
            if not self.first_use:
                raise
            fault = error
        if self.first_use:
            _raise_faults(_exchanged(_fault(fault), self.group))


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
            what has to be the same on all ranks.

    Raises:
        ValueError, TypeError: what `check` raises at any rank, or ranks that differ. When a call is made for
            the first time all ranks raise the same error, which names the argument and the ranks.
    """
    if torch.compiler.is_compiling():
        sizes, _ = check()
        if group.shards != "equal":
            raise ValueError("group: want shards='equal' under torch.compile, got 'uneven'")
        return Shards(group, {name: (rows,) * group.size for name, rows in sizes.items()}, False)
    fault: Exception | None = None
    sizes, facts = {}, {}
    try:
        sizes, given = check()
        facts = {"group": function, **given, **group.options()}
    except (ValueError, TypeError) as error:
        fault = error
    key = tuple(facts.items())
    known = group.agreed.get(key)
    if known is None:
        everyone = _exchanged((_fault(fault), facts, sizes), group)
        _raise_faults([each[0] for each in everyone])
        _check_same([each[1] for each in everyone])
        if group.shards == "equal":
            _check_same(
                [each[2] for each in everyone], "number of rows", "; Group(shards='uneven') takes others"
            )
        group.agreed[key] = tuple(sizes.values())
    elif fault is not None:
        raise fault
    if group.shards == "uneven":
        counts = _all_sizes(tuple(sizes.values()), group, facts["device"])
        return Shards(group, dict(zip(sizes, counts, strict=True)), known is None)
    if known is not None and known != tuple(sizes.values()):
        now = dict(zip(sizes, zip(known, sizes.values(), strict=True), strict=True))
        name, (before, given_rows) = next(item for item in now.items() if item[1][0] != item[1][1])
        raise ValueError(
            f"{name}: want {before} rows as in the calls before, got {given_rows}; "
            "Group(shards='uneven') takes numbers of rows that change"
        )
    return Shards(group, {name: (rows,) * group.size for name, rows in sizes.items()}, known is None)


def agree_on_rows(
    group: Group,
    function: str,
    check: Callable[[], Mapping[str, Hashable]],
    leaves: Iterable[object] = (),
    /,
    **embeddings: Tensor | None,
) -> Shards:
    """`agree` for a loss of embeddings of which each rank has as many rows; the counts are of "rows".

    Args:
        group, function: as of `agree`.
        check: checks the options, and returns those which have to be the same on all ranks.
        leaves: further tensors that gradients may flow to.
        **embeddings: this rank's; the first of them sets the rest's number of rows, width and dtype.
    """

    def checked() -> tuple[dict[str, int], Mapping[str, Hashable]]:
        given = {name: x for name, x in embeddings.items() if x is not None}
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
            "gradients of": wanting_gradients((*given.values(), *leaves)),
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
    empty = isinstance(x, Tensor) and x.dim() == 2 and not len(x) and group.shards == "uneven"
    return x.new_empty(1, x.shape[1]) if empty else x


def wanting_gradients(leaves: Iterable[object]) -> tuple[bool, ...]:
    """Of each leaf, whether a gradient is to be found: ranks that find none would not take part in sums."""
    enabled = torch.is_grad_enabled()
    return tuple(enabled and isinstance(x, Tensor) and x.requires_grad for x in leaves)


def _all_sizes(sizes: tuple[int, ...], group: Group, device: Any) -> list[tuple[int, ...]]:
    """Each argument's number of rows at each rank."""
    mine = torch.tensor(sizes, dtype=torch.int64, device=device)
    found = mine.new_empty(group.size * len(sizes))
    all_gather(found, mine, group=group.process_group)
    return [tuple(column) for column in found.view(group.size, -1).T.tolist()]


def _exchanged(mine: Any, group: Group) -> list[Any]:
    found: list[Any] = [None] * group.size
    dist.all_gather_object(found, mine, group=group.process_group)
    return found


def _fault(error: Exception | None) -> tuple[str, str] | None:
    return (
        None if error is None else ("TypeError" if isinstance(error, TypeError) else "ValueError", str(error))
    )


def _raise_faults(faults: list[tuple[str, str] | None]) -> None:
    """Raises the first rank's error, and says on which ranks it is, if not on all."""
    first = next((fault for fault in faults if fault is not None), None)
    if first is None:
        return
    kind, text = first
    ranks = [rank for rank, fault in enumerate(faults) if fault == first]
    if len(ranks) < len(faults):
        text += f" (on {_named(ranks)} of {len(faults)})"
    raise (TypeError if kind == "TypeError" else ValueError)(text)


def _check_same(given: list[dict[str, Any]], what: str = "value", hint: str = "") -> None:
    """Raises ValueError for the first name under which not all ranks have the same."""
    for name in dict.fromkeys(itertools.chain(*given)):
        values = [each.get(name) for each in given]
        if all(value == values[0] for value in values):
            continue
        having: dict[Any, list[int]] = {}
        for rank, value in enumerate(values):
            having.setdefault(value, []).append(rank)
        shown = " and ".join(f"{value} on {_named(ranks)}" for value, ranks in having.items())
        raise ValueError(f"{name}: want the same {what} on all ranks of the group, got {shown}{hint}")


def _named(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


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
