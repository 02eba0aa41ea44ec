"""Files: whole or not at all."""

from __future__ import annotations

import errno
import functools
import gzip
import os
import random
import stat
import subprocess
import sys
import threading
from pathlib import Path

import forked_programs
import pytest
from threaded import in_threads

from otel_torchprof._export.file import write
from otel_torchprof.errors import ExportError

PIECES = [b"abc", b"", b"d" * 200_000]
CONTENT = b"".join(PIECES)


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("kind", [str, Path])
def test_pieces_stand_in_the_file_one_after_the_other(tmp_path, kind):
    """Both kinds of path; the number returned is that of the bytes; nothing else is left in the folder."""
    assert write(kind(tmp_path / "t.json"), iter(PIECES)) == len(CONTENT)
    assert (tmp_path / "t.json").read_bytes() == CONTENT
    assert names_in(tmp_path) == ["t.json"]


def test_gz_is_compressed(tmp_path):
    """The name decides; the number returned is that of the bytes before compression."""
    assert write(tmp_path / "t.json.gz", PIECES) == len(CONTENT)
    assert gzip.decompress((tmp_path / "t.json.gz").read_bytes()) == CONTENT
    assert (tmp_path / "t.json.gz").stat().st_size < len(CONTENT) / 10


def test_no_pieces_make_an_empty_file(tmp_path):
    """Also compressed, where nothing is still a header and a trailer."""
    assert write(tmp_path / "t", []) == write(tmp_path / "t.gz", []) == 0
    assert (tmp_path / "t").read_bytes() == b""
    assert gzip.decompress((tmp_path / "t.gz").read_bytes()) == b""


def test_the_old_file_stays_until_the_new_one_is_complete(tmp_path):
    """While pieces are still coming, readers see the old content, and then all of the new."""
    path = tmp_path / "t.json"
    path.write_bytes(b"old")

    def pieces():
        yield b"n" * 1_000_000
        assert path.read_bytes() == b"old"
        assert len(names_in(tmp_path)) == 2
        yield b"ew"

    write(path, pieces())
    assert path.read_bytes() == b"n" * 1_000_000 + b"ew"
    assert names_in(tmp_path) == ["t.json"]


@pytest.mark.parametrize("name", ["t.json", "t.json.gz"])
@pytest.mark.parametrize(
    "error", [ValueError("bad"), OSError(errno.EIO, "of the pieces"), KeyboardInterrupt()], ids=repr
)
def test_a_failure_of_the_pieces_leaves_nothing_behind(tmp_path, error, name):
    """The error arrives as it was, the old file stays, the temporary is gone."""
    (tmp_path / name).write_bytes(b"old")

    def pieces():
        yield b"half"
        raise error

    with pytest.raises(type(error)) as raised:
        write(tmp_path / name, pieces())
    assert raised.value is error
    assert (tmp_path / name).read_bytes() == b"old"
    assert names_in(tmp_path) == [name]


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("no/t.json", "No such file or directory; create the folder first"),
        ("", "Is a directory; give the name of a file in it"),
        ("file/t.json", "Not a directory; a part of the path is a file: choose another path"),
        ("n" * 256, "File name too long; choose a shorter name"),
    ],
)
def test_a_path_that_cannot_be_written(tmp_path, path, said):
    """The error says path, reason and way out, and keeps the system's as its cause; nothing is asked of the pieces, nothing created."""
    (tmp_path / "file").touch()
    with pytest.raises(ExportError) as raised:
        write(tmp_path / path, (pytest.fail("was asked") for _ in range(1)))
    assert str(raised.value) == f"cannot write {str(tmp_path / path)!r}: {said}"
    assert isinstance(raised.value.__cause__, OSError)
    assert names_in(tmp_path) == ["file"]


UNPRIVILEGED = """
import os, sys
from otel_torchprof import ChromeTraceExporter, ExportError
from otel_torchprof._export.file import write
os.chdir(sys.argv[1])
if os.geteuid() == 0:
    os.setgid(65534), os.setuid(65534)
for attempt in (lambda: write("locked/t.json", [b"new"]), lambda: write("read-only.json", [b"new"]), lambda: ChromeTraceExporter("locked/t.json")):
    try:
        attempt()
    except ExportError as error:
        print(error)
"""


def test_what_must_not_be_written_is_not(tmp_path):
    """A folder without write permission, also to an exporter, and a read-only file, which a rename would replace; not as root."""
    tmp_path.chmod(0o777)
    for parent in tmp_path.parents[:2]:
        parent.chmod(0o755)
    (tmp_path / "locked").mkdir(mode=0o555)
    (tmp_path / "read-only.json").write_bytes(b"old")
    (tmp_path / "read-only.json").chmod(0o444)
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-c", UNPRIVILEGED, str(tmp_path)]
    done = forked_programs.run(command, check=True, env={**os.environ, "PYTHONPATH": str(root)})
    *wrote, opening = done.stdout.splitlines()
    reason = "Permission denied; choose a path that this user may write to"
    assert wrote == [f"cannot write {path!r}: {reason}" for path in ("locked/t.json", "read-only.json")]
    assert opening.endswith(reason)
    assert (tmp_path / "read-only.json").read_bytes() == b"old"
    assert names_in(tmp_path) == ["locked", "read-only.json"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no /dev/full")
@pytest.mark.parametrize("pieces", [[b"x"], [b"x" * 1_000_000] * 2], ids=["seen on closing", "seen on writing"])
def test_a_full_disk(pieces):
    """The device is written to, not replaced, and what it says becomes the error."""
    with pytest.raises(ExportError, match=r"'/dev/full': No space left on device; free some space") as raised:
        write("/dev/full", pieces)
    assert isinstance(raised.value.__cause__, OSError)
    assert stat.S_ISCHR(Path("/dev/full").stat().st_mode)


def test_a_full_disk_leaves_nothing_behind(tmp_path):
    """The limit of the file's size stands in for the disk: the half-written temporary is removed."""
    code = (
        "import resource, signal, sys\n"
        "from otel_torchprof._export.file import write\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
        "write(sys.argv[1], [b'x' * 60_000] * 5)\n"
    )
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-c", code, str(tmp_path / "t.json")]
    done = forked_programs.run(command, env={**os.environ, "PYTHONPATH": str(root)})
    assert "ExportError: cannot write" in done.stderr
    assert "File too large" in done.stderr
    assert names_in(tmp_path) == []


@pytest.mark.parametrize("name", ["fifo", "fifo.gz"])
def test_a_fifo_is_written_to(tmp_path, name):
    """Whoever waits at the other end gets the bytes; the FIFO is still one afterwards."""
    os.mkfifo(tmp_path / name)
    received: list[bytes] = []
    reader = threading.Thread(target=lambda: received.append((tmp_path / name).read_bytes()))
    reader.start()
    write(tmp_path / name, PIECES)
    reader.join()
    assert (gzip.decompress(received[0]) if name.endswith(".gz") else received[0]) == CONTENT
    assert stat.S_ISFIFO((tmp_path / name).stat().st_mode)


def test_standard_output_is_written_to_even_where_it_is_a_file(tmp_path):
    """The file that the shell opened gets the bytes: a rename would leave them in another one of the same name."""
    root = Path(__file__).resolve().parents[2]
    code = "from otel_torchprof._export.file import write; write('/dev/stdout', [b'abc'])"
    with (tmp_path / "out").open("wb") as out:
        subprocess.run([sys.executable, "-c", code], stdout=out, check=True, env={"PYTHONPATH": str(root)})
        assert os.fstat(out.fileno()).st_ino == (tmp_path / "out").stat().st_ino
    assert (tmp_path / "out").read_bytes() == b"abc"


@pytest.mark.parametrize("exists", [True, False])
def test_symbolic_links_are_followed(tmp_path, exists):
    """The file that the link names is written, in its own folder, and the link stays a link."""
    (tmp_path / "elsewhere").mkdir()
    if exists:
        (tmp_path / "elsewhere" / "t.json").write_bytes(b"old")
    (tmp_path / "link.json").symlink_to("elsewhere/t.json")
    write(tmp_path / "link.json", PIECES)
    assert (tmp_path / "link.json").is_symlink()
    assert (tmp_path / "elsewhere" / "t.json").read_bytes() == CONTENT
    assert names_in(tmp_path / "elsewhere") == ["t.json"]


@pytest.mark.parametrize(("old", "expected"), [(None, 0o640), (0o604, 0o604)])
def test_permissions(tmp_path, old, expected):
    """A new file gets what the umask leaves, a replaced one keeps what it had."""
    path = tmp_path / "t.json"
    if old is not None:
        path.touch()
        path.chmod(old)
    umask = os.umask(0o027)
    try:
        write(path, PIECES)
    finally:
        os.umask(umask)
    assert stat.S_IMODE(path.stat().st_mode) == expected


def test_a_name_of_the_greatest_length(tmp_path):
    """The temporary's name does not grow with the file's."""
    write(tmp_path / ("n" * 255), PIECES)
    assert names_in(tmp_path) == ["n" * 255]


@pytest.mark.parametrize("path", [b"t.json", 7, None])
def test_a_path_of_another_type_is_an_error(path):
    """Bytes, a file descriptor, nothing: TypeError that names the type."""
    with pytest.raises(TypeError, match=type(path).__name__):
        write(path, PIECES)


def test_writers_of_one_path_do_not_mix(tmp_path):
    """Of several threads the last one to finish wins, whole."""
    contents = [random.Random(seed).randbytes(300_000) for seed in range(4)]
    in_threads(
        *(
            functools.partial(write, tmp_path / "t", [content[at : at + 1000] for at in range(0, 300_000, 1000)])
            for content in contents
        )
    )
    assert (tmp_path / "t").read_bytes() in contents
    assert names_in(tmp_path) == ["t"]
