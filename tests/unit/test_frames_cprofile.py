"""What the tracer records of a program is what cProfile counts on the same interpreter."""

from __future__ import annotations

import cProfile
import functools
import gc
import re
import types
from collections import Counter

import pytest
from frame_trees import recorded
from hypothesis import given
from nested_calls import EVERYTHING, programs, run_all

from otel_torchprof._columns.schema import Flag


def _label(name):
    """What is the same in our name of a call and in cProfile's: a function's first line, a C function's own name."""
    if isinstance(name, types.CodeType):
        return name.co_name
    if found := re.fullmatch(r"<built-in function (\w+)>|<built-in method (?:.*\.)?(\w+)(?: of .*)?>", name):
        return f"C {found[1] or found[2]}"
    if found := re.fullmatch(r"<method '(\w+)' of '.*' objects>", name):
        return f"C {found[1]}"
    return re.fullmatch(r".*\(\d+\): (.+)", name)[1]


def _counted(program):
    """How often each function was called, and by which other, as cProfile counts."""
    profiler = cProfile.Profile()
    profiler.enable()
    run_all(program)
    profiler.disable()
    calls, edges = Counter(), Counter()
    for entry in profiler.getstats():
        calls[_label(entry.code)] += entry.callcount
        for callee in entry.calls or ():
            edges[_label(entry.code), _label(callee.code)] += callee.callcount
    del calls["C disable"]
    return calls, edges


def _recorded(program):
    """The same of a recording."""
    batch = recorded(functools.partial(run_all, program))
    names = [_label(batch.names[name]) for name in batch["name"].tolist()]
    calls, edges = Counter(), Counter()
    finished = (batch["flags"] & Flag.UNFINISHED) == 0  # what was there at the start is not
    for row in finished.nonzero()[0].tolist():
        calls[names[row]] += 1
        if finished[parent := batch["parent"][row]]:
            edges[names[parent], names[row]] += 1
    return calls, edges


@pytest.fixture(autouse=True)
def no_collections():
    """Or the callbacks of a collection, of Hypothesis's, are in one of the two."""
    gc.disable()
    yield
    gc.enable()


def test_every_kind_of_call():
    """Each kind of call inside each other kind: functions, their counts and who called them are cProfile's."""
    assert _recorded(EVERYTHING) == _counted(EVERYTHING)


@given(programs())
def test_random_programs(program):
    """So it is for programs that are put together at random."""
    assert _recorded(program) == _counted(program)
