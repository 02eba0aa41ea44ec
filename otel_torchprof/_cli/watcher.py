"""The watcher: a small process that outlives a program and saves the black box of one that dies.

It is forked from the program, is not its child, and then runs this file in a fresh interpreter without the package: so it needs 4 MB
instead of the 18 MB of pages that a fork keeps alive, and ``pkill -f train.py`` does not hit it. Therefore this module imports
nothing of the package, and as little as possible of the standard library.
"""

from __future__ import annotations

import errno
import fcntl
import os
import select
import sys
from contextlib import suppress

TYPE_CHECKING = False  # importing typing would take 1 MB
if TYPE_CHECKING:
    from typing import NoReturn

_STDERR = 2
_IMAGE, _PROGRAM = 3, 4
"""The watcher's descriptors beside the standard ones: the image of the box, and the pidfd of the program."""
_FREE = 5
"""The first descriptor that the watcher does not use."""
_PIDFD_OPEN = 434
"""The number of the system call, the same on every architecture that torch supports."""
_MAGIC = b"OTPBOX\n\x1a"
_PID_AT, _STATE_AT, _HEADER, _OPEN = 24, 28, 32, 1
"""Header of an image (``blackbox_format.h``): offsets of pid and state, bytes up to their end, and the state of an open box."""
_INFO_AT, _INFO_BYTES = 4096, 8192
"""Offset and size of the metadata of the process, as JSON."""
_DIED = "died without ending its recording"
_SIGTERM = 15
_PIDFD_GET_INFO, _PIDFD_INFO, _INFO_EXIT, _EXIT_AT = 0xC040FF0B, 64, 1 << 3, 60
"""``PIDFD_GET_INFO`` of ``linux/pidfd.h``: the request, the size of its ``struct pidfd_info``, the bit that requests the exit status,
and the offset of the status. Refused before Linux 6.15."""


def start_watcher(image: int, path: str) -> None:
    """Starts a watcher of this process, which saves the image if the process ends without closing its box.

    The process has no child afterwards. Call it before there are threads. Costs 10 ms.

    Args:
        image: descriptor of the box's memory.
        path: where to save the image, relative to the current working directory.

    Raises:
        OSError: the watcher cannot be started, or would not outlive the process.
    """
    if os.getpid() == 1:  # of a container: when it ends, the kernel kills every other process
        raise OSError(errno.ENOTSUP, "no process outlives the first one of a container")
    import signal

    program = _own_pidfd()
    ignored = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ignored)  # the watcher leaves them blocked
    try:
        child = _forked()
        if child == 0:
            _become_watcher(image, program, path)
        with suppress(ChildProcessError):  # the process ignores SIGCHLD: its children leave no status
            if os.waitpid(child, 0)[1]:
                raise OSError(errno.EAGAIN, "the system gives no process")
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.close(program)


def watch(path: str) -> None:
    """Waits for the end of the program, and saves the image if the box is still open, with a message on stderr."""
    program = select.poll()
    program.register(_PROGRAM, select.POLLIN)
    program.poll()
    header = os.pread(_IMAGE, _HEADER, 0)
    if header.startswith(_MAGIC) and _number(header, _STATE_AT) == _OPEN:
        pid = _number(header, _PID_AT)
        is_terminated = ended_by_sigterm(pid, _PROGRAM)
        rank = _rank(os.pread(_IMAGE, _INFO_BYTES, _INFO_AT))
        how = "was ended by SIGTERM, as launchers do when another rank has failed" if rank and is_terminated else _DIED
        result = _saved(path, pid, is_rank=bool(rank))
        text = f"otel-torchprof: {rank or 'the program'} {how}; what it did last {result}\n"
        with suppress(OSError):
            os.write(_STDERR, os.fsencode(text))


def _rank(info: bytes) -> str:
    """``rank 3``, if the box is that of one of several ranks; else empty."""
    fields = {}
    for field in info.partition(b"}")[0].split(b","):
        name, _, value = field.partition(b":")
        fields[name.strip(b' {"')] = value.strip()
    is_one_of_many = fields.get(b"world_size", b"").isdigit() and int(fields[b"world_size"]) > 1
    return f"rank {int(fields[b'rank'])}" if is_one_of_many and fields.get(b"rank", b"").isdigit() else ""


def ended_by_sigterm(pid: int, pidfd: int) -> bool:
    """Whether SIGTERM ended a process. False before Linux 6.15 if its parent, a launcher, has already read its status."""
    status = _status_of_reaped(pidfd)
    if status is None:
        status = _status_of_zombie(pid)
        reaped = _status_of_reaped(pidfd)  # if reaped meanwhile, another process may have its pid
        status = status if reaped is None else reaped
    return status is not None and os.WIFSIGNALED(status) and os.WTERMSIG(status) == _SIGTERM


def _status_of_zombie(pid: int) -> int | None:
    with suppress(OSError, ValueError), open(f"/proc/{pid}/stat", "rb") as file:  # noqa: PTH123 - a fork imports nothing
        return int(file.read().split()[-1])
    return None


def _status_of_reaped(pidfd: int) -> int | None:
    info = bytearray(_INFO_EXIT.to_bytes(8, sys.byteorder).ljust(_PIDFD_INFO, b"\0"))
    with suppress(OSError):
        fcntl.ioctl(pidfd, _PIDFD_GET_INFO, info)
        if int.from_bytes(info[:8], sys.byteorder) & _INFO_EXIT:
            return int.from_bytes(info[_EXIT_AT : _EXIT_AT + 4], sys.byteorder)
    return None


def _own_pidfd() -> int:
    if hasattr(os, "pidfd_open"):
        return os.pidfd_open(os.getpid())
    import ctypes  # only for interpreters that were built for older systems, as uv's and conda's are

    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = int(libc.syscall(_PIDFD_OPEN, os.getpid(), 0))
    if descriptor < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return descriptor


def _forked() -> int:
    import warnings

    with warnings.catch_warnings():  # about a fork with threads, such as a debugger's: this child takes no locks
        warnings.simplefilter("ignore")
        return os.fork()


def _become_watcher(image: int, program: int, path: str) -> NoReturn:
    """Forks again and ends the first fork, so that the watcher is not a child of the program."""
    status = 1
    try:
        os.setsid()
        if _forked() == 0:
            _take_descriptors(image, program)
            _execute(path)
            watch(path)
        status = 0
    finally:
        os._exit(status)


def _take_descriptors(image: int, program: int) -> None:
    """Closes all descriptors but stderr and the watcher's own: a pipe of the program ends only when nobody has it open."""
    has_stderr = _STDERR not in {image, program} and _is_open(_STDERR)
    copies = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, _FREE) for descriptor in (image, program)]
    null = os.open(os.devnull, os.O_RDWR)
    for number in range(_STDERR if has_stderr else _STDERR + 1):
        os.dup2(null, number)
    for number, copy in zip((_IMAGE, _PROGRAM), copies, strict=True):
        os.dup2(copy, number)
    for number in map(int, os.listdir("/proc/self/fd")):  # noqa: PTH208 - a fork imports nothing
        if number >= _FREE:
            with suppress(OSError):  # the descriptor of the listing itself
                os.close(number)


def _is_open(descriptor: int) -> bool:
    with suppress(OSError):
        os.fstat(descriptor)
        return True
    return False


def _execute(path: str) -> None:
    """Runs this file in a fresh interpreter; returns if none can be relied on to find its standard library."""
    if sys.executable and not getattr(sys, "frozen", False) and "PYTHONHOME" not in os.environ:
        with suppress(OSError):
            os.execv(sys.executable, [sys.executable, "-I", "-S", __file__, path])  # noqa: S606 - its own


def _number(header: bytes, at: int) -> int:
    return int.from_bytes(header[at : at + 4], "little")


def _saved(path: str, pid: int, *, is_rank: bool) -> str:
    """Saves the image; returns the end of the message. Imports nothing, to be fast: the shell's prompt is back already."""
    stem, suffix = os.path.splitext(path)  # noqa: PTH122
    target = f"{stem}.{pid}{suffix}" if _is_of_the_living(path) else path
    try:
        _write(target, f"{target}.{pid}.part")
    except OSError as error:
        with suppress(OSError):  # the working directory may be removed
            target = os.path.join(os.getcwd(), target)  # noqa: PTH109, PTH118
        return f"could not be saved as {_printable(target)}: {error.strerror}"
    text = f"is in {_printable(target)}: otel-torchprof recover {_printable(_quoted(target))}"
    folder = os.path.dirname(target) or "."  # noqa: PTH120
    return f"{text}; to compare the ranks: otel-torchprof autopsy {_printable(_quoted(folder))}" if is_rank else text


def _quoted(text: str) -> str:
    """A word for a shell, as ``shlex.quote``."""
    is_plain = bool(text) and all(char.isascii() and (char.isalnum() or char in "@%+=:,./-_") for char in text)
    return text if is_plain else "'" + text.replace("'", "'\"'\"'") + "'"


def _printable(text: str) -> str:
    return text if text.isprintable() else ascii(text)


def _is_of_the_living(path: str) -> bool:
    """Whether the process of a box still writes it: it holds a lock on the file (``box_file.py``)."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno == errno.EWOULDBLOCK
    finally:
        os.close(file)
    return False


def _write(target: str, part: str) -> None:
    """Writes the file under another name first, so that nobody reads half of it."""
    file = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        at, size = 0, os.fstat(_IMAGE).st_size
        while sent := os.sendfile(file, _IMAGE, at, size - at):
            at += sent
        os.replace(part, target)  # noqa: PTH105
    except OSError:
        os.unlink(part)  # noqa: PTH108
        raise
    finally:
        os.close(file)


if __name__ == "__main__":
    watch(sys.argv[1])
    os._exit(0)
