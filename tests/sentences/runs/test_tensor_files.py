"""A file of tensors is what was written, or it is refused; files without a checksum are read too."""

import json
import resource
import struct

import pytest
import torch
from safetensors.torch import save_file

from fastqt.errors import InputError
from fastqt.sentences.runs.tensor_files import metadata_of, open_tensors, save_tensors

TENSORS = {"a": torch.arange(6, dtype=torch.float32).reshape(2, 3), "b": torch.tensor([7, 8])}


def read(path):
    """The tensors and the metadata, or None if the file is refused."""
    try:
        with open_tensors(path) as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return tensors, metadata_of(file)
    except InputError:
        return None


def same(found, wanted):
    return (
        found[1] == wanted[1]
        and found[0].keys() == wanted[0].keys()
        and all(
            value.dtype == wanted[0][name].dtype and torch.equal(value, wanted[0][name])
            for name, value in found[0].items()
        )
    )


def flips(data):
    for place in range(len(data)):
        for bit in range(8):
            yield place, data[:place] + bytes([data[place] ^ 1 << bit]) + data[place + 1 :]


def test_every_flipped_bit_is_refused_or_changes_nothing(tmp_path):
    path = tmp_path / "x.safetensors"
    save_tensors(path, TENSORS)
    whole = path.read_bytes()
    wanted = read(path)
    assert same(wanted, (TENSORS, {}))
    end_of_header = 8 + struct.unpack("<Q", whole[:8])[0]
    refused = 0
    for place, flipped in flips(whole):
        path.write_bytes(flipped)
        found = read(path)
        if found is None:
            refused += 1
            continue
        # Only the name of the checksum may be hit without harm: the file then counts as an old one.
        assert place < end_of_header
        assert found[0].keys() == wanted[0].keys()
        assert all(torch.equal(found[0][name], wanted[0][name]) for name in wanted[0])
    assert refused > 0.9 * 8 * len(whole)


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}])
def test_files_without_a_checksum_are_read(tmp_path, metadata):
    path = tmp_path / "old.safetensors"
    save_file(TENSORS, path, metadata)
    assert same(read(path), (TENSORS, metadata or {}))


def test_every_cut_and_every_appended_byte_is_refused(tmp_path):
    path = tmp_path / "x.safetensors"
    save_tensors(path, TENSORS, {"progress": "{}"})
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        assert read(path) is None
    path.write_bytes(whole + b"\0")
    assert read(path) is None


def header(tensors):
    text = json.dumps(tensors).encode()
    return struct.pack("<Q", len(text)) + text


@pytest.mark.parametrize(
    "data",
    [
        struct.pack("<Q", 2**63) + b"{}",
        struct.pack("<Q", 99_000_000) + b"{}",
        header({"a": {"dtype": "F32", "shape": [10**12], "data_offsets": [0, 4 * 10**12]}}),
        header({"a": {"dtype": "F32", "shape": [2**40, 2**40], "data_offsets": [0, 4]}}) + bytes(4),
        header({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}) + bytes(4),
        header({"a": {"dtype": "F99", "shape": [1], "data_offsets": [0, 4]}}) + bytes(4),
        header({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 2**70]}}) + bytes(4),
        header({"__metadata__": {"x": 1}}),
        header([]),
        struct.pack("<Q", 100_000) + b"[" * 100_000,
        struct.pack("<Q", 4) + b'{"\xff"',
        b"",
    ],
)
def test_headers_that_lie_are_refused_without_a_traceback(tmp_path, data):
    path = tmp_path / "x.safetensors"
    path.write_bytes(data)
    assert read(path) is None


def test_a_full_disk_leaves_the_old_file(tmp_path):
    """A limit on the size of files stands for the disk: the library then reports what no OSError is."""
    path = tmp_path / "x.safetensors"
    save_tensors(path, TENSORS)
    before, limits = path.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(OSError, match=r"cannot write .*x\.safetensors"):
            save_tensors(path, {"large": torch.zeros(1000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
