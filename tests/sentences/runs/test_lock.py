"""Only one process holds the lock of a directory, and it holds it no longer than it lives."""

import errno
import fcntl
import os
import signal
import subprocess
import sys

import pytest

from fastqt.errors import InputError
from fastqt.sentences.runs import lock
from fastqt.sentences.runs.lock import locked

HOLDER = """
import sys, time
from pathlib import Path
from fastqt.sentences.runs.lock import locked
with locked(Path(sys.argv[1])):
    print("locked", flush=True)
    time.sleep(600)
"""


def test_the_second_learns_who_holds_the_lock_and_may_have_it_after_a_kill(tmp_path):
    with subprocess.Popen([sys.executable, "-c", HOLDER, tmp_path], stdout=subprocess.PIPE) as holder:
        assert holder.stdout.readline() == b"locked\n"
        who = f"process {holder.pid} on host {os.uname().nodename} is writing in it"
        with pytest.raises(InputError, match=who), locked(tmp_path):
            pass
        holder.send_signal(signal.SIGKILL)
    with locked(tmp_path):
        assert (tmp_path / ".fastqt.lock").exists()
    assert not list(tmp_path.iterdir())


def test_it_is_released_after_an_error(tmp_path):
    with pytest.raises(KeyboardInterrupt), locked(tmp_path):
        raise KeyboardInterrupt
    with locked(tmp_path), pytest.raises(InputError, match="is writing in it"), locked(tmp_path):
        pass


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": "x", "host": 1}', "9" * 999, "[" * 999])
def test_any_text_may_stand_in_the_file(tmp_path, text):
    with locked(tmp_path):
        (tmp_path / ".fastqt.lock").write_text(text)
        with pytest.raises(InputError, match="another process is writing in it"), locked(tmp_path):
            pass


def test_a_file_that_was_removed_before_it_was_locked_is_not_enough(tmp_path, monkeypatch):
    """Otherwise two processes could hold locks: one on the removed file, one on its successor."""
    path, take = tmp_path / ".fastqt.lock", fcntl.flock
    inodes = []

    def remove_and_take(file, operation):
        if not inodes:
            path.unlink()
        inodes.append(os.fstat(file.fileno()).st_ino)
        take(file, operation)

    monkeypatch.setattr(fcntl, "flock", remove_and_take)
    with locked(tmp_path):
        assert len(inodes) == 2
        assert path.stat().st_ino == inodes[1]


def test_a_file_system_without_locks_is_warned_about(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(lock.fcntl, "flock", refuse)
    with pytest.warns(UserWarning, match="cannot be locked"), locked(tmp_path):
        pass
