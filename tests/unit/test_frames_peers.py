"""The tracer of calls against the interpreter's own tools: a tree by sys.setprofile, and cProfile's sums."""

import gc
import re

import pytest
from call_programs import PROGRAMS
from frame_trees import recorded
from other_tracers import sums_by_cprofile, sums_of, tree_by_setprofile, without_address


@pytest.fixture(autouse=True)
def _no_collection():
    """No collector and no finalizer of something else's in between."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def _rows(batch):
    return [batch.names[name] for name in batch["name"].tolist()], batch["parent"].tolist()


def _tree(batch, program):
    """What is inside a program, as tree_by_setprofile has it."""
    depths, found = {}, []
    for row, (name, parent) in enumerate(zip(*_rows(batch), strict=True)):
        if parent in depths:
            depths[row] = depths[parent] + 1
            found.append((depths[row], without_address(re.sub(r"^[^<>]*(?=\(\d+\): )|^<.*>(?=\(\d+\): )", "", name))))
        elif name.endswith(f"): {program.__name__}"):
            depths[row] = 0
    return found


@pytest.mark.parametrize("program", PROGRAMS)
def test_tree_is_that_of_setprofile(program):
    """Names, lines, order and nesting are those that a profile function in Python is told of, three times over."""
    program()  # what is made once and then kept is made now
    expected = tree_by_setprofile(program)
    assert len(expected) > 10
    for _ in range(3):
        assert _tree(recorded(program), program) == expected


@pytest.mark.parametrize("program", PROGRAMS)
def test_sums_are_those_of_cprofile(program):
    """Calls of every function, and of every function by every other, are counted as cProfile counts them."""
    program()
    expected, going_on = sums_by_cprofile(program)
    found = sums_of(*_rows(recorded(program)), f"): {program.__name__}", going_on)
    assert found == expected
    assert len(expected.edges) > 3
