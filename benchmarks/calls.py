"""What recording adds to a Python call, while it runs, under every interpreter that there is an environment for.

Run as a program it measures the interpreter that runs it, and prints the rows as JSON.
"""

from __future__ import annotations

import functools
import json
import os
import statistics
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import call_workloads as workloads
import tracers
from harness import KINETO, OURS, Budget, Recorder, Row, Settings, against_nothing, limited, rows, timed
from tracers import CPROFILE, EMPTY_MONITORING, EMPTY_PROFILE, HAS_MONITORING, HAS_TORCH, VIZTRACER

from otel_torchprof import FrameFilter

if TYPE_CHECKING:
    from collections.abc import Callable

_VERSIONS = ("3.11", "3.12", "3.13")
_ROUNDS = 60
_CALLS = 2_000
"""In a block."""
_WARM_UP = 500
_BLOCKS = 7
"""The median of so many blocks makes a run: an interrupt spoils one of them, not the run."""
_NO_CALLBACK = 5.0
"""Nanoseconds that a call may take which the interpreter need not tell of."""


class _Work(NamedTuple):
    """A program, and how often it is run in a block."""

    name: str
    run: Callable[[int], object]


_WORKS = (
    _Work("an empty Python function", workloads.empty_calls),
    _Work("a C function", workloads.c_calls),
    _Work("a generator that continues", workloads.generators),
    _Work("a tree of calls", workloads.tree),
)


def measure(settings: Settings) -> list[Row]:
    """Each interpreter in a process of its own; what becomes of the calls then under this one."""
    import calls_memory  # needs torch, and the interpreters without it come to this file too

    table: list[Row] = []
    for version in sorted({_version(), *_VERSIONS}):
        python = _python(version, settings)
        if python is None:
            why = f"no interpreters/{version} with VizTracer in this environment, and no --python"
            table.append(Row(f"Python {version}: a call", OURS, (), "", absent=why))
        else:
            table += _in_new_process(python, settings)
    return [*table, *calls_memory.measure(settings)]


def _python(version: str, settings: Settings) -> str | None:
    """The interpreter that has what this benchmark needs: this one, one of the command line, one set up in this environment."""
    if version == _version():
        return sys.executable
    candidates = [*settings.pythons, f"{sys.prefix}/interpreters/{version}/bin/python"]
    return next((path for path in candidates if Path(path).exists() and _version_of(path) == version), None)


def _version_of(python: str) -> str:
    """Of an interpreter that has what this benchmark needs; of others nothing."""
    command = [python, "-c", "import sys, viztracer; print('%d.%d' % sys.version_info[:2])"]
    return subprocess.run(command, check=False, capture_output=True, text=True).stdout.strip()


def _version() -> str:
    return ".".join(map(str, sys.version_info[:2]))


def _in_new_process(python: str, settings: Settings) -> list[Row]:
    root = str(Path(__file__).parent.parent)
    paths = [root, *(path for path in sys.path if path)] if python == sys.executable else [root]
    done = subprocess.run(
        [python, __file__, str(settings.rounds_or(_ROUNDS))],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )
    return [_row(each) for each in json.loads(done.stdout.splitlines()[-1])]


def _row(fields: dict[str, Any]) -> Row:
    budget = fields.pop("budget")
    return Row(**fields, budget=Budget(*budget) if budget else None)


# ---- in the process of an interpreter ----


def _here(rounds: int) -> list[Row]:
    table: list[Row] = []
    for work in _WORKS:
        table += _all_recorded(work, rounds)
    for case in _FILTERS:
        table += _left_out(case, rounds)
    return table


def _all_recorded(work: _Work, rounds: int) -> list[Row]:
    contestants: dict[str, Recorder] = {**_floors(), OURS: tracers.ours, VIZTRACER: tracers.viztracer}
    contestants[CPROFILE] = tracers.cprofile
    if HAS_TORCH:
        from recorders import kineto

        contestants[KINETO] = functools.partial(kineto, with_stack=True)
    added = against_nothing(_run(work), contestants, rounds)
    return limited(rows(f"Python {_version()}: {work.name}", "ns", added), {OURS: _budgets()})


def _floors() -> dict[str, Recorder]:
    floors: dict[str, Recorder] = {EMPTY_PROFILE: tracers.empty_profile}
    return floors | ({EMPTY_MONITORING: tracers.empty_monitoring} if HAS_MONITORING else {})


def _budgets() -> list[Budget]:
    if HAS_MONITORING:
        return [Budget(CPROFILE, 0.6)]
    return [*([Budget(KINETO, 0.57)] if HAS_TORCH else []), Budget(VIZTRACER, 0.66)]


class _Filter(NamedTuple):
    """What is left out of which work: by a filter of ours, and by VizTracer's where it has one."""

    name: str
    work: _Work
    ours: dict[str, Any]
    viztracer: dict[str, Any] | None
    silent: bool = True
    """Whether an interpreter with sys.monitoring need not tell of what is left out; of the depth it knows nothing."""


_FILTERS = (
    _Filter(
        "excluded by its module",
        _WORKS[0],
        {"exclude": (workloads.__name__,)},
        {"exclude_files": [str(Path(workloads.__file__))]},
    ),
    _Filter("modules only", _WORKS[0], {"modules_only": True}, None),
    _Filter("no C functions", _WORKS[1], {"c_functions": False}, {"ignore_c_function": True}),
    _Filter("deeper than the maximum depth", _WORKS[0], {"max_depth": 1}, {"max_stack_depth": 1}, silent=False),
)


def _left_out(case: _Filter, rounds: int) -> list[Row]:
    contestants: dict[str, Recorder] = _floors()
    contestants[OURS] = functools.partial(tracers.ours, frames=FrameFilter(**case.ours))
    if case.viztracer is not None:
        contestants[VIZTRACER] = functools.partial(tracers.viztracer, **case.viztracer)
    added = against_nothing(_run(case.work), contestants, rounds)
    budgets = {OURS: Budget(plus=_NO_CALLBACK)} if HAS_MONITORING and case.silent else None
    return rows(f"Python {_version()}: {case.work.name}, {case.name}", "ns", added, budgets)


def _run(work: _Work) -> Callable[[Recorder], float]:
    each = workloads.calls_of(work.run)
    times = max(_CALLS // each, 1)

    def run(recorder: Recorder) -> float:
        with recorder():
            work.run(max(_WARM_UP // each, 1))
            return statistics.median(timed(lambda: work.run(times), times * each) for _ in range(_BLOCKS))

    return run


if __name__ == "__main__":
    print(json.dumps([asdict(row) for row in _here(int(sys.argv[1]))]))
