"""A checkpoint or a model is read as it was written, or it is refused in words."""

import json
import os
import stat
from copy import deepcopy
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from fastqt.errors import InputError
from fastqt.sentences.runs.checkpoint import (
    Progress,
    generator_states,
    load_checkpoint,
    load_model,
    read_generators,
    read_progress,
    save_checkpoint,
    save_model,
    set_generator_states,
)
from fastqt.sentences.text import Position, Span
from fastqt.sentences.train.optim import Adam


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_new_files_follow_the_umask(tmp_path, umask):
    """safetensors would create files that only their owner can read."""
    before = os.umask(umask)
    try:
        save_model(tmp_path / "model.safetensors", torch.nn.Linear(2, 2))
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "model.safetensors").stat().st_mode) == 0o666 & ~umask


def trained():
    """A model and its optimiser after one step."""
    model = torch.nn.Linear(2, 2)
    optimizer = Adam(model.parameters(), lr=0.1)
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    return model, optimizer


def test_a_checkpoint_restores_the_random_number_generator(tmp_path):
    model, optimizer = trained()
    save_checkpoint(tmp_path / "checkpoint", model, optimizer, Progress())
    drawn = torch.rand(5)
    load_checkpoint(tmp_path / "checkpoint", model, optimizer)
    assert torch.equal(torch.rand(5), drawn)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="/proc/self/maps exists on Linux only")
def test_loaded_tensors_do_not_map_the_file(tmp_path):
    """A process that reads a tensor that maps a truncated file is killed by a signal."""
    path = tmp_path / "checkpoint"
    save_checkpoint(path, *trained(), Progress())
    model, optimizer = trained()
    load_checkpoint(path, model, optimizer)
    assert str(path) not in Path("/proc/self/maps").read_text()
    assert len(optimizer.state) == 2


PROGRESS = Progress(
    step=3, epoch=1, position=Position(0, 10, 2, 1), seconds=1.5, sentences=9, corpus_bytes=(99,)
)


def save_old(path, progress, tensors):
    """Writes a checkpoint as versions without a checksum did."""
    save_file(tensors, path, {"format": "1", "progress": json.dumps(progress)})


def test_flipped_bits_of_a_checkpoint_are_refused(tmp_path):
    """A bit of each byte of the header and of some of the others; test_tensor_files.py flips every bit."""
    path = tmp_path / "checkpoint.safetensors"
    save_checkpoint(path, *trained(), PROGRESS)
    whole = path.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    for place in [*range(header), *range(header, len(whole), 50)]:
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1 :])
        with pytest.raises(InputError, match=r"checkpoint\.safetensors is "):
            read_progress(path)
    path.write_bytes(whole)
    assert read_progress(path) == PROGRESS


def test_a_checkpoint_of_an_older_version_is_read(tmp_path):
    model, optimizer = trained()
    save_checkpoint(tmp_path / "new", model, optimizer, PROGRESS)
    progress = asdict(PROGRESS)
    for name in ("corpus_digests", "vocabulary_digest", "taken", "spans", "best_loss", "since_best"):
        del progress[name]
    save_old(tmp_path / "old", progress, load_file(tmp_path / "new"))
    assert read_progress(tmp_path / "old") == replace(PROGRESS, taken=None)
    wanted = deepcopy(model.state_dict())
    with torch.no_grad():
        model.weight.zero_()
    load_checkpoint(tmp_path / "old", model, optimizer)
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"step": "3"}, "step: want an integer, got '3'"),
        ({"step": True}, "step: want an integer, got True"),
        ({"step": -1}, "step: want a count"),
        ({"epoch": 10**30}, "epoch: want a count"),
        ({"epoch": None}, "epoch: want an integer, got None"),
        ({"seconds": "long"}, "seconds: want a number, got 'long'"),
        ({"seconds": float("nan")}, "seconds or best: want a time"),
        ({"cpu_seconds": -1.0}, "seconds or best: want a time"),
        ({"best": float("nan")}, "seconds or best: want a time"),
        ({"best_loss": float("nan")}, "best_loss: want a loss"),
        ({"since_best": -1}, "since_best: want a count"),
        ({"position": [0, 1]}, "position: want a place in one of 1 files"),
        ({"position": [1, 0, 0, 0]}, "position: want a place in one of 1 files"),
        ({"position": [0, 2**70, 0, 0]}, "position: want a place in one of 1 files"),
        ({"position": [0, 1.5, 0, 0]}, "position: want a place in one of 1 files"),
        ({"position": "home"}, "position: want a place in one of 1 files"),
        ({"taken": "3"}, "taken: want an integer, got '3'"),
        ({"taken": -1}, "taken: want a count"),
        ({"spans": 3}, "spans: want a list, got 3"),
        ({"spans": [3]}, "spans: want a list for each rank"),
        ({"spans": [[3]]}, "spans: want the starts and sizes"),
        ({"spans": [[[[0, 0, 0, -1], 0]]]}, "spans: want the starts and sizes"),
        ({"spans": [[[[0, 0, 0, -1], True]]]}, "spans: want the starts and sizes"),
        ({"spans": [[[[1, 0, 0, -1], 2]]]}, "position: want a place in one of 1 files"),
        ({"corpus_bytes": 9}, "corpus_bytes: want a list, got 9"),
        ({"corpus_bytes": ["9"]}, "corpus_bytes: want a count"),
        ({"corpus_digests": ["a", "b"]}, "corpus_digests: want 1, got 2"),
        ({"vocabulary_digest": 5}, "vocabulary_digest: want a text, got 5"),
        ({"colour": "red"}, "progress: unknown \\['colour'\\]"),
    ],
    ids=str,
)
def test_a_damaged_field_of_the_progress_is_named(tmp_path, change, message):
    save_old(tmp_path / "x", asdict(PROGRESS) | change, {"a": torch.zeros(1)})
    with pytest.raises(InputError, match=f"x is damaged: {message}"):
        read_progress(tmp_path / "x")


def test_the_place_and_the_generators_of_each_rank_are_kept(tmp_path):
    spans = ((Span(Position(0, 7, 1, 0), 4), Span(Position(0, 50, 9, 2), 1)), ())
    progress = replace(PROGRESS, position=None, taken=4, spans=spans)
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


@pytest.mark.parametrize("text", ["", "[]", "{", '{"step": 1, "step": 2}', "9" * 9999, "[" * 99_999])
def test_progress_that_is_no_object_is_refused(tmp_path, text):
    save_file({"a": torch.zeros(1)}, tmp_path / "x", {"format": "1", "progress": text})
    with pytest.raises(InputError, match="x is damaged"):
        read_progress(tmp_path / "x")
    save_file({"a": torch.zeros(1)}, tmp_path / "x", {"format": "1"})
    with pytest.raises(InputError, match="x is not a checkpoint"):
        read_progress(tmp_path / "x")


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
    save_old(
        tmp_path / "x", asdict(PROGRESS), {key: tensors[key] for key in tensors if tensors[key] is not None}
    )
    with pytest.raises(InputError, match=message):
        load_checkpoint(tmp_path / "x", *trained())


def test_a_model_of_half_precision_is_read_and_one_of_integers_refused(tmp_path):
    model = torch.nn.Linear(2, 2)
    save_file({name: tensor.half() for name, tensor in model.state_dict().items()}, tmp_path / "x")
    other = torch.nn.Linear(2, 2)
    load_model(tmp_path / "x", other)
    assert torch.equal(other.weight, model.weight.half().float())
    save_file({name: tensor.int() for name, tensor in model.state_dict().items()}, tmp_path / "x")
    with pytest.raises(InputError, match="want one of F64, F32, F16, BF16, got I32"):
        load_model(tmp_path / "x", other)
