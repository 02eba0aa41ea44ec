"""Reads untrusted files in bounded memory, decompressed; errors have the offset."""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from otel_torchprof._process import threads
from otel_torchprof.errors import TorchProfError

from .file import GZIP_FORMAT

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import BinaryIO

LARGEST_PIECE = 16 << 20
"""Largest line or message in bytes, since each is completely in memory, twice."""
READ_SIZE = 1 << 19
"""Bytes of a piece. Between pieces a reader waits for the interpreter's lock, up to 5 ms if another thread computes: few pieces."""
_LONGEST_VARINT = 10
_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
_WAYS_OUT = {
    errno.ENOENT: "check the name",
    errno.ENOTDIR: "a part of the path is a file: check the name",
    errno.EISDIR: "give the name of a file in it",
    errno.EACCES: "read it as a user who may, or change its permissions",
    errno.EPERM: "read it as a user who may, or change its permissions",
    errno.ETIMEDOUT: "start what writes to it, or name a file",
}
_PATIENCE = 10.0
"""Seconds to wait for a writer of a pipe."""


class UnexpectedError(Exception):
    """Unexpected data at an offset, after which reading cannot continue.

    Args:
        offset: position in uncompressed bytes.
        text: expected and found data.
        end: end of the message with the unexpected data, if known; reading may continue there.
    """

    def __init__(self, offset: int, text: str, end: int | None = None) -> None:
        super().__init__(text)
        self.offset = offset
        self.end = end


@contextlib.contextmanager
def opened(path: str) -> Iterator[ByteStream]:
    """Opens the content of a file.

    Raises:
        TorchProfError: the content read inside the context cannot be read; names the file, the position and the fix.
    """
    stream = None
    try:
        with _opened_in_time(path) as file:
            stream = ByteStream(file)
            yield stream
    except UnexpectedError as error:
        raise TorchProfError(f"{path!r}: {place(stream, error.offset)}: {error}") from error
    except (OSError, ValueError) as error:  # ValueError: a path with a zero byte
        reason = getattr(error, "strerror", None) or error
        way_out = _WAYS_OUT.get(getattr(error, "errno", None) or 0, "copy it elsewhere and try again")
        where = f" after byte {stream.offset}" if stream is not None and stream.offset else ""
        raise TorchProfError(f"cannot read {path!r}{where}: {reason}; {way_out}") from error


def _opened_in_time(path: str) -> BinaryIO:
    """Opens a file, or a pipe as soon as it has a writer. Raises OSError."""
    if not Path(path).is_fifo():
        return Path(path).open("rb", buffering=0)
    results: list[int | OSError] = []
    # On a thread, since a pipe that is opened without waiting does not show whether a writer will come.
    opening = threads.Thread(target=lambda: results.append(_descriptor(path)), daemon=True)
    opening.start()
    opening.join(_PATIENCE)
    descriptor = (
        results[0] if results else OSError(errno.ETIMEDOUT, f"nobody has opened this pipe to write for {_PATIENCE:g} s")
    )
    if isinstance(descriptor, OSError):
        raise descriptor
    return open(descriptor, "rb", buffering=0)  # noqa: PTH123 - a descriptor


def _descriptor(path: str) -> int | OSError:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        return error


def place(stream: ByteStream | None, offset: int) -> str:
    """An offset in words."""
    return f"at byte {offset}" + (" after decompression" if stream is not None and stream.is_compressed else "")


class _GzipUnpacker:
    """Decompresses members of gzip, each up to its end."""

    name, padding, error = "gzip", b"\0", zlib.error

    def __init__(self) -> None:
        self._native = zlib.decompressobj(GZIP_FORMAT)
        self.rest = b""
        """Input to give again: of this member, or after it."""

    @property
    def is_over(self) -> bool:
        return self._native.eof

    def unpacked(self, packed: bytes) -> bytes:
        """Returns at most READ_SIZE bytes."""
        content = self._native.decompress(packed, READ_SIZE)
        self.rest = self._native.unused_data if self._native.eof else self._native.unconsumed_tail
        return content


class _ZstdUnpacker:
    """Decompresses frames of zstd, each up to its end; the library keeps input itself."""

    name, padding = "zstd", b""
    _size = 1 << 16
    """Bytes of a call: all of a call that meets an error are lost."""

    def __init__(self) -> None:
        library = _zstd()
        self.error: type[Exception] = library.ZstdError
        self._native = library.ZstdDecompressor()
        self.rest = b""

    @property
    def is_over(self) -> bool:
        return bool(self._native.eof)

    def unpacked(self, packed: bytes) -> bytes:
        """Returns at most so many bytes."""
        content: bytes = self._native.decompress(packed if self._native.needs_input else b"", self._size)
        more = b"" if self._native.needs_input else _ZSTD  # not empty: there is more
        self.rest = self._native.unused_data if self._native.eof else more
        return content


def _zstd() -> Any:
    """Returns Python's module, or the library with it for earlier versions."""
    with contextlib.suppress(ImportError):
        return importlib.import_module("compression.zstd")  # from Python 3.14 on
    try:
        return importlib.import_module("backports.zstd")
    except ImportError as error:
        raise UnexpectedError(0, "the file is zstd: pip install 'otel-torchprof[zstd]' to read it") from error


class ByteStream:
    """The bytes of a file, decompressed if it is gzip or zstd; a truncated file ends early. Raises UnexpectedError and OSError."""

    def __init__(self, file: BinaryIO) -> None:
        self.offset = 0
        """Offset of the next byte."""
        self._file = file
        self._buffer = bytearray()
        self._at = 0
        self._packed = file.read(READ_SIZE)
        self.read_bytes = len(self._packed)
        """Size of the file on disk."""
        kinds = {_GZIP: _GzipUnpacker, _ZSTD: _ZstdUnpacker}
        self._kind: Any = next((kind for magic, kind in kinds.items() if self._packed.startswith(magic)), None)
        self.is_compressed = self._kind is not None
        self._unpacker: Any = None if self._kind is None else self._kind()
        self._is_in_member = False
        self._failure: UnexpectedError | OSError | None = None
        """Error that ended the reading; raised after the bytes before it were taken."""

    def peek(self, size: int = 1) -> bytes:
        """The next bytes, or what there is."""
        self._fill(size)
        return bytes(self._buffer[self._at : self._at + size])

    def some(self) -> bytes:
        """The next bytes, at most READ_SIZE; none at the end."""
        if self._at < len(self._buffer):
            return self._taken(min(READ_SIZE, len(self._buffer) - self._at))
        content = self._more()  # not copied
        if not content and self._failure is not None:
            raise self._failure
        self.offset += len(content)
        return content

    def take(self, size: int) -> bytes:
        """Reads up to ``size`` bytes."""
        self._fill(size)
        return self._taken(min(size, len(self._buffer) - self._at))

    def take_all(self, size: int, begun: int) -> bytes:
        """Takes ``size`` bytes of a message that began at offset ``begun``. Raises UnexpectedError if there are fewer."""
        content = self.take(size)
        if len(content) < size:
            raise self.cut_off(begun, f"a message of {size} bytes, of which {len(content)} are there")
        return content

    def varint(self, begun: int) -> bytes:
        """Takes the bytes of a varint. Raises UnexpectedError if there is none."""
        content = self.take_all(1, begun)
        while content[-1] & 0x80:
            if len(content) == _LONGEST_VARINT:
                raise UnexpectedError(begun, f"expected the size of a message, found {content.hex(' ')}")
            content += self.take_all(1, begun)
        return content

    def line(self) -> bytes:
        """The next line with its end, the rest where it has none; empty when there is nothing more."""
        looked = 0
        while (end := self._buffer.find(b"\n", self._at + looked)) < 0:
            looked = len(self._buffer) - self._at
            if looked > LARGEST_PIECE:
                raise too_large(self.offset, looked)
            if not self._fill(looked + 1):
                return self._taken(looked)
        return self._taken(end + 1 - self._at)

    def skip_space(self) -> bool:
        """Skips white space of any length; returns whether there is something after it."""
        while self._fill(1) and self._buffer[self._at] in b" \t\r\n":
            block = bytes(self._buffer[self._at :])
            self._taken(len(block) - len(block.lstrip(b" \t\r\n")))
        return self._at < len(self._buffer)

    def skip(self, size: int) -> int:
        """Skips up to ``size`` bytes; returns how many there were."""
        left = size
        while left > 0 and (content := self.take(min(left, READ_SIZE))):
            left -= len(content)
        return size - left

    def check_end(self) -> None:
        """Raises the error that ended the reading, if it was not the end of the file; for callers that expect the end."""
        if self._failure is not None or self._is_in_member:
            raise self.cut_off(self.offset, "what the rest of the compressed data would hold")

    def cut_off(self, offset: int, what: str) -> UnexpectedError | OSError:
        """The error for a file that ends inside of something that begins at the offset."""
        return self._failure or cut_off(offset, what)

    def _taken(self, size: int) -> bytes:
        content = bytes(self._buffer[self._at : self._at + size])
        self._at += size
        self.offset += size
        return content

    def _fill(self, size: int) -> bool:
        """Reads until so many bytes are there; whether they are."""
        while len(self._buffer) - self._at < size:
            if not (more := self._more()):
                return False
            del self._buffer[: self._at]
            self._at = 0
            self._buffer += more
        return True

    def _more(self) -> bytes:
        """Some more bytes; nothing at the end, or after an error, which is kept."""
        if self._failure is None:
            try:
                return self._read()
            except (UnexpectedError, OSError) as error:
                self._failure = error
        return b""

    def _read(self) -> bytes:
        """Some more bytes, nothing at the end."""
        while packed := self._packed or self._file.read(READ_SIZE):
            self.read_bytes += 0 if self._packed else len(packed)
            self._packed = b""
            unpacked = self._unpacked(packed) if self.is_compressed else packed
            if unpacked:
                return unpacked
        return b""

    def _unpacked(self, packed: bytes) -> bytes:
        if not self._is_in_member:
            packed = packed.lstrip(self._kind.padding)  # between members
        try:
            unpacked: bytes = self._unpacker.unpacked(packed)
        except self._unpacker.error as error:
            offset = self.offset + len(self._buffer) - self._at
            expected = f"expected {self._kind.name}, found something else after this byte ({error})"
            raise UnexpectedError(offset, f"{expected}; copy the file again") from error
        self._is_in_member = bool(packed) and not self._unpacker.is_over
        self._packed = self._unpacker.rest
        if self._unpacker.is_over:
            self._unpacker = self._kind()
        return unpacked


def cut_off(offset: int, what: str) -> UnexpectedError:
    """The error for a file that ends too early."""
    return UnexpectedError(offset, f"the file is cut off: here begins {what}; copy it again if its writer is done")


def too_large(offset: int, size: int) -> UnexpectedError:
    """The error for a piece that would take too much memory."""
    return UnexpectedError(
        offset, f"expected pieces of at most {LARGEST_PIECE} bytes, found one of {size}; write smaller batches"
    )
