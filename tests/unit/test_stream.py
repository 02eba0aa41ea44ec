"""A file that grows by appends: what is in it after each, and after each that failed."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import gzip
import json
import mmap
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
    """Whoever reads it between two appends, or after a kill, sees all of them and the closing; an older file stays until the first."""
    path.write_bytes(b"old" * 1000)
    file = stream(path)
    assert path.read_bytes() == b"old" * 1000
    for expected in (b"1]}", b"12]}", b"123]}"):
        assert file.is_empty == (expected == b"1]}")
        file.append((expected[-3:-2], b""))
        assert content(path) == expected
    file.close()
    with pytest.raises(ValueError, match="is closed"):
        file.append([b"4"])
    assert content(path) == b"123]}"


def test_nothing_appended_nothing_made(path):
    """A file that is closed before the first append leaves no trace, and closing again does nothing."""
    file = stream(path)
    file.close()
    file.close()
    assert not path.exists()


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
    write, left = os.pwrite, [3]

    def short(fd: int, data: bytes, at: int) -> int:
        if not left:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(fd, data[: left.pop()], at)

    with monkeypatch.context() as full:
        full.setattr(os, "pwrite", short)
        with pytest.raises(OSError, match="No space left"):
            file.append([b",lost" * 10])
    file.append([b"2"])
    file.close()
    assert content(path) == b"12]}"


def test_short_writes_are_gone_on_with(path, monkeypatch):
    """The system may take fewer bytes than it was given."""
    write = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: write(fd, data[:7], at))
    file = stream(path)
    file.append([b"1" * 100])
    file.close()
    assert content(path) == b"1" * 100 + b"]}"


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


# ---- descriptors that the program closes ----


def taken(file: StreamedFile, victim: Path) -> int:
    """Closes the file's descriptor, as a daemon does with all that it finds; the program's own file gets the number."""
    victim.write_bytes(b"precious" * 100)
    number = file._fd
    os.close(number)
    descriptor = os.open(victim, os.O_RDWR)
    if descriptor != number:
        os.dup2(descriptor, number)
        os.close(descriptor)
    return number


def assert_untouched(number: int, victim: Path) -> None:
    assert os.fstat(number).st_size == 800
    assert os.lseek(number, 0, os.SEEK_CUR) == 0
    assert victim.read_bytes() == b"precious" * 100
    os.close(number)


def test_a_closed_descriptor_is_opened_anew(path, tmp_path):
    """What has got the file's number is neither written nor cut nor closed; the file goes on under its path, locked again."""
    file = stream(path)
    file.append([b"1"])
    number = taken(file, tmp_path / "victim")
    file.append([b"2"])
    assert content(path) == b"12]}"
    with pytest.raises(OSError, match="other processes write to it"):
        StreamedFile(str(path), beside=str(path), closing=b"]}").append([b"3"])
    file.close()
    assert_untouched(number, tmp_path / "victim")


def test_half_an_append_is_cut_when_the_file_is_opened_anew(path, tmp_path):
    """Where the descriptor is lost in the middle of an append, that fails and leaves its victim alone; the next one tidies up."""
    numbers = []

    def pieces():
        yield b"half" * 1_000_000
        numbers.append(taken(file, tmp_path / "victim"))
        yield os.urandom(4_000_000)

    file = stream(path)
    file.append([b"1"])
    with pytest.raises(OSError, match="closed its descriptor"):
        file.append(pieces())
    file.append([b"2"])
    file.close()
    assert content(path) == b"12]}"
    assert_untouched(*numbers, tmp_path / "victim")


@pytest.mark.parametrize("there", ["nothing", "another file", "another file with its inode"])
def test_a_path_that_leads_elsewhere_is_left_alone(path, tmp_path, there):
    """Where the path has been taken too, appends are refused with the reason, again and again, and nothing is made or changed."""
    file = stream(path)
    file.append([b"1" * 100])
    number = taken(file, tmp_path / "victim")
    path.unlink()
    if there != "nothing":
        path.write_bytes(b"theirs")
    if there == "another file with its inode":
        file._identity = (path.stat().st_dev, path.stat().st_ino)
    for _ in range(2):
        with pytest.raises(OSError, match="closed its descriptor"):
            file.append([b"2"])
    file.close()
    assert path.exists() == (there != "nothing")
    assert there == "nothing" or path.read_bytes() == b"theirs"
    assert_untouched(number, tmp_path / "victim")


@pytest.mark.parametrize("end", ["close", "abandon"])
def test_a_lost_descriptor_is_not_closed(path, tmp_path, end):
    """The number is somebody else's, at the end and in a child as well."""
    file = stream(path)
    file.append([b"1"])
    number = taken(file, tmp_path / "victim")
    getattr(file, end)()
    assert_untouched(number, tmp_path / "victim")
    assert content(path) == b"1]}"


def test_a_pipe_that_is_lost_gets_no_closing(tmp_path):
    """A pipe has nothing to put back: whoever has its number gets no closing, and the end of the file says so."""
    os.mkfifo(tmp_path / "fifo")
    reader = os.open(tmp_path / "fifo", os.O_RDONLY | os.O_NONBLOCK)
    file = stream(tmp_path / "fifo")
    file.append([b"1"])
    number = taken(file, tmp_path / "victim")
    with pytest.raises(OSError, match="closed its descriptor"):
        file.close()
    assert_untouched(number, tmp_path / "victim")
    os.close(reader)


def test_an_append_that_is_interrupted_after_the_old_end_was_overwritten(tmp_path, monkeypatch):
    """The file is as it was before, with its end."""
    file = StreamedFile(str(tmp_path / "t"), beside=str(tmp_path / "u"), closing=b"\n]")
    file.append([b"[1"])
    write, calls = os.pwrite, []

    def interrupted(*arguments):
        written = write(*arguments)
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return written

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", interrupted)
        with pytest.raises(KeyboardInterrupt):
            file.append([b",2"])
    assert (tmp_path / "t").read_text() == "[1\n]"
    file.append([b",3"])
    file.close()
    assert json.loads((tmp_path / "t").read_text()) == [1, 3]


def pages_in_memory(path: Path) -> int:
    """How many pages of the file the kernel keeps, without reading one."""
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as content:
        states = (ctypes.c_ubyte * -(-len(content) // mmap.PAGESIZE))()
        start = ctypes.byref((ctypes.c_char * len(content)).from_buffer(content))
        assert ctypes.CDLL(None).mincore(start, ctypes.c_size_t(len(content)), states) == 0
        del start
        return sum(state & 1 for state in states)


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="this system takes no advice on files")
def test_a_growing_file_does_not_fill_the_memory(tmp_path):
    """Pages that are on the disk are released with the next MiB, so that the kernel keeps those of the program's data."""
    path = tmp_path / "trace.json"
    file = stream(path)
    file.append([os.urandom(2 << 20)])
    with path.open("rb") as written:
        os.fsync(written.fileno())
        os.posix_fadvise(written.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if pages_in_memory(path):
        pytest.skip("this file system is the memory")
    content_before = path.read_bytes()
    assert pages_in_memory(path) >= 512
    file.append([b"x" * (1 << 20)])
    assert pages_in_memory(path) <= 256 + 64
    file.close()
    assert path.read_bytes()[: 2 << 20] == content_before[: 2 << 20]
