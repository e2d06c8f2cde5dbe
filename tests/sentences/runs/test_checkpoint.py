"""A file of tensors, a checkpoint or a model is read as it was written, or it is refused in words."""

import itertools
import json
import resource
import struct
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from fastqt.errors import InputError
from fastqt.optim import Adam
from fastqt.sentences.runs.checkpoint import (
    Progress,
    check_weights,
    generator_states,
    load_checkpoint,
    load_weights,
    read_generators,
    read_progress,
    save_checkpoint,
    set_generator_states,
)
from fastqt.sentences.runs.tensor_files import metadata_of, open_tensors, save_tensors
from fastqt.sentences.text import Position, Span

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


def test_every_flipped_bit_is_refused_or_changes_nothing(tmp_path):
    path = tmp_path / "x.safetensors"
    save_tensors(path, TENSORS)
    whole = path.read_bytes()
    wanted = read(path)
    assert same(wanted, (TENSORS, {}))
    end_of_header = 8 + struct.unpack("<Q", whole[:8])[0]
    refused = 0
    for place, bit in itertools.product(range(len(whole)), range(8)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << bit]) + whole[place + 1 :])
        found = read(path)
        if found is None:
            refused += 1
            continue
        # Only the name of the checksum may be hit without harm: the file then counts as another program's.
        assert place < end_of_header
        assert found[0].keys() == wanted[0].keys()
        assert all(torch.equal(found[0][name], wanted[0][name]) for name in wanted[0])
    assert refused > 0.9 * 8 * len(whole)


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
        header({"a": {"dtype": "F32", "shape": [2**40, 2**40], "data_offsets": [0, 4]}}) + bytes(4),
        header({"a": {"dtype": "F99", "shape": [1], "data_offsets": [0, 4]}}) + bytes(4),
        header({"__metadata__": {"x": 1}}),
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


def trained():
    """A model and its optimiser after one step."""
    model = torch.nn.Linear(2, 2)
    optimizer = Adam(model.parameters(), lr=0.1)
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    return model, optimizer


def test_a_checkpoint_restores_the_random_number_generator_and_does_not_map_its_file(tmp_path):
    """A process that reads a tensor that maps a truncated file is killed by a signal."""
    path = tmp_path / "checkpoint"
    save_checkpoint(path, *trained(), Progress())
    drawn = torch.rand(5)
    model, optimizer = trained()
    load_checkpoint(path, model, optimizer)
    assert torch.equal(torch.rand(5), drawn)
    assert len(optimizer.state) == 2
    if (maps := Path("/proc/self/maps")).exists():  # on Linux
        assert str(path) not in maps.read_text()


PROGRESS = Progress(
    3, 1, seconds=1.5, sentences=9, corpus_bytes=(99,), corpus_digests=("a",), vocabulary_digest="b", taken=4
)


def save_old(path, progress, tensors):
    """Writes a checkpoint without a checksum."""
    save_file(tensors, path, {"format": "1", "progress": json.dumps(progress)})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"step": True}, "step: want an integer, got True"),
        ({"step": -1}, "step: want a number in its range"),
        ({"seconds": float("nan")}, "seconds: want a number in its range"),
        ({"cpu_seconds": -1.0}, "cpu_seconds: want a number in its range"),
        ({"best": float("nan")}, "best: want a number in its range"),
        ({"best_loss": float("nan")}, "best_loss: want a number in its range"),
        ({"loss_scale": float("inf")}, "loss_scale: want a number in its range"),
        ({"since_best": -1}, "since_best: want a number in its range"),
        ({"taken": -1}, "taken: want a number in its range"),
        ({"spans": 3}, "spans: want a list, got 3"),
        ({"spans": [3]}, "spans: want a list for each rank"),
        ({"spans": [[[[0, 0, 0, -1], 0]]]}, "spans: want the starts and sizes"),
        *(
            ({"spans": [[[place, 2]]]}, "position: want a place in one of 1 files")
            for place in ([1, 0, 0, -1], [0, 2**70, 0, 0], [0, 1.5, 0, 0])
        ),
        ({"corpus_bytes": ["9"]}, "corpus_bytes: want sizes of files"),
        ({"corpus_digests": ["a", "b"]}, "corpus_digests: want 1, got 2"),
        ({"colour": "red"}, "progress: unknown \\['colour'\\]"),
    ],
    ids=str,
)
def test_a_damaged_field_of_the_progress_is_named(tmp_path, change, message):
    save_old(tmp_path / "x", asdict(PROGRESS) | change, {"a": torch.zeros(1)})
    with pytest.raises(InputError, match=f"x is damaged: {message}"):
        read_progress(tmp_path / "x")


@pytest.mark.parametrize("text", ["", "[]", '{"step": 1, "step": 2}', "[" * 99_999, None])
def test_progress_that_is_no_object_is_refused(tmp_path, text):
    metadata = {"format": "1"} if text is None else {"format": "1", "progress": text}
    save_file({"a": torch.zeros(1)}, tmp_path / "x", metadata)
    with pytest.raises(InputError, match="x is " + ("not a checkpoint" if text is None else "damaged")):
        read_progress(tmp_path / "x")


def test_the_place_and_the_generators_of_each_rank_are_kept(tmp_path):
    spans = ((Span(Position(0, 7, 1, 0), 4), Span(Position(0, 50, 9, 2), 1)), ())
    progress = replace(PROGRESS, spans=spans)
    generators = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        generators.append(generator_states())
    save_checkpoint(tmp_path / "x", *trained(), progress, generators)
    assert read_progress(tmp_path / "x") == progress
    stored = read_generators(tmp_path / "x")
    assert len(stored) == 2
    for seed, states in zip((1, 2), stored, strict=True):
        set_generator_states(states, tmp_path / "x")
        ours = torch.rand(3)
        torch.manual_seed(seed)
        assert torch.equal(ours, torch.rand(3))
    # Without ranks, as one process reads it, the first rank's count.
    load_checkpoint(tmp_path / "x", *trained())
    assert torch.equal(torch.get_rng_state(), generators[0]["cpu"])


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("model.weight", None, r"model\.weight is missing"),
        ("model.weight", torch.zeros(3, 2), r"the shape of model\.weight differs"),
        ("model.weight", torch.zeros(2, 2, dtype=torch.int64), r"model\.weight: want one of F64, .* got I64"),
        ("optimizer.exp_avg.weight", torch.zeros(1), r"optimizer\.exp_avg\.weight: want shape \(2, 2\)"),
        ("optimizer.step.weight", torch.zeros(7), r"optimizer\.step\.weight: want shape \(\)"),
        ("rng.cpu", None, "rng"),
        ("rng.cpu", torch.zeros(5, dtype=torch.uint8), "rng: want the state of a generator"),
        ("rng.cpu", torch.zeros(5), "rng: want the state of a generator"),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(tmp_path, name, value, message):
    save_checkpoint(tmp_path / "new", *trained(), PROGRESS)
    tensors = {**load_file(tmp_path / "new"), name: value}
    kept = {key: tensor for key, tensor in tensors.items() if tensor is not None}
    save_old(tmp_path / "x", asdict(PROGRESS), kept)
    with pytest.raises(InputError, match=message):
        load_checkpoint(tmp_path / "x", *trained())


def load_model(path, model):
    with open_tensors(path) as file:
        check_weights(file, path, model.state_dict())
        load_weights(file, path, model.state_dict())


def test_a_model_of_half_precision_is_read_and_one_of_integers_refused(tmp_path):
    model = torch.nn.Linear(2, 2)
    save_file({name: tensor.half() for name, tensor in model.state_dict().items()}, tmp_path / "x")
    other = torch.nn.Linear(2, 2)
    load_model(tmp_path / "x", other)
    assert torch.equal(other.weight, model.weight.half().float())
    save_file({name: tensor.int() for name, tensor in model.state_dict().items()}, tmp_path / "x")
    with pytest.raises(InputError, match="want one of F64, F32, F16, BF16, got I32"):
        load_model(tmp_path / "x", other)
