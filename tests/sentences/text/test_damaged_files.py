"""Damaged and malicious .npz files and JSON are refused in words, before memory is taken for them."""

import io
import json
import pickle
import random
import struct
import tracemalloc
import zipfile

import numpy as np
import pytest

from fastqt.errors import InputError, one_line
from fastqt.sentences.json_text import field, parse, parse_object, read_object
from fastqt.sentences.text import json_stream, limits
from fastqt.sentences.text.json_stream import JsonStream
from fastqt.sentences.text.npz import Wanted, read_npz

WANTED = {"words": Wanted("U", 1), "vectors": Wanted("fiu", 2), "counts": Wanted("iu", 1, optional=True)}


def npy(header, data=b""):
    """The bytes of an .npy file with this text as its header."""
    text = header.encode() + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + data


def archive(path, compression=zipfile.ZIP_DEFLATED, **members):
    with zipfile.ZipFile(path, "w", compression) as file:
        for name, data in members.items():
            file.writestr(f"{name}.npy", data)
    return path


def array(value) -> bytes:
    file = io.BytesIO()
    np.save(file, value)
    return file.getvalue()


WORDS, VECTORS = np.array(["a", "bc"]), np.arange(6.0).reshape(2, 3)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", ["<f4", ">f8", "f2", "i4"])
def test_arrays_are_read_as_numpy_reads_them(tmp_path, save, order, dtype):
    arrays = {"words": WORDS, "vectors": VECTORS.astype(dtype, order=order), "other": np.array([None])}
    save(tmp_path / "x.npz", **arrays)
    found = read_npz(tmp_path / "x.npz", WANTED)
    assert found.keys() == {"words", "vectors"}
    for name, value in found.items():
        np.testing.assert_array_equal(value, arrays[name])
        assert value.dtype == arrays[name].dtype


class Evil:
    def __reduce__(self):
        return (pytest.fail, ("code in a file was executed",))


def described(descr, shape, data=b""):
    return npy(f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}}}", data)


OF_TEXT = "words: want 1 dimensions and a dtype of kind U"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (None, "words is missing"),
        (array(VECTORS), OF_TEXT + r", got shape \(2, 3\) and float64"),
        (array(np.array(["a", None], dtype=object)), OF_TEXT),
        (array(np.zeros(2, dtype=[("a", "U3")])), OF_TEXT),
        (array(np.array([], dtype="U1")), "words: want a value at least"),
        (described("<U0", "(1000000000000,)"), "want a value at least"),
        (described("<U9", "(-2,)"), "words: want a value at least"),
        (described("<U9", "(1000000000000,)", b"1234"), "want 36,000,000,000,000 bytes for shape .* got 4"),
        (described("<U500000000", "(9,)"), "bytes for shape"),
        (described("|O", "(2,)", pickle.dumps(Evil())), "of kind U"),
        *((npy(text), "damaged header") for text in ("__import__('os').abort()", "{'a': 1}", "\x00", "'''")),
        (npy("{'descr': " + "(" * 5000), "damaged header"),
        (npy("{" + "'a': 1," * 9000 + "}"), "damaged header"),
        (b"\x93NUMPY\x09\x00", "damaged header"),
        (b"", "damaged header"),
    ],
    ids=range(18),
)
def test_what_is_no_array_of_the_wanted_kind_is_refused(tmp_path, words, message):
    members = {"vectors": array(VECTORS)} | ({} if words is None else {"words": words})
    with pytest.raises(InputError, match=rf"x\.npz.*{message}"):
        read_npz(archive(tmp_path / "x.npz", **members), WANTED)


def test_a_bomb_takes_no_memory(tmp_path, monkeypatch):
    """A gigabyte of zeros is a megabyte when it is compressed; here the memory is said to be small."""
    size = 1 << 26
    zeros = described("<f4", f"({size // 4}, 1)", bytes(size))
    path = archive(tmp_path / "x.npz", words=array(WORDS), vectors=zeros)
    assert path.stat().st_size < 1 << 20
    monkeypatch.setattr(limits, "machine_memory", lambda: 1 << 20)
    tracemalloc.start()
    try:
        with pytest.raises(InputError, match="vectors: want at most half of this machine's memory, 524,288"):
            read_npz(path, WANTED)
        assert tracemalloc.get_traced_memory()[1] < 1 << 22
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("declared", [1 << 40, 200])
def test_a_declared_size_that_is_a_lie_is_refused(tmp_path, declared):
    path = archive(tmp_path / "x.npz", words=array(WORDS), vectors=array(VECTORS))
    data = path.read_bytes()
    true = struct.pack("<I", len(array(VECTORS)))
    path.write_bytes(data.replace(true, struct.pack("<I", min(declared, 2**32 - 2))))
    with pytest.raises(InputError, match=r"x\.npz"):
        read_npz(path, WANTED)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_damage_is_refused_or_changes_nothing(tmp_path, save):
    path = tmp_path / "x.npz"
    save(path, words=WORDS, vectors=VECTORS)
    whole, generator = path.read_bytes(), random.Random(0)
    refused = 0
    for number in range(600):
        data = bytearray(whole)
        for _ in range(1 + number % 3):
            data[generator.randrange(len(data))] = generator.choice((0, 255, generator.randrange(256)))
        path.write_bytes(data[: generator.randrange(len(data))] if number % 5 == 0 else data)
        try:
            found = read_npz(path, WANTED)
        except InputError:
            refused += 1
            continue
        np.testing.assert_array_equal(found["words"], WORDS)
        np.testing.assert_array_equal(found["vectors"], VECTORS)
    assert refused > 200


def test_other_files_and_compressions_are_refused(tmp_path):
    for compression in (zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA):
        path = archive(tmp_path / "x.npz", compression, words=array(WORDS), vectors=array(VECTORS))
        with pytest.raises(InputError, match=r"words: want it as numpy\.savez writes it"):
            read_npz(path, WANTED)
    with pytest.raises(InputError, match="no such file: none"):
        read_npz("none", WANTED)
    for data in (b"", b"PK", json.dumps([1]).encode(), array(VECTORS)):
        (tmp_path / "x.npz").write_bytes(data)
        with pytest.raises(InputError, match=r"x\.npz is not an \.npz, or is damaged"):
            read_npz(tmp_path / "x.npz", WANTED)
    with pytest.raises(InputError, match=r"is not an \.npz, or is damaged: .*Is a directory"):
        read_npz(tmp_path, WANTED)


DOCUMENT = {
    "words": ["a", "é\n", "\u2028", "x" * 50],
    "": {},
    "numbers": {"one": [1, -2.5, 1e-7, 12345678901], "none": [], "two": [[1], {"a": [None, True]}]},
    "last": -17.25,
}


def taken(stream: JsonStream, depth: int = 2):
    """The value that begins in a stream, of which objects and lists are walked through down to a depth."""
    kind = stream._next()
    if kind == "{" and depth:
        return {key: taken(stream, depth - 1) for key in stream.members()}
    if kind == "[" and depth:
        return [taken(stream, depth - 1) for _ in stream.items()]
    return stream.value()


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 1 << 18])
@pytest.mark.parametrize("layout", [{}, {"indent": 3}, {"ensure_ascii": False, "separators": (",", ":")}])
def test_values_are_those_of_the_whole_text(monkeypatch, size, layout):
    monkeypatch.setattr(json_stream, "READ_BYTES", size)
    for document in (DOCUMENT, [DOCUMENT, 3], [], {}, [12, 34], -5.5):
        stream = JsonStream(io.BytesIO(json.dumps(document, **layout).encode()), "x.json")
        assert taken(stream) == document
        stream.end()


def test_damaged_text_is_refused_where_python_refuses_it(monkeypatch):
    monkeypatch.setattr(json_stream, "READ_BYTES", 5)
    generator = random.Random(0)
    whole = json.dumps({"a": [1.5, 2], "b": {"c": "d"}})
    refused = 0
    for _ in range(400):
        text = list(whole)
        text[generator.randrange(len(text))] = generator.choice('{}[]",:x1 \\')
        text = "".join(text)
        try:
            wanted = json.loads(text)
        except ValueError:
            wanted = None
        stream = JsonStream(io.BytesIO(text.encode()), "x.json")
        try:
            found = taken(stream)
            stream.end()
        except InputError:
            found, refused = None, refused + 1
        assert found == wanted, text
    assert refused > 100


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "want '{', got its end"),
        (b"[1]", r"want '{', got '\['"),
        (b'{"a" 1}', "want ':', got '1'"),
        (b"{1: 1}", "want a text as a key, got 1"),
        (b'{"a": 1', "want '}', got its end"),
        (b'{"a": 1}}', "want nothing behind the whole, got '}'"),
        (b'{"a": \xff}', "is not UTF-8"),
        (b'{"a": ' + b"[" * 100_000, "recursion"),
        (b'{"a": ' + b"9" * 5000 + b"}", "4300 digits"),
        (b'{"a": "' + b"x" * (1 << 21) + b'"', "Unterminated string"),
        (b'{"a": 1' + b"e" * (1 << 21), "want values of at most 1,048,576 characters"),
        (b'{"a": ' + b" " * (1 << 21), "Expecting value"),
    ],
    ids=range(12),
)
def test_what_is_no_object_is_refused_in_words(data, message):
    stream = JsonStream(io.BytesIO(data), "x.json")

    def read():
        for _ in stream.members():
            stream.value()
        stream.end()

    with pytest.raises(InputError, match=message) as caught:
        read()
    assert str(caught.value).isprintable()
    assert "x.json" in str(caught.value)


def test_little_of_the_text_is_in_memory():
    """Eight megabytes are walked through, and at no time is more than a megabyte of them kept."""

    class Long(io.RawIOBase):
        parts = 0

        def read(self, size=-1):
            self.parts += 1
            if self.parts == 1:
                return b"["
            return b"[%s0], " % (b"1, " * 2000) * 40 if self.parts <= 30 else b"0]" * (self.parts == 31)

    stream = JsonStream(Long(), "x.json")
    longest = 0
    for _ in stream.items():
        stream.value()
        longest = max(longest, len(stream._text))
    assert longest < 1 << 20


def test_a_field_is_returned_if_it_has_the_type():
    values = parse_object('{"a": 1, "b": 2.5, "c": "x", "d": [], "e": {}}', "f")
    for name, kind in (("a", int), ("a", float), ("b", float), ("c", str), ("d", list), ("e", dict)):
        assert field(values, name, kind, "f") == values[name]
    assert parse("[1]", "f", list) == [1]


@pytest.mark.parametrize(
    ("value", "kind", "message"),
    [
        (1.0, int, r"a: want an integer, got 1\.0"),
        (False, float, "a: want a number, got False"),
        ("x" * 99, int, "a: want an integer, got a text"),
        (["x"], str, "a: want a text, got a list"),
        (None, dict, "a: want an object, got None"),
    ],
)
def test_a_field_of_another_type_is_refused(value, kind, message):
    with pytest.raises(InputError, match=f"^f is damaged: {message}$"):
        field({"a": value}, "a", kind, "f")
    with pytest.raises(InputError, match=r"^f is damaged: a is missing$"):
        field({}, "a", kind, "f")


def test_absence_is_for_the_caller_to_explain_and_text_is_shown_on_one_line(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_object(tmp_path / "none", most_bytes=9)
    assert one_line("a\nb\x00c\u2028\ud800é") == r"a\nb\x00c\u2028\ud800é"
    assert len(one_line("\n" * 999, 50)) == 50
