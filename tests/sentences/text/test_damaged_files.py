"""Damaged and malicious .npy files and JSON are refused in words."""

import io
import pickle
import struct

import numpy as np
import pytest

from fastqt.errors import InputError, one_line
from fastqt.sentences.json_text import field, parse_object, read_object
from fastqt.sentences.text.vectors import map_rows


def npy(header, data=b""):
    """The bytes of an .npy file with this text as its header."""
    text = header.encode() + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + data


def described(descr, shape, data=b""):
    return npy(f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}}}", data)


def array(value) -> bytes:
    file = io.BytesIO()
    np.save(file, value)
    return file.getvalue()


ROWS = np.arange(6.0).reshape(2, 3)


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", ["<f4", ">f8", "f2"])
def test_rows_are_mapped_as_numpy_reads_them(tmp_path, order, dtype):
    np.save(tmp_path / "x.npy", ROWS.astype(dtype, order=order))
    found = map_rows(tmp_path / "x.npy")
    assert isinstance(found, np.memmap)
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, ROWS)


class Evil:
    def __reduce__(self):
        return (pytest.fail, ("code in a file was executed",))


WANT = r"want rows \(n, d\) of a floating-point type in an \.npy, got "


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (array(ROWS[0]), WANT + r"shape \(3,\) of float64"),
        (array(ROWS.astype(int)), WANT + r"shape \(2, 3\) of int64"),
        (array(ROWS.astype(complex)), WANT),
        (array(ROWS[:0]), WANT + r"shape \(0, 3\)"),
        (described("<f4", "(10000000000000, 1)", b"1234"), "damaged"),
        (described("<f4", "(-2, 3)"), "damaged"),
        (array(ROWS)[:-8], "damaged"),
        (described("|O", "(2, 1)", pickle.dumps(Evil())), "damaged"),
        (pickle.dumps(Evil()), "damaged"),
        *((npy(text), "damaged") for text in ("__import__('os').abort()", "{'a': 1}", "\x00", "'''")),
        (npy("{'descr': " + "(" * 5000), "damaged"),
        (npy("{" + "'a': 1," * 9000 + "}"), "damaged"),
        (b"\x93NUMPY\x09\x00", "damaged"),
        (b"", "damaged"),
    ],
    ids=range(17),
)
def test_what_holds_no_rows_is_refused(tmp_path, data, message):
    (tmp_path / "x.npy").write_bytes(data)
    with pytest.raises(InputError, match=rf"x\.npy.*{message}") as caught:
        map_rows(tmp_path / "x.npy")
    assert str(caught.value).isprintable()


def test_other_files_are_no_rows(tmp_path):
    np.savez(tmp_path / "x.npz", ROWS)
    for path, message in (
        (tmp_path / "x.npz", WANT),
        (tmp_path, "cannot read"),
        ("none", "no such file: none"),
    ):
        with pytest.raises(InputError, match=message):
            map_rows(path)


def test_a_field_is_returned_if_it_has_the_type():
    values = parse_object('{"a": 1, "b": 2.5, "c": "x", "d": [], "e": {}}', "f")
    for name, kind in (("a", int), ("a", float), ("b", float), ("c", str), ("d", list), ("e", dict)):
        assert field(values, name, kind, "f") == values[name]


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
