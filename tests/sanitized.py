"""Runs the tests of the tracer with both extension modules built under sanitizers: `make sanitized-test`.

In a copy of the tree, so that the ordinary build stays; what has not changed is not compiled again. The interpreter itself
is not instrumented. Under TSan its lock is seen as any lock, so that what is reported is ours; tests that fork are left out
there, since TSan's own threads do not survive a fork.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "build" / "sanitized"
COPIED = ("otel_torchprof", "native", "tests", "pyproject.toml", "setup.py", "README.md", "LICENSE")
TESTS = ("test_frames.py", "test_frames_unwinding.py", "test_frame_threads.py", "test_frame_thread_lives.py")
FLAVOURS = {
    "asan": ("address,undefined -fno-sanitize-recover=all", ("libasan.so", "libubsan.so"), ""),
    "tsan": ("thread", ("libtsan.so",), "not fork"),
}
OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=0:handle_abort=1",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    "TSAN_OPTIONS": "second_deadlock_stack=1:report_signal_unsafe=0",
    "PYTHONMALLOC": "malloc",
    "PYTHONDONTWRITEBYTECODE": "1",
}


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


def built(place: Path, flags: str) -> None:
    """Builds both extension modules there, where anything that they are made of is newer."""
    compiler = f"-fsanitize={flags} -fno-omit-frame-pointer -g1 -O1"
    environment = {**os.environ, "CFLAGS": compiler, "CXXFLAGS": compiler, "LDFLAGS": f"-fsanitize={flags}"}
    subprocess.run([sys.executable, "setup.py", "-q", "build_ext", "--inplace"], cwd=place, env=environment, check=True)


def tested(place: Path, libraries: tuple[str, ...], left_out: str) -> int:
    """The status of pytest there, with the sanitizer's library loaded before all others."""
    found = [subprocess.check_output(["gcc", f"-print-file-name={name}"], text=True).strip() for name in libraries]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", left_out]
    command += [f"tests/unit/{name}" for name in TESTS]
    if "libtsan.so" in libraries and subprocess.run(["setarch", "-R", "true"], check=False).returncode == 0:
        command = ["setarch", "-R", *command]  # see native/Makefile
    environment = {**os.environ, **OPTIONS, "PYTHONPATH": str(place), "LD_PRELOAD": " ".join(found)}
    return subprocess.run(command, cwd=place, env=environment, check=False).returncode


def main() -> int:
    """Both flavours; the worse of their statuses."""
    status = 0
    for flavour, (flags, libraries, left_out) in FLAVOURS.items():
        sys.stdout.write(f"  {flavour}\n")
        sys.stdout.flush()
        place = copied(flavour)
        built(place, flags)
        status = max(status, tested(place, libraries, left_out))
    return status


if __name__ == "__main__":
    sys.exit(main())
