"""A directory is written whole or not at all, of what a library computes as `fastqt embed` does."""

import ctypes
import json
import os
import stat
import sys

import pytest

from fastqt.errors import InputError
from fastqt.sentences.inference import export
from fastqt.sentences.inference.encoder import SentenceEncoder
from fastqt.sentences.inference.export import export_run, folder
from fastqt.sentences.inference.export.folder import check_vectors
from tests.shared.stored_runs import write_run

pytest.importorskip("sentence_transformers", reason="the extra st is not installed")

of_bags = pytest.mark.parametrize("run", ["bow"], indirect=True)


def contents(directory):
    return {path.name: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@of_bags
def test_an_export_lists_its_files_which_all_can_read(run, tmp_path):
    (tmp_path / "out").mkdir()  # an empty directory is as good as none
    export_run(run, tmp_path / "out", "sentence-transformers")
    about = json.loads((tmp_path / "out/export.json").read_text())
    paths = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert set(about["files"]) == {path.relative_to(tmp_path / "out").as_posix() for path in paths}
    assert about["identity"] == SentenceEncoder.load(run, with_identity=True).identity
    modes = {stat.S_IMODE(path.stat().st_mode) for path in paths}
    assert modes == {stat.S_IMODE((run / "config.json").stat().st_mode)}
    assert {path.name for path in tmp_path.iterdir()} == {"run", "out"}


@of_bags
def test_a_directory_with_files_is_kept_and_an_export_replaced(run, tmp_path):
    export_run(run, tmp_path / "out", "sentence-transformers")
    before = contents(tmp_path / "out")
    with pytest.raises(InputError, match=r"out: want a new directory, or --overwrite"):
        export_run(run, tmp_path / "out", "sentence-transformers")
    (tmp_path / "out/notes.txt").write_text("mine")
    with pytest.raises(InputError, match=r"overwrite: want .*, got notes\.txt in "):
        export_run(run, tmp_path / "out", "sentence-transformers", overwrite=True)
    with pytest.raises(InputError, match=r"overwrite: want .*, got config\.json in "):
        export_run(run, run, "sentence-transformers", overwrite=True)
    assert contents(tmp_path / "out") == before | {"notes.txt": b"mine"}
    (tmp_path / "out/notes.txt").unlink()
    other = write_run(tmp_path / "other", encoder="gru")
    export_run(other, tmp_path / "out", "sentence-transformers", normalize=False, overwrite=True)
    assert not json.loads((tmp_path / "out/export.json").read_text())["normalize"]
    assert {path.name for path in tmp_path.iterdir()} == {"run", "other", "out"}


@pytest.mark.skipif(sys.platform != "linux", reason="other systems exchange no names")
def test_at_each_moment_there_is_the_old_export_or_the_new_one_on_the_disk(tmp_path, monkeypatch):
    """A look at each line of the module sees what a crash there would leave."""
    synced, looks, fsync = set(), [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: (synced.add(os.fstat(file).st_ino), fsync(file)))

    def export(text):
        with folder.new_folder(tmp_path / "out", {"text": text}) as new:
            (new / "half").mkdir()
            (new / "half/weights").write_text(text)

    def look(frame, event, argument):
        if frame.f_code.co_filename == folder.__file__:
            looks.append(json.loads((tmp_path / "out/export.json").read_text())["text"])
            assert (tmp_path / "out/half/weights").read_text() == looks[-1]
            if looks[-1] == "new":
                inodes = {path.stat().st_ino for path in (tmp_path / "out", *(tmp_path / "out").rglob("*"))}
                assert inodes <= synced
        return look

    export("old")
    synced.clear()
    before = sys.gettrace()
    sys.settrace(look)
    try:
        export("new")
    finally:
        sys.settrace(before)
    assert set(looks) == {"old", "new"}
    assert tmp_path.stat().st_ino in synced  # the directory that holds the name
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_what_a_user_has_added_meanwhile_is_kept(tmp_path):
    def export():
        with folder.new_folder(tmp_path / "out", {}):
            (tmp_path / "out").mkdir()
            (tmp_path / "out/notes.txt").write_text("mine")

    with pytest.raises(InputError, match=r"overwrite: want .*, got notes\.txt in "):
        export()
    assert contents(tmp_path / "out") == {"notes.txt": b"mine"}
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@of_bags
@pytest.mark.parametrize("moment", ["while it is written", "in its place"])
def test_a_failure_leaves_what_was_there(run, tmp_path, monkeypatch, moment):
    export_run(run, tmp_path / "out", "sentence-transformers")
    before = contents(tmp_path / "out")

    def fail(*arguments):
        raise OSError(28, "No space left on device")

    if moment == "while it is written":
        monkeypatch.setattr(export, "card_text", fail)
    else:
        monkeypatch.setattr(ctypes, "CDLL", lambda name: None)  # a system that cannot exchange names
        rename = type(tmp_path).rename
        monkeypatch.setattr(
            type(tmp_path),
            "rename",
            lambda path, to: fail() if path.suffix == folder.PARTIAL else rename(path, to),
        )
    for out, overwrite in (("out", True), ("new", False)):
        with pytest.raises(OSError, match="No space left"):
            export_run(run, tmp_path / out, "sentence-transformers", overwrite=overwrite)
    assert contents(tmp_path / "out") == before
    assert {path.name for path in tmp_path.iterdir()} == {"run", "out"}


@of_bags
def test_other_vectors_are_not_written(run):
    """What another library computes differently, even one text alone or one row of NaN, is refused."""
    encoder, differ = SentenceEncoder.load(run, "cpu"), "format: the vectors in x differ from those of this "

    def check(change, width=16):
        def other(texts):
            return encoder.encode(list(texts))[:, :width] + change * (len(texts) == 1)

        check_vectors(encoder, other, normalize=True, format="x")

    check(0.0)
    for change in (1e-4, float("nan")):
        with pytest.raises(InputError, match=differ):
            check(change)
    with pytest.raises(InputError, match=r"gives vectors of shape \(6, 8\), want \(6, 16\)"):
        check(0.0, width=8)
