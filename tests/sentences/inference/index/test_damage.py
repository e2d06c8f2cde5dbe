"""Index files that are damaged, or made to harm with right checksums, are refused without a crash."""

import json
import random
import struct
import zlib

import numpy as np
import pytest

from fastqt.errors import InputError
from fastqt.sentences.inference.index import Index, IndexOptions, build_index
from fastqt.sentences.inference.index.array_file import END, ArrayWriter
from tests.shared.clustered import Clustered, write_corpus

KINDS = ["flat", "ivf"]
ROWS = 200


@pytest.fixture(scope="module")
def encoder():
    return Clustered(ROWS, width=8)


@pytest.fixture(scope="module")
def files(encoder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    corpus = write_corpus(folder / "corpus.txt", range(ROWS))
    for kind in KINDS:
        build_index(encoder, corpus, folder / f"{kind}.index", IndexOptions(kind=kind))
    return {kind: (folder / f"{kind}.index").read_bytes() for kind in KINDS}


def assert_refused(encoder, path, k=150):
    """In words, shortly, and with the name of the file."""
    with pytest.raises(InputError, match=path.name) as error:
        Index(path).search(encoder, ["3", "150"], k)
    assert str(error.value).isprintable()
    assert len(str(error.value)) < 400


@pytest.mark.parametrize("kind", KINDS)
def test_parts_of_a_file_are_refused(encoder, files, tmp_path, kind):
    whole, path = files[kind], tmp_path / "x.index"
    generator = random.Random(kind)
    sizes = [0, 1, 19, 20, len(whole) - 1, *(generator.randrange(len(whole)) for _ in range(30))]
    for size in sizes:
        for part in (whole[:size], whole[len(whole) - size :]):
            path.write_bytes(part)
            assert_refused(encoder, path)
    for other in (tmp_path, tmp_path / "absent.index"):
        with pytest.raises(InputError, match=r"no such file|cannot read"):
            Index(other)


@pytest.mark.parametrize("kind", KINDS)
def test_a_changed_bit_is_refused_or_does_not_matter(encoder, files, tmp_path, kind):
    """It may be in the padding, or in a part that no search reads; then the answers are the same."""
    whole, path = files[kind], tmp_path / "x.index"
    path.write_bytes(whole)
    right = Index(path).search(encoder, ["3", "150"], 150)
    generator = random.Random(kind)
    refused = 0
    for _ in range(150):
        data = bytearray(whole)
        data[generator.randrange(len(data))] ^= 1 << generator.randrange(8)
        path.write_bytes(data)
        try:
            found = Index(path).search(encoder, ["3", "150"], 150)
        except InputError as error:
            found, refused = right if path.name in str(error) else None, refused + 1
        assert found == right
    assert refused > 100


def parts(data):
    """The header and the arrays of an index file."""
    length = END.unpack(data[-END.size :])[0]
    header = json.loads(data[-END.size - length : -END.size])
    header.pop("checksums")
    arrays = {
        name: np.frombuffer(data, entry["dtype"], int(np.prod(entry["shape"])), entry["offset"]).reshape(
            entry["shape"]
        )
        for name, entry in header.pop("arrays").items()
    }
    return header, arrays


def write(path, header, arrays):
    with path.open("w+b") as file:
        writer = ArrayWriter(file)
        for name, values in arrays.items():
            writer.add(name, str(values.dtype), values.shape, [values])
        writer.finish(header)


def changed(values, place, value):
    values = values.copy()
    values.reshape(-1)[place] = value
    return values


BIG = 2**62


def of_header(kind):
    yield from (("rows", value) for value in (-1, 0, 1, ROWS - 1, ROWS + 1, BIG, 1e3, "9", None))
    yield from (("width", value) for value in (-8, 0, 1, 7, 9, 2**24, BIG))
    yield from (("effort", value) for value in (-1, 0, 10**6, BIG, "1"))
    yield from (("kind", value) for value in ("tree", None, *(other for other in KINDS if other != kind)))
    yield from (("files", value) for value in ([], [1], ["a", "b"], {}, None))
    yield from (("firsts", value) for value in ([], [1], [0, 0], ["0"], [0, ROWS], [BIG]))
    yield from (("recall", value) for value in (1.0, {}, {"value": "x", "at": 1, "queries": 1}))
    yield from (("format", value) for value in (0, 2, None))


@pytest.mark.parametrize("kind", KINDS)
def test_a_header_made_to_harm_is_refused(encoder, files, tmp_path, kind):
    path = tmp_path / "x.index"
    header, arrays = parts(files[kind])
    write(path, header, arrays)
    assert path.read_bytes() == files[kind]  # this test's writing is right
    for name, value in of_header(kind):
        write(path, {**header, name: value}, arrays)
        assert_refused(encoder, path)
    for name in header:
        if name != "fastqt":
            write(path, {each: header[each] for each in header if each != name}, arrays)
            with pytest.raises(InputError, match=rf"x\.index is damaged: {name} is missing"):
                Index(path)


@pytest.mark.parametrize("kind", KINDS)
def test_arrays_made_to_harm_are_refused(encoder, files, tmp_path, kind):
    path = tmp_path / "x.index"
    header, arrays = parts(files[kind])
    cases = [
        *((name, arrays[name][:-1]) for name in arrays),
        *((name, np.concatenate([arrays[name], arrays[name][:1]])) for name in arrays if name != "text"),
        *((name, x.astype("float32" if x.dtype == "int64" else "int64")) for name, x in arrays.items()),
        *(("ends", changed(arrays["ends"], 150, value)) for value in (-1, 0, 3, BIG)),
        ("text", changed(arrays["text"], arrays["ends"][149], 0xFF)),
    ]
    if kind == "ivf":
        sizes, row_bytes = arrays["sizes"], 4 * 8 + 8
        cases += [("sizes", changed(sizes, 0, value)) for value in (-1, ROWS + 1, BIG, -BIG)]
        opposite = sizes.copy()
        opposite[:2] += [BIG, -BIG]
        cases.append(("sizes", opposite))
        cases.append(("centroids", np.full_like(arrays["centroids"], np.nan)))
        begin = len(arrays["index"]) - ROWS * row_bytes  # of the first list, whose vectors come first
        first = slice(begin + int(sizes[0]) * 4 * 8, begin + int(sizes[0]) * row_bytes)
        cases.append(("index", changed(arrays["index"], first, 0x7F)))
    for name, values in cases:
        write(path, header, {**arrays, name: values})
        assert_refused(encoder, path, ROWS)


def test_offsets_and_shapes_made_to_harm_are_refused(encoder, files, tmp_path):
    path, whole = tmp_path / "x.index", files["flat"]
    length = END.unpack(whole[-END.size :])[0]
    header = json.loads(whole[-END.size - length : -END.size])
    for entry in (
        *({"offset": offset} for offset in (-64, 1, 64, BIG)),
        *({"shape": s} for s in ([], [1, 1, 1], [BIG, BIG], [-1, 8], [ROWS, "8"], [0, 8], 8, [True, 8])),
        *({"dtype": dtype} for dtype in ("object", "float64", "O", "")),
    ):
        arrays = {**header["arrays"], "index": {**header["arrays"]["index"], **entry}}
        text = json.dumps({**header, "arrays": arrays}).encode()
        end = struct.pack("<QI8s", len(text), zlib.crc32(text), whole[-8:])
        path.write_bytes(whole[: -END.size - length] + text + end)
        assert_refused(encoder, path)
