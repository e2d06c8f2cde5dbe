"""Reads the rows of tables in bounded memory: Parquet and Arrow files, and folders that `datasets` wrote."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fastqt.errors import InputError, one_line
from fastqt.integrations._libraries import load_library
from fastqt.sentences.json_text import field, read_object

ENDINGS = (".parquet", ".arrow")
STATE = "state.json"  # in a folder that `Dataset.save_to_disk` wrote
SPLITS = "dataset_dict.json"  # in one that `DatasetDict.save_to_disk` wrote
LARGEST_STATE = 1 << 26  # bytes
USUAL = ("text", "sentence")  # columns that hold the text if none is named
ROWS = 256  # that are read together
READ_BYTES = 1 << 18  # of text that are handed on together
LONGEST_CELL = 1 << 20  # bytes, as of a line of text
TEXTS = ("string", "large_string", "string_view")
FILE_MAGIC = b"ARROW1"  # a file of Arrow's other format, a stream, begins otherwise

NamesOf = Callable[[Any, Path], list[str]]  # the columns to read, by the schema of a file


def is_table(path: str) -> bool:
    """Whether a path names a table: a file by its ending, or any directory."""
    return Path(path).suffix in ENDINGS or Path(path).is_dir()


def data_files(path: str) -> list[Path]:
    """The files of which a table consists: itself, or those that the state of a folder names."""
    folder = Path(path)
    if not folder.is_dir():
        return [folder]
    if (folder / SPLITS).exists():
        splits = ", ".join(sorted(str(each) for each in folder.iterdir() if each.is_dir()))
        raise InputError(f"{path}: want the folder of one split, got that of several: {one_line(splits)}")

    try:
        state = read_object(folder / STATE, most_bytes=LARGEST_STATE)
    except FileNotFoundError:
        raise InputError(
            f"{path}: want a file, or a folder that Dataset.save_to_disk wrote; {STATE} is missing"
        ) from None

    files = []
    for entry in field(state, "_data_files", list, folder / STATE):
        name = entry.get("filename") if isinstance(entry, dict) else None
        if not isinstance(name, str) or Path(name).name != name:
            raise InputError(
                f"{folder / STATE}: _data_files: want names of files in the folder, got {entry!r:.100}"
            )
        files.append(folder / name)
    return files


def read_rows(path: str, column: str | None, start: int = 0) -> Iterator[tuple[list[str], list[int]]]:
    """Streams the rows of a table (see `is_table`) from `start` on, about 256 KiB of text at a time.

    They are texts without surrounding white space, "" for a cell without a value, and the number of rows up
    to each of them. A line break within a cell is a blank. Memory holds a few hundred rows, and of an Arrow
    file with compressed batches one batch. A column that is not chosen, or has another type, is refused, and
    so is a cell longer than 1 MiB.
    """
    before = 0

    def names_of(schema: Any, file: Path) -> list[str]:
        return [_name(schema, column, file)]

    for file in data_files(path):
        with _errors_in_words(file):
            for batch in (_of_parquet if file.suffix == ".parquet" else _of_arrow)(file, names_of):
                for first in range(max(start - before, 0), batch.num_rows, ROWS):
                    array = _checked(batch.slice(first, ROWS).column(0))
                    for begin, end in _cuts(array, before + first, path):
                        cells = array[begin:end].to_pylist()
                        texts = [(text or "").replace("\n", " ").strip() for text in cells]
                        yield texts, list(range(before + first + begin + 1, before + first + end + 1))
                before += batch.num_rows


def read_columns(
    path: str, choose: Callable[[Sequence[str], Path], list[str]]
) -> Iterator[tuple[int, list[str]]]:
    """Streams the rows of a table: the number of each, and its texts in the columns that are chosen.

    `choose` gets the names of all columns of text, and the file. A cell without a value is "".
    """
    before = 0

    def names_of(schema: Any, file: Path) -> list[str]:
        return choose([each.name for each in schema if _is_text(each.type)], file)

    for file in data_files(path):
        with _errors_in_words(file):
            for batch in (_of_parquet if file.suffix == ".parquet" else _of_arrow)(file, names_of):
                for first in range(0, batch.num_rows, ROWS):
                    part = batch.slice(first, ROWS)
                    columns = [_checked(column).to_pylist() for column in part.columns]
                    for row, cells in enumerate(zip(*columns, strict=True)):
                        yield before + first + row + 1, [text or "" for text in cells]
                before += batch.num_rows


def _of_parquet(file: Path, names_of: NamesOf) -> Iterator[Any]:
    _library(file)
    parquet = importlib.import_module("pyarrow.parquet")
    # The buffer makes it read one page after the other, not the whole column of a row group.
    with parquet.ParquetFile(file, memory_map=True, pre_buffer=False, buffer_size=READ_BYTES) as reader:
        names = names_of(reader.schema_arrow, file)
        for batch in reader.iter_batches(ROWS, columns=names, use_threads=False):
            yield batch.select(names)


def _of_arrow(file: Path, names_of: NamesOf) -> Iterator[Any]:
    arrow = _library(file)
    with arrow.memory_map(str(file)) as source:
        is_file = source.read(len(FILE_MAGIC)) == FILE_MAGIC
        source.seek(0)
        reader = arrow.ipc.open_file(source) if is_file else arrow.ipc.open_stream(source)
        names = names_of(reader.schema, file)
        for batch in map(reader.get_batch, range(reader.num_record_batches)) if is_file else reader:
            yield batch.select(names)


def _name(schema: Any, column: str | None, file: Path) -> str:
    """The name of the column of text."""
    name = column or _usual_name(schema, file)
    if (index := schema.get_field_index(name)) < 0:
        raise InputError(f"{file}: column {name!r}: want one of {one_line(', '.join(schema.names))}")
    if not _is_text(kind := schema.field(index).type):
        raise InputError(f"{file}: column {name!r}: want texts, got {one_line(kind)}")
    return name


def _usual_name(schema: Any, file: Path) -> str:
    of_text = [each.name for each in schema if _is_text(each.type)]
    for name in USUAL:
        if name in of_text:
            return name
    if len(of_text) == 1:
        only: str = of_text[0]
        return only
    names = one_line(", ".join(of_text)) or f"none among {one_line(', '.join(schema.names)) or 'no columns'}"
    raise InputError(f"{file}: column: want the name of the column of text, got no name and {names}")


def _is_text(kind: Any) -> bool:
    of_value = kind.value_type if hasattr(kind, "index_type") else kind  # the former of a dictionary
    return str(of_value) in TEXTS


def _checked(array: Any) -> Any:
    """An array as plain values, if its buffers hold what it says: a damaged file may say anything."""
    array.validate(full=True)
    if hasattr(array, "dictionary_decode"):
        array = array.dictionary_decode()
    return array.cast("large_string") if str(array.type) == "string_view" else array


def _cuts(array: Any, first: int, path: str) -> Iterator[tuple[int, int]]:
    """Where to cut texts, of which `first` is the number of the first row, so that no part is much text."""
    sizes = importlib.import_module("pyarrow.compute").binary_length(array).fill_null(0)
    ends = np.cumsum(sizes.to_numpy(zero_copy_only=False), dtype=np.int64)
    if len(longer := np.flatnonzero(np.diff(ends, prepend=0) > LONGEST_CELL)):
        raise InputError(
            f"{path}: row {first + int(longer[0]) + 1} is longer than 1 MiB; want one sentence per row"
        )
    begin = 0
    while begin < len(ends):
        before = int(ends[begin - 1]) if begin else 0
        end = max(begin + 1, int(np.searchsorted(ends, before + READ_BYTES, side="right")))
        yield begin, end
        begin = end


@contextlib.contextmanager
def _errors_in_words(file: Path) -> Iterator[None]:
    try:
        yield
    except InputError:
        raise
    except FileNotFoundError:
        raise InputError(f"no such file: {file}") from None
    except MemoryError:  # a file says itself how large its parts are
        raise InputError(f"{file}: want a file whose parts this machine's memory can hold") from None
    except (_library(file).ArrowException, OSError, UnicodeDecodeError) as error:
        raise InputError(f"{file}: damaged or not what its name says: {one_line(error)}") from error


def _library(file: Path) -> Any:
    try:
        return load_library("pyarrow")
    except ImportError as error:
        raise InputError(f"{file}: {error}") from error
