"""The file of a black box: where it lies, how large it may be, and which of those that are left go."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import shutil
import stat
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from otel_torchprof.errors import TorchProfError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import BinaryIO

_logger = logging.getLogger("otel_torchprof")

SUFFIX = ".otpbox"
"""Of the names of all of them."""
_SENT = f".sent{SUFFIX}"
_SHARED_MEMORY = "/dev/shm"  # noqa: S108 - a folder of the user's alone is made in it
_SIZE, _SMALL = 16 << 20, 4 << 20
_SHARE_OF_FREE = 8
"""The ranks of a machine take no more than one part of so many of what is free: a loader that finds no room there dies."""
_KEPT_SECONDS = 7 * 86_400.0
"""Counted from when somebody has first seen that the process has died: a mapping in shared memory does not change a file's times."""
_KEPT_BYTES = 1 << 30
"""Or the same share of the whole file system, where that is less: a process that dies again and again must not fill it."""
_PIECE = 1 << 20
_MFD_CLOEXEC = 1
_HIGH = 200
_MODE, _MODE_SEEN = 0o600, 0o400
"""Of a file, and of one whose process has been seen to have died."""
_INFO_AT, _INFO_BYTES = 4096, 8192
"""Where an image has what its process says of itself, as JSON (``blackbox_format.h``)."""
_KINDS = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}


class BoxFileError(TorchProfError):
    """There is no file for a black box; the text says why."""


class BoxFile:
    """A file that has all of its blocks, open. As long as it is, others can tell that its process lives.

    Args:
        descriptor: of the file.
        size: in bytes.
        path: None: it has no name, and goes with the last process that has it open.
    """

    def __init__(self, descriptor: int, size: int, path: Path | None) -> None:
        self.descriptor = descriptor
        """-1 once it is closed."""
        self.size = size
        self.path = path
        self._is_kept = False

    def keep_if_failed(self) -> None:
        """At the interpreter's exit: where an unhandled exception has ended the program, a copy takes the file's place.

        The recorder empties the file itself when it stops, which it has to before the interpreter ends.
        """
        if self.path is None or self._is_kept or not _has_failed():
            return
        copy = self.path.with_suffix(f".copy{SUFFIX}")  # removed like others where the process is killed in the middle
        try:
            with self.path.open("rb") as source, open(copy, "xb", opener=_private) as target:
                shutil.copyfileobj(source, target, _PIECE)
            copy.replace(self.path)
            self._is_kept = True
        except (OSError, MemoryError) as error:
            with suppress(OSError):
                copy.unlink(missing_ok=True)
            _logger.warning("the black box of a program that failed is not kept: %s", error)

    def remove(self) -> None:
        """Takes its name away, unless it is to be kept, and closes it; again without effect."""
        if self.path is not None and not self._is_kept:
            with suppress(OSError):  # somebody was faster
                self.path.unlink()
        self.close()

    def close(self) -> None:
        """Closes it, and leaves it where it is; again without effect: the number may be another file's by then."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            with suppress(OSError):
                os.close(descriptor)


def memory_file(size: int | None) -> BoxFile:
    """A file without a name, in memory; it counts to what the process uses, not to the shared memory file system.

    Raises:
        BoxFileError: there is no memory.
    """
    try:
        descriptor = _memory()
    except OSError as error:
        raise BoxFileError(f"there is no memory with a descriptor: {error.strerror}") from error
    try:
        return BoxFile(descriptor, _allocated(descriptor, size or _SIZE, "memory"), None)
    except BoxFileError:
        os.close(descriptor)
        raise


def _memory() -> int:
    name = "otel-torchprof-blackbox"
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name, os.MFD_CLOEXEC)
    import ctypes  # only for interpreters that were built for an older system, as uv's are

    libc = ctypes.CDLL(None, use_errno=True)
    found = int(libc.memfd_create(name.encode(), _MFD_CLOEXEC)) if hasattr(libc, "memfd_create") else -1
    if found < 0:
        number = ctypes.get_errno() or errno.ENOSYS
        raise OSError(number, os.strerror(number))
    return found


def named_file(name: str, directory: str, size: int | None, processes: int) -> BoxFile:
    """A new file in a folder of the user's alone, after those that nobody needs have been removed.

    Args:
        name: of the file, without its suffix; must be no other process's.
        directory: that it lies in; empty: one under the shared memory file system.
        size: in bytes; None: 16 MiB, or 4 MiB where there is no room.
        processes: of this machine that will have one.

    Raises:
        BoxFileError: it cannot be made, or there is no room.
    """
    folder = _folder(directory)
    path = folder / f"{name}{SUFFIX}"
    try:
        _prune(folder)
        size = _fitting(size, folder, processes)
        descriptor = _moved_up(_private(str(path), os.O_RDWR | os.O_CREAT | os.O_EXCL))
    except OSError as error:
        raise BoxFileError(f"{path} cannot be made: {error.strerror}") from error
    file = BoxFile(descriptor, size, path)
    try:
        _lock(descriptor, folder)
        _allocated(descriptor, size, str(folder))
    except BaseException:
        file.remove()
        raise
    return file


def _has_failed() -> bool:
    """Whether an exception that nobody handled has ended the program: it has left the main program's first frame.

    Interactive sessions, and programs that run others, as pytest does, note errors in the same place.
    """
    error = getattr(sys, "last_value", None)
    frame = error.__traceback__.tb_frame if isinstance(error, Exception) and error.__traceback__ else None
    return frame is not None and frame.f_back is None and not hasattr(sys, "ps1")


def _private(path: str, flags: int) -> int:
    """Opens a file that no other user can open, from the first moment on."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, _MODE)


def _moved_up(descriptor: int) -> int:
    """The same file under a high number: programs close low ones that they do not know, and get them for files of their own."""
    try:
        moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _HIGH)
    except OSError:  # the limit of the process is lower
        return descriptor
    os.close(descriptor)
    return moved


def opened(path: Path) -> BinaryIO:
    """A file, open to be read; nothing waits for whoever would write to a pipe.

    Raises:
        OSError: it cannot be opened, or is no regular file.
    """
    _check_is_file(path.stat())  # before it is opened: who waits to write to a pipe must not meet a reader that leaves
    file = cast("BinaryIO", open(path, "rb", buffering=0, opener=_without_waiting))  # noqa: SIM115 - the caller's
    try:
        _check_is_file(os.fstat(file.fileno()))
    except OSError:
        file.close()
        raise
    return file


def _check_is_file(info: os.stat_result) -> None:
    kind = stat.S_IFMT(info.st_mode)
    if kind != stat.S_IFREG:
        raise OSError(errno.EINVAL, f"it is {_KINDS.get(kind, 'a device')}; name a file")


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)


def is_of_the_living(path: Path) -> bool:
    """Whether the process that writes the file still lives: it holds a lock then, and so does a child that native code forked.

    Raises:
        OSError: it cannot be opened.
    """
    with opened(path) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return not has_ended(os.pread(file.fileno(), _INFO_BYTES, _INFO_AT))
    return False


@contextmanager
def sole_sender(folder: Path) -> Iterator[bool]:
    """Whether no other process is sending the boxes of a folder; none can begin within the context.

    The folder is locked, not its files: whose lock is held is a box of the living.

    Raises:
        OSError: the folder cannot be opened or locked.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        yield False
    else:
        yield True
    finally:
        os.close(descriptor)


def unsent(folder: Path) -> list[Path]:
    """Files of black boxes in a folder, oldest first, without those that :func:`mark_sent` renamed."""
    found = []
    for path in folder.glob(f"*{SUFFIX}"):
        with suppress(OSError):  # another process has removed it
            info = path.lstat()
            if stat.S_ISREG(info.st_mode) and not path.name.endswith(_SENT):
                found.append((info.st_mtime_ns, path))
    return [path for _, path in sorted(found)]


def mark_sent(path: Path) -> None:
    """Renames a file so that :func:`unsent` leaves it out. Other readers still find it, and it is removed like the others."""
    stem, number = path.name.removesuffix(SUFFIX), 1
    target = path.with_name(f"{stem}{_SENT}")
    while target.exists():  # of an earlier process whose box had the same name
        number += 1
        target = path.with_name(f"{stem}.{number}{_SENT}")
    path.rename(target)


def default_folder() -> Path:
    """Where boxes lie when nobody says otherwise."""
    return Path(_SHARED_MEMORY) / f"otel-torchprof-{os.geteuid()}"


def _folder(directory: str) -> Path:
    """Raises BoxFileError for one that others can write to, or that is a link: it would lead elsewhere."""
    try:
        folder = Path(directory).expanduser() if directory else default_folder()
    except RuntimeError as error:  # there is no such user
        raise BoxFileError(f"{directory} cannot be made: {error}; name another folder") from error
    try:
        if directory:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = folder.stat()
        else:
            with suppress(FileExistsError):
                folder.mkdir(mode=0o700)
            found = folder.lstat()
    except OSError as error:
        raise BoxFileError(f"{folder} cannot be made: {error.strerror}; name another folder") from error
    if not stat.S_ISDIR(found.st_mode):
        raise BoxFileError(f"{folder} is no folder; remove it, or name another")
    if found.st_uid != os.geteuid() or (not directory and found.st_mode & 0o077) or found.st_mode & stat.S_IWOTH:
        raise BoxFileError(f"{folder} belongs to somebody else, or others can write to it; name another folder")
    return folder


def _fitting(size: int | None, folder: Path, processes: int) -> int:
    free = os.statvfs(folder)
    available = free.f_bavail * free.f_frsize
    most = available // _SHARE_OF_FREE // max(processes, 1)
    for each in (size,) if size else (_SIZE, _SMALL):
        if each <= most:
            return each
    needed = size or _SMALL
    raise BoxFileError(
        f"{folder} has {available >> 20} MiB free, and a box of {needed >> 20} MiB for each of {processes} processes would be more than an "
        "eighth of that; name another folder, or a smaller size"
    )


def _lock(descriptor: int, folder: Path) -> None:
    """Shows others that the process lives, as long as it does."""
    try:
        fcntl.flock(
            descriptor, fcntl.LOCK_SH
        )  # another process may hold it for microseconds, to see whether this one lives
    except OSError as error:  # Lustre without the mount option flock
        raise BoxFileError(f"{folder} cannot lock files: {error.strerror}; name another folder") from error
    with suppress(OSError):
        os.fchmod(descriptor, _MODE)  # who looked before that has taken it for one of the dead


def _allocated(descriptor: int, size: int, where: str) -> int:
    """Gives the file all of its blocks: to run out of them later would be a SIGBUS in the program."""
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        if error.errno in {errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS}:
            raise BoxFileError(
                f"{where} cannot allocate a file's blocks: {error.strerror}; name another folder"
            ) from error
        raise BoxFileError(f"{where} has no room for {size >> 20} MiB: {error.strerror}") from error
    return size


def _prune(folder: Path) -> None:
    """Removes what processes that have died left: after seven days, and the oldest of more than 1 GiB."""
    system, now, left = os.statvfs(folder), time.time(), 0
    most = min(_KEPT_BYTES, system.f_blocks * system.f_frsize // _SHARE_OF_FREE)
    for seen, _, size, path in sorted(_left_behind(folder, now), reverse=True):
        left += size
        if left > most or seen < now - _KEPT_SECONDS:
            with suppress(OSError):
                path.unlink()


def _left_behind(folder: Path, now: float) -> Iterator[tuple[float, float, int, Path]]:
    """Files of processes that have died: since when that is known, when each was written last, its size and its path."""
    for path in folder.glob(f"*{SUFFIX}"):
        with suppress(OSError):
            info = path.lstat()
            if not stat.S_ISREG(info.st_mode) or info.st_uid != os.geteuid() or is_of_the_living(path):
                continue
            is_new = bool(info.st_mode & stat.S_IWUSR)
            if is_new:
                path.chmod(_MODE_SEEN)
            yield now if is_new else info.st_ctime, info.st_mtime, info.st_size, path


# ---- whose a black box is: tells a process from others that have its number, or its lock ----


_STARTED_AT = 19
"""Of ``/proc/<pid>/stat``, behind the name: the ticks from the start of the machine to that of the process."""
_DEAD = frozenset("ZXx")


def owner_info() -> dict[str, Any]:
    """What the box of this process says of it; empty where the system does not tell."""
    with suppress(OSError, ValueError, IndexError):
        return {"owner": os.getpid(), "started": _stat("/proc/self")[1], "machine": _boot(), "pids": _namespace()}
    return {}


def has_ended(text: bytes) -> bool:
    """Whether the process of a box does not run any more, by the box's info; False where that cannot be known."""
    with suppress(OSError, ValueError, TypeError, KeyError, IndexError, RecursionError):
        info = json.JSONDecoder().raw_decode(text.decode(errors="replace"))[0]
        if (info["machine"], info["pids"]) == (_boot(), _namespace()):
            return not _runs(int(info["owner"]), info["started"])
    return False


def _runs(pid: int, started: int) -> bool:
    """Also where its main thread has ended and others have not."""
    try:
        state, since = _stat(f"/proc/{pid}")
        if since != started:
            return False
        return state not in _DEAD or any(
            _stat(str(task))[0] not in _DEAD for task in Path(f"/proc/{pid}/task").iterdir()
        )
    except (FileNotFoundError, ProcessLookupError):
        return False


def _stat(folder: str) -> tuple[str, int]:
    """The state of a process or thread, and when it started."""
    words = Path(folder, "stat").read_bytes().rpartition(b")")[2].split()
    return words[0].decode(), int(words[_STARTED_AT])


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()


def _namespace() -> int:
    return Path("/proc/self/ns/pid").stat().st_ino
