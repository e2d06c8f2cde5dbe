"""What an error says when ranks wait for each other in vain.

torch's own error of a failed collective names no rank. A rank whose exchange fails leaves word of that in
the store of the process group, and so does a rank that raises an error of its own. Those that fail read there
what the others have raised, or which of them have left no word: these have ended, hang or are late. Nothing
is written or read while all goes well.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist

from fastqt.distributed.group import Group

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

# How long a rank whose exchange has failed waits for the others' word of it.
WORD_SECONDS = 3.0
# A rank that meets closed connections as soon as it comes has come too late.
LATE_SECONDS = 0.5
# How many ranks a message names, and how much of an error another rank shows.
NAMED_RANKS = 8
SHOWN_CHARACTERS = 400
# Of a message that nobody sends: what is received instead of another message would have another size.
UNUSED_TAG = 1_414_213_562

Result = TypeVar("Result")
Method = TypeVar("Method", bound=Callable[..., Any])


# The errors of arguments, which all ranks raise alike.
SHARED_ERRORS: dict[str, type[Exception]] = {"TypeError": TypeError, "ValueError": ValueError}


class ExchangeError(RuntimeError):
    """Ranks of a group could not exchange what a loss needs; its cause is torch's own error."""


class OutOfStepError(ValueError):
    """Ranks of a group were about to exchange different things; all of them raise it."""


def exchange(
    group: Group, what: str, function: Callable[..., Result], /, *args: object, **options: object
) -> Result:
    """function(*args, **options), a collective or a wait for one.

    Args:
        group: the ranks.
        what: what travels, in the plural.
        function, args, options: the collective.

    Raises:
        ExchangeError: the collective failed; the message names what travelled, and as far as it can be found
            out the ranks which did not take part.
    """
    if torch.compiler.is_compiling():
        return function(*args, **options)
    began = time.monotonic()
    try:
        return function(*args, **options)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise ExchangeError(_explained(group, what, time.monotonic() - began)) from error


@contextlib.contextmanager
def leaving_word(group: Group) -> Iterator[None]:
    """Within this context an error is reported to the ranks that wait for this one, and raised again."""
    try:
        yield
    except Exception as error:  # raised again, whatever it is
        leave_word(group, error)
        raise


def telling(method: Method) -> Method:
    """A method of what has `shards`, whose errors are reported to the ranks that wait for this one."""

    @functools.wraps(method)
    def told(self: Any, *args: Any) -> Any:
        with leaving_word(self.shards.group):
            return method(self, *args)

    return cast(Method, told)


# The word that this process has left of an error of its own, which may have been caught.
_left: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()


def leave_word(group: Group, error: Exception) -> None:
    """Tells the ranks that are going to wait for this one what it has raised."""
    if isinstance(error, (ExchangeError, OutOfStepError)):
        return
    text = f"rank {group.rank} raised {type(error).__name__}: {error}"[:SHOWN_CHARACTERS]
    _asked(group, lambda store: store.set("raised", text))
    _left[group.process_group] = text


def forget(group: Group) -> None:
    """Takes back the word that this rank has left, as it is taking part again."""
    if not _left:
        return
    text = _left.pop(group.process_group, None)

    def take_back(store: Store) -> None:
        if store.check(["raised"]) and store.get("raised").decode() == text:
            store.delete_key("raised")

    if text is not None:
        _asked(group, take_back)


def named(ranks: list[int], most: int | None = None) -> str:
    """Ranks in words."""
    shown = ranks[:most]
    text = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, shown))}"
    return text if len(shown) == len(ranks) else text + " and more"


def described(error: Exception | None) -> tuple[str, str] | None:
    """The kind of an error and its message, for the other ranks."""
    if error is None:
        return None
    kind = next((kind for kind in SHARED_ERRORS if isinstance(error, SHARED_ERRORS[kind])), None)
    return (kind, str(error)) if kind else ("RuntimeError", f"{type(error).__name__}: {error}")


def raise_first(given: list[tuple[str, str] | None], own: Exception | None) -> None:
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
        text += f" (on {named(ranks)} of {len(given)})"
    raise SHARED_ERRORS.get(kind, RuntimeError)(text) from own


class _Word(NamedTuple):
    """What the store says of a failed exchange."""

    raised: str | None
    missing: list[int]
    late: str | None


def _explained(group: Group, what: str, waited: float) -> str:
    """The message of a failed exchange."""
    word = _asked(group, functools.partial(_word, group, waited), 3 * WORD_SECONDS)
    if word is None:
        reason = (
            "it could not be found out which rank failed, as the store of the process group does not answer; "
            "it is rank 0 of all processes that holds it, unless torchrun does"
        )
    elif word.raised is not None:
        reason = word.raised
    elif word.missing:
        missing = named(word.missing, NAMED_RANKS)
        reason = f"{missing} did not take part and left no word of why: ended, hung or late"
    elif word.late is not None:
        reason = f"{word.late} came after the others had given up waiting"
    else:
        reason = "the exchange failed on all ranks, and none is missing"
    return (
        f"group: want {what} of all {group.size} ranks in {group.function}, "
        f"got none on rank {group.rank}: {reason}"
    )


def _word(group: Group, waited: float, store: Store) -> _Word:
    """Leaves word of a failed exchange, and waits for the other ranks' word."""
    keys = [f"failed {rank}" for rank in range(group.size)]
    if waited < LATE_SECONDS and store.check(["failed"]):
        store.set("late", f"rank {group.rank}")
    store.set("failed", "")
    store.set(keys[group.rank], "")
    _wake_others(group)
    end, pause = time.monotonic() + WORD_SECONDS, 0.01
    while not (store.check(["raised"]) or store.check(keys)) and time.monotonic() < end:
        time.sleep(pause)
        pause = min(2 * pause, WORD_SECONDS / 8)
    raised, late = (store.get(key).decode() if store.check([key]) else None for key in ("raised", "late"))
    return _Word(raised, _absent(store, keys, 0), late)


def _absent(store: Store, keys: list[str], first: int) -> list[int]:
    """The places of some more keys than a message names that the store lacks, counted from `first`.

    A store answers for many keys at once, but only whether it has all: thousands of ranks ask one process.
    """
    if store.check(keys):
        return []
    if len(keys) == 1:
        return [first]
    half = len(keys) // 2
    found = _absent(store, keys[:half], first)
    return found if len(found) > NAMED_RANKS else found + _absent(store, keys[half:], first + half)


def _wake_others(group: Group) -> None:
    """Has the ranks that wait for others fail now, and not at the end of their timeouts.

    A rank that has ended closes its connections, which those notice that wait for it. Others wait for these.
    Gloo closes all connections of a process when a receive of it runs out of time.
    """
    if dist.get_backend(group.process_group) != "gloo":
        return
    for step in range(1, group.size):
        peer = (group.rank + step) % group.size
        with contextlib.suppress(RuntimeError):  # which is what closes them
            unused = torch.empty(1, device="cpu")
            work = dist.irecv(unused, group=group.process_group, group_src=peer, tag=UNUSED_TAG)
            if work is not None:
                work.wait(timedelta(milliseconds=1))


def _asked(group: Group, question: Callable[[Store], Result], seconds: float = WORD_SECONDS) -> Result | None:
    """What a question to the store of the process group finds; None if the store does not answer in time."""
    of_group = getattr(group.process_group, "get_group_store", None)  # other backends' groups may have none
    base = of_group() if of_group is not None else None
    if base is None:
        return None
    found: list[Result] = []

    def ask() -> None:
        # The store is gone where the process that holds it has ended.
        with contextlib.suppress(RuntimeError):
            found.append(question(dist.distributed_c10d.PrefixStore("fastqt", base)))

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(seconds)
    return found[0] if found else None
