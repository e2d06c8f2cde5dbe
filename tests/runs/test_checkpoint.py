"""Files are written atomically, so that a crash at any moment leaves the old or the new file."""

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


def test_a_file_is_synced_before_it_is_renamed(tmp_path, monkeypatch):
    """First the data are synced, then the file is renamed, then the directory is synced."""
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


def test_a_failed_write_leaves_only_the_old_file(tmp_path):
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
