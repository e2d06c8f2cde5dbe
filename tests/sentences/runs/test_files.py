"""A file is written completely or not at all, links and devices stay, and one process locks a directory."""

import errno
import fcntl
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from fastqt.errors import InputError
from fastqt.sentences.runs import files as lock
from fastqt.sentences.runs.files import locked, write_atomically


def write_new(partial):
    partial.write_bytes(b"new")


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
    write_atomically(path, write_new)
    assert events == [("sync", len("new")), ("rename", "config.json"), ("sync directory",)]
    assert path.read_text() == "new"


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left on device")], ids=str)
def test_a_failure_leaves_only_the_old_file(tmp_path, monkeypatch, error):
    path = tmp_path / "vocabulary.json"
    path.write_text("old")

    def fail(*_, **__):
        raise error

    def write_half(partial):
        partial.write_text("half of the n")
        if isinstance(error, KeyboardInterrupt):
            fail()

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(type(error)):
        write_atomically(path, write_half)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["vocabulary.json"]


def test_a_new_file_follows_the_umask_and_an_old_one_keeps_its_mode(tmp_path):
    path = tmp_path / "x"

    def write_private(partial):
        partial.unlink()
        os.close(os.open(partial, os.O_CREAT | os.O_WRONLY, 0o600))

    before = os.umask(0o027)
    try:
        write_atomically(path, write_private)
        assert stat.S_IMODE(path.stat().st_mode) == 0o640
        path.chmod(0o604)
        write_atomically(path, write_private)
        assert stat.S_IMODE(path.stat().st_mode) == 0o604
    finally:
        os.umask(before)


@pytest.mark.parametrize("exists", [True, False])
def test_a_symbolic_link_stays_one(tmp_path, exists):
    (tmp_path / "elsewhere").mkdir()
    target, link = tmp_path / "elsewhere" / "x", tmp_path / "link"
    if exists:
        target.write_text("old")
    (tmp_path / "middle").symlink_to(Path("elsewhere") / "x")
    link.symlink_to("middle")
    write_atomically(link, write_new)
    assert link.is_symlink()
    assert (tmp_path / "middle").is_symlink()
    assert target.read_text() == "new"
    assert os.listdir(tmp_path / "elsewhere") == ["x"]


def test_a_fifo_is_given_the_data_and_stays_one(tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    received = []
    reader = threading.Thread(target=lambda: received.append(fifo.read_bytes()), daemon=True)
    reader.start()

    def write_and_seek(partial):
        with partial.open("wb") as file:
            file.write(b"old")
            file.seek(0)
            file.write(b"new")

    write_atomically(fifo, write_and_seek)
    reader.join(timeout=60)
    assert received == [b"new"]
    assert fifo.is_fifo()
    assert os.listdir(tmp_path) == ["fifo"]


def test_a_pipe_that_a_shell_names_is_written(tmp_path):
    """The target of /dev/fd/N is `pipe:[…]`, which is no path."""
    program = (
        "from fastqt.sentences.runs.files import write_atomically\n"
        "write_atomically('/dev/stdout', lambda partial: partial.write_bytes(b'new'))"
    )
    done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, check=True, cwd=tmp_path)
    assert done.stdout == b"new"


def test_a_character_device_stays_one(tmp_path):
    device = tmp_path / "null"
    try:
        os.mknod(device, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
        device.write_bytes(b"")
    except PermissionError:
        pytest.skip("only root may make a device here")
    write_atomically(device, write_new)
    assert stat.S_ISCHR(device.stat().st_mode)


def test_other_kinds_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the name of a socket is limited to 108 bytes
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket")
        with pytest.raises(InputError, match="socket: want a file, a FIFO or a character device"):
            write_atomically("socket", write_new)
    with pytest.raises(IsADirectoryError, match=str(tmp_path)):
        write_atomically(tmp_path, write_new)
    os.symlink("loop", "loop")
    with pytest.raises(OSError, match="'loop'"):
        write_atomically("loop", write_new)
    with pytest.raises(FileNotFoundError, match=r"'none/x'$"):
        write_atomically(Path("none") / "x", write_new)
    assert sorted(os.listdir()) == ["loop", "socket"]


def test_writers_of_one_file_do_not_mix_their_data(tmp_path):
    """Each has a temporary file of its own; the last one that finishes wins."""
    path = tmp_path / "x"

    def write_slowly(partial):
        with partial.open("w") as file:
            file.write("outer " * 3)
            write_atomically(path, lambda other: other.write_text("inner"))
            assert path.read_text() == "inner"
            file.write("outer")

    write_atomically(path, write_slowly)
    assert path.read_text() == "outer " * 3 + "outer"
    assert os.listdir(tmp_path) == ["x"]


HOLDER = """
import sys, time
from pathlib import Path
from fastqt.sentences.runs.files import locked
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


def test_a_lock_is_released_after_an_error(tmp_path):
    with pytest.raises(KeyboardInterrupt), locked(tmp_path):
        raise KeyboardInterrupt
    with locked(tmp_path), pytest.raises(InputError, match="is writing in it"), locked(tmp_path):
        pass


@pytest.mark.parametrize("text", ["", "[]", '{"pid": "x", "host": 1}', "[" * 999])
def test_any_text_may_stand_in_the_file_of_a_lock(tmp_path, text):
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
