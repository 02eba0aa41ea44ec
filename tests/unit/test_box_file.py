"""The file of a black box: which folder is good enough, how large it may be, and which of those that are left go."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import forked_programs
import pytest

from otel_torchprof._files import box_file
from otel_torchprof._files.box_file import SUFFIX, BoxFileError, is_of_the_living, memory_file, named_file
from otel_torchprof._process import private_folder

MIB = 1 << 20
DAY = 86_400.0
LARGE = 1 << 40


@pytest.fixture
def made():
    """Makes files that are removed after the test."""
    files = []

    def make(name, folder, size=MIB, processes=1):
        files.append(named_file(name, str(folder), size, processes))
        return files[-1]

    yield make
    for file in files:
        file.remove()


@pytest.fixture
def default(monkeypatch, tmp_path):
    """The folder that nobody names, in a shared memory file system of the test's."""
    monkeypatch.setattr(private_folder, "_SHARED_MEMORY", str(tmp_path))
    return private_folder.default_folder()


def has_free(monkeypatch, free: int, total: int = LARGE) -> None:
    """Every file system has so many bytes."""
    found = SimpleNamespace(f_bavail=free // 4096, f_frsize=4096, f_blocks=total // 4096)
    monkeypatch.setattr(os, "statvfs", lambda _path: found)


def left_by_the_dead(folder, name: str, size: int = MIB, changed: float = 0.0):
    """What a process left that has died, and whose file was last written then."""
    path = folder / f"{name}{SUFFIX}"
    path.touch(0o600)
    os.truncate(path, size)
    os.utime(path, (changed, changed))
    return path


def failing(function, error: int, condition=lambda *_: True):
    """A function of the system that fails where a condition holds of its arguments."""

    def fail(*arguments):
        if condition(*arguments):
            raise OSError(error, os.strerror(error))
        return function(*arguments)

    return fail


def test_a_file_is_of_its_user_alone_and_has_all_of_its_blocks(default):
    """Folder and file can be read by nobody else, all blocks are allocated, and no program that is executed inherits it."""
    file = named_file("rank0.1", "", MIB, 1)
    try:
        assert file.path == default / f"rank0.1{SUFFIX}"
        assert stat.S_IMODE(default.stat().st_mode) == 0o700
        found = file.path.stat()
        assert (stat.S_IMODE(found.st_mode), found.st_size) == (0o600, MIB)
        assert found.st_blocks * 512 >= MIB
        assert not os.get_inheritable(file.descriptor)
    finally:
        file.remove()
    assert list(default.iterdir()) == []


def test_memory_has_no_name():
    """A file without a name has its size in blocks, and nothing is left of it."""
    file = memory_file(None)
    assert (file.path, os.fstat(file.descriptor).st_size) == (None, 16 * MIB)
    file.remove()
    file.remove()


@pytest.mark.parametrize(
    ("free", "processes", "size", "expected"),
    [
        (128, 1, None, 16),
        (127, 1, None, 4),
        (32, 1, None, 4),
        (1024, 8, None, 16),
        (1023, 8, None, 4),
        (256, 8, None, 4),
        (1024, 0, None, 16),
        (256, 1, 32, 32),
        (8, 1, 1, 1),
    ],
)
def test_the_size_goes_by_what_is_free(monkeypatch, tmp_path, made, *, free, processes, size, expected):
    """All processes together take no more than an eighth: 16 MiB each, else 4, else what was asked for."""
    has_free(monkeypatch, free * MIB)
    file = made("box", tmp_path, size and size * MIB, processes)
    assert (file.size, file.path.stat().st_size) == (expected * MIB, expected * MIB)


@pytest.mark.parametrize(
    ("free", "processes", "size", "needed"), [(31, 1, None, 4), (255, 8, None, 4), (255, 1, 32, 32), (0, 1, 1, 1)]
)
def test_where_there_is_no_room_there_is_no_file(monkeypatch, tmp_path, *, free, processes, size, needed):
    """What was asked for is not made smaller, and less than 4 MiB is not taken by itself: the error names folder, room and way out."""
    has_free(monkeypatch, free * MIB)
    with pytest.raises(BoxFileError) as error:
        named_file("box", str(tmp_path), size and size * MIB, processes)
    text = str(error.value)
    assert text.startswith(f"{tmp_path} has {free} MiB free, and a box of {needed} MiB for each of {processes}")
    assert text.endswith("name another folder, or a smaller size")
    assert list(tmp_path.iterdir()) == []


def test_the_default_folder_is_no_link(default, tmp_path):
    """Who makes a link in the shared folder before the user does would lead the file elsewhere: nothing is written there."""
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    default.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(BoxFileError, match=f"^{default} is no folder"):
        named_file("box", "", MIB, 1)
    assert list((tmp_path / "elsewhere").iterdir()) == []


@pytest.mark.parametrize("mode", [0o777, 0o701, 0o750])
def test_the_default_folder_is_open_to_nobody(default, mode):
    """Whoever else may look into it, or write to it, keeps the file from being made."""
    default.mkdir()
    default.chmod(mode)
    with pytest.raises(BoxFileError, match=f"^{default} belongs to somebody else, or others can write to it"):
        named_file("box", "", MIB, 1)


def test_a_folder_that_is_named_is_made_and_may_be_read(tmp_path, made):
    """It and those above it are made; one that others can read, or a link to it, is good enough, since the file is not theirs."""
    assert made("box", tmp_path / "a" / "b").path.parent == tmp_path / "a" / "b"
    (tmp_path / "read").mkdir(mode=0o755)
    (tmp_path / "link").symlink_to(tmp_path / "read")
    assert stat.S_IMODE(made("box", tmp_path / "link").path.stat().st_mode) == 0o600


@pytest.mark.parametrize("directory", ["", "named"])
def test_a_folder_of_somebody_else_is_refused(monkeypatch, default, tmp_path, directory):
    """Its owner could exchange what is in it."""
    folder = tmp_path / directory if directory else default
    folder.mkdir(mode=0o700)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    monkeypatch.setattr(private_folder, "default_folder", lambda: folder)
    with pytest.raises(BoxFileError, match=f"^{folder} belongs to somebody else"):
        named_file("box", directory and str(folder), MIB, 1)


def test_a_folder_that_others_can_write_to_is_refused(tmp_path):
    """So is one that is named and world-writable."""
    tmp_path.chmod(0o777)
    with pytest.raises(BoxFileError, match=f"^{tmp_path} belongs to somebody else, or others can write to it"):
        named_file("box", str(tmp_path), MIB, 1)


@pytest.mark.parametrize("directory", ["", "named"])
def test_a_file_in_the_place_of_the_folder_is_refused(default, tmp_path, directory):
    """The error names it."""
    folder = tmp_path / directory if directory else default
    folder.touch(0o600)
    with pytest.raises(BoxFileError, match=f"^{folder} (is no folder|cannot be made: File exists)"):
        named_file("box", directory and str(folder), MIB, 1)


@pytest.mark.parametrize("directory", ["/proc/boxes", "~nobody-has-this-name/boxes"])
def test_a_folder_that_cannot_be_made(directory):
    """The error names it, the reason and the way out."""
    with pytest.raises(BoxFileError, match=f"^{directory} cannot be made: .*; name another folder$"):
        named_file("box", directory, MIB, 1)


@pytest.mark.parametrize(
    ("module", "function", "error", "said"),
    [
        (os, "posix_fallocate", errno.ENOSPC, "has no room for 1 MiB: No space left on device"),
        (
            os,
            "posix_fallocate",
            errno.EOPNOTSUPP,
            "cannot allocate a file's blocks: Operation not supported; name another",
        ),
        (os, "open", errno.EROFS, "cannot be made: Read-only file system"),
        (fcntl, "flock", errno.ENOSYS, "cannot lock files: Function not implemented; name another folder"),
    ],
)
def test_a_file_system_that_cannot(monkeypatch, tmp_path, *, module, function, error, said):
    """One that is full, read-only, or cannot do what a box needs: the error says so, and nothing is left there."""
    monkeypatch.setattr(module, function, failing(getattr(module, function), error))
    with pytest.raises(BoxFileError) as raised:
        named_file("box", str(tmp_path), MIB, 1)
    assert str(raised.value).startswith(str(tmp_path))
    assert said in str(raised.value)
    monkeypatch.undo()
    assert list(tmp_path.iterdir()) == []


def test_a_name_is_given_once(tmp_path, made):
    """A file, or a link, of that name is neither overwritten nor followed."""
    (tmp_path / f"link{SUFFIX}").symlink_to(tmp_path / "victim")
    made("box", tmp_path)
    for name in ("box", "link"):
        with pytest.raises(BoxFileError, match="cannot be made: File exists"):
            named_file(name, str(tmp_path), MIB, 1)
    assert not (tmp_path / "victim").exists()


def test_two_files_of_a_user_side_by_side(tmp_path, made):
    """Each is known to be of a process that lives until it is closed, whatever becomes of the other."""
    first, second = made("first", tmp_path), made("second", tmp_path)
    assert (is_of_the_living(first.path), is_of_the_living(second.path)) == (True, True)
    first.close()
    assert (is_of_the_living(first.path), is_of_the_living(second.path)) == (False, True)
    second.remove()
    assert [path.name for path in tmp_path.iterdir()] == [f"first{SUFFIX}"]


def test_a_file_that_is_being_looked_at_while_it_is_made(monkeypatch, tmp_path, made):
    """Another process that asks whether it is of the living, and marks it, stops nobody: it is locked and private afterwards."""
    real, path = fcntl.flock, tmp_path / f"box{SUFFIX}"

    def flock(file, flags):
        monkeypatch.setattr(fcntl, "flock", real)
        other = os.open(path, os.O_RDONLY)
        real(other, fcntl.LOCK_EX)
        path.chmod(0o400)
        looking = threading.Thread(target=os.close, args=(other,))
        looking.start()
        real(file, flags)
        looking.join()

    monkeypatch.setattr(fcntl, "flock", flock)
    made("box", tmp_path)
    assert is_of_the_living(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_descriptor_is_closed_once(tmp_path, made):
    """What has its number later stays open."""
    file = made("box", tmp_path)
    number = file.descriptor
    file.close()
    other = os.open(tmp_path, os.O_RDONLY)
    os.dup2(other, number)
    file.remove()
    assert os.fstat(number).st_ino == tmp_path.stat().st_ino
    for each in {other, number}:
        os.close(each)


def test_what_the_dead_left_goes_after_seven_days(monkeypatch, tmp_path, made):
    """Seven days count from when it was first seen, since a file's times do not change with its memory; the living keep theirs."""
    now = box_file.time.time()
    dead, living = left_by_the_dead(tmp_path, "dead"), made("living", tmp_path)
    os.utime(living.path, (0, 0))
    made("sees it", tmp_path)
    for days, is_there in ((6.9, True), (7.1, False)):
        monkeypatch.setattr(box_file.time, "time", lambda days=days: now + days * DAY)
        made(f"after {days}", tmp_path)
        assert (dead.exists(), living.path.exists()) == (is_there, True)


@pytest.mark.parametrize(
    ("total", "size", "kept"),
    [(LARGE, 400 * MIB, 2), (LARGE, 1 << 30, 1), (64 * MIB, 4 * MIB, 2), (64 * MIB, 3 * MIB, 2)],
)
def test_the_oldest_of_too_much_go(monkeypatch, tmp_path, made, *, total, size, kept):
    """Of the dead no more than 1 GiB stays, or an eighth of a small file system: the latest. The living are not counted."""
    has_free(monkeypatch, LARGE, total)
    paths = [left_by_the_dead(tmp_path, f"{age}", size, changed=1e9 - age) for age in range(4)]
    living = made("living", tmp_path, 16 * MIB)
    made("new", tmp_path)
    assert [path.exists() for path in paths] == [age < kept for age in range(4)]
    assert living.path.exists()


def test_nothing_else_is_touched(monkeypatch, tmp_path, made):
    """Files with other names, folders, links and what they lead to, and what belongs to somebody else stay, however old."""
    elsewhere = left_by_the_dead(tmp_path, "elsewhere").rename(tmp_path / "elsewhere")
    (tmp_path / f"link{SUFFIX}").symlink_to(elsewhere)
    (tmp_path / f"folder{SUFFIX}").mkdir()
    os.mkfifo(tmp_path / f"pipe{SUFFIX}")
    (tmp_path / f"box{SUFFIX}.txt").touch()
    before = {path: path.lstat() for path in tmp_path.iterdir()}
    made("sees it", tmp_path)
    now = box_file.time.time()
    monkeypatch.setattr(box_file.time, "time", lambda: now + 100 * DAY)
    made("after", tmp_path)
    assert {path: path.lstat().st_ctime_ns for path in before} == {
        path: was.st_ctime_ns for path, was in before.items()
    }


def test_what_others_own_is_not_removed(monkeypatch, tmp_path):
    """In a folder that several users had, each one's own files alone go."""
    path = left_by_the_dead(tmp_path, "theirs")
    monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)
    box_file._prune(tmp_path)
    monkeypatch.setattr(box_file.time, "time", lambda: path.stat().st_ctime + 100 * DAY)
    box_file._prune(tmp_path)
    assert path.exists()


def test_processes_that_the_kernel_killed_for_memory(monkeypatch, tmp_path):
    """They are those of the cgroup since the box was opened; nothing is said of another machine's, or of a cgroup that was made anew."""
    monkeypatch.setattr(box_file, "_CGROUPS", tmp_path)
    events = tmp_path / "memory.events"
    events.write_text("low 0\noom 5\noom_kill 2\noom_group_kill 0\n")
    info = box_file.owner_info()
    assert box_file.kills_for_memory(info) == 0
    events.write_text("low 0\noom 9\noom_kill 3\noom_group_kill 0\n")
    assert box_file.kills_for_memory(info) == 1
    assert box_file.kills_for_memory({**info, "machine": "another"}) == 0
    assert box_file.kills_for_memory({**info, "cgroup": 0}) == 0
    events.write_text("low 0\n")
    assert box_file.kills_for_memory(info) == 0


def test_without_counts_of_the_kernel_nothing_is_noted(monkeypatch, tmp_path):
    """An older kernel, or a system without cgroups, leaves the rest of what is known of the process."""
    monkeypatch.setattr(box_file, "_CGROUPS", tmp_path)
    assert set(box_file.owner_info()) == {"owner", "started", "machine", "pids"}
    assert box_file.kills_for_memory(box_file.owner_info()) == 0


def test_a_process_that_is_stopped_is_held():
    """From SIGSTOP to SIGCONT; one that has ended, or of another machine, is not."""
    process = forked_programs.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    info = {**box_file.owner_info(), "owner": process.pid}
    assert not box_file.is_held(info)
    process.send_signal(signal.SIGSTOP)
    deadline = time.monotonic() + 60
    while not box_file.is_held(info):
        assert time.monotonic() < deadline
    assert not box_file.is_held({**info, "machine": "another"})
    process.send_signal(signal.SIGCONT)
    process.communicate(b"\n")
    assert not box_file.is_held(info)


@pytest.mark.parametrize("kind", ["hang", "memory"])
def test_reports_go_after_seven_days(tmp_path, made, kind):
    """A later process removes the old ones, of hangs and of failed allocations, and leaves the younger and what has another name."""
    names = (f"otel-torchprof-{kind}.a.1.txt", f"otel-torchprof-{kind}.a.2.txt", f"{kind}.txt")
    old, young, other = (tmp_path / name for name in names)
    for path, days in ((old, 8), (young, 6), (other, 8)):
        path.touch()
        os.utime(path, (time.time() - days * DAY,) * 2)
    made("rank0", tmp_path)
    assert [path.exists() for path in (old, young, other)] == [False, True, True]
