"""A file that grows by whole appends and is complete after each, whatever happens to the process in between."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import math
import os
import stat
import zlib
from typing import TYPE_CHECKING

from otel_torchprof._process.descriptors import identity

from .file import GZIP_FORMAT, GZIP_LEVEL

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_WRITE_SIZE = 1 << 20
_LOST = "other code closed its descriptor, and the path does not lead to the same file"


class StreamedFile:
    """A growing document: each append is followed by ``closing``, which the next append overwrites with blanks.

    First the new text with its own closing is written after the old closing, then blanks over the old one. So the file always
    begins with a complete document, even after ``kill -9`` in the middle of an append. If the path ends in ``.gz``, appends are gzip
    members, which readers treat as one stream. A failed append leaves the file unchanged. Without a ``closing`` the file only grows, and
    a killed process may leave a partial append, which readers must detect. A file that is not regular (a FIFO, ``/dev/stdout``) gets
    ``closing`` at the end only, and keeps a partial append.

    The kernel would keep the pages of a growing file in memory, instead of those of the program's data set, so they are released while
    the file grows. That also saves time if fresh memory is expensive: 0.1 instead of 0.4 to 1.1 ms of processor time per 356 KiB, in a
    file of 600 MiB (virtual machine, 2 cores, ext4).

    The file is created at the first append; an existing one is replaced, unless another process holds it: then
    ``beside`` is written instead. Not thread-safe.

    If a program closes all descriptors (to become a daemon), the number may be reused. Other files are never written, truncated or
    closed: this file is reopened by its path, and if another file is there, appends raise OSError.
    """

    def __init__(self, path: str, *, beside: str, closing: bytes) -> None:
        self.path = path
        """Path of the file; fixed by the first append."""
        self._beside = beside
        self._compressed = path.endswith(".gz")
        # Not compressed, so that a member with blanks is as long.
        self._closing = self._member(closing)
        self._blank = self._member(b" " * len(closing))
        self._fd = -1
        self._identity: tuple[int, int] | None = None
        """Device and inode of the file, once it is open."""
        self._closed = False
        self._size = self._released = 0
        self._rewritable = False

    @property
    def is_empty(self) -> bool:
        """Whether nothing has been appended yet."""
        return self._size == 0

    @property
    def size(self) -> int:
        """Bytes on the disk."""
        return self._size

    def append(self, pieces: Iterable[bytes | memoryview], most: int | None = None) -> bool:
        """Whether they were appended: not where a file that can be rewritten would have more than ``most`` bytes by them.

        Raises OSError when the system refuses, ValueError after :meth:`close`, and what ``pieces`` raises.
        """
        if self._closed:
            raise ValueError(f"{self.path!r} is closed")
        if self._identity is None:
            self._open()
        elif not self._is_ours():
            self._reopen()
        room = most - self._size if most is not None and self._rewritable else math.inf
        try:
            closing = (self._closing,) if self._rewritable else ()
            encoded = itertools.chain(self._encoded(pieces), closing)
            written = 0
            for piece in _gathered(encoded):
                if written + len(piece) > room:
                    self._take_back()
                    return False
                self._write(piece, self._size + written)
                written += len(piece)
            if self._rewritable and self._size:
                self._write(self._blank, self._size - len(self._closing))
        except BaseException:
            self._take_back()
            raise
        self._size += written
        if self._size - self._released >= _WRITE_SIZE:
            self._release_pages()
        return True

    def close(self) -> None:
        """Ends the file; without effect where nothing was written. Raises OSError when the system refuses."""
        was_closed, self._closed = self._closed, True
        try:
            if self._size and not self._rewritable and not was_closed:
                self._write(self._closing, self._size)
        finally:
            self._let_go()

    def abandon(self) -> None:
        """Lets go of the file without a word: in a forked child, whose parent continues to write."""
        self._closed = True
        self._let_go()

    def _open(self) -> None:
        for path in (self.path, self._beside):
            # O_NONBLOCK: a FIFO without a reader is an error instead of an endless wait.
            fd = _above_standard(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, 0o666))
            if self._begin(path, fd):
                return
            os.close(fd)
        raise OSError(errno.EBUSY, f"{os.strerror(errno.EBUSY)}: other processes write to it and to {self._beside!r}")

    def _begin(self, path: str, fd: int) -> bool:
        """Whether the file is ours to write."""
        rewritable = stat.S_ISREG(os.fstat(fd).st_mode)
        if rewritable:
            if _held_by_another(fd):
                return False
            os.ftruncate(fd, 0)
        os.set_blocking(fd, True)
        self.path, self._fd, self._rewritable, self._identity = path, fd, rewritable, identity(fd)
        return True

    def _is_ours(self) -> bool:
        """Whether the descriptor still is that of the file."""
        return self._identity is not None and identity(self._fd) == self._identity

    def _reopen(self) -> None:
        self._fd = -1
        try:
            fd = os.open(self.path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise OSError(errno.ESTALE, _LOST) from error
        # Also the size: the inode of a deleted file may be reused.
        is_ours = identity(fd) == self._identity and os.fstat(fd).st_size >= self._size * self._rewritable
        if not is_ours or (self._rewritable and _held_by_another(fd)):
            os.close(fd)
            raise OSError(errno.ESTALE, _LOST)
        os.set_blocking(fd, True)
        self._fd = fd
        self._take_back()

    def _let_go(self) -> None:
        fd, is_ours, self._fd = self._fd, self._is_ours(), -1
        if is_ours:
            os.close(fd)

    def _write(self, data: bytes | memoryview, at: int) -> None:
        """Writes all data; ``at``: position in a rewritable file."""
        left = memoryview(data)
        while left:
            if not self._is_ours():
                raise OSError(errno.ESTALE, _LOST)
            written = os.pwrite(self._fd, left, at) if self._rewritable else os.write(self._fd, left)
            left, at = left[written:], at + written

    def _release_pages(self) -> None:
        """Advises the kernel to write the file's pages to disk, without waiting, and to release those that are written already."""
        self._released = self._size
        if self._rewritable and hasattr(os, "posix_fadvise"):  # macOS has none
            with contextlib.suppress(OSError):  # advice only: not every file system takes it
                os.posix_fadvise(self._fd, 0, self._size, os.POSIX_FADV_DONTNEED)

    def _take_back(self) -> None:
        """Removes a partial append; if that fails, the next append overwrites it."""
        if self._rewritable and self._is_ours():
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self._size)
                if self._size:  # the end may be overwritten with blanks already
                    self._write(self._closing, self._size - len(self._closing))

    def _member(self, data: bytes) -> bytes:
        if not self._compressed or not data:
            return data
        stored = zlib.compressobj(0, wbits=GZIP_FORMAT)
        return stored.compress(data) + stored.flush()

    def _encoded(self, pieces: Iterable[bytes | memoryview]) -> Iterator[bytes | memoryview]:
        compressor = zlib.compressobj(GZIP_LEVEL, wbits=GZIP_FORMAT) if self._compressed else None
        for piece in pieces:
            yield compressor.compress(piece) if compressor else piece
        if compressor:
            yield compressor.flush()


def _above_standard(fd: int) -> int:
    """The file under a number that no program takes for that of stdin, stdout or stderr, which it may have closed."""
    if fd > 2:  # noqa: PLR2004 - stderr
        return fd
    try:
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)
    finally:
        os.close(fd)


def _gathered(pieces: Iterable[bytes | memoryview]) -> Iterator[bytes | memoryview]:
    """Larger pieces: few exports need more than one call of the system, which is hardly ever killed halfway. A message alone is not copied."""
    parts: list[bytes | memoryview] = []
    size = 0
    for piece in (piece for piece in pieces if piece):
        parts.append(piece)
        size += len(piece)
        if size >= _WRITE_SIZE:
            yield _joined(parts)
            parts, size = [], 0
    yield _joined(parts)


def _joined(parts: list[bytes | memoryview]) -> bytes | memoryview:
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _held_by_another(fd: int) -> bool:
    """Locks the file for as long as it is open; True when another process has."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # file systems without locks: then there is no telling
        return False
    return False


def is_held(path: str) -> bool:
    """Whether a process is writing the file."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return _held_by_another(fd)
    finally:
        os.close(fd)
