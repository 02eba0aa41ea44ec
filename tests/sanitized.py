"""Builds copies of the tree under sanitizers, and runs tests in them that use all of their native parts: `make sanitized-test`.

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
import zlib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "helpers"))

import device_process  # noqa: E402

OUT = ROOT / "build" / "sanitized"
COPIED = ("otel_torchprof", "native", "tests", "pyproject.toml", "setup.py", "README.md", "LICENSE")
TESTS = [
    f"tests/{name}.py"
    for name in (
        # Python's calls, labels, modules, contexts, pauses of the collector, stacks.
        *("unit/test_frames", "unit/test_frames_random", "unit/test_frames_threads", "unit/test_frames_neighbours"),
        *("unit/test_frames_lifetimes", "unit/test_gc_pauses"),
        *("unit/test_labels", "unit/test_context_source", "unit/test_module_source", "unit/test_stack_reader"),
        # Torch's operators: on threads, with inputs, memory, calls, modules and contexts, under all orders of several profiles.
        *("torch/test_bare_operators", "torch/test_threads", "torch/test_info", "torch/test_contexts"),
        *("torch/test_memory_events", "torch/test_memory_slot", "torch/test_all_orders", "torch/test_coexistence"),
        *("torch/test_frames_parity", "torch/test_with_modules", "torch/test_ranges"),
        *("torch/test_label_traces", "torch/test_record_function_fast", "torch/test_torchrun_collectives"),
        # Phases of training loops.
        *("torch/test_phases", "torch/test_phase_hooks", "torch/test_phase_roots"),
        "torch/test_thread_usage",
    )
]
DEVICE_TESTS = ["tests/torch/test_device_times.py", "tests/torch/test_device_trouble.py"]
"""In a process of their own, which gets the device and is not forked as otherwise."""
LEFT_OUT = ("fake_tensors", "inductors_code", "language_model", "two_hundred_thousand", "torch_may_come_later")
"""Minutes of Python's in torch, or of a compiler's, or as many events as tests of memory have."""
ASAN_LEFT_OUT = ("greenlet",)
"""Greenlets copy a stack together with what ASan has put between its variables."""
TSAN_LEFT_OUT = ("fork", "torchrun")
"""Tests that fork, and those of collectives: threads of gloo and of torchrun's store race in code that is not instrumented."""
FLAVOURS = {
    "asan": (
        "address,undefined -fno-sanitize=vptr -fno-sanitize-recover=all",
        ("libasan.so", "libubsan.so"),
        (*LEFT_OUT, *ASAN_LEFT_OUT),
    ),
    "tsan": ("thread", ("libtsan.so",), (*LEFT_OUT, *TSAN_LEFT_OUT)),
}
FIRST = "import sys, torch, pytest; from otel_torchprof._native import torch_library; torch_library.load(); sys.exit(pytest.main())"
"""What runs the tests: the sanitizers name functions of those libraries only that were there before their first report."""
OPTIONS = {
    # Programs ask for more memory than there is, and torch says so.
    "ASAN_OPTIONS": "detect_leaks=0:handle_abort=1:allocator_may_return_null=1",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    # Not its search for deadlocks, which ends the process at 64 locks at a time: of many that torch lets go of it never hears.
    "TSAN_OPTIONS": f"detect_deadlocks=0:report_signal_unsafe=0:allocator_may_return_null=1:suppressions={ROOT}/tests/tsan.supp",
    "KINETO_LOG_LEVEL": "99",  # else two lines for each profile of torch's, between which a report is hard to find
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
    script, header = place / "sanitized-c++", place / "sanitized.h"
    compiler = os.environ.get("CXX", "c++")
    # std::timed_mutex would call pthread_mutex_clocklock, which TSan of gcc 12 does not see: that lock would seem to be nobody's.
    header.write_text("#include <cstddef>\n#undef _GLIBCXX_USE_PTHREAD_MUTEX_CLOCKLOCK\n")
    options = f"-fsanitize={flags} -fno-omit-frame-pointer -g1 -include {header}"
    script.write_text(f'#!/bin/sh\nexec {compiler} {options} "$@" -O1\n')
    # By the options: the library in there is looked up by its sources and by its compiler's name.
    folder = place / f"torch-library-{zlib.crc32(options.encode()):08x}"
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
    chosen = " and ".join(f"not {name}" for name in FLAVOURS[flavour][2])
    # What is written to the standard error itself is a report, and is to be seen also where the process ends of it.
    options = ("-q", "-p", "no:cacheprovider", "--capture=sys", "--durations=5", "-k", chosen)
    status = 0
    for tests, of_device in ((TESTS, {}), (DEVICE_TESTS, {device_process.REPORTS: str(copy.place / "reports")})):
        command = [*copy.command, sys.executable, "-c", FIRST, *options, *tests]
        environment = {**os.environ, **copy.environment, **of_device}
        status = max(status, subprocess.run(command, cwd=copy.place, env=environment, check=False).returncode)
    return status


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
