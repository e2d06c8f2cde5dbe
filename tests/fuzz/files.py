"""Files that targets hand to readers: in a scratch folder in memory, of several makes of the same bytes."""

from __future__ import annotations

import copy
import functools
import gzip
import json
import lzma
import shutil
import tempfile
import zlib
from pathlib import Path
from typing import Any

from tests.fuzz.source import Bytes

LONGEST_BOMB = 5 << 18  # bytes of text, more than the longest line
USUAL_BOMB = 1 << 11
XZ_FILTERS = [{"id": lzma.FILTER_LZMA2, "dict_size": 4096}]  # the default's tables take milliseconds to make
XZ_STREAM_HEADER = 12  # bytes before the block header

NASTY: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    1,
    -1,
    2,
    1.5,
    -0.0,
    1e308,
    10**9,
    10**12,
    2**31,
    2**63,
    2**64,
    -(2**63),
    10**400,
    float("nan"),
    float("inf"),
    float("-inf"),
    "",
    "a",
    "\x00",
    "\n",
    "\x1b[2J",
    "\ud800",
    "nan",
    "1",
    "300",
    "\u2028",
    "../../x",
    "é" * 200,
    [],
    {},
    [0],
    [1, 2, 3],
    [None],
    [[]],
    {"a": 1},
    ["a", "b"],
    [1e9, 1, 1],
)


@functools.cache
def folder() -> Path:
    """The scratch folder. Under the runner it lies in memory, where there is a file system in memory."""
    return Path(tempfile.mkdtemp(prefix="fastqt-fuzz-"))


def remove_folder() -> None:
    """Removes the scratch folder, for those who replay inputs in their own process."""
    shutil.rmtree(folder())
    folder.cache_clear()


def write(name: str, data: bytes) -> Path:
    path = folder() / name
    path.write_bytes(data)
    return path


def text_file(source: Bytes, stem: str) -> Path:
    """A text file: plain or compressed, whole, damaged or swollen."""
    make = source.choice(("txt", "gz bytes", "xz bytes", "gz", "xz", "gz damaged", "xz header", "bomb.gz"))
    suffix = make.split()[0]

    if make == "gz":
        data = gzip.compress(source.rest(), 1, mtime=0)
    elif make == "xz":
        data = lzma.compress(source.rest(), filters=XZ_FILTERS)
    elif make == "gz damaged":
        place, mask = source.integer(0, 65535), source.integer(0, 255)
        data = _flipped(gzip.compress(source.rest(), 1, mtime=0), place, mask)
    elif make == "xz header":
        changes = [(source.integer(0, 255), source.integer(0, 255)) for _ in range(source.integer(1, 3))]
        data = _with_block_header(lzma.compress(source.rest(), filters=XZ_FILTERS), changes)
    elif make == "bomb.gz":
        repeats = source.integer(0, 0xFFFFFF)
        text = source.rest()
        # A long line takes milliseconds, and long lists of lines seconds: few inputs are of the former.
        longest = LONGEST_BOMB if repeats % 1024 == 1023 and b"\n" not in text else USUAL_BOMB
        data = gzip.compress(text * min(repeats, longest // max(1, len(text))), 1, mtime=0)
    else:
        data = source.rest()

    return write(f"{stem}.{suffix}", data)


def _flipped(data: bytes, place: int, mask: int) -> bytes:
    damaged = bytearray(data)
    damaged[place % len(damaged)] ^= mask
    return bytes(damaged)


def _with_block_header(data: bytes, changes: list[tuple[int, int]]) -> bytes:
    """Changes bytes of an xz file's first block header, and makes its checksum right again."""
    changed = bytearray(data)
    length = (changed[XZ_STREAM_HEADER] + 1) * 4
    if XZ_STREAM_HEADER + length > len(changed) or changed[XZ_STREAM_HEADER] == 0:
        return data  # an empty file has no block
    for place, value in changes:
        changed[XZ_STREAM_HEADER + place % (length - 4)] = value
    end = XZ_STREAM_HEADER + length
    changed[end - 4 : end] = zlib.crc32(changed[XZ_STREAM_HEADER : end - 4]).to_bytes(4, "little")
    return bytes(changed)


def json_text(source: Bytes, document: Any) -> bytes:
    """JSON: bytes as they come, or `document` with some of its values replaced, removed or added."""
    if source.flag():
        return source.rest()
    damaged = json.loads(json.dumps(document))
    for _ in range(source.integer(1, 3)):
        damaged = _damaged(source, damaged)
    return json.dumps(damaged).encode()


def _damaged(source: Bytes, value: Any) -> Any:
    """`value` with a change at one place of its tree."""
    if not isinstance(value, (dict, list)) or not value or source.integer(0, 3) == 0:
        return _nasty(source)
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    key = source.choice(keys)
    change = source.choice(("deeper", "replace", "remove", "add"))
    if change == "remove":
        del value[key]
    elif change == "add" and isinstance(value, dict):
        value[source.choice(("extra", "", "\n", "words", *map(str, keys)))] = _nasty(source)
    elif change == "add":
        value.append(_nasty(source))
    else:
        value[key] = _nasty(source) if change == "replace" else _damaged(source, value[key])
    return value


def _nasty(source: Bytes) -> Any:
    return copy.copy(source.choice(NASTY))
