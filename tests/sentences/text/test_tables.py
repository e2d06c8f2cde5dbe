"""Tables against text files with the same sentences: all kinds of files, positions, columns and damage."""

import json
import random

import numpy as np
import pytest
import torch

from fastqt.errors import InputError
from fastqt.sentences.text import Columns, Corpus, Position, Vocabulary, batches, read_blocks, tables
from fastqt.sentences.text.batches import Span, span_batches, split

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


def read(files, start=None, columns=None):
    return [
        (sentence, block.documents[i], block.file, block.lines[i], block.position(i).line)
        for block in read_blocks(files, start, columns=columns)
        for i, sentence in enumerate(block.sentences)
    ]


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
    positions = [p for block in read_blocks(files) for p in map(block.position, range(len(block.lines)))]
    for place, position in enumerate(positions):
        assert read(files, position) == read(text)[place + 1 :]


@each_kind
def test_positions_with_a_document_column(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(tables, "ROWS", 2)
    documents = ["a", "a", "a", "b", "b", None, None, "c", "c", "c", "a"]
    cells = ["1", "2", "", "4", "5", "6", "7", "8", "9", "10", "11"]
    table = pa.table({"text": cells, "book": documents})
    path, columns = made(tmp_path, kind, table, rows=3), Columns(document="book")
    whole = read([path], columns=columns)
    assert [each[1] for each in whole] == [0, 0, 1, 1, 2, 2, 3, 3, 3, 4]
    positions = [
        p
        for block in read_blocks([path], columns=columns)
        for p in map(block.position, range(len(block.lines)))
    ]
    for place, position in enumerate(positions):
        assert read([path], position, columns) == whole[place + 1 :]


@pytest.mark.parametrize(
    "array",
    [
        pa.array(CELLS, pa.large_string()),
        pa.array(CELLS).dictionary_encode(),
        pa.array(CELLS, pa.string_view()),
    ],
    ids=lambda array: str(array.type),
)
def test_kinds_of_texts(tmp_path, array):
    path = made(tmp_path, "b.arrow", pa.table({"text": array}))
    assert read([path]) == read([as_text(tmp_path, LINES)])


@pytest.mark.parametrize(
    ("values", "documents"),
    [
        ([1, 1, 2, 2], [0, 0, 1, 1]),
        ([True, False, False, True], [0, 1, 1, 2]),
        (pa.array(["x", "x", "y", "y"]).dictionary_encode(), [0, 0, 1, 1]),
    ],
    ids=str,
)
def test_kinds_of_documents(tmp_path, values, documents):
    path = made(tmp_path, "b.arrow", pa.table({"text": list("abcd"), "book": values}))
    assert [each[1] for each in read([path], columns=Columns(document="book"))] == documents


def table_of(**columns):
    return pa.table(columns)


@pytest.mark.parametrize(
    ("table", "name"),
    [
        (table_of(other=["o"], sentence=["s"], text=["t"]), "text"),
        (table_of(other=["o"], sentence=["s"], text=[3]), "sentence"),
        (table_of(number=[2], other=["o"]), "other"),
    ],
    ids=["text", "sentence", "the only one"],
)
def test_the_usual_column(tmp_path, table, name):
    path = made(tmp_path, "a.parquet", table)
    assert [each[0] for each in read([path])] == [name[0]]


@each_kind
@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (Columns(), "column: want the name of the column of text, got no name and one, two$"),
        (Columns("three"), "column 'three': want one of one, two, number$"),
        (Columns("number"), "column 'number': want texts, got int64$"),
        (Columns("one", "four"), "column 'four': want one of one, two, number$"),
        (Columns("one", "one"), "document_column: want another column than that of the text$"),
    ],
    ids=str,
)
def test_wrong_columns_are_refused(tmp_path, kind, columns, message):
    path = made(tmp_path, kind, pa.table({"one": ["a"], "two": ["b"], "number": [1]}))
    with pytest.raises(InputError, match=message) as caught:
        read([path], columns=columns)
    assert str(caught.value).startswith(path)


def test_a_table_without_texts_is_refused(tmp_path):
    path = made(tmp_path, "a.parquet", pa.table({"number": [1], "many": [["a"]]}))
    with pytest.raises(InputError, match="got no name and none among number, many"):
        read([path])
    with pytest.raises(InputError, match="column 'many': want texts, got list<"):
        read([path], columns=Columns("many"))


@each_kind
def test_long_cells_are_refused(tmp_path, kind):
    fits, too_long = "x" * tables.LONGEST_CELL, "x" * (tables.LONGEST_CELL + 1)
    read([made(tmp_path, kind, pa.table({"text": ["a", fits]}))])
    (tmp_path / "next").mkdir()
    path = made(tmp_path / "next", kind, pa.table({"text": ["a", "b", too_long]}), rows=1)
    with pytest.raises(InputError, match=r"row \d is longer than 1 MiB"):
        read([path])


def refusal(path) -> bool:
    """Whether a table is refused, which has to be in words."""
    try:
        read([path])
    except InputError as error:
        message = str(error)
    else:
        return False
    assert path in message
    assert "\n" not in message
    return True


@each_kind
def test_damaged_files_are_refused_in_words(tmp_path, kind):
    path = made(tmp_path, kind, pa.table({"text": [f"sentence {i}" for i in range(50)]}))
    file = tables.data_files(path)[0]
    whole = file.read_bytes()
    generator = random.Random(0)
    refused = 0
    for case in range(80):
        damaged = bytearray(whole)
        if case % 2:
            del damaged[generator.randrange(len(damaged)) :]
        else:
            for _ in range(3):
                damaged[generator.randrange(len(damaged))] ^= generator.randrange(1, 256)
        file.write_bytes(bytes(damaged))
        refused += refusal(path)
    assert refused > 20


def test_text_that_is_not_utf8_is_refused(tmp_path):
    array = pa.StringArray.from_buffers(
        2, pa.py_buffer(np.array([0, 1, 2], np.int32)), pa.py_buffer(b"a\xff")
    )
    path = made(tmp_path, "b.arrow", pa.table({"text": array}))
    with pytest.raises(InputError, match=r"b\.arrow: damaged .*UTF8"):
        read([path])


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
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(
        InputError, match=r"a\.parquet: want pyarrow >= 18, got none: pip install 'fastqt\[datasets\]'"
    ):
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


@pytest.fixture
def corpora(tmp_path):
    """The same sentences as text and as tables, and their vocabulary."""
    generator = random.Random(1)
    lines = [" ".join(generator.choices("abcdefg", k=generator.randint(0, 4))) for _ in range(60)]
    found = {"text": as_text(tmp_path, lines)}
    found |= {kind: made(tmp_path, kind, pa.table({"text": lines}), rows=7) for kind in WRITERS}
    return found, Vocabulary.build(lines, 8)


@each_kind
def test_batches_and_spans_are_those_of_text(corpora, kind):
    files, vocabulary = corpora
    ours, wanted = ([files[each]] for each in (kind, "text"))
    assert_same_batches(batches(ours, vocabulary, 7), batches(wanted, vocabulary, 7))
    sentences = len(read(wanted))
    shares = [split(each, [Span(Position(), sentences)], 3) for each in (ours, wanted)]
    for own, others in zip(*shares, strict=True):
        sizes = [5] * (own[0].sentences // 5)
        assert_same_batches(
            (batch for batch, _ in span_batches(ours, vocabulary, sizes, own)),
            (batch for batch, _ in span_batches(wanted, vocabulary, sizes, others)),
        )
    samples = [Corpus(each, vocabulary).sample(np.arange(sentences)) for each in (ours, wanted)]
    assert torch.equal(samples[0].tokens, samples[1].tokens)


def assert_same_batches(found, wanted):
    number = 0
    for ours, theirs in zip(found, wanted, strict=True):
        for name in ("tokens", "lengths", "document_ids"):
            assert torch.equal(getattr(ours, name), getattr(theirs, name)), name
        number += 1
    assert number


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
    for block in read_blocks([path], columns=Columns("text")):
        most = max(most, pa.total_allocated_bytes() - before)
        assert sum(map(len, block.sentences)) <= 1 << 19
    assert most < total / 4, (most, total)
