"""The tracer of calls against a model of programs made by chance, filtered or not, and against a profile function in Python."""

from __future__ import annotations

import contextlib
import gc
import re
import sys
from dataclasses import replace

import pytest
from call_programs import PROGRAMS
from frame_trees import recorded, recording
from hypothesis import assume, example, given
from hypothesis import strategies as st
from model_of_calls import Call, Model, undisturbed
from random_calls import CAUGHT_AFTER_CLOSE, RESUMES_ITSELF, Program, drawn_programs

from examples import random_examples
from otel_torchprof import FrameFilter
from otel_torchprof._columns.schema import Flag

PARTS = ("one", "two", "three")
_parts = st.sets(st.sampled_from(PARTS))
_filters = st.fixed_dictionaries(
    {
        "included": _parts,
        "excluded": _parts,
        "max_depth": st.none() | st.integers(1, 4),
        "c_functions": st.booleans(),
        "modules_only": st.sampled_from([False, False, False, True]),
    }
)
_recordings = st.sampled_from([[None]]) | st.lists(st.none() | _filters, min_size=1, max_size=2)


def tree_by_setprofile(program):
    """Every call inside a program: how many are around it there, and its name as a recording has it without the path."""
    found = []
    depth = 0

    def profile(frame, event, argument):
        nonlocal depth
        if event in ("call", "c_call"):
            found.append((depth, f"({frame.f_lineno}): {frame.f_code.co_name}" if event == "call" else repr(argument)))
            depth += 1
        else:
            depth -= 1

    sys.setprofile(profile)
    try:
        program()
    finally:
        sys.setprofile(None)
    # Whether the return from setprofile is reported depends on what the process has traced before.
    first = f"({program.__code__.co_firstlineno}): {program.__name__}"
    start, base = next((at, depth) for at, (depth, name) in enumerate(found) if name == first)
    end = next(at for at, (depth, _) in enumerate([*found[start + 1 :], (base, "")]) if depth <= base)
    return [(depth - base, without_address(name)) for depth, name in found[start + 1 : start + 1 + end]]


def without_address(name):
    """A name without what is another in each run."""
    return re.sub(r" at 0x[0-9a-f]+", "", name)


def _part_of(name):
    """In which of three files a function is; what is no numbered function is in none."""
    number = re.search(r": f(\d+)$", name)
    return PARTS[int(number[1]) % 3] if number else None


def _divided(function):
    """The program's functions, moved into the files."""
    for other in list(function.__globals__.values()):
        if (code := getattr(other, "__code__", None)) and (part := _part_of(f": {code.co_name}")):
            other.__code__ = code.replace(co_filename=f"/filtered/{part}/file.py")
    return function


def _filter(chosen):
    """Without a file that is included the frames of pytest would count, too."""
    if chosen is None:
        return None
    included, excluded = ([f"/filtered/{part}/" for part in chosen[name]] for name in ("included", "excluded"))
    options = {name: chosen[name] for name in ("max_depth", "c_functions", "modules_only")}
    return FrameFilter(included or ["/filtered/*"], excluded, **options)


def _kept(calls, chosen):
    """The calls that are kept, each with the number of kept ones around it."""
    kept, enclosing = [], []
    for call in calls:
        del enclosing[call.depth :]
        is_c = call.name.startswith("<")
        requested = enclosing[-1][0] if is_c else _is_requested(_part_of(call.name), chosen)
        depth = sum(is_kept for _, is_kept in enclosing)
        is_kept = requested and _is_kept(depth, is_c, chosen)
        enclosing.append((requested, is_kept))
        if is_kept:
            kept.append(replace(call, depth=depth, error=_known(call.error)))
    return kept


def _is_requested(part, chosen):
    return chosen is None or (part in (chosen["included"] or PARTS) and part not in chosen["excluded"])


def _is_kept(depth, is_c, chosen):
    if chosen is None:
        return True
    limit = chosen["max_depth"]
    return not chosen["modules_only"] and (chosen["c_functions"] or not is_c) and (limit is None or depth < limit)


def _known(error):
    """Before Python 3.12 the class of an exception is not known."""
    return error if error is None or sys.version_info >= (3, 12) else "_OTHER"


def _found(prof, chosen):
    """What was recorded of the program, in the same form; all of it is inside f0, unless a filter leaves that out."""
    depths, found = {}, []
    names, columns = prof.names, {name: column.tolist() for name, column in prof.columns.items()}
    for row, (index, parent) in enumerate(zip(columns["name"], columns["parent"], strict=True)):
        name = names[index]
        inside = name.startswith(("/filtered/", "<built-in")) if chosen else parent in depths or name.endswith("): f0")
        if inside:
            error = names[columns["error_type"][row]] if columns["flags"][row] & Flag.ERROR else None
            text = re.sub(r"^/filtered/\w+/file.py|^/elsewhere| at 0x[0-9a-f]+", "", name)
            found.append(Call(depths.get(parent, 0), text, columns["fwd_thread"][row], error))
            depths[row] = found[-1].depth + 1
    return found


def _numbered(calls):
    """Identities by first sight, from 1: the numbers themselves are the tracer's affair."""
    seen = {0: 0}
    return [seen.setdefault(call.identity, len(seen)) for call in calls]


_ALL = {"included": set(), "excluded": set(), "max_depth": None, "c_functions": True, "modules_only": False}


@random_examples(250)
@given(drawn_programs, _recordings)
@example(CAUGHT_AFTER_CLOSE, [None])
@example(CAUGHT_AFTER_CLOSE, [{**_ALL, "excluded": {"two"}}])
@example(RESUMES_ITSELF, [{**_ALL, "included": {"one"}}])
def test_calls_are_those_of_the_model(drawn, recordings):
    """One or two profiles at once have the model's calls that their filters keep: names, lines, order, nesting, generators, errors."""
    program = Program(drawn)
    model = Model(program)
    assume(not model.too_many and not model.is_untold)
    calls = [Call(0, f"({program.functions[0].line}): f0"), *model.calls]
    function = _divided(program.run("/elsewhere"))
    with undisturbed(), contextlib.ExitStack() as running:
        profs = [running.enter_context(recording(frames=_filter(chosen))) for chosen in recordings]
        function()
    for prof, chosen in zip(profs, recordings, strict=True):
        found, expected = _found(prof, chosen), _kept(calls, chosen)
        text = (program.text, recordings)
        assert [replace(call, identity=0) for call in found] == [replace(call, identity=0) for call in expected], text
        assert _numbered(found) == _numbered(expected), text


@pytest.fixture
def _no_collection():
    """No collector and no finalizer of something else's in between."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def _tree(prof, program):
    """What is inside a program, as tree_by_setprofile has it."""
    depths, found = {}, []
    rows = zip(prof.columns["name"].tolist(), prof.columns["parent"].tolist(), strict=True)
    for row, (index, parent) in enumerate(rows):
        name = prof.names[index]
        if parent in depths:
            depths[row] = depths[parent] + 1
            found.append((depths[row], without_address(re.sub(r"^[^<>]*(?=\(\d+\): )|^<.*>(?=\(\d+\): )", "", name))))
        elif name.endswith(f"): {program.__name__}"):
            depths[row] = 0
    return found


@pytest.mark.usefixtures("_no_collection")
@pytest.mark.parametrize("program", PROGRAMS)
def test_tree_is_that_of_setprofile(program):
    """Names, lines, order and nesting are those that a profile function in Python is told of, three times over."""
    program()  # what is made once and then kept is made now
    expected = tree_by_setprofile(program)
    assert len(expected) > 10
    for _ in range(3):
        assert _tree(recorded(program), program) == expected


@pytest.mark.parametrize("program", PROGRAMS)
def test_short_calls_are_taken_out(program):
    """Of two profiles at once, the one with a shortest duration has the calls of the other that last so long."""
    limit = 5_000
    with recording() as everything, recording(frames=FrameFilter(min_duration=limit / 1e9)) as long_ones:
        program()
    calls = everything.columns
    names = [everything.names[name] for name in calls["name"].tolist()]
    start = next(row for row, name in enumerate(names) if name.endswith(f"): {program.__name__}"))

    def inside(prof, shortest):
        columns = prof.columns
        rows = (columns["start"] > calls["start"][start]) & (columns["end"] < calls["end"][start])
        return columns["id"][rows & (columns["end"] - columns["start"] >= shortest)].tolist()

    assert inside(long_ones, 0) == inside(everything, limit)
