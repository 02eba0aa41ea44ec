"""What is loaded into the process can be written, replaced or moved by nobody but the user and root."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import otel_torchprof as otp
from otel_torchprof._native import torch_build

ROOT = Path(__file__).resolve().parent.parent.parent
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")


@pytest.fixture
def library(tmp_path):
    """A whole file in a private folder two folders deep, and its digest."""
    folder = tmp_path / "parent" / "kept"
    folder.mkdir(parents=True)
    for path in (folder.parent, folder):
        path.chmod(0o700)
    file = folder / "library.so"
    file.write_bytes(b"machine code")
    file.chmod(0o644)
    file.with_suffix(".sha256").write_text(hashlib.sha256(b"machine code").hexdigest())
    return file


def descriptors():
    """How many files this process has open."""
    return len(list(Path("/dev/fd").iterdir()))


def test_a_private_file_is_opened(library):
    """What passes is opened for reading, closed at exec, and nothing else stays open."""
    before = descriptors()
    assert torch_build.is_whole(library)
    descriptor = torch_build.open_private(library)
    assert descriptors() == before + 1
    assert os.pread(descriptor, 100, 0) == b"machine code"
    assert not os.get_inheritable(descriptor)
    os.close(descriptor)


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702, 0o2775])
@pytest.mark.parametrize("level", [0, 1])
def test_a_parent_that_others_can_write_to_is_refused(library, mode, level):
    """A folder above the library's in which others could exchange it is refused by name, mode and way out."""
    parent = library.parents[level]
    parent.chmod(mode)
    before = descriptors()
    way_out = rf"{parent} can be written by others \(mode {mode:o}\).*chmod go-w {parent}.*OTEL_TORCHPROF_BUILD_DIR"
    with pytest.raises(otp.TorchLibraryError, match=way_out):
        torch_build.open_private(library)
    assert descriptors() == before


@AS_ROOT
def test_a_parent_of_somebody_else_is_refused(library):
    """So is a folder above the library's that belongs to another user."""
    os.chown(library.parent.parent, 12345, -1)
    with pytest.raises(otp.TorchLibraryError, match=f"{library.parent.parent} belongs to user id 12345, not to you"):
        torch_build.open_private(library)


def test_a_sticky_parent_will_do(library):
    """In a folder like /tmp others can neither move nor remove ours; the library's own folder may not be one."""
    library.parent.parent.chmod(0o1777)
    assert torch_build.is_whole(library)
    library.parent.chmod(0o1777)
    with pytest.raises(otp.TorchLibraryError, match=r"can be written by others \(mode 1777\)"):
        torch_build.is_whole(library)


def test_a_parent_that_cannot_be_listed_will_do(library):
    """A folder above the library's has to let the user through, and no more."""
    library.parent.parent.chmod(0o100)
    assert torch_build.is_whole(library)


def test_links_to_folders_are_followed_to_where_they_lead(library, tmp_path):
    """A linked cache folder is fine where its target is private, and refused by the target's name where it is not."""
    (tmp_path / "link").symlink_to(library.parent.parent)
    linked = tmp_path / "link" / "kept" / library.name
    assert torch_build.is_whole(linked)
    library.parent.parent.chmod(0o777)
    with pytest.raises(otp.TorchLibraryError, match=f"^{library.parent.parent} can be written"):
        torch_build.is_whole(linked)


def test_a_link_in_place_of_the_file(library, tmp_path):
    """A link is not followed: the library is built again."""
    other = library.rename(tmp_path / "other")
    library.symlink_to(other)
    with pytest.raises(OSError, match="symbolic link"):
        torch_build.open_private(library)
    assert not torch_build.is_whole(library)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_is_no_file_is_refused(library, make):
    """A pipe in place of the library blocks nobody."""
    library.unlink()
    make(library)
    library.chmod(0o700)
    before = descriptors()
    with pytest.raises(otp.TorchLibraryError, match="is no regular file"):
        torch_build.open_private(library)
    assert descriptors() == before


@pytest.mark.parametrize("umask", [0, 0o077])
def test_folders_that_are_made_pass(tmp_path, monkeypatch, umask):
    """Every folder that is made on the way is private, whatever the umask."""
    monkeypatch.delenv("OTEL_TORCHPROF_BUILD_DIR", raising=False)
    before = os.umask(umask)
    try:
        torch_build._make_folder(tmp_path / "cache" / "otel_torchprof")
    finally:
        os.umask(before)
    for folder in (tmp_path / "cache", tmp_path / "cache" / "otel_torchprof"):
        assert folder.stat().st_mode & 0o777 == 0o700


def test_nothing_is_made_where_others_can_write(tmp_path, monkeypatch):
    """Where the library would not be loaded from, no folder is made and nothing is built."""
    monkeypatch.setattr(torch_build, "library_name", lambda torch: "library.so")
    monkeypatch.setenv("OTEL_TORCHPROF_BUILD_DIR", str(tmp_path / "new"))
    tmp_path.chmod(0o777)
    with pytest.raises(otp.TorchLibraryError, match=f"{tmp_path} can be written by others"):
        torch_build.ensure(None)
    assert not (tmp_path / "new").exists()


WITHOUT_ROOT = """
import ctypes, os, sys
from pathlib import Path
from otel_torchprof import TorchLibraryError
from otel_torchprof._native import torch_build
if os.geteuid() == 0:
    os.setresgid(54321, 54321, 54321)
    os.setresuid(54321, 54321, 54321)
libc = ctypes.CDLL(None, use_errno=True)
libc.prctl(4, 1)  # PR_SET_DUMPABLE: who has been root may not write to /proc/self
me = os.geteuid()
folder = Path(sys.argv[1], "of-mine")
folder.mkdir(mode=0o700)
library = folder / "library.so"
library.touch(mode=0o600)
if libc.unshare(0x10000000) != 0: raise SystemExit(f"no user namespace can be made here ({os.strerror(ctypes.get_errno())})")
Path("/proc/self/uid_map").write_text(f"{me} {me} 1")
assert os.stat("/").st_uid not in (0, me)
os.close(torch_build.open_private(library))
try: torch_build.open_private(Path("/etc/passwd"))
except TorchLibraryError as error: print(error)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has user namespaces")
def test_a_user_namespace_without_root():
    """In a container without root, root's folders above the library's pass, and its files do not."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o1777)
        done = subprocess.run(
            [sys.executable, "-c", WITHOUT_ROOT, folder],
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1"},  # namespaces want one thread
            check=False,
            timeout=60,
        )
    if "no user namespace" in done.stderr:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr
    assert "/etc belongs to user id" in done.stdout
