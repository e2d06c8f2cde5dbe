"""A write, sync or rename fails, each in turn: the run stays whole, and can be continued to the same end."""

import contextlib
import errno
import io
import os
from dataclasses import replace

import pytest
from safetensors import SafetensorError

from fastqt.errors import InputError
from fastqt.sentences.inference.encoder import SentenceEncoder
from fastqt.sentences.runs import tensor_files
from fastqt.sentences.runs.checkpoint import read_progress
from fastqt.sentences.runs.config import TrainConfig
from fastqt.sentences.train import train
from tests.shared.trainings import metrics_without_times

SETTINGS = {"word_dim": 4, "batch_size": 240, "context_size": 1, "epochs": 2}
SETTINGS |= {"report_every": 1, "checkpoint_every": 2}
OF_OS = ("open", "fsync", "replace", "rename", "chmod", "unlink", "mkdir", "truncate", "ftruncate")


class Faults:
    """Lets one call fail: the one with the number `fatal` among those that change files below `directory`."""

    def __init__(self, monkeypatch, directory):
        self.directory, self.fatal, self.calls = str(directory), None, 0
        for name in OF_OS:
            monkeypatch.setattr(os, name, self._failing(getattr(os, name)))
        opened = io.open
        monkeypatch.setattr(io, "open", self._opening(opened))
        monkeypatch.setattr("builtins.open", self._opening(opened))
        monkeypatch.setattr(tensor_files, "save_file", self._saving(tensor_files.save_file))

    def begin(self, fatal):
        self.fatal, self.calls = fatal, 0

    def is_due(self, path=None):
        if self.fatal is None or (path is not None and not str(path).startswith(self.directory)):
            return False
        self.calls += 1
        return self.calls == self.fatal

    def raise_where_due(self, path=None):
        if self.is_due(path):
            raise self.error()

    def error(self):
        code = (errno.ENOSPC, errno.EIO)[self.fatal % 2]
        return OSError(code, os.strerror(code))

    def _failing(self, function):
        def call(target, *arguments, **options):
            self.raise_where_due(None if isinstance(target, int) else target)
            return function(target, *arguments, **options)

        return call

    def _opening(self, function):
        def call(path, mode="r", *arguments, **options):
            ours = not isinstance(path, int) and str(path).startswith(self.directory)
            if not ours or not set(mode) & set("wax+"):
                return function(path, mode, *arguments, **options)
            self.raise_where_due()
            return File(self, function(path, mode, *arguments, **options))

        return call

    def _saving(self, function):
        def call(tensors, path, metadata):
            function(tensors, path, metadata)
            if self.is_due():
                os.truncate(path, os.stat(path).st_size // 2)
                raise SafetensorError(str(self.error()))

        return call


class File:
    """An open file whose writes may fail, in the middle."""

    def __init__(self, faults, file):
        self.faults, self.file = faults, file

    def write(self, data):
        if self.faults.is_due():
            self.file.write(data[: len(data) // 2])
            raise self.faults.error()
        return self.file.write(data)

    def close(self):
        if not self.file.closed:
            self.file.close()
            self.faults.raise_where_due()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def __getattr__(self, name):
        if name in ("flush", "truncate"):
            self.faults.raise_where_due()
        return getattr(self.file, name)


def contents(run):
    """The model and the metrics of a run."""
    return (run / "model.safetensors").read_bytes(), metrics_without_times(run)


def assert_whole(run):
    """What a run holds can be read; nothing else lies there."""
    names = {"config.json", "vocabulary.json", "metrics.jsonl", "finished.json", ".fastqt.lock"}
    names |= {"model.safetensors", "checkpoint.safetensors"}
    assert {path.name for path in run.iterdir()} <= names
    if (run / "checkpoint.safetensors").exists():
        read_progress(run / "checkpoint.safetensors")
        SentenceEncoder.load(run).encode(["a sentence"])


FROM_START, BEGUN = (pytest.param(begun, 1, marks=pytest.mark.slow) for begun in (False, True))


@pytest.mark.parametrize(("begun", "stride"), [(True, 13), FROM_START, BEGUN])
def test_a_call_that_fails_leaves_a_run_that_can_be_continued(planted, tmp_path, monkeypatch, begun, stride):
    config = TrainConfig((planted[0],), **SETTINGS)
    train(config, tmp_path / "whole")
    wanted = contents(tmp_path / "whole")
    faults = Faults(monkeypatch, tmp_path / "runs")
    (tmp_path / "runs").mkdir()
    for fatal in range(1, 1000, stride):
        run = tmp_path / "runs" / str(fatal)
        faults.begin(None)
        before = b""
        if begun:
            train(replace(config, steps=1, keep_checkpoint=True), run)
            before = (run / "checkpoint.safetensors").read_bytes()
        faults.begin(fatal)
        failed = True
        with contextlib.suppress(OSError, InputError):
            train(config, run, resume=begun)
            failed = False
        hit = faults.calls >= fatal
        faults.begin(None)
        if not hit:
            break
        if not failed:  # only what the training can do without may fail in silence
            assert contents(run) == wanted
        if run.exists():
            assert_whole(run)
            if begun and not (run / "finished.json").exists():
                after = (run / "checkpoint.safetensors").read_bytes()
                assert after == before or read_progress(run / "checkpoint.safetensors").step > 1
        train(config, run, resume=True)
        assert contents(run) == wanted, fatal
    assert 50 < fatal < 1000
