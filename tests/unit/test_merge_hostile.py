"""``merge`` on files that are not to be trusted: what can be merged is, the rest is said, and memory is bounded."""

from __future__ import annotations

import gzip
import json
import os
import sys
from pathlib import Path

import forked_programs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from malformed_files import malformed
from merged_files import BASE, BEGIN, STEP, Meetings, RankTrace, WrongClock, attributes

from otel_torchprof._cli import main as cli
from otel_torchprof._encode import otlp_json

ROOT = Path(__file__).resolve().parents[2]
MOST_MEMORY = 160 << 20
"""A hundred more than what a program has that has read nothing."""
AT = {"pid": 4711, "tid": 77, "ts": (BEGIN - BASE) / 1000}


@pytest.fixture
def merge(tmp_path, capsys):
    """Merges the files of two ranks, of which the second has more events; the exit status, stderr and the document."""

    def run(*events, changed=lambda content: content):
        meetings = Meetings(2, 30)
        first, second = (meetings.trace(rank, WrongClock()) for rank in range(2))
        second.events += events
        files = [first.chrome(tmp_path / "0"), second.chrome(tmp_path / "1")]
        files[1].write_bytes(changed(files[1].read_bytes()))
        status = cli.main(["merge", "-q", *map(str, files), "-o", str(tmp_path / "out")])
        err = capsys.readouterr().err
        return status, err, json.loads((tmp_path / "out").read_text(), parse_constant=pytest.fail)

    return run


@pytest.mark.parametrize(
    ("event", "said"),
    [
        ({"ph": "s", "name": "flow", **AT}, "an event of phase 's' has no id"),
        ({"ph": "b", "name": "task", **AT}, "an event of phase 'b' has no id"),
        ({"ph": "X", "name": "a", **AT, "ts": 1e300}, "ts is 1E+300, expected a number up to"),
        ({"ph": "X", "name": "a", **AT, "ts": float("nan")}, "ts is nan"),
        ({"ph": "X", "name": "a", **AT, "dur": "soon"}, "dur is 'soon'"),
        ({"ph": "i", "name": "a", "pid": 1}, "ts is of type NoneType"),
        ({"ph": 7, "name": "a", **AT}, "ph is of type int"),
        ({"ph": "X", "name": 7, **AT}, None),
        ({"ph": "X", "name": "a", **AT, "dur": -5}, None),
        ({"ph": "i", "name": "a", **AT, "ts": -12.5}, None),
        ({"ph": "i", "name": "a", **AT, "ts": "12.5"}, None),
        ({"ph": "i", "name": "\ud800", **AT, "args": {"a": float("inf"), "b": 10**400, "c": 0.1}}, None),
        ({"ph": "t", "name": "a", **AT, "id": {"a": []}}, None),
        ({"ph": "M", "name": "thread_name", "pid": [], "args": 5}, None),
        ({"ph": "M", "name": {}, "pid": 1}, "name"),
    ],
)
def test_events_that_cannot_be(merge, event, said):
    """An event that cannot be placed is left out, counted and named; what viewers could not read is written otherwise; all others are there."""
    status, err, document = merge(event)
    assert (status, "not counted: 1; the first: " in err) == ((1, True) if said else (0, False))
    assert (said or "") in err
    assert sum(each["ph"] == "X" and each["name"] == "c10d::allreduce_" for each in document["traceEvents"]) == 60
    json.dumps(document, ensure_ascii=False).encode()


def test_a_file_that_is_cut_off(merge):
    """What comes before the end is merged; stderr says once where it ends."""
    status, err, document = merge(changed=lambda content: content[:-300])
    assert status == 1
    assert err.count("the file is cut off") == 1
    assert len(document["traceEvents"]) > 100


@pytest.mark.parametrize("member", ["-1", '"soon"', "1e400", "[]", "9" * 30])
def test_values_of_the_document(merge, member):
    """A base of the times that cannot be is none, which is said; clocks are aligned all the same."""
    old = f'"baseTimeNanoseconds": {BASE}'.encode()
    status, err, _ = merge(changed=lambda content: content.replace(old, f'"baseTimeNanoseconds": {member}'.encode()))
    assert status == 1
    assert "baseTimeNanoseconds cannot be read" in err


def test_ranks_that_cannot_be(merge):
    """A rank below 0 is none, one beyond what viewers take as a process gets another number."""
    old = b'"torch.distributed.rank": 1'
    for rank, pids in (("-1", {0, 1}), (str(2**50), {0, 1})):
        _, _, document = merge(changed=lambda content, rank=rank: content.replace(old, old[:-1] + rank.encode()))
        assert {each["pid"] for each in document["traceEvents"]} == pids


@pytest.mark.parametrize("content", [b"", b"nonsense", b"[]", b"{}", b'{"traceEvents":5}', b"\x1f\x8b nothing"])
def test_no_traces(tmp_path, content, capsys):
    """One message that names the file, and nothing written."""
    good = Meetings(2, 30).trace(0, WrongClock()).chrome(tmp_path / "0")
    (tmp_path / "1").write_bytes(content)
    assert cli.main(["merge", "-q", str(good), str(tmp_path / "1"), "-o", str(tmp_path / "out")]) == 1
    assert repr(str(tmp_path / "1")) in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]


def test_a_pipe(tmp_path, capsys):
    """What can be read once is refused."""
    os.mkfifo(tmp_path / "pipe")
    assert cli.main(["merge", "-q", str(tmp_path / "pipe"), "-o", str(tmp_path / "out")]) == 1
    assert "is read twice; write it to a file first" in capsys.readouterr().err


@given(st.integers(0, 1 << 40))
def test_whatever_the_file(tmp_path_factory, seed):
    """Any fault in any form beside a rank: a document, or an error without one; the same for a rank that has the fault behind its spans."""
    folder = tmp_path_factory.mktemp("any")
    meetings = Meetings(2, 10)
    good = meetings.trace(0, WrongClock()).lines(folder / "0")
    made = malformed(seed).content
    (folder / "1").write_bytes(made)
    (folder / "2").write_bytes(meetings.trace(1, WrongClock()).lines(folder / "2").read_bytes() + made)
    for other in ("1", "2"):
        status = cli.main(["merge", "-q", str(good), str(folder / other), "-o", str(folder / "out")])
        assert status in {0, 1}
        if (folder / "out").exists():
            json.loads((folder / "out").read_text(), parse_constant=pytest.fail)


# ---- memory ----

MEASURED = """
import pathlib, re, sys
from otel_torchprof._cli import main as cli
for number in range(int(sys.argv[1])):
    code = cli.main(["merge", "-q", "good.gz", f"{number}.gz", "-o", f"{number}.out.gz"])
    print(code, re.search(r"VmHWM:\\s+(\\d+)", pathlib.Path("/proc/self/status").read_text())[1])
"""


def calls(count, **more):
    return [
        {"name": "c10d::allreduce_", "pid": 1, "tid": 1, "ph": "X", "ts": at * 10, "dur": 5}
        | {"args": {"span_id": f"{at + 1:x}", "attributes": attributes(at, **more)}}
        for at in range(count)
    ]


def chrome(*events):
    return b"[" + b",".join(json.dumps(each).encode() for each in events) + b"]"


def overlapping(count):
    """Spans of OTLP, as protobuf, of no thread."""
    trace = RankTrace(None)
    for at in range(count):
        trace.span("x", BEGIN + at, BEGIN + STEP, {})
    request = trace.request()
    for each in request["resourceSpans"][0]["scopeSpans"][0]["spans"]:
        each["attributes"] = []
    return otlp_json.request_of(request).SerializeToString()


BOMBS = {
    "collectives": lambda: chrome(*calls(50_000)),
    "processes": lambda: chrome(
        *calls(10), *({"ph": "i", "name": "a", "pid": f"{at}" * 9, "ts": at} for at in range(30_000))
    ),
    "names of tracks": lambda: chrome(
        *calls(10),
        *({"ph": "M", "name": "thread_name", "pid": 1, "tid": at, "args": {"name": "n" * 99}} for at in range(100_000)),
    ),
    "large events": lambda: chrome(
        *calls(10), *({"ph": "i", "name": "n" * 900_000, "pid": 1, "ts": at} for at in range(30))
    ),
    "an event of objects": lambda: b'[{"ph":"X","args":[' + b"{}," * (1 << 20),
    "spans that overlap": lambda: overlapping(10_000),
}


def test_memory_is_bounded(tmp_path):
    """Small files that grow when they are read stay under 160 MB, one after another, whether they can be merged or not."""
    for number, bomb in enumerate(BOMBS.values()):
        (tmp_path / f"{number}.gz").write_bytes(gzip.compress(bomb(), 1))
    (tmp_path / "good.gz").write_bytes(gzip.compress(chrome(*calls(60)), 1))
    words = (sys.executable, "-c", MEASURED, str(len(BOMBS)))
    done = forked_programs.run(words, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
    for name, line in zip(BOMBS, done.stdout.splitlines(), strict=True):
        code, most = map(int, line.split())
        assert (code in {0, 1}, most << 10 < MOST_MEMORY) == (True, True), name
