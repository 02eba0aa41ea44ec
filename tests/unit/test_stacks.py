"""Stacks from the tree, against the same worked out event by event."""

import copy

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from examples import random_examples
from otel_torchprof._columns.batch import Batch, RecordedThread
from otel_torchprof._columns.schema import Kind, Scope
from otel_torchprof._model.frames import python_ids, stack_codes, without_frames
from otel_torchprof._model.tree import torch_view
from otel_torchprof._profile.events import EventList

_NAMES = ["", "a.py(1): f", "a.py(2): g", "torch/autograd/__init__.py(3): backward", "nn.Module: Net_4", "aten::add"]
_OPERATOR = len(_NAMES) - 1


def _batch(moves):
    """Begins (a name) and ends (a place on the stack, which may be inside), one per tick."""
    rows, stack, clock = [], [], 0
    for name, at in moves:
        clock += 1
        if name:
            rows.append([name, stack[-1] if stack else -1, clock, 0])
            stack.append(len(rows) - 1)
        elif stack:
            rows[stack.pop(-1 - at % min(2, len(stack)))][3] = clock
    while stack:
        clock += 1
        rows[stack.pop()][3] = clock
    name, parent, start, end = (np.array(column) for column in zip(*rows, strict=True)) if rows else [np.zeros(0)] * 4
    kind = np.where(name == _OPERATOR, Kind.OPERATOR, Kind.FRAME)
    return Batch.of({"name": name, "parent": parent, "start": start, "end": end, "kind": kind}, _NAMES)


def _replayed(batch):
    """Stacks as torch finds them: what ends takes along all that is open inside it."""
    stacks, open_rows = [], []
    start, end = batch["start"].tolist(), batch["end"].tolist()
    for row in range(len(batch)):
        for ended in sorted(range(row), key=end.__getitem__):
            if end[ended] < start[row] and ended in open_rows:
                del open_rows[open_rows.index(ended) :]
        names = [batch.names[batch["name"][at]] for at in reversed(open_rows) if batch["kind"][at] == Kind.FRAME]
        stacks.append([name for name in names if "autograd/__init__" not in name])
        open_rows.append(row)
    return stacks


_MOVES = st.lists(st.tuples(st.sampled_from([0, 0, 1, 2, 3, 4, _OPERATOR]), st.integers(0, 1)), max_size=40)


@random_examples(300)
@given(_MOVES)
def test_stacks_are_those_of_a_replay(moves):
    """However calls and operators are nested and misnested, the stacks are those of playing them through; equal ones are one."""
    batch = _batch(moves)
    view = torch_view(batch)
    codes, stacks = stack_codes(view)
    expected = _replayed(batch)
    found = [stacks[code] for code in codes.tolist()]
    assert found == [expected[row] for row in view.rows.tolist()]
    assert len(set(codes.tolist())) == len({tuple(stack) for stack in found})


@random_examples(50)
@given(_MOVES, st.integers(1, 3))
def test_innermost_entries_group_as_the_lists_do(moves, entries):
    """Numbers by the innermost entries are equal where the beginnings of the lists are."""
    _, stacks = stack_codes(torch_view(_batch(moves)))
    numbers = stacks.innermost(entries).tolist()
    for one in range(len(stacks)):
        for other in range(one):
            assert (numbers[one] == numbers[other]) == (stacks[one][:entries] == stacks[other][:entries])


def test_backward_has_the_stack_of_its_forward():
    """A backward function and all in it have the stack of the operator with its number and thread; none where there is none."""
    names = ["", "f", "aten::mm", "g", "MmBackward0", "aten::t", "OtherBackward0"]
    batch = Batch.of(
        {
            "name": [1, 2, 3, 4, 5, 6],
            "start": [0, 1, 10, 11, 12, 15],
            "end": [5, 4, 20, 14, 13, 16],
            "parent": [-1, 0, -1, 2, 3, 2],
            "kind": [Kind.FRAME, Kind.OPERATOR, Kind.FRAME, *[Kind.OPERATOR] * 3],
            "scope": [0, 0, 0, Scope.BACKWARD_FUNCTION, 0, Scope.BACKWARD_FUNCTION],
            "sequence_nr": [-1, 7, -1, 7, -1, 8],
            "fwd_thread": [0, 0, 0, 1, 0, 1],
        },
        names,
        (RecordedThread(11, 12, 1, "main"),),
    )
    codes, stacks = stack_codes(torch_view(batch))
    assert [stacks[code] for code in codes.tolist()] == [[], ["f"], [], ["f"], ["f"], []]


def test_without_calls_there_are_no_stacks():
    """Where no calls were recorded every stack is empty, and the batch is its own remainder."""
    batch = Batch.of({"name": [1], "start": [0], "end": [1]}, ["", "aten::add"])
    codes, stacks = stack_codes(torch_view(batch))
    assert (codes.tolist(), len(stacks), stacks[0]) == ([0], 1, [])
    assert without_frames(batch) is batch
    assert python_ids(batch) is None


def test_numbers_of_calls_and_modules():
    """Calls are numbered by start over all threads; each knows its caller's number, a module's call which instance it is."""
    batch = Batch.of(
        {
            "name": [1, 4, 5, 2, 2],
            "start": [10, 11, 12, 13, 1],
            "end": [20, 19, 18, 17, 2],
            "parent": [-1, 0, 1, 2, -1],
            "thread": [0, 0, 0, 0, 1],
            "kind": [Kind.FRAME, Kind.FRAME, Kind.OPERATOR, Kind.FRAME, Kind.FRAME],
        },
        _NAMES,
        (RecordedThread(1, 1, 1, "one"), RecordedThread(2, 2, 2, "two")),
    )
    ids = python_ids(batch)
    assert ids is not None
    assert ids.own.tolist() == [2, 3, -1, 4, 1]
    assert ids.caller.tolist() == [-1, 2, -1, 3, -1]
    assert ids.module.tolist() == [-1, 4, -1, -1, -1]


@random_examples(100)
@given(_MOVES)
def test_batch_without_calls(moves):
    """What remains are the other rows as they are, each under the nearest of them that was around it."""
    batch = _batch(moves)
    rest = without_frames(batch)
    kept = [row for row in range(len(batch)) if batch["kind"][row] != Kind.FRAME]
    assert rest["id"].tolist() == batch["id"][kept].tolist()
    for row, parent in zip(kept, rest["parent"].tolist(), strict=True):
        above = int(batch["parent"][row])
        while above >= 0 and batch["kind"][above] == Kind.FRAME:
            above = int(batch["parent"][above])
        assert (kept[parent] if parent >= 0 else -1) == above


@random_examples(50)
@given(_MOVES)
def test_entries_are_those_of_the_stacks(moves):
    """The different entries of some stacks are found without making these; what is only called elsewhere is not among them."""
    codes, stacks = stack_codes(torch_view(_batch(moves)))
    for some in (codes, codes[:3], codes[:0]):
        expected = {entry for code in some.tolist() for entry in stacks[code]}
        assert sorted(stacks.entries(some)) == sorted(expected)


def test_merged_stacks_have_every_call(tmp_path):
    """Merged, a call's own time is under its own name, with that of operators in it, and many that are short are not lost."""
    names, (outer, leaf, operator) = ["", "a.py(1): outer", "a.py(2): leaf", "aten::add"], (1, 2, 3)
    rows = [
        (outer, -1, 0, 10_000, Kind.FRAME),
        (leaf, 0, 100, 4_100, Kind.FRAME),
        (operator, 1, 200, 1_200, Kind.OPERATOR),
    ]
    rows += [(leaf, 0, 5_000 + 400 * at, 5_400 + 400 * at, Kind.FRAME) for at in range(5)]
    columns = zip(("name", "parent", "start", "end", "kind"), np.array(rows).T, strict=True)
    events = EventList.of(Batch.of(dict(columns), names), origin_ns=0)
    for listed in (events, copy.deepcopy(events)):
        listed.export_stacks(tmp_path / "merged", "self_cpu_time_total", merged=True)
        assert (tmp_path / "merged").read_text() == "a.py(1):_outer 4\na.py(1):_outer;a.py(2):_leaf 6\n"
        listed.export_stacks(tmp_path / "torchs", "self_cpu_time_total")
        assert (tmp_path / "torchs").read_text() == "a.py(1):_outer 3\na.py(1):_outer;a.py(2):_leaf 1\n"
