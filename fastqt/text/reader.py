"""Sentences out of files, in order and in bounded memory: one a line, blank lines between documents."""

from __future__ import annotations

import contextlib
import gzip
import lzma
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

from fastqt.errors import InputError

STDIN = "-"
READ_BYTES = 1 << 18
LONGEST_LINE = 1 << 20
BOM = b"\xef\xbb\xbf"


class Position(NamedTuple):
    """Where reading continues: the first unread byte of one of the files."""

    file: int = 0  # index into the list of files
    offset: int = 0  # bytes of text before it, after decompression
    line: int = 0  # lines before it
    document: int = -1  # number of the last document that a sentence was read from


@dataclass(frozen=True)
class Block:
    """Some consecutive sentences of one file, and where each of them ends."""

    file: int
    sentences: list[str]
    offsets: list[int]  # the byte after the sentence's line
    lines: list[int]  # the sentence's line number, from 1
    documents: list[int]  # the number of its document, over all files, from 0

    def position(self, index: int) -> Position:
        """Where reading continues after sentence `index` of the block."""
        return Position(self.file, self.offsets[index], self.lines[index], self.documents[index])


def read_blocks(files: Sequence[str], start: Position | None = None) -> Iterator[Block]:
    """Streams the sentences of text files.

    A line is a sentence, stripped of white space around it; blank lines, and the ends of files, are
    document boundaries. Files are UTF-8 text, `.gz` or `.xz` by their names, or `-` for standard input.
    Memory stays within a few megabytes whatever the size of the files.

    Args:
        files: paths, read one after the other.
        start: where to begin; a `Position` that an earlier pass over the same files returned.

    Yields:
        Blocks of about 256 KiB of text, none of them empty.

    Raises:
        InputError: a file is missing, unreadable, damaged, not UTF-8, or has a line above 1 MiB.
    """
    start = start or Position()
    for file in range(start.file, len(files)):
        if file != start.file:
            start = Position(file, document=start.document)
        with open_text(files[file]) as handle:
            for block in _blocks_of_file(handle, files[file], start):
                start = start._replace(document=block.documents[-1])
                yield block


@contextlib.contextmanager
def open_text(path: str) -> Iterator[IO[bytes]]:
    """Opens text for reading in bytes, decompressed according to its name; errors name the file."""
    try:
        if path == STDIN:
            yield sys.stdin.buffer
            return
        openers: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".xz": lzma.open}
        with cast("IO[bytes]", openers.get(Path(path).suffix, open)(path, "rb")) as handle:
            yield handle
    except FileNotFoundError:
        raise InputError(f"no such file: {path}") from None
    except (lzma.LZMAError, gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise InputError(f"{path}: damaged or not what its name says: {error}") from error
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from error


def _blocks_of_file(handle: IO[bytes], path: str, start: Position) -> Iterator[Block]:
    offset, line, document = start.offset, start.line, start.document
    boundary = offset == 0
    rest = b""
    if offset:
        handle.seek(offset)
    while True:
        data = handle.read(READ_BYTES)
        at_end = not data
        if offset == 0 and not rest and data.startswith(BOM):
            offset, data = len(BOM), data[len(BOM) :]
        lines = (rest + data).split(b"\n")
        rest = b"" if at_end else lines.pop()
        if len(rest) > LONGEST_LINE:
            raise InputError(
                f"{path}: line {line + len(lines) + 1} is longer than 1 MiB; wanted one sentence a line"
            )
        block = Block(start.file, [], [], [], [])
        for raw in lines:
            try:
                sentence = raw.decode().strip()
            except UnicodeDecodeError as error:
                raise InputError(
                    f"{path}: line {line + 1} is not UTF-8 (byte 0x{raw[error.start]:02x} at byte offset "
                    f"{offset + error.start} of the text); convert it, e.g. with iconv -f latin1 -t utf-8"
                ) from None
            offset += len(raw) + 1
            line += 1
            if not sentence:
                boundary = True
                continue
            document += boundary
            boundary = False
            block.sentences.append(sentence)
            block.offsets.append(offset)
            block.lines.append(line)
            block.documents.append(document)
        if block.sentences:
            yield block
        if at_end:
            return
