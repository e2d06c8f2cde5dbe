"""A file is written whole or not at all, whenever the machine stops."""

import os
import stat
from pathlib import Path

import pytest
import torch

from fastqt.runs.checkpoint import (
    Progress,
    load_checkpoint,
    replacing,
    save_checkpoint,
    save_model,
    write_text,
)
from fastqt.train.optim import Adam


def test_a_file_is_on_the_disk_before_it_takes_its_name(tmp_path, monkeypatch):
    """First data, then the name and its directory are synced: a power cut leaves the old or the new file."""
    path = tmp_path / "config.json"
    path.write_text("old")
    events = []
    fsync, replace = os.fsync, Path.replace

    def recorded_fsync(descriptor):
        status = os.fstat(descriptor)
        events.append(("sync directory",) if stat.S_ISDIR(status.st_mode) else ("sync", status.st_size))
        fsync(descriptor)

    def recorded_replace(source, target):
        events.append(("rename", target.name))
        return replace(source, target)

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(Path, "replace", recorded_replace)
    write_text(path, "new text")
    assert events == [("sync", len("new text")), ("rename", "config.json"), ("sync directory",)]
    assert path.read_text() == "new text"


def test_a_failure_leaves_what_was_there_and_nothing_else(tmp_path):
    path = tmp_path / "vocabulary.json"
    path.write_text("old")

    def write_half():
        with replacing(path) as partial:
            partial.write_text("half of the n")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_half()
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["vocabulary.json"]


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_files_are_as_open_as_the_user_has_it(tmp_path, umask):
    """Files have a new file's permissions, although safetensors lets only their owner read them."""
    before = os.umask(umask)
    try:
        save_model(tmp_path / "model.safetensors", torch.nn.Linear(2, 2))
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "model.safetensors").stat().st_mode) == 0o666 & ~umask


def trained():
    """A model after one step of training, and its optimiser."""
    model = torch.nn.Linear(2, 2)
    optimizer = Adam(model.parameters(), lr=0.1)
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    return model, optimizer


def test_a_checkpoint_brings_back_the_random_numbers(tmp_path):
    model, optimizer = trained()
    save_checkpoint(tmp_path / "checkpoint", model, optimizer, Progress())
    drawn = torch.rand(5)
    load_checkpoint(tmp_path / "checkpoint", model, optimizer)
    assert torch.equal(torch.rand(5), drawn)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="asks Linux what is mapped")
def test_loaded_tensors_do_not_map_the_file(tmp_path):
    """Reading a tensor that maps a file that was truncated would end the process by a signal."""
    path = tmp_path / "checkpoint"
    save_checkpoint(path, *trained(), Progress())
    model, optimizer = trained()
    load_checkpoint(path, model, optimizer)
    assert str(path) not in Path("/proc/self/maps").read_text()
    assert len(optimizer.state) == 2
