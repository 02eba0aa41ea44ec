"""Native loops over columns: the sums of numpy's unbuffered operations, the formula of span ids, and distinct values on any thread."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

import otel_torchprof
from otel_torchprof._columns.arrays import BLOCK, distinct_values, find, is_any_of
from otel_torchprof._native import loops
from otel_torchprof._process.heap import Arena

TIMES = st.integers(min_value=-(2**40), max_value=2**40)


@st.composite
def forests(draw):
    """Rows with parents before them, and two numbers each."""
    rows = draw(st.integers(min_value=0, max_value=30))
    parent = [draw(st.integers(min_value=-1, max_value=row - 1)) for row in range(rows)]
    columns = draw(arrays.arrays(np.int64, (2, rows), elements=TIMES))
    return np.array(parent, dtype=np.int32), *columns


@given(forests())
def test_values_come_off_their_parents_totals(forest):
    """What a row has is taken off the total of its parent, whatever the type of the column of parents; roots change nothing."""
    parent, values, totals = forest
    expected, inside = totals.copy(), parent >= 0
    np.subtract.at(expected, parent[inside], values[inside])
    for kind in (np.int32, np.int64):
        found = totals.copy()
        loops.subtract_from_parents(found, parent.astype(kind), values)
        np.testing.assert_array_equal(found, expected)


@given(st.lists(st.integers(min_value=-1, max_value=20), max_size=21))
def test_roots(parents):
    """The topmost ancestor of each node, in whatever order parents and children stand; a circle has one of its own."""
    parent = np.array([above if above < len(parents) else -1 for above in parents], dtype=np.int64)
    for node, root in enumerate(loops.roots_of(parent).tolist()):
        way = [node]
        while parent[way[-1]] >= 0 and parent[way[-1]] not in way:
            way.append(int(parent[way[-1]]))
        around = way[way.index(parent[way[-1]]) :] if parent[way[-1]] >= 0 else way[-1:]
        assert root in around


@given(st.data(), st.integers(min_value=0, max_value=30), st.sampled_from([np.uint32, np.int64]))
def test_groups(data, rows, kind):
    """First row, number and sums of the rows of each group, added to what was there; wrong groups are an error before anything is."""
    group = data.draw(arrays.arrays(kind, rows, elements=st.integers(min_value=0, max_value=4)))
    values = data.draw(arrays.arrays(np.int64, (2, rows), elements=TIMES))
    first, count, sums = np.array([-1, -1, 3, -1, -1]), np.arange(5), np.full((2, 5), 7)
    loops.add_to_groups(group, 100, first, count, list(zip(values, sums, strict=True)))
    for number in range(5):
        own = np.flatnonzero(group == number)
        assert first[number] == (3 if number == 2 else own[0] + 100 if own.size else -1)
        assert count[number] == number + own.size
        assert sums[:, number].tolist() == [7 + column[own].sum() for column in values]
    with pytest.raises(IndexError, match="group 5 is not one of the 5"):
        loops.add_to_groups(np.append(group, kind(5)), 0, first, count, [])
    assert count.sum() == 10 + rows


@given(forests())
def test_self_times(forest):
    """The duration of each row less those of its direct children."""
    parent, start, end = forest
    expected, inside = end - start, parent >= 0
    np.subtract.at(expected, parent[inside], (end - start)[inside])
    np.testing.assert_array_equal(loops.self_times(parent, start, end), expected)


@given(forests(), st.randoms())
def test_rows_on_display(forest, random):
    """Any rows in any order have their parents by position, times less those of their children, and the number of these."""
    parent, start, end = forest
    rows = np.array(random.sample(range(len(parent)), random.randint(0, len(parent))), dtype=np.int32)
    found = loops.display_tree(rows, parent, start, end, Arena(0))
    position = {row: place for place, row in enumerate(rows.tolist())}
    above = [position.get(parent.item(row), -1) for row in rows.tolist()]
    duration, inside = (end - start)[rows], np.array(above, dtype=np.int64) >= 0
    own = duration.copy()
    np.subtract.at(own, np.array(above, dtype=np.int64)[inside], duration[inside])
    assert found.parent.tolist() == above
    assert found.children.tolist() == [above.count(place) for place in range(len(rows))]
    np.testing.assert_array_equal(found.duration, duration)
    np.testing.assert_array_equal(found.self_time, own)
    whole = loops.display_tree(None, parent, start, end, Arena(0))
    np.testing.assert_array_equal(whole.parent, parent)
    np.testing.assert_array_equal(whole.self_time, loops.self_times(parent, start, end))


@given(arrays.arrays(np.uint64, st.integers(0, 20)), st.integers(0, 2**64 - 1))
def test_span_ids_follow_the_formula(ids, key):
    """The id times the odd key, through the finaliser of SplitMix64: in numpy's arithmetic the same."""
    z = ids * np.uint64(key | 1)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    np.testing.assert_array_equal(loops.event_span_ids(ids, key), z ^ (z >> np.uint64(31)))


@given(st.lists(st.integers(0, 9)), st.lists(st.integers(0, 12)), st.sampled_from([1, 2**32, 2**63 // 12]))
def test_positions_of_ids(ids, wanted, spread):
    """Each id is found where it is first, however often it is looked for; one that is not there, and 0, nowhere."""
    columns = (np.array(values, dtype=np.uint64) * np.uint64(spread) for values in (ids, wanted))
    expected = [ids.index(value) if value and value in ids else -1 for value in wanted]
    assert loops.positions_of(*columns).tolist() == expected


@st.composite
def any_parents(draw):
    """Rows with any parents, also later ones and circles, some starts that are the same, and a few threads."""
    rows = draw(st.integers(min_value=0, max_value=25))
    parent = [draw(st.integers(min_value=-1, max_value=rows - 1)) for _ in range(rows)]
    if rows and draw(st.booleans()):  # deep, which chance alone makes rare
        parent = [row - 1 if draw(st.integers(0, 9)) else parent[row] for row in range(rows)]
    start, thread, family = (draw(st.lists(st.integers(0, 3), min_size=rows, max_size=rows)) for _ in range(3))
    family = [min(number, rows) for number in family]
    return tuple(np.array(column, dtype=np.int64) for column in (parent, start, thread, family))


@given(any_parents(), st.integers(0, 2**32))
def test_a_forest_of_any_parents(columns, seed):
    """Depths, order, sums and maxima are those of a plain walk; circles hang nowhere, and what is too deep under its last good ancestor."""
    parent, start, thread, family = columns
    by_start = np.argsort(start, kind="stable")
    found = loops.forest(parent, by_start, thread, family.copy(), deepest=4)

    def ancestors(row):
        above = []
        while (row := int(parent[row])) >= 0 and row not in above:
            above.append(row)
        return above if row < 0 else None

    above, depth, own_family = [], [], []
    for row in range(len(parent)):
        path = ancestors(row)
        good = path[-4:] if path else []
        above.append(good[0] if good else -1)
        depth.append(len(good))
        own_family.append(good[0] + 1 if good else 0 if parent[row] >= 0 else int(family[row]))
    assert (found.above.tolist(), found.depth.tolist(), found.family.tolist()) == (above, depth, own_family)
    rank = {row: at for at, row in enumerate(by_start.tolist())}
    in_order = sorted(range(len(parent)), key=lambda row: (depth[row], own_family[row], thread[row], rank[row]))
    assert found.order.tolist() == in_order
    values = np.random.default_rng(seed).integers(-100, 100, len(parent))
    sums, highest = values.copy(), values.copy()
    for row in reversed(in_order):
        if above[row] >= 0:
            sums[above[row]] += sums[row]
            highest[above[row]] = max(highest[above[row]], highest[row])
    assert loops.raise_sums(found, values).tolist() == sums.tolist()
    assert loops.raise_highest(found, values).tolist() == highest.tolist()


@given(
    arrays.arrays(np.uint32, st.integers(0, 40), elements=st.integers(0, 3)),
    st.lists(st.integers(0, 5), max_size=4) | st.lists(st.integers(0, 5), min_size=65, max_size=70),
)
def test_values_among_a_few(values, few):
    """As numpy's functions tell, for columns with one value and for many to look for too."""
    assert is_any_of(values, few).tolist() == np.isin(values, few).tolist()
    assert distinct_values(values).tolist() == sorted(set(values.tolist()))
    assert distinct_values(np.full(3, 7)).tolist() == [7]


def test_rows_are_found_in_every_block():
    """A test that is asked block by block finds what it finds in the whole column, at the edges too."""
    values = np.zeros(2 * BLOCK + 1, dtype=np.int64)
    at = [0, BLOCK - 1, BLOCK, 2 * BLOCK - 1, 2 * BLOCK]
    values[at] = 1
    assert find(len(values), lambda block: values[block] > 0).tolist() == at
    assert find(0, lambda block: values[block] > 0).tolist() == []


@given(
    arrays.arrays(
        st.sampled_from([np.dtype(kind) for kind in ("u8", "i8", "i4", "u1", "?")]),
        st.integers(min_value=0, max_value=20),
    )
)
def test_as_numpys(values):
    """They are what ``np.unique`` gives, of the same type."""
    found = distinct_values(values)
    np.testing.assert_array_equal(found, np.unique(values))
    assert found.dtype == values.dtype


AT_THE_END = """
import threading
import numpy as np
from otel_torchprof._columns.arrays import distinct_values
values = np.random.default_rng(0).integers(0, 1 << 40, 200_000).astype(np.uint64)
begun = threading.Barrier(3)

def work():
    begun.wait()
    while True:
        distinct_values(values)

for _ in range(2):
    threading.Thread(target=work, daemon=True).start()
begun.wait()
"""


@pytest.mark.parametrize("again", range(3))
def test_threads_at_the_end_of_the_interpreter(again):
    """A process whose daemon threads look for different values when it ends, ends as any other."""
    done = subprocess.run([sys.executable, "-c", AT_THE_END], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, ""), again


def test_numpys_is_called_where_it_sorts_only():
    """No module calls ``np.unique`` without asking for more than the values: it would be the one that may abort."""
    root = Path(otel_torchprof.__file__).parent
    called = [
        f"{path.relative_to(root)}:{node.lineno}"
        for path in root.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "np.unique"
        if not any(word.arg.startswith("return_") for word in node.keywords)
    ]
    assert called == []
