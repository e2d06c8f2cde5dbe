"""Reads sentences in bounded memory: lines of text with blank ones between documents, or rows of tables."""

from __future__ import annotations

import contextlib
import gzip
import lzma
import os
import sys
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

from fastqt.devices import machine_memory
from fastqt.errors import InputError
from fastqt.sentences.text.tables import is_table, read_rows

Part = tuple[list[str], list[int]]  # lines or rows: their texts, and where each of them ends
STDIN = "-"
READ_BYTES = 1 << 18
LONGEST_LINE = 1 << 20  # bytes; a longer line is an error, so that memory stays bounded
LONGEST_OF_TABLE = 1 << 24  # bytes of a line
COMPRESSED = (".gz", ".xz")  # how the names of compressed files end
BOM = b"\xef\xbb\xbf"


class Position(NamedTuple):
    """Where reading continues: the first unread byte or row of one of the files."""

    file: int = 0  # index into the list of files
    offset: int = 0  # bytes of decompressed text before it, or rows of a table
    line: int = 0  # lines before it, or rows of a table
    document: int = -1  # index of the document of the last sentence that was read


@dataclass(frozen=True)
class Block:
    """Consecutive sentences of one file, and where each of them ends."""

    file: int
    sentences: list[str]
    offsets: list[int]  # the first byte after each sentence's line, or the rows up to it
    lines: list[int]  # each sentence's line or row number, from 1
    documents: list[int]  # the index of each sentence's document, counted over all files from 0

    def position(self, index: int) -> Position:
        """Where reading continues after sentence number `index` of the block."""
        return Position(self.file, self.offsets[index], self.lines[index], self.documents[index])


def read_blocks(
    files: Sequence[str], start: Position | None = None, *, column: str | None = None
) -> Iterator[Block]:
    """Streams the sentences of text files and of tables, in non-empty blocks of about 256 KiB of text.

    Each line is a sentence; surrounding white space is removed. A blank line or the end of a file ends a
    document. Reading takes a few megabytes of memory, however large the files are. In a table each row is a
    sentence, in which line breaks are blanks; a row without text is as a blank line. Lines and cells longer
    than 1 MiB are refused, and tables as by `fastqt.sentences.text.tables.read_rows`.

    Args:
        files: paths of UTF-8 text, read one after the other. Names that end in `.gz` or `.xz` are
            decompressed; `-`, which may be given once, is standard input. Names that end in `.parquet` or
            `.arrow`, and folders that `Dataset.save_to_disk` of the `datasets` library wrote, are tables.
        start: where to begin, a `Position` from an earlier pass over the same files.
        column: of tables, that of the text; by default `text`, `sentence` or the only one of text.
    """
    check_stdin_once("corpus", files)
    start = start or Position()
    for file in range(start.file, len(files)):
        if file != start.file:
            start = Position(file, document=start.document)
        with contextlib.closing(_parts(files[file], start, column)) as parts:
            for block in _blocks(parts, start):
                start = start._replace(document=block.documents[-1])
                yield block


def _parts(path: str, start: Position, column: str | None) -> Generator[Part]:
    """The lines of a text file or the rows of a table, from a position in it."""
    if is_table(path):
        yield from read_rows(path, column, start.offset)
        return
    with open_text(path) as handle:
        yield from _lines_of_file(handle, path, start)


@contextlib.contextmanager
def open_text(path: str) -> Iterator[IO[bytes]]:
    """Opens a text file for reading bytes, and decompresses it if its name ends in .gz or .xz.

    Errors of reading inside the `with` block are InputErrors too.
    """
    try:
        if path == STDIN:
            _check_stdin()
            yield sys.stdin.buffer
            return
        openers: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".xz": lzma.open}
        with cast("IO[bytes]", openers.get(Path(path).suffix, open)(path, "rb")) as handle:
            yield handle
    except FileNotFoundError:
        raise InputError(f"no such file: {path}{beside(path)}") from None
    except (lzma.LZMAError, gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise InputError(f"{path}: damaged or not what its name says: {error}") from error
    except MemoryError:  # an .xz file says itself how much memory its decompression takes
        raise InputError(f"{path}: want a file that this machine's memory can decompress") from None
    except OSError as error:
        name = "standard input" if path == STDIN else path
        raise InputError(f"cannot read {name}: {error.strerror or error}") from error


def beside(path: str) -> str:
    """For the message that a file is missing: that it is there compressed, or not compressed; else ""."""
    plain = path.removesuffix(".xz").removesuffix(".gz")
    others = (plain, *(plain + ending for ending in COMPRESSED))
    other = next((each for each in others if each != path and os.path.isfile(each)), None)
    return "" if other is None or os.path.exists(path) else f"; there is {other}"


def check_exists(path: str) -> None:
    """Checks, before any work, that there is a file of this name, or a folder."""
    if not os.path.exists(path):
        raise InputError(f"no such file: {path}{beside(path)}")


def numbered_lines(path: str, longest: int = LONGEST_LINE) -> Iterator[tuple[int, str]]:
    """Streams the lines of a text file as they are, with their numbers from 1 and without their breaks.

    A break is a line feed, or a carriage return with one; a byte order mark at the beginning is no text. A
    line of more than `longest` bytes is refused.
    """
    with open_text(path) as handle:
        number = 0
        while raw := handle.readline(longest + 1):
            number += 1
            if len(raw) > longest:
                raise InputError(f"{path}: line {number}: want at most {longest:,} bytes")
            try:
                text = raw.removeprefix(BOM if number == 1 else b"").decode()
            except UnicodeDecodeError as error:
                raise InputError(
                    f"{path}: line {number} is not UTF-8 (byte 0x{raw[error.start]:02x}); convert it, e.g. "
                    "with iconv -f latin1 -t utf-8"
                ) from None
            yield number, text.removesuffix("\n").removesuffix("\r")


def check_bytes(size: int, name: str) -> None:
    """Refuses what would take more than half of this machine's memory; `name` says what it is."""
    if size > (most := machine_memory() // 2):
        raise InputError(f"{name}: want at most half of this machine's memory, {most:,} bytes, got {size:,}")


def table_lines(path: str | Path) -> Iterator[str]:
    """Streams the lines of a text file, as of `numbered_lines`, without blank lines at its end.

    The file may be compressed as .gz or .xz. An empty file is refused, and one that is larger than memory.
    """
    blank = total = 0
    some = False
    for _, text in numbered_lines(str(path), LONGEST_OF_TABLE):
        check_bytes(total := total + len(text), str(path))
        if not text:
            blank += 1
            continue
        yield from [""] * blank
        blank, some = 0, True
        yield text
    if not some:
        raise InputError(f"{path} is empty")


def check_rereadable(name: str, files: Sequence[str]) -> None:
    """Checks that files can be read more than once; `name` says what they are, for the message."""
    for path in files:
        if path == STDIN:
            raise InputError(
                f"{name}: want files that can be read more than once, got standard input; write the text to "
                "a file first"
            )
        if Path(path).exists() and not (Path(path).is_file() or Path(path).is_dir()):
            raise InputError(
                f"{name}: want files that can be read more than once, got a pipe or a device, {path}; "
                "write the text to a file first"
            )


def check_stdin_once(name: str, files: Sequence[str]) -> None:
    """Checks that standard input, which has nothing left after it was read, is at most one of the files."""
    if (times := list(files).count(STDIN)) > 1:
        raise InputError(f"{name}: want standard input, {STDIN}, once, got it {times} times")


def _check_stdin() -> None:
    if sys.stdin is None:  # it was closed when this process began
        raise InputError("cannot read standard input: it is closed")


def _blocks(parts: Iterable[Part], start: Position) -> Iterator[Block]:
    line, document = start.line, start.document
    boundary = start.offset == 0
    for texts, ends in parts:
        block = Block(start.file, [], [], [], [])
        for sentence, end in zip(texts, ends, strict=True):
            line += 1
            if not sentence:
                boundary = True
                continue
            document += boundary
            boundary = False
            block.sentences.append(sentence)
            block.offsets.append(end)
            block.lines.append(line)
            block.documents.append(document)
        if block.sentences:
            yield block


def _lines_of_file(handle: IO[bytes], path: str, start: Position) -> Iterator[Part]:
    """The lines of each READ_BYTES of text, and the offset after each of them."""
    offset, line = start.offset, start.line
    rest = b""
    if offset:
        # The offset is behind a line break, which the last line may lack: then it is beyond the end, and a
        # read from there fails in an .xz file that something follows.
        handle.seek(offset - 1)
        if not handle.read(1):
            return

    while data := handle.read(READ_BYTES):
        if offset == 0 and not rest and data.startswith(BOM):
            offset, data = len(BOM), data[len(BOM) :]

        *lines, rest = (rest + data).split(b"\n")
        if len(rest) > LONGEST_LINE:
            raise InputError(
                f"{path}: line {line + len(lines) + 1} is longer than 1 MiB; want one sentence per line"
            )
        if lines:
            yield _decoded(lines, path, offset, line)
            offset += sum(map(len, lines)) + len(lines)
            line += len(lines)

    if rest:
        yield _decoded([rest], path, offset, line)


def _decoded(lines: list[bytes], path: str, offset: int, line: int) -> Part:
    """The text of lines of which the first begins at `offset` and has `line` lines before it."""
    texts: list[str] = []
    ends: list[int] = []
    for raw in lines:
        try:
            texts.append(raw.decode().strip())
        except UnicodeDecodeError as error:
            raise InputError(
                f"{path}: line {line + len(texts) + 1} is not UTF-8 (byte 0x{raw[error.start]:02x} at byte "
                f"offset {offset + error.start} of the text); convert it, e.g. with iconv -f latin1 -t utf-8"
            ) from None
        offset += len(raw) + 1
        ends.append(offset)
    return texts, ends
