"""Builds copies of the tree under sanitizers, and runs the tracer's tests in them: `make sanitized-test`.

A copy leaves the ordinary build alone; unchanged files are not compiled again. `make stress FLAVOUR=asan` uses the same copies. Both
extension modules and the library for torch are instrumented, the interpreter and torch are not. TSan sees the interpreter's
lock as any lock, so that what it reports is ours; tests that fork are left out there, since TSan's own threads do not survive a
fork.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "build" / "sanitized"
COPIED = ("otel_torchprof", "native", "tests", "pyproject.toml", "setup.py", "README.md", "LICENSE")
TESTS = ("test_frames.py", "test_frames_unwinding.py", "test_frame_threads.py", "test_frame_thread_lives.py")
FLAVOURS = {
    "asan": ("address,undefined -fno-sanitize=vptr -fno-sanitize-recover=all", ("libasan.so", "libubsan.so"), ""),
    "tsan": ("thread", ("libtsan.so",), "not fork"),
}
OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=0:handle_abort=1",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    # Not its search for deadlocks, which ends the process at 64 locks at a time: of many that torch lets go of it never hears.
    "TSAN_OPTIONS": f"detect_deadlocks=0:report_signal_unsafe=0:suppressions={ROOT}/tests/tsan.supp",
    "PYTHONMALLOC": "malloc",  # so that ASan sees each object of Python's, and not the blocks that they share
    "PYTHONDONTWRITEBYTECODE": "1",
}


@dataclass(frozen=True)
class Copy:
    """A copy of the tree with sanitized native parts, and how to run Python in it."""

    place: Path
    command: tuple[str, ...]
    """What goes before the interpreter."""
    environment: dict[str, str]


def copied(flavour: str) -> Path:
    """A copy of the tree whose unchanged files are as old as they were, without the ordinary extension modules."""
    place = OUT / flavour
    for name in COPIED:
        source, target = ROOT / name, place / name
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.so", "__pycache__"), dirs_exist_ok=True)
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)
    return place


def build(place: Path, flags: str) -> None:
    """Builds both extension modules there, where anything that they are made of is newer."""
    compiler = f"-fsanitize={flags} -fno-omit-frame-pointer -g1 -O1"
    environment = {**os.environ, "CFLAGS": compiler, "CXXFLAGS": compiler, "LDFLAGS": f"-fsanitize={flags}"}
    subprocess.run([sys.executable, "setup.py", "-q", "build_ext", "--inplace"], cwd=place, env=environment, check=True)


def build_library(place: Path, flags: str) -> Path:
    """Builds the library for torch, if there is torch, as the ordinary package builds it; where it is.

    Ahead of the runs: the sanitizer that these load first would also be loaded into the compiler.
    """
    script, folder = place / "sanitized-c++", place / "torch-library"
    compiler = os.environ.get("CXX", "c++")
    script.write_text(f'#!/bin/sh\nexec {compiler} -fsanitize={flags} -fno-omit-frame-pointer -g1 "$@" -O1\n')
    script.chmod(0o755)
    if importlib.util.find_spec("torch") is not None:
        program = "import torch; from otel_torchprof._native import torch_build; torch_build.ensure(torch)"
        names = {"PYTHONPATH": str(ROOT), "CXX": str(script), "OTEL_TORCHPROF_BUILD_DIR": str(folder)}
        subprocess.run([sys.executable, "-c", program], env={**os.environ, **names}, check=True)
    return folder


def sanitized_copy(flavour: str) -> Copy:
    """The copy of that flavour, built where that is needed."""
    flags, libraries, _ = FLAVOURS[flavour]
    place = copied(flavour)
    build(place, flags)
    found = [subprocess.check_output(["gcc", f"-print-file-name={name}"], text=True).strip() for name in libraries]
    fixed = flavour == "tsan" and subprocess.run(["setarch", "-R", "true"], check=False).returncode == 0
    paths = {"PYTHONPATH": str(place), "OTEL_TORCHPROF_BUILD_DIR": str(build_library(place, flags))}
    # see native/Makefile for setarch
    return Copy(place, ("setarch", "-R") if fixed else (), {**OPTIONS, **paths, "LD_PRELOAD": " ".join(found)})


def tested(flavour: str) -> int:
    """The status of pytest in that copy."""
    copy = sanitized_copy(flavour)
    command = [
        *copy.command,
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-k",
        FLAVOURS[flavour][2],
    ]
    command += [f"tests/unit/{name}" for name in TESTS]
    return subprocess.run(command, cwd=copy.place, env={**os.environ, **copy.environment}, check=False).returncode


def main() -> int:
    """Both flavours; the worse of their statuses."""
    status = 0
    for flavour in FLAVOURS:
        sys.stdout.write(f"  {flavour}\n")
        sys.stdout.flush()
        status = max(status, tested(flavour))
    return status


if __name__ == "__main__":
    sys.exit(main())
