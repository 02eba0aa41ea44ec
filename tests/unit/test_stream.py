"""A file that grows by appends: what is in it after each, and after each that failed."""

from __future__ import annotations

import errno
import fcntl
import gzip
import os
from typing import TYPE_CHECKING

import pytest

from otel_torchprof._export.stream import StreamedFile

if TYPE_CHECKING:
    from pathlib import Path


def stream(path: Path | str) -> StreamedFile:
    return StreamedFile(str(path), beside=f"{path}.beside", closing=b"]}")


def content(path: Path) -> bytes:
    """What is in the file, without the blanks of earlier closings."""
    data = path.read_bytes()
    return (gzip.decompress(data) if path.suffix == ".gz" else data).replace(b" ", b"")


@pytest.fixture(params=["t.json", "t.json.gz"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return tmp_path / request.param


def test_the_file_is_complete_after_each_append(path):
    """Whoever reads it between two appends, or after a kill, sees all of them and the closing."""
    file = stream(path)
    assert not path.exists()
    for expected in (b"1]}", b"12]}", b"123]}"):
        assert file.is_empty == (expected == b"1]}")
        file.append((expected[-3:-2], b""))
        assert content(path) == expected
    file.close()
    assert content(path) == b"123]}"


def test_an_older_file_is_replaced(path):
    """Also one that was longer."""
    path.write_bytes(b"old" * 1000)
    file = stream(path)
    assert path.read_bytes() == b"old" * 1000
    file.append([b"1"])
    file.close()
    assert content(path) == b"1]}"


def test_nothing_appended_nothing_made(path):
    """A file that is closed before the first append leaves no trace, and closing again does nothing."""
    file = stream(path)
    file.close()
    file.close()
    assert not path.exists()


def test_nothing_is_written_after_the_end(path):
    """An append that comes too late must not replace the file by itself."""
    file = stream(path)
    file.append([b"1"])
    file.close()
    with pytest.raises(ValueError, match="is closed"):
        file.append([b"2"])
    assert content(path) == b"1]}"


@pytest.mark.parametrize(
    "error", [ValueError("bad"), OSError(errno.EIO, "of the pieces"), KeyboardInterrupt()], ids=repr
)
def test_an_append_that_fails_leaves_the_file_as_it_was(path, error):
    """At the beginning and later, and the next append goes on from there."""

    def pieces():
        yield b"half" * 100_000
        raise error

    file = stream(path)
    for before, after in ((b"", b"1]}"), (b"1]}", b"12]}")):
        with pytest.raises(type(error)):
            file.append(pieces())
        assert (content(path) if path.stat().st_size else b"") == before
        file.append([after[-3:-2]])
        assert content(path) == after


def test_a_full_disk_takes_nothing_away(path, monkeypatch):
    """The system takes some bytes and then no more: what was there before is still complete."""
    file = stream(path)
    file.append([b"1"])
    write, left = os.write, [3]

    def short(fd: int, data: bytes) -> int:
        if not left:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(fd, data[: left.pop()])

    with monkeypatch.context() as full:
        full.setattr(os, "write", short)
        with pytest.raises(OSError, match="No space left"):
            file.append([b",lost" * 10])
    file.append([b"2"])
    file.close()
    assert content(path) == b"12]}"


def test_short_writes_are_gone_on_with(path, monkeypatch):
    """The system may take fewer bytes than it was given."""
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:7]))
    file = stream(path)
    file.append([b"1" * 100])
    file.close()
    assert content(path) == b"1" * 100 + b"]}"


def test_a_device_without_room_is_asked_again():
    """What is no regular file cannot be put back, but every append is tried."""
    file = stream("/dev/full")
    for _ in range(2):
        with pytest.raises(OSError, match="No space left"):
            file.append([b"1"])
    file.close()


def test_a_pipe_gets_the_closing_at_the_end(tmp_path):
    """There is no going back in it, so the closing comes once."""
    os.mkfifo(tmp_path / "fifo")
    file = stream(tmp_path / "fifo")
    with pytest.raises(OSError, match=os.strerror(errno.ENXIO)):
        file.append([b"1"])  # nobody reads: an error, not a wait without end
    reader = os.open(tmp_path / "fifo", os.O_RDONLY | os.O_NONBLOCK)
    file.append([b"1"])
    file.append([b"2"])
    assert os.read(reader, 100) == b"12"
    file.close()
    assert os.read(reader, 100) == b"]}"
    os.close(reader)


def test_a_file_that_another_process_writes_is_left_alone(path):
    """The other name is written instead, and where that is taken too, nothing."""
    beside = path.with_name(f"{path.name}.beside")
    with path.open("wb") as other:
        other.write(b"theirs")
        other.flush()
        fcntl.flock(other, fcntl.LOCK_EX)
        file = stream(path)
        file.append([b"1"])
        assert (path.read_bytes(), file.path) == (b"theirs", str(beside))
        with pytest.raises(OSError, match="other processes write to it"):
            stream(path).append([b"2"])
    file.close()
    data = beside.read_bytes()
    assert (gzip.decompress(data) if path.suffix == ".gz" else data) == b"1]}"


def test_a_file_system_without_locks_does(path, monkeypatch):
    """Where nothing can be locked there is no telling, and the file is written."""

    def refused(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refused)
    file = stream(path)
    file.append([b"1"])
    assert content(path) == b"1]}"
    file.close()


def test_who_abandons_the_file_changes_nothing(path):
    """A child lets go of what its parent goes on writing."""
    file = stream(path)
    file.append([b"1"])
    before = path.read_bytes()
    file.abandon()
    assert path.read_bytes() == before
    with pytest.raises(ValueError, match="is closed"):
        file.append([b"2"])
