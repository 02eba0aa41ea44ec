"""Traces that releases of torch wrote: every reader finds what that torch's own averages say."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path

import pytest

from otel_torchprof._answers.details import Details
from otel_torchprof._answers.rank_reading import steps_of
from otel_torchprof._answers.tree_times import TreeTimes
from otel_torchprof._cli.show import read
from otel_torchprof._files.merge import FileOutline
from otel_torchprof._files.reading import read_events

FOLDER = Path(__file__).resolve().parents[1] / "helpers" / "recordings" / "torch"
FILES = sorted(path.name.removesuffix(".json.gz") for path in FOLDER.glob("*.json.gz"))
STEP = "ProfilerStep*"


def path_of(name):
    return str(FOLDER / f"{name}.json.gz")


def averages_of(name):
    """By name: calls, total and self time in ns, as key_averages() had them."""
    return json.loads((FOLDER / f"{name}.averages.json").read_text())


def document_of(name):
    return json.loads(gzip.decompress(Path(path_of(name)).read_bytes()))


def is_frame(name):
    return "): " in name or name.startswith(("<built-in ", "nn.Module: "))


def test_releases():
    """There are files of five releases, one of them with stacks, and of both ways to begin a file."""
    assert {name.split("_")[1].rsplit(".", 1)[0] for name in FILES} == {"2.6", "2.8", "2.9", "2.13", "2.14"}
    assert {gzip.decompress(Path(path_of(name)).read_bytes())[:1] for name in FILES} == {b"\n", b" "}
    assert any(name.endswith("_stacks") for name in FILES)


@pytest.mark.parametrize("name", FILES)
def test_show(name):
    """Counts, totals and self times are those of torch to the nanosecond.

    Where the file has frames of Python, self times are others: most releases have no frames in their averages, and those of 2.13
    have some whose self time is negative.
    """
    sums, problems = read(path_of(name))
    found = {row.name: [row.calls, row.total, row.self_time] for row in sums.averages()}
    expected = averages_of(name)
    has_frames = any(map(is_frame, found))
    assert problems == []
    assert has_frames == name.endswith("_stacks")
    if not any(map(is_frame, expected)):
        found = {key: row for key, row in found.items() if not is_frame(key)}
    assert {key: row[:2] for key, row in found.items()} == {key: row[:2] for key, row in expected.items()}
    if not has_frames:
        assert found == expected


@pytest.mark.parametrize("name", FILES)
def test_left_out(name):
    """All events of the file are slices that are counted, metadata, or reported as left out."""
    sums, _ = read(path_of(name))
    phases = Counter(event["ph"] for event in document_of(name)["traceEvents"])
    assert set(phases) == {"X", "M", "i", "s", "f"}
    reported = f"instant events ({phases['i']}), arrows ({phases['s'] + phases['f']}), slices of the profiler (1)"
    assert sorted(sums.left_out.replace(", members of the document, as 'ERROR' (1)", "").split(", ")) == sorted(
        reported.split(", ")
    )
    assert len(sums) == phases["X"] - 1


@pytest.mark.parametrize("name", FILES)
def test_explain_and_diff(name):
    """Steps, and self times of what ran in them, are those of torch: of the longest operators, and of the whole tree."""
    events = read_events([path_of(name)])
    listed = steps_of(path_of(name), events)
    assert events.problems == []
    [process] = listed.processes.values()
    expected = averages_of(name)
    assert [len(process.steps), sum(step.duration for step in process.steps)] == expected[STEP][:2]
    details, tree = Details(events, listed), TreeTimes(events, listed, 0)
    self_times = Counter()
    for row, names in enumerate(tree.paths):
        self_times[names[-1] if names else STEP] += tree.times([row]).sum() * 1e9
    rows = {row.name: row.self_time for row in read(path_of(name))[0].averages()}
    inside = {
        key: time for key, time in rows.items() if key != STEP and not is_frame(key)
    }  # frames are around steps too
    assert len(inside) > 40
    assert {key: self_times[key] for key in inside} == pytest.approx(inside, rel=1e-5, abs=10)
    for operators in details.longest_operators():
        assert len(operators) > 3
        assert all(each.seconds * 1e9 <= rows[each.name] + 1 for each in operators)


@pytest.mark.parametrize("name", FILES)
def test_merge(name):
    """What merging needs is found wherever it stands: up to torch 2.12 the base of the times comes after the events."""
    outline = FileOutline(path_of(name))
    assert outline.problems == []
    [process] = outline.processes.values()
    assert outline.base == document_of(name)["baseTimeNanoseconds"] > 10**18
    assert process.service == "python"
