"""The watcher: a small process that outlives a program and saves the black box of one that dies.

It is forked from the program, is not its child, and then runs this file in a fresh interpreter without the package: so it holds 4 MB
of its own instead of the 18 MB of pages that a fork keeps alive, and ``pkill -f train.py`` does not hit it. For that reason this
module imports nothing of the package, and as little as it can of the library.
"""

from __future__ import annotations

import errno
import fcntl
import os
import select
import sys
from contextlib import suppress

TYPE_CHECKING = False  # typing's would take 1 MB
if TYPE_CHECKING:
    from typing import NoReturn

_STDERR = 2
_IMAGE, _PROGRAM = 3, 4
"""The descriptors that the watcher has beside the standard ones: the image of the box, and the process it waits for."""
_FREE = 5
"""From here on it has none."""
_PIDFD_OPEN = 434
"""The number of the system call, the same on every architecture that torch has."""
_MAGIC = b"OTPBOX\n\x1a"
_PID_AT, _STATE_AT, _HEADER, _OPEN = 24, 28, 32, 1
"""Of the header of an image (``blackbox_format.h``): two fields, the bytes up to their end, and the state of an open box."""
_INFO_AT, _INFO_BYTES = 4096, 8192
"""Where it has what its process says of itself, as JSON."""
_DIED = "died without ending its recording"
_SIGTERM = 15
_PIDFD_GET_INFO, _PIDFD_INFO, _INFO_EXIT, _EXIT_AT = 0xC040FF0B, 64, 1 << 3, 60
"""``PIDFD_GET_INFO`` of ``linux/pidfd.h``: the request, the size of its ``struct pidfd_info``, the bit that asks for the status, and
where that is. Since Linux 6.15; before, it is refused."""


def start_watcher(image: int, path: str) -> None:
    """Starts a watcher of this process. It saves the image when the process ends without having closed its box.

    The process has no child afterwards. Call it before there are threads. Costs 10 ms.

    Args:
        image: descriptor of the box's memory.
        path: where the image is saved, relative to the working directory of now.

    Raises:
        OSError: no watcher can be had, or none would outlive the process.
    """
    if os.getpid() == 1:  # orphans become its children, and the system kills all of them when it ends
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
    """Waits for the end of the program, saves the image where the box is still open, and says so on stderr."""
    program = select.poll()
    program.register(_PROGRAM, select.POLLIN)
    program.poll()
    header = os.pread(_IMAGE, _HEADER, 0)
    if header.startswith(_MAGIC) and _number(header, _STATE_AT) == _OPEN:
        pid = _number(header, _PID_AT)
        is_terminated = ended_by_sigterm(pid, _PROGRAM)
        rank = _rank(os.pread(_IMAGE, _INFO_BYTES, _INFO_AT))
        how = "was ended by SIGTERM, as launchers do when another rank has failed" if rank and is_terminated else _DIED
        said = _saved(path, pid, is_rank=bool(rank))
        text = f"otel-torchprof: {rank or 'the program'} {how}; what it did last {said}\n"
        with suppress(OSError):
            os.write(_STDERR, os.fsencode(text))


def _rank(info: bytes) -> str:
    """``rank 3``, where the box is one of several ranks; else empty."""
    found = {}
    for field in info.partition(b"}")[0].split(b","):
        name, _, value = field.partition(b":")
        found[name.strip(b' {"')] = value.strip()
    is_one_of_many = found.get(b"world_size", b"").isdigit() and int(found[b"world_size"]) > 1
    return f"rank {int(found[b'rank'])}" if is_one_of_many and found.get(b"rank", b"").isdigit() else ""


def ended_by_sigterm(pid: int, pidfd: int) -> bool:
    """Whether SIGTERM ended a process. A kernel before 6.15 forgets that once its parent, a launcher, has asked: False then."""
    status = _status_of_reaped(pidfd)
    if status is None:
        status = _status_of_zombie(pid)
        reaped = _status_of_reaped(pidfd)  # meanwhile, and its number may be another process's
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
    found = int(libc.syscall(_PIDFD_OPEN, os.getpid(), 0))
    if found < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return found


def _forked() -> int:
    import warnings

    with warnings.catch_warnings():  # of threads, where an agent has started some before us: this child takes no locks
        warnings.simplefilter("ignore")
        return os.fork()


def _become_watcher(image: int, program: int, path: str) -> NoReturn:
    """Continues in a second fork, which belongs to nobody once this first one has ended."""
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
    """Leaves the watcher stderr and its own two: a reader of one of the program's pipes waits for all that have it open."""
    has_stderr = _STDERR not in {image, program} and _is_open(_STDERR)
    kept = [fcntl.fcntl(each, fcntl.F_DUPFD, _FREE) for each in (image, program)]
    null = os.open(os.devnull, os.O_RDWR)
    for number in range(_STDERR if has_stderr else _STDERR + 1):
        os.dup2(null, number)
    for number, each in zip((_IMAGE, _PROGRAM), kept, strict=True):
        os.dup2(each, number)
    for each in map(int, os.listdir("/proc/self/fd")):  # noqa: PTH208 - a fork imports nothing
        if each >= _FREE:
            with suppress(OSError):  # the descriptor of the listing itself
                os.close(each)


def _is_open(descriptor: int) -> bool:
    with suppress(OSError):
        os.fstat(descriptor)
        return True
    return False


def _execute(path: str) -> None:
    """Runs this file in a fresh interpreter; returns where there is none that is sure to find its library."""
    if sys.executable and not getattr(sys, "frozen", False) and "PYTHONHOME" not in os.environ:
        with suppress(OSError):
            os.execv(sys.executable, [sys.executable, "-I", "-S", __file__, path])  # noqa: S606 - its own


def _number(header: bytes, at: int) -> int:
    return int.from_bytes(header[at : at + 4], "little")


def _saved(path: str, pid: int, *, is_rank: bool) -> str:
    """Saves the image; what there is to say of it. Imports nothing: the shell has shown its prompt by now."""
    stem, suffix = os.path.splitext(path)  # noqa: PTH122
    target = f"{stem}.{pid}{suffix}" if _is_of_the_living(path) else path
    try:
        _write(target, f"{target}.{pid}.part")
    except OSError as error:
        with suppress(OSError):  # the working directory may be removed
            target = os.path.join(os.getcwd(), target)  # noqa: PTH109, PTH118
        return f"could not be saved as {_printable(target)}: {error.strerror}"
    said = f"is in {_printable(target)}: otel-torchprof recover {_printable(_quoted(target))}"
    folder = os.path.dirname(target) or "."  # noqa: PTH120
    return f"{said}; to compare the ranks: otel-torchprof autopsy {_printable(_quoted(folder))}" if is_rank else said


def _quoted(text: str) -> str:
    """A word for a shell, as ``shlex.quote``."""
    is_plain = bool(text) and all(each.isascii() and (each.isalnum() or each in "@%+=:,./-_") for each in text)
    return text if is_plain else "'" + text.replace("'", "'\"'\"'") + "'"


def _printable(text: str) -> str:
    return text if text.isprintable() else ascii(text)


def _is_of_the_living(path: str) -> bool:
    """Whether the file is a box that its process still writes: it holds a lock then (``box_file.py``)."""
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
