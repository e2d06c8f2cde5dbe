"""Which regular expressions of a tokenizer's file are known to end soon, whatever the text is.

The library's engine goes back and tries again where a match fails. With repetitions inside of repetitions it
may try as many times as a text has parts, and never end. The expressions of the models in use need no such
thing: they are alternatives of a few signs one after the other, each of which may be repeated.
"""

from __future__ import annotations

import re
from itertools import dropwhile

LONGEST = 2000  # characters of an expression
MOST_REPEATED = 5  # signs of an alternative that may be there or not, or several times

CLASS = r"\[\^?(?:\\.|\[(?:\\.|[^\[\]\\])*\]|[^\[\]\\])+\]"
ESCAPE = r"\\[pP]\{\^?\w+\}|\\[sSdDwWhHrntfv]|\\[^\w\s]"
SIGN = rf"{CLASS}|{ESCAPE}|[^\\\[\](){{}}*+?|^$]"
GROUP = rf"\((?:\?[im]?:)?(?:{SIGN})+(?:\|(?:{SIGN})+)*\)"
LOOKAHEAD = rf"\(\?[!=](?:{SIGN})\)"
PART = re.compile(
    rf"(?P<bar>\|)|(?P<lookahead>{LOOKAHEAD})|(?:(?P<group>{GROUP})|{SIGN})"
    r"(?P<repeated>[?*+][?+]?|\{(?P<least>[0-9]),?(?P<most>[0-9]?)\})?"
)


def ends_soon(pattern: str) -> bool:
    """Whether an expression takes steps of at most about the square of a text's length, and no empty match.

    A group is repeated once at most, and has nothing repeated in it. Of the signs that are repeated without a
    limit, an alternative has two at most; where it has two, all that follows the second may be absent. The
    engine goes back in the first alone, because the second needs one sign and then nothing can fail.
    """
    if len(pattern) > LONGEST:
        return False
    alternatives: list[list[re.Match[str]]] = [[]]
    place = 0
    while place < len(pattern):
        part = PART.match(pattern, place)
        if part is None:
            return False
        place = part.end()
        if part["bar"]:
            alternatives.append([])
        else:
            alternatives[-1].append(part)
    return all(map(_alternative_ends_soon, alternatives))


def _alternative_ends_soon(parts: list[re.Match[str]]) -> bool:
    repeated = [part for part in parts if part["repeated"]]
    if len(repeated) > MOST_REPEATED or any(part["group"] and part["repeated"] != "?" for part in repeated):
        return False
    if all(part["lookahead"] or _may_be_absent(part) for part in parts):
        return False  # it matches the empty text

    endless = [part for part in parts if _is_endless(part)]
    if len(endless) < 2:
        return True
    behind = [*dropwhile(lambda part: part is not endless[1], parts)][1:]
    return len(endless) == 2 and all(map(_may_be_absent, behind))


def _may_be_absent(part: re.Match[str]) -> bool:
    return (part["repeated"] or " ")[0] in "?*" or part["least"] == "0"


def _is_endless(part: re.Match[str]) -> bool:
    repeated = part["repeated"] or ""
    return repeated[:1] in ("*", "+") or repeated.endswith(",}")
