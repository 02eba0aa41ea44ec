"""Who records Python's calls, while some work runs. Needs no torch, except for torch's own."""

from __future__ import annotations

import atexit
import contextlib
import cProfile
import functools
import importlib.util
import itertools
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import otel_torchprof as otp

if TYPE_CHECKING:
    from collections.abc import Iterator

VIZTRACER = "VizTracer"
CPROFILE = "cProfile"
EMPTY_PROFILE = "empty profile function"
EMPTY_MONITORING = "empty sys.monitoring callbacks"

HAS_MONITORING = sys.version_info >= (3, 12)
HAS_TORCH = importlib.util.find_spec("torch") is not None

_RING = 1 << 17
"""Calls that VizTracer has room for: more than a run makes."""
_MONITORED = ("PY_START", "PY_RESUME", "PY_RETURN", "PY_YIELD", "PY_UNWIND", "CALL", "C_RETURN", "C_RAISE")
"""What there is to be told of in order to see every call begin and end."""


def profile(**arguments: Any) -> otp.profile:
    """Ours, of calls alone."""
    return otp.profile(with_stack=True, operators=False, **arguments)


@contextlib.contextmanager
def ours(**arguments: Any) -> Iterator[otp.profile]:
    """The package at hand, which has to record the calls."""
    with profile(**arguments) as prof:
        yield prof
    if off := [note for note in prof.health.notes if note.startswith("frames off:")]:
        raise RuntimeError(f"calls were not recorded: {off}")


@contextlib.contextmanager
def viztracer(**options: Any) -> Iterator[Any]:
    """VizTracer, with a ring of memory that it has filled once before: only its calls are to be measured."""
    tracer = _viztracer(json.dumps(options))
    tracer.start()
    try:
        yield tracer
    finally:
        tracer.stop()
        tracer.clear()


@functools.cache
def _viztracer(options: str) -> Any:
    """By its options as JSON, of which a list of files is one that has no hash."""
    tracer = new_viztracer(_RING, **json.loads(options))
    tracer.start()
    for _ in itertools.repeat(None, _RING + 1):
        _nothing()
    tracer.stop()
    tracer.clear()
    return tracer


def new_viztracer(entries: int, **options: Any) -> Any:
    """One that has room for so many calls, and writes them the fastest way it has."""
    from viztracer import VizTracer

    return VizTracer(tracer_entries=entries, verbose=0, register_global=False, dump_raw=True, **options)


def _nothing() -> None:
    pass


@contextlib.contextmanager
def cprofile() -> Iterator[None]:
    """Python's own: sums per function, no events."""
    profiler = cProfile.Profile()
    profiler.enable()
    try:
        yield
    finally:
        profiler.disable()


@contextlib.contextmanager
def empty_profile() -> Iterator[None]:
    """A profile function in C that does nothing."""
    _peers().profile(True)
    try:
        yield
    finally:
        _peers().profile(False)


@contextlib.contextmanager
def empty_monitoring() -> Iterator[None]:
    """Callbacks in C that do nothing, for all that tells of a call or of its end."""
    monitoring: Any = sys.monitoring  # type: ignore[attr-defined]
    tool, requested = monitoring.OPTIMIZER_ID, 0
    monitoring.use_tool_id(tool, "empty")
    for name in _MONITORED:
        event = getattr(monitoring.events, name)
        monitoring.register_callback(tool, event, _peers().callback)
        requested |= event
    monitoring.set_events(tool, requested)
    try:
        yield
    finally:
        monitoring.set_events(tool, 0)
        for name in _MONITORED:
            monitoring.register_callback(tool, getattr(monitoring.events, name), None)
        monitoring.free_tool_id(tool)


@functools.cache
def _peers() -> Any:
    """The functions of ``peers_python.cc``, built for this interpreter into a folder that goes with the process."""
    folder = tempfile.TemporaryDirectory(prefix="otel-torchprof-bench-")
    atexit.register(folder.cleanup)
    path = str(Path(folder.name) / "peers_python.so")
    source = str(Path(__file__).with_name("peers_python.cc"))
    include = f"-I{sysconfig.get_paths()['include']}"
    compiler = os.environ.get("CXX", "c++")
    subprocess.run([compiler, "-std=c++17", "-O2", "-fPIC", "-shared", include, source, "-o", path], check=True)
    specification = importlib.util.spec_from_file_location("peers_python", path)
    if specification is None or specification.loader is None:
        raise ImportError(f"{path} is no extension module")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module
