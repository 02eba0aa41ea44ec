"""The file of a black box: where it lies, how large it may be, and which of those that are left go."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from otel_torchprof.errors import TorchProfError

SUFFIX = ".otpbox"
"""Of the names of all of them."""
_SHARED_MEMORY = "/dev/shm"  # noqa: S108 - a folder of the user's alone is made in it
_SIZE, _SMALL = 16 << 20, 4 << 20
_SHARE_OF_FREE = 8
"""The ranks of a machine take no more than one part of so many of what is free: a loader that finds no room there dies."""
_KEPT_SECONDS = 7 * 86_400.0
_KEPT_BYTES = 1 << 30


class BoxFileError(TorchProfError):
    """There is no file for a black box; the text says why."""


class BoxFile(NamedTuple):
    """A file that has all of its blocks, open. As long as it is, others can tell that its process lives."""

    descriptor: int
    size: int
    path: Path | None
    """None: it has no name, and goes with the last process that has it open."""

    def remove(self) -> None:
        """Closes it, and takes its name away."""
        if self.path is not None:
            with suppress(OSError):  # somebody was faster
                self.path.unlink()
        self.close()

    def close(self) -> None:
        """Closes it, and leaves it where it is."""
        with suppress(OSError):
            os.close(self.descriptor)


def memory_file(size: int | None) -> BoxFile:
    """A file without a name, in memory; it counts to what the process uses, not to the shared memory file system.

    Raises:
        BoxFileError: there is no memory.
    """
    descriptor = os.memfd_create("otel-torchprof-blackbox", os.MFD_CLOEXEC)
    return BoxFile(descriptor, _allocated(descriptor, size or _SIZE, "memory"), None)


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
    _prune(folder)
    path = folder / f"{name}{SUFFIX}"
    try:
        size = _fitting(size, folder, processes)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(path, flags, 0o600)
    except OSError as error:
        raise BoxFileError(f"{path} cannot be made: {error.strerror}") from error
    file = BoxFile(descriptor, size, path)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        _allocated(descriptor, size, str(folder))
    except BaseException:
        file.remove()
        raise
    return file


def is_of_the_living(path: Path) -> bool:
    """Whether the process that writes the file still has it open."""
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def default_folder() -> Path:
    """Where boxes lie when nobody says otherwise."""
    return Path(_SHARED_MEMORY) / f"otel-torchprof-{os.geteuid()}"


def _folder(directory: str) -> Path:
    """Raises BoxFileError for one that others can write to, or that is a link: it would lead elsewhere."""
    folder = Path(directory).expanduser() if directory else default_folder()
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
    most: int = available // _SHARE_OF_FREE // max(processes, 1)
    for each in (size or _SIZE, *(() if size else (_SMALL,))):
        if each <= most:
            return each
    needed = size or _SMALL
    raise BoxFileError(
        f"{folder} has {available >> 20} MiB free, and a box of {needed >> 20} MiB for each of {processes} processes would be more than an "
        "eighth of that; name another folder, or a smaller size"
    )


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
    """Removes what processes that have died left: what is older than seven days, and the oldest of more than 1 GiB."""
    found = []
    for path in folder.glob(f"*{SUFFIX}"):
        with suppress(OSError):
            info = path.lstat()
            if stat.S_ISREG(info.st_mode) and info.st_uid == os.geteuid() and not is_of_the_living(path):
                found.append((info.st_mtime, info.st_size, path))
    left = 0
    for changed, size, path in sorted(found, reverse=True):
        left += size
        if left > _KEPT_BYTES or changed < time.time() - _KEPT_SECONDS:
            with suppress(OSError):
                path.unlink()
