"""Writing to a file: whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

from otel_torchprof.errors import ExportError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from typing import BinaryIO

# Chrome JSON of a transformer's training steps (22,544 events of torch's, Xeon): level 1 takes 1.0 µs per event and
# makes it 7.2 times smaller; level 6, the usual one, 2.1 µs and 8.7 times. Encoding takes 0.13 µs, so compression is
# nearly all of it.
GZIP_LEVEL = 1
GZIP_FORMAT = 31  # zlib's wbits: a window of 2**15 bytes, +16 for gzip's header and trailer

_WAYS_OUT = {
    errno.ENOENT: "create the folder first",
    errno.ENOTDIR: "a part of the path is a file: choose another path",
    errno.EISDIR: "give the name of a file in it",
    errno.EACCES: "choose a path that this user may write to",
    errno.EPERM: "choose a path that this user may write to",
    errno.EROFS: "choose a path that is not read-only",
    errno.ENOSPC: "free some space, or let the name end in .gz",
    errno.EDQUOT: "free some space, or let the name end in .gz",
    errno.ESTALE: "make exporters after the program has closed descriptors that are not its own",
    errno.ENAMETOOLONG: "choose a shorter name",
}


def write(path: str | os.PathLike[str], pieces: Iterable[bytes | memoryview]) -> int:
    """Writes the pieces to ``path``, compressed with gzip when the name ends in ``.gz``.

    Returns the bytes written, counted before compression. The file appears under its name only when it is complete:
    until then it is a hidden temporary file beside it, which is removed on any failure, and an existing file is
    unchanged. A file that is not regular (a FIFO, a device, ``/dev/stdout``) is written directly. Symbolic links
    are followed. No folder is created. The file is not synced to the disk. Thread-safe; if two threads write to one path, the
    last to finish wins.

    Raises ExportError, with the OSError as its cause, if the system refuses; TypeError if ``path`` is not a str or
    path-like; the exceptions of ``pieces``.
    """
    name = os.fspath(path)
    if not isinstance(name, str):
        raise TypeError(f"path is {path!r} of type {type(path).__name__}: give a str or a pathlib.Path")
    with naming(name):
        target = _target(name)
        if target is None:
            file = Path(name).open("wb")  # noqa: SIM115 (_write_all closes it)
    if target is None:
        return _write_all(name, file, pieces)
    return _write_and_rename(name, target, pieces)


def write_descriptor(descriptor: int, name: str, pieces: Iterable[bytes | memoryview]) -> int:
    """As :func:`write`, into a file that is open, which is closed. Its ``name`` is for compression and messages only."""
    with naming(name):
        file = os.fdopen(descriptor, "wb")
    return _write_all(name, file, pieces)


def check_writable(path: str) -> None:
    """Raises ExportError for a path that could not be written now. Makes and changes nothing."""
    with naming(path):
        target = _target(path)
        if target is None or target.exists():
            return
        if not stat.S_ISDIR(target.parent.stat().st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        if not os.access(target.parent, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def check_is_no_input(path: str, inputs: Iterable[str]) -> None:
    """Raises ExportError for an output that is one of the files which are read: these may be all that there is."""
    if os.path.realpath(path) in map(os.path.realpath, inputs):
        raise ExportError(f"the output {path!r} is one of the files that are read: give it another name")


@contextlib.contextmanager
def naming(path: str) -> Iterator[None]:
    """Turns the system's refusal into an ExportError that says what to do."""
    try:
        yield
    except OSError as error:
        way_out = _WAYS_OUT.get(error.errno or 0, "choose another path")
        raise ExportError(f"cannot write {path!r}: {error.strerror or error}; {way_out}") from error


def _target(name: str) -> Path | None:
    """The regular file to replace or create, links resolved; None for what must be written to directly."""
    path = Path(name)
    if str(path.absolute()).startswith(("/dev/std", "/dev/fd/", "/proc/")):
        return None  # a file that is open already: a rename would put another one in its place
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return path.resolve()
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not stat.S_ISREG(mode):
        return None
    if not os.access(path, os.W_OK):  # a rename would not ask
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    return path.resolve()


def _write_and_rename(name: str, target: Path, pieces: Iterable[bytes | memoryview]) -> int:
    # Not named after the target: with anything added, a name of the greatest length would be too long.
    temporary = target.with_name(f".otel-torchprof-{os.urandom(8).hex()}.tmp")
    with naming(name):
        # The mode follows the umask: the 0600 of the tempfile module would exclude other readers.
        file = temporary.open("xb")
    try:
        with contextlib.suppress(OSError):  # no file there yet, or a file system without modes
            temporary.chmod(stat.S_IMODE(target.stat().st_mode))
        written = _write_all(name, file, pieces)
        with naming(name):
            temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return written


def _write_all(name: str, file: BinaryIO, pieces: Iterable[bytes | memoryview]) -> int:
    """Writes and closes the file; its exceptions become an ExportError, those of ``pieces`` are passed on."""
    compressor = zlib.compressobj(GZIP_LEVEL, wbits=GZIP_FORMAT) if name.endswith(".gz") else None
    written = 0
    try:
        for piece in pieces:
            with naming(name):
                file.write(compressor.compress(piece) if compressor else piece)
            written += len(piece)
        with naming(name):
            if compressor:
                file.write(compressor.flush())
            file.close()
    except BaseException:
        with contextlib.suppress(OSError):
            file.close()
        raise
    return written
