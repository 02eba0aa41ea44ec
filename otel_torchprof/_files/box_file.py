"""Files of black boxes: folder, size, and removal of old ones."""

from __future__ import annotations

import errno
import fcntl
import functools
import json
import logging
import os
import platform
import shutil
import stat
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from otel_torchprof._process.descriptors import moved_up
from otel_torchprof._process.private_folder import FolderError, made_folder
from otel_torchprof.errors import TorchProfError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from typing import BinaryIO

_logger = logging.getLogger("otel_torchprof")

SUFFIX = ".otpbox"
"""Suffix of their names."""
_SENT = f".sent{SUFFIX}"
_SIZE, _SMALL = 16 << 20, 4 << 20
_SHARE_OF_FREE = 8
"""The boxes of a machine take at most one eighth of the free memory: DataLoader workers die if shared memory is full."""
_KEPT_SECONDS = 7 * 86_400.0
"""Age at which boxes of dead processes are removed, from when the death was first noticed: writes to a mapping do not change file times."""
_KEPT_BYTES = 1 << 30
"""Total size of the boxes of dead processes, or one eighth of the file system if that is less: repeated crashes must not fill it."""
_PIECE = 1 << 20
_MFD_CLOEXEC = 1
_MODE, _MODE_SEEN = 0o600, 0o400
"""Mode of a file, and of one whose process is known to be dead."""
_INFO_AT, _INFO_BYTES = 4096, 8192
"""Offset and size of the metadata of the process in an image, as JSON (``blackbox_format.h``)."""
_CGROUPS = Path("/sys/fs/cgroup")
_KINDS = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}


class BoxFileError(TorchProfError):
    """The file of a black box could not be created; the message has the reason."""


class BoxFile:
    """An open file with all its blocks allocated. While it is open, other processes can detect that its process is alive.

    Args:
        descriptor: its descriptor.
        size: its size in bytes.
        path: None if it has no name; it is then freed when the last process closes it.
    """

    def __init__(self, descriptor: int, size: int, path: Path | None) -> None:
        self.descriptor = descriptor
        """-1 once it is closed."""
        self.size = size
        self.path = path
        self._is_kept = False

    def keep_if_failed(self) -> None:
        """Replaces the file by a copy, at exit after an unhandled exception.

        The recorder, which has to stop before the interpreter ends, empties the file itself.
        """
        if self.path is None or self._is_kept or failure() is None:
            return
        copy = self.path.with_suffix(f".copy{SUFFIX}")  # if the process is killed now, it is removed like other boxes
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
        """Removes the file, unless it was kept, and closes it; may be called repeatedly."""
        if self.path is not None and not self._is_kept:
            with suppress(OSError):  # another process has removed it
                self.path.unlink()
        self.close()

    def close(self) -> None:
        """Closes the file without removing it; a second call has no effect, since the descriptor may be reused."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            with suppress(OSError):
                os.close(descriptor)


_MEMORY_NAME = "otel-torchprof-blackbox"


def box_of(pid: int) -> Path | None:
    """The open box of a living process, wherever it is, in memory too; None if it has none, or is not this user's."""
    with suppress(OSError):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):  # closed meanwhile
                target = os.readlink(entry)  # noqa: PTH115 - of memory it is no path
                if target.endswith(SUFFIX) or target.startswith(f"/memfd:{_MEMORY_NAME}"):
                    return Path(target) if target.endswith(SUFFIX) and Path(target).exists() else entry
    return None


def memory_file(size: int | None) -> BoxFile:
    """Creates a file in memory without a name; it counts as memory of the process, not of the shared memory file system.

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
    if hasattr(os, "memfd_create"):
        return os.memfd_create(_MEMORY_NAME, os.MFD_CLOEXEC)
    import ctypes  # only for interpreters that were built for an older system, as uv's are

    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = int(libc.memfd_create(_MEMORY_NAME.encode(), _MFD_CLOEXEC)) if hasattr(libc, "memfd_create") else -1
    if descriptor < 0:
        number = ctypes.get_errno() or errno.ENOSYS
        raise OSError(number, os.strerror(number))
    return descriptor


def named_file(name: str, directory: str, size: int | None, processes: int) -> BoxFile:
    """Creates a file in a folder of the user, after removing old boxes.

    Args:
        name: unique name of the file, without suffix.
        directory: its folder; empty: one in the shared memory file system.
        size: size in bytes; None: 16 MiB, or 4 MiB if there is not enough space.
        processes: number of processes of this machine that create a box.

    Raises:
        BoxFileError: the file cannot be created, or there is not enough space.
    """
    try:
        folder = made_folder(directory)
    except FolderError as error:
        raise BoxFileError(str(error)) from error
    path = folder / f"{name}{SUFFIX}"
    try:
        _prune(folder)
        size = _fitting(size, folder, processes)
        descriptor = moved_up(_private(str(path), os.O_RDWR | os.O_CREAT | os.O_EXCL))
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


def report_file(folder: Path) -> Path:
    """File of the report that the processes of one parent, such as torchrun, make of a hang."""
    return folder / f"otel-torchprof-hang.{platform.node()}.{os.getppid()}.txt"


def failure() -> Exception | None:
    """The unhandled exception that has ended the program, if any: one that has left the main program's first frame.

    Interactive sessions, and programs that run others, as pytest does, note errors in the same place.
    """
    error = getattr(sys, "last_value", None)
    if not isinstance(error, Exception) or error.__traceback__ is None or hasattr(sys, "ps1"):
        return None
    return error if error.__traceback__.tb_frame.f_back is None else None


def private_file(path: Path) -> BinaryIO:
    """Opens a file for writing, anew, that only this user can read."""
    return cast("BinaryIO", open(path, "wb", buffering=0, opener=_private))


def _private(path: str, flags: int) -> int:
    """Opens a file for this user only; it is private from its creation on."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, _MODE)


def opened(path: Path) -> BinaryIO:
    """Opens a regular file for reading; never blocks on a pipe.

    Raises:
        OSError: it cannot be opened, or is no regular file.
    """
    _check_is_file(path.stat())  # before opening: a writer that waits at a pipe must not get a reader that leaves again
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
    """Whether the process of a box is alive: it then holds a lock. A child that native code forked holds it too.

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
    """Yields whether no other process is sending the boxes of a folder; none can begin to inside the context.

    Locks the folder, since a lock on a box means that its process is alive.

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
    files = []
    for path in folder.glob(f"*{SUFFIX}"):
        with suppress(OSError):  # another process has removed it
            info = path.lstat()
            if stat.S_ISREG(info.st_mode) and not path.name.endswith(_SENT):
                files.append((info.st_mtime_ns, path))
    return [path for _, path in sorted(files)]


def mark_sent(path: Path) -> None:
    """Renames a box so that :func:`unsent` omits it. Other commands still read it, and it is removed like the others."""
    stem, number = path.name.removesuffix(SUFFIX), 1
    target = path.with_name(f"{stem}{_SENT}")
    while target.exists():  # of an earlier process whose box had the same name
        number += 1
        target = path.with_name(f"{stem}.{number}{_SENT}")
    path.rename(target)


def _fitting(size: int | None, folder: Path, processes: int) -> int:
    free = os.statvfs(folder)
    available = free.f_bavail * free.f_frsize
    most = available // _SHARE_OF_FREE // max(processes, 1)
    for candidate in (size,) if size else (_SIZE, _SMALL):
        if candidate <= most:
            return candidate
    needed = size or _SMALL
    raise BoxFileError(
        f"{folder} has {available >> 20} MiB free, and a box of {needed >> 20} MiB for each of {processes} processes would be more than an "
        "eighth of that; name another folder, or a smaller size"
    )


def _lock(descriptor: int, folder: Path) -> None:
    """Locks a file as long as the process lives, for :func:`is_of_the_living`."""
    try:
        fcntl.flock(
            descriptor, fcntl.LOCK_SH
        )  # another process may hold it for microseconds, to see whether this one lives
    except OSError as error:  # Lustre without the mount option flock
        raise BoxFileError(f"{folder} cannot lock files: {error.strerror}; name another folder") from error
    with suppress(OSError):
        os.fchmod(descriptor, _MODE)  # a process that looked before the lock has marked it as dead


def _allocated(descriptor: int, size: int, where: str) -> int:
    """Allocates all blocks of the file, since a missing one would later be a SIGBUS in the program; returns the size."""
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
    """Removes boxes of dead processes: those older than seven days, and the oldest beyond 1 GiB in total."""
    system, now, left = os.statvfs(folder), time.time(), 0
    most = min(_KEPT_BYTES, system.f_blocks * system.f_frsize // _SHARE_OF_FREE)
    for seen, _, size, path in sorted(_left_behind(folder, now), reverse=True):
        left += size
        if left > most or seen < now - _KEPT_SECONDS:
            with suppress(OSError):
                path.unlink()
    for path in (*folder.glob("otel-torchprof-hang.*.txt"), *folder.glob("otel-torchprof-memory.*")):
        with suppress(OSError):
            if path.lstat().st_mtime < now - _KEPT_SECONDS:
                path.unlink()


def _left_behind(folder: Path, now: float) -> Iterator[tuple[float, float, int, Path]]:
    """Yields the boxes of dead processes: when the death was first noticed, time of the last change, size and path."""
    for path in folder.glob(f"*{SUFFIX}"):
        with suppress(OSError):
            info = path.lstat()
            if not stat.S_ISREG(info.st_mode) or info.st_uid != os.geteuid() or is_of_the_living(path):
                continue
            is_new = bool(info.st_mode & stat.S_IWUSR)
            if is_new:
                path.chmod(_MODE_SEEN)
            yield now if is_new else info.st_ctime, info.st_mtime, info.st_size, path


# ---- identity of the process of a black box, since another process may have its pid or its lock ----


_STARTED_AT = 19
"""Index, after the name, of the process's start time in ``/proc/<pid>/stat``, in ticks since boot."""
_DEAD = frozenset("ZXx")
_HELD = frozenset("Tt")


def owner_info() -> dict[str, Any]:
    """Identity of this process for its box; empty if the system does not provide it."""
    with suppress(OSError, ValueError, IndexError):
        own = {"owner": os.getpid(), "started": _stat("/proc/self")[1], "machine": _boot(), "pids": _namespace()}
        return {**own, **_memory_events()}
    return {}


def has_ended(text: bytes) -> bool:
    """Whether the process of a box has ended, by the box's metadata; False if unknown."""
    with suppress(OSError, ValueError, TypeError, KeyError, IndexError, RecursionError):
        info = json.JSONDecoder().raw_decode(text.decode(errors="replace"))[0]
        if (info["machine"], info["pids"]) == (_boot(), _namespace()):
            return not _runs(int(info["owner"]), info["started"])
    return False


def process_folder(info: Mapping[str, Any]) -> Path | None:
    """The folder in ``/proc`` of the living process of a box, by the box's metadata; None if it cannot be seen from here."""
    with suppress(OSError):
        if (info.get("machine"), info.get("pids")) == (_boot(), _namespace()) and isinstance(info.get("owner"), int):
            return Path(f"/proc/{info['owner']}")
    return None


def is_held(info: Mapping[str, Any]) -> bool:
    """Whether the living process of a box is stopped, or a debugger is attached to it; False if it cannot be seen from here."""
    with suppress(OSError):
        if (folder := process_folder(info)) is not None:
            fields = dict(line.partition(":")[::2] for line in (folder / "status").read_text().splitlines())
            return fields.get("State", "").strip()[:1] in _HELD or fields.get("TracerPid", "").strip() not in {"", "0"}
    return False


def kills_for_memory(info: Mapping[str, Any]) -> int:
    """Processes of the cgroup of a box that the kernel has killed for lack of memory since the box was opened; 0 if unknown.

    Unknown too where the cgroup was removed, or another one has its path here.
    """
    with suppress(OSError, ValueError, TypeError, KeyError):
        path = Path(info["memory_events"])
        if info["machine"] == _boot() and path.parent.stat().st_ino == info["cgroup"]:
            return max(_killed(path) - int(info["killed"]), 0)
    return 0


def _memory_events() -> dict[str, Any]:
    """The file that counts the processes that the kernel kills in the cgroup of this one, and its count; empty without one."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, group = line.split(":", 2)
        root, name = _CGROUPS, "memory.events"
        if controllers:
            root, name = _CGROUPS / "memory", "memory.oom_control"
        if controllers not in {"", "memory"}:
            continue
        for folder in (root / group.lstrip("/"), root):  # in a container, its own may be mounted as the root
            with suppress(OSError, ValueError):
                path = folder / name
                return {"memory_events": str(path), "cgroup": folder.stat().st_ino, "killed": _killed(path)}
    return {}


def _killed(path: Path) -> int:
    counts = [line.split()[1] for line in path.read_text("utf-8").splitlines() if line.startswith("oom_kill ")]
    if not counts:
        raise ValueError(f"{path} of this kernel has no count")
    return int(counts[0])


def _runs(pid: int, started: int) -> bool:
    """Whether a process runs; True also if only its main thread has ended."""
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
    """The state of a process or thread, and its start time in ticks."""
    words = Path(folder, "stat").read_bytes().rpartition(b")")[2].split()
    return words[0].decode(), int(words[_STARTED_AT])


@functools.cache
def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text("utf-8").strip()


def _namespace() -> int:
    return Path("/proc/self/ns/pid").stat().st_ino
