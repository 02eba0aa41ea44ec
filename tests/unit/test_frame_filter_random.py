"""Filters on programs made by chance: what is recorded is what is left of a model's calls when they are filtered there."""

import re

import call_programs
import pytest
from frame_trees import recorded, recording
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from model_of_calls import Call, Model, undisturbed
from random_calls import CAUGHT_AFTER_CLOSE, RESUMES_ITSELF, Program, drawn_programs

from otel_torchprof._columns.schema import Flag
from otel_torchprof._record.frame_filter import FrameFilter

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


def _filtered(calls, *, included, excluded, max_depth, c_functions, modules_only):
    """The calls that are kept, each with the number of kept ones around it."""
    kept, enclosing = [], []
    for call in calls:
        del enclosing[call.depth :]
        is_c = call.name.startswith("<")
        requested = enclosing[-1][0] if is_c else _is_wanted(_part_of(call.name), included, excluded)
        depth = sum(is_kept for _, is_kept in enclosing)
        is_kept = (
            requested and not modules_only and (c_functions or not is_c) and (max_depth is None or depth < max_depth)
        )
        enclosing.append((requested, is_kept))
        if is_kept:
            kept.append((depth, call.name, call.error is not None))
    return kept


def _is_wanted(part, included, excluded):
    return part in (included or PARTS) and part not in excluded


def _found(batch):
    """What was recorded of the program, in the same form."""
    depths, found = {}, []
    errors = (batch["flags"] & Flag.ERROR).tolist()
    for row, (index, parent) in enumerate(zip(batch["name"].tolist(), batch["parent"].tolist(), strict=True)):
        name = batch.names[index]
        depths[row] = depths.get(parent, 0)
        if name.startswith(("/filtered/", "<built-in")):
            found.append((depths[row], re.sub(r"^/filtered/\w+/file.py| at 0x[0-9a-f]+", "", name), errors[row] != 0))
            depths[row] += 1
    return found


@settings(max_examples=150)
@given(drawn_programs, _filters)
@example(
    CAUGHT_AFTER_CLOSE,
    {"included": set(), "excluded": {"two"}, "max_depth": None, "c_functions": True, "modules_only": False},
)
@example(
    RESUMES_ITSELF,
    {"included": {"one"}, "excluded": set(), "max_depth": None, "c_functions": True, "modules_only": False},
)
def test_calls_are_those_that_the_model_keeps(drawn, chosen):
    """Included and excluded files, a greatest depth, no C functions: each leaves out what it should, and nothing else."""
    program = Program(drawn)
    model = Model(program)
    assume(not model.too_many and not model.is_untold)
    calls = [Call(0, f"({program.functions[0].line}): f0"), *model.calls]
    paths = {f"{name}clude": [f"/filtered/{part}/" for part in chosen[f"{name}cluded"]] for name in ("in", "ex")}
    options = {name: chosen[name] for name in ("max_depth", "c_functions", "modules_only")}
    # Without this the frames of pytest would count, too.
    frame_filter = FrameFilter(**{**paths, "include": paths["include"] or ["/filtered/*"]}, **options)
    function = _divided(program.run("/elsewhere"))
    with undisturbed():
        batch = recorded(function, frame_filter=frame_filter)
    assert _found(batch) == _filtered(calls, **chosen), (program.text, frame_filter)


@pytest.mark.parametrize("program", call_programs.PROGRAMS)
def test_short_calls_are_taken_out(program):
    """Of two recordings at once, the one with a shortest duration has the calls of the other that last so long."""
    limit = 5_000
    with recording() as everything, recording(frame_filter=FrameFilter(min_duration=limit / 1e9)) as long_ones:
        program()
    calls = everything.batch()
    names = [calls.names[name] for name in calls["name"].tolist()]
    start = next(row for row, name in enumerate(names) if name.endswith(f"): {program.__name__}"))

    def inside(batch, shortest):
        rows = (batch["start"] > calls["start"][start]) & (batch["end"] < calls["end"][start])
        return batch["id"][rows & (batch["end"] - batch["start"] >= shortest)].tolist()

    assert inside(long_ones.batch(), 0) == inside(calls, limit)
