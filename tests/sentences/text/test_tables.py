"""Tables against text files with the same sentences: all kinds of files, positions, columns and damage."""

import json
import random
import sys

import numpy as np
import pytest

from fastqt.errors import InputError
from fastqt.sentences.text import read_blocks, tables

pa = pytest.importorskip("pyarrow", reason="the extra datasets is not installed")
import pyarrow.parquet as pq  # noqa: E402  # after the skip

CELLS = ["One.", " zwei — drei… ", None, "", "four\nfive ", "四 五\r", " \n", "\u2028six", "seven"]
LINES = ["One.", "zwei — drei…", "", "", "four five", "四 五", "", "\u2028six", "seven"]


def write_parquet(path, table, rows=4):
    pq.write_table(table, path, row_group_size=rows, data_page_size=64)


def write_stream(path, table, rows=4):
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=rows)


def write_file(path, table, rows=4):
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=rows)


def write_folder(path, table, rows=4):
    """As `Dataset.save_to_disk` writes it, in shards."""
    path.mkdir()
    names = [f"data-{i:05d}.arrow" for i in range(0, table.num_rows, 3)]
    for number, name in enumerate(names):
        write_stream(path / name, table.slice(3 * number, 3), rows)
    (path / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))


WRITERS = {"a.parquet": write_parquet, "b.arrow": write_stream, "c.arrow": write_file, "d": write_folder}
each_kind = pytest.mark.parametrize("kind", WRITERS)


def made(folder, kind, table, rows=4):
    WRITERS[kind](folder / kind, table, rows)
    return str(folder / kind)


def as_text(folder, lines):
    path = folder / f"{len(list(folder.iterdir()))}.txt"
    path.write_text("\n".join(lines))
    return str(path)


def read(files, start=None, column=None):
    return [
        (sentence, block.documents[i], block.file, block.lines[i], block.position(i).line)
        for block in read_blocks(files, start, column=column)
        for i, sentence in enumerate(block.sentences)
    ]


def positions_of(files, column=None):
    blocks = read_blocks(files, column=column)
    return [block.position(i) for block in blocks for i in range(len(block.sentences))]


@each_kind
@pytest.mark.parametrize("read_bytes", [3, 1 << 18])
@pytest.mark.parametrize("rows", [2, 256])
def test_rows_are_lines(tmp_path, monkeypatch, kind, read_bytes, rows):
    monkeypatch.setattr(tables, "READ_BYTES", read_bytes)
    monkeypatch.setattr(tables, "ROWS", rows)
    table = pa.table({"number": range(len(CELLS)), "text": CELLS})
    files = [made(tmp_path, kind, table), as_text(tmp_path, ["between"])] * 2
    text = [as_text(tmp_path, LINES), files[1]] * 2
    assert read(files) == read(text)
    for place, position in enumerate(positions_of(files)):
        assert read(files, position) == read(text)[place + 1 :]


def test_kinds_of_texts(tmp_path):
    texts = pa.array(CELLS, pa.large_string()), pa.array(CELLS).dictionary_encode()
    for array in (*texts, pa.array(CELLS, pa.string_view())):
        path = made(tmp_path, "b.arrow", pa.table({"text": array}))
        assert read([path]) == read([as_text(tmp_path, LINES)])


def test_the_usual_column(tmp_path):
    for columns, name in (
        ({"other": ["o"], "sentence": ["s"], "text": ["t"]}, "text"),
        ({"other": ["o"], "sentence": ["s"], "text": [3]}, "sentence"),
        ({"number": [2], "other": ["o"]}, "other"),  # the only one
    ):
        path = made(tmp_path, "a.parquet", pa.table(columns))
        assert [each[0] for each in read([path])] == [name[0]]


@each_kind
@pytest.mark.parametrize(
    ("column", "message"),
    [
        (None, "column: want the name of the column of text, got no name and one, two$"),
        ("three", "column 'three': want one of one, two, number$"),
        ("number", "column 'number': want texts, got int64$"),
    ],
    ids=str,
)
def test_wrong_columns_are_refused(tmp_path, kind, column, message):
    path = made(tmp_path, kind, pa.table({"one": ["a"], "two": ["b"], "number": [1]}))
    with pytest.raises(InputError, match=message) as caught:
        read([path], column=column)
    assert str(caught.value).startswith(path)


def test_a_table_without_texts_or_with_damaged_ones_is_refused(tmp_path):
    buffers = pa.py_buffer(np.array([0, 1, 2], np.int32)), pa.py_buffer(b"a\xff")
    path = made(tmp_path, "b.arrow", pa.table({"text": pa.StringArray.from_buffers(2, *buffers)}))
    with pytest.raises(InputError, match=r"b\.arrow: damaged .*UTF8"):
        read([path])
    path = made(tmp_path, "a.parquet", pa.table({"number": [1], "many": [["a"]]}))
    with pytest.raises(InputError, match="got no name and none among number, many"):
        read([path])
    with pytest.raises(InputError, match="column 'many': want texts, got list<"):
        read([path], column="many")


@each_kind
def test_long_cells_are_refused(tmp_path, kind):
    fits, too_long = "x" * tables.LONGEST_CELL, "x" * (tables.LONGEST_CELL + 1)
    read([made(tmp_path, kind, pa.table({"text": ["a", fits]}))])
    (tmp_path / "next").mkdir()
    path = made(tmp_path / "next", kind, pa.table({"text": ["a", "b", too_long]}), rows=1)
    with pytest.raises(InputError, match=r"row \d is longer than 1 MiB"):
        read([path])


@each_kind
def test_damaged_files_are_refused_in_words(tmp_path, kind):
    path = made(tmp_path, kind, pa.table({"text": [f"sentence {i}" for i in range(50)]}))
    file = tables.data_files(path)[0]
    whole = file.read_bytes()
    generator = random.Random(0)
    messages = []
    for case in range(80):
        damaged = bytearray(whole)
        if case % 2:
            del damaged[generator.randrange(len(damaged)) :]
        else:
            for _ in range(3):
                damaged[generator.randrange(len(damaged))] ^= generator.randrange(1, 256)
        file.write_bytes(bytes(damaged))
        try:
            read([path])
        except InputError as error:
            messages.append(str(error))
    assert len(messages) > 20
    assert all(path in message and "\n" not in message for message in messages)


def test_folders_that_are_no_data_set_are_refused(tmp_path):
    path = made(tmp_path, "d", pa.table({"text": ["a"]}))
    (tmp_path / "d" / "data-00000.arrow").unlink()
    with pytest.raises(InputError, match=r"no such file: .*data-00000\.arrow"):
        read([path])
    for text in ("", "[]", "{}", '{"_data_files": 3}', '{"_data_files": [{"filename": "../x.arrow"}]}'):
        (tmp_path / "d" / "state.json").write_text(text)
        with pytest.raises(InputError, match=r"state\.json"):
            read([path])
    (tmp_path / "d" / "dataset_dict.json").write_text('{"splits": ["train"]}')
    (tmp_path / "d" / "train").mkdir()
    with pytest.raises(InputError, match=r"want the folder of one split, got that of several: .*train"):
        read([path])


def test_a_missing_library_is_named(tmp_path, monkeypatch):
    path = made(tmp_path, "a.parquet", pa.table({"text": ["a"]}))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(InputError, match=r"a\.parquet: want pyarrow >= 18, got none: pip install 'fastqt\["):
        read([path])


def test_the_datasets_library_itself(tmp_path):
    datasets = pytest.importorskip("datasets", reason="the library datasets is not installed")
    data = datasets.Dataset.from_dict({"number": range(len(CELLS)), "text": CELLS})
    data.save_to_disk(tmp_path / "folder", num_shards=2)
    data.to_parquet(tmp_path / "x.parquet")
    wanted = read([as_text(tmp_path, LINES)])
    assert read([str(tmp_path / "folder")]) == read([str(tmp_path / "x.parquet")]) == wanted
    data.select([8, 0, 4]).save_to_disk(tmp_path / "chosen")
    assert [each[0] for each in read([str(tmp_path / "chosen")])] == ["seven", "One.", "four five"]
    datasets.DatasetDict({"train": data}).save_to_disk(tmp_path / "several")
    with pytest.raises(InputError, match="want the folder of one split"):
        read([str(tmp_path / "several")])


@pytest.mark.parametrize("kind", ["a.parquet", "b.arrow"])
def test_memory_does_not_grow_with_the_table(tmp_path, kind):
    rows = 40_000
    line = "a sentence of some words, of which there are many in a large table" * 4
    table = pa.table({"text": [line] * rows, "other": [line[::-1]] * rows})
    path = made(tmp_path, kind, table, rows=rows)
    del table
    total = rows * len(line)
    before = pa.total_allocated_bytes()
    most = 0
    for block in read_blocks([path], column="text"):
        most = max(most, pa.total_allocated_bytes() - before)
        assert sum(map(len, block.sentences)) <= 1 << 19
    assert most < total / 4, (most, total)
