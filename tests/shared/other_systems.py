"""Windows or macOS, as far as a process on Linux can be made to resemble them.

`become` takes away the modules and functions that Python does not have there, hides Linux's own files, and
changes `sys.platform`. The paths stay those of this system. It is for a process of its own, whose whole state
it changes, and it comes after the import of torch and of other libraries, which decide by the platform which
of their files they load.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import signal
import sys
import types
from typing import Any

POSIX_MODULES = ("fcntl", "grp", "posix", "pty", "pwd", "resource", "syslog", "termios", "tty")
LINUX_FUNCTIONS = (
    *("sched_getaffinity", "sched_setaffinity", "sched_getscheduler", "posix_fadvise", "posix_fallocate"),
    *("copy_file_range", "memfd_create", "eventfd", "pidfd_open", "splice", "getrandom", "getresuid"),
)
POSIX_FUNCTIONS = (
    *("fork", "forkpty", "getuid", "geteuid", "getgid", "getpgid", "setsid", "killpg", "uname", "sysconf"),
    *("pread", "preadv", "pwrite", "pwritev", "mkfifo", "mknod", "chown", "fchown", "fchmod", "getloadavg"),
    *("statvfs", "nice", "wait", "sched_yield", "confstr", "chroot", "sync", "fdatasync"),
)
POSIX_SIGNALS = ("SIGKILL", "SIGUSR1", "SIGUSR2", "SIGHUP", "SIGALRM", "SIGCHLD", "SIGPIPE", "setitimer")
MEMORY = 8 << 30  # bytes that the fake of Windows has


def become(system: str) -> None:
    """Makes this process resemble `system`, "win32" or "darwin"."""
    _remove(os, LINUX_FUNCTIONS)
    sys.addaudithook(_refuse_linux_files)
    # Neither has a Triton of its own, and the extension is for Linux.
    for name in ("triton", "fastqt._C"):
        sys.modules[name] = None  # type: ignore[assignment]

    if system == "win32":
        _become_windows()
    sys.platform = system


def _become_windows() -> None:
    import fcntl

    sys.modules["msvcrt"] = _msvcrt(fcntl)
    for name in POSIX_MODULES:
        sys.modules[name] = None  # type: ignore[assignment]
    usage = shutil.disk_usage(os.curdir)  # for which shutil asks another function of Windows
    shutil.disk_usage = lambda path: usage
    _remove(os, POSIX_FUNCTIONS)
    _remove(signal, POSIX_SIGNALS)
    kernel = types.SimpleNamespace(GlobalMemoryStatusEx=_memory_status)
    ctypes.windll = types.SimpleNamespace(kernel32=kernel)  # type: ignore[attr-defined]
    os.open, os.fsync = _opened(os.open), _synced(os.fsync)


def _remove(module: types.ModuleType, names: tuple[str, ...]) -> None:
    for name in names:
        if hasattr(module, name):
            delattr(module, name)


def _refuse_linux_files(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and str(arguments[0]).startswith(("/proc/", "/sys/", "/dev/shm")):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), arguments[0])


def _msvcrt(fcntl: Any) -> types.ModuleType:
    """The part of the C runtime that locks a byte, which fails at once where another has locked it."""
    module = types.ModuleType("msvcrt")
    module.LK_NBLCK = 2  # type: ignore[attr-defined]

    def locking(descriptor: int, mode: int, size: int) -> None:
        assert (mode, size) == (2, 1)
        assert os.lseek(descriptor, 0, os.SEEK_CUR) > os.fstat(descriptor).st_size
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES)) from None

    module.locking = locking  # type: ignore[attr-defined]
    return module


def _memory_status(reference: Any) -> int:
    """What Windows writes to a MEMORYSTATUSEX: 64 bytes, of which 8 from the ninth on are the memory."""
    status = reference._obj
    assert ctypes.sizeof(status) == 64
    assert ctypes.c_uint32.from_buffer(status).value == 64
    ctypes.c_uint64.from_buffer(status, 8).value = MEMORY
    return 1


def _opened(genuine: Any) -> Any:
    """Windows opens no directory."""

    def opened(path: Any, *arguments: Any, **options: Any) -> int:
        if os.path.isdir(path):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return genuine(path, *arguments, **options)

    return opened


def _synced(genuine: Any) -> Any:
    """Windows syncs only what is open for writing. An empty write is refused where it is not."""

    def synced(descriptor: int) -> None:
        os.write(descriptor, b"")
        genuine(descriptor)

    return synced
