"""The libraries that come with a wheel: which torch they are taken for, and that no compiler is asked then."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import preloaded
import pytest

torch = pytest.importorskip("torch", minversion="2.6")

from otel_torchprof._native import prebuilt, torch_build  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
PROFILE = """
import sys
from pathlib import Path
from otel_torchprof._native import prebuilt, torch_library
prebuilt.FOLDER = Path(sys.argv[1])
import torch, otel_torchprof as otp
with otp.profile(record_shapes=True, profile_memory=True) as prof:
    torch.ones(3).neg()
print([event.name for event in prof.events()][-1], torch_library.load().path.name)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a list, as in a wheel: the library for the torch that is installed, and one for another."""
    monkeypatch.setattr(prebuilt, "FOLDER", tmp_path / "prebuilt")
    prebuilt.FOLDER.mkdir()
    library = prebuilt.FOLDER / "torch_ops-own.so"
    shutil.copyfile(torch_build.ensure(torch), library)
    target = torch_build.BuildTarget.of(torch)
    own = prebuilt.Library(
        library.name,
        prebuilt.digest(library),
        target.version,
        target.git_version,
        target.cxx11_abi,
        torch_build.sources_digest(),
        prebuilt.headers_digest(target.include),
    )
    prebuilt.write_list(prebuilt.FOLDER, [own._replace(file="none.so", git_version="0" * 40), own])
    return prebuilt.FOLDER


def listed_as(folder, **changed):
    """Changes what the list says of the library."""
    other, own = prebuilt.listed(folder)
    prebuilt.write_list(folder, [other, own._replace(**changed)])


def test_the_one_for_this_torch_is_found(folder):
    """Of several the one of torch's commit and ABI; where there is no list, as in a checkout, none."""
    assert prebuilt.find(torch) == folder / "torch_ops-own.so"
    (folder / prebuilt.LIST).unlink()
    assert prebuilt.find(torch) is None


@pytest.mark.parametrize(
    "changed",
    [
        {"git_version": "1" * 40},
        {"cxx11_abi": 7},
        {"sources": "of another"},
        {"headers": "of another"},
        {"sha256": "0" * 64},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_whatever_differs_it_is_not_taken(folder, changed):
    """Another commit, ABI, source or header, or a damaged file: then it is compiled."""
    listed_as(folder, **changed)
    assert prebuilt.find(torch) is None


@pytest.mark.parametrize("missing", ["the library", "a header"])
def test_where_something_is_missing_it_is_compiled(folder, tmp_path, monkeypatch, missing):
    """A library that was removed, or an installation with some of torch's headers only, is no error here."""
    if missing == "the library":
        (folder / "torch_ops-own.so").unlink()
    else:
        (tmp_path / "include").mkdir()
        some = torch_build.BuildTarget.of(torch)._replace(include=tmp_path / "include")
        monkeypatch.setattr(torch_build.BuildTarget, "of", lambda _: some)
    assert prebuilt.find(torch) is None


def test_a_torch_without_headers_or_distributed(folder, tmp_path):
    """Headers may be missing, as in images that were stripped of them; a torch without distributed is no release."""
    bare = SimpleNamespace(
        __version__=torch.__version__,
        __file__=str(tmp_path / "torch" / "__init__.py"),
        version=torch.version,
        compiled_with_cxx11_abi=torch.compiled_with_cxx11_abi,
        distributed=torch.distributed,
    )
    assert prebuilt.find(bare) == folder / "torch_ops-own.so"
    bare.distributed = SimpleNamespace(is_available=lambda: False)
    assert prebuilt.find(bare) is None


def profiled(folder, tmp_path, **environment):
    nowhere = {"PATH": str(tmp_path), "CXX": "", "OTEL_TORCHPROF_BUILD_DIR": str(tmp_path / "none")}
    variables = {**os.environ, "PYTHONPATH": str(ROOT), **nowhere, **environment}
    return preloaded.run(PROFILE, str(folder), environment=variables, has_package=True)


def test_without_a_compiler(folder, tmp_path):
    """A program records operators, shapes and memory with it where there is no compiler and no folder to build in, and says nothing."""
    done = profiled(folder, tmp_path)
    assert (done.stdout, done.stderr, done.returncode) == ("[memory] torch_ops-own.so\n", "", 0)


def test_one_that_cannot_be_loaded_is_built_instead(folder, tmp_path):
    """A file that the loader refuses is named, once, and what was built here serves."""
    (folder / "torch_ops-own.so").write_bytes(b"no library")
    listed_as(folder, sha256=prebuilt.digest(folder / "torch_ops-own.so"))
    done = profiled(folder, tmp_path, OTEL_TORCHPROF_BUILD_DIR=str(torch_build.folder()))
    assert done.returncode == 0
    assert done.stdout == f"[memory] {torch_build.library_name(torch)}\n"
    assert done.stderr.count("torch_ops-own.so could not be loaded") == 1


WRONG_FIRST = """
from otel_torchprof.errors import TorchLibraryError
from otel_torchprof._native import torch_library
probe, probed = torch_library._probe, []

def wrong_first(torch, library):
    probed.append(library.path.name)
    if len(probed) == 1:
        raise TorchLibraryError("the library was loaded, but read nonsense")
    probe(torch, library)

torch_library._probe = wrong_first
"""


def test_one_that_records_nonsense_is_not_used(folder):
    """A library of the wheel that loads and then reads torch's objects wrongly is said to, and one is built instead."""
    program = WRONG_FIRST + PROFILE
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = preloaded.run(program, str(folder), environment=environment, has_package=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["[memory]", torch_build.library_name(torch)]
    assert done.stderr.count("read nonsense; it came with the package, so one is built here instead") == 1
