"""Reading trace files takes bounded memory whatever they hold, and what is added up in pieces is what all at once would be."""

from __future__ import annotations

import gzip
import json
import random
import subprocess
import sys
from pathlib import Path

import forked_programs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples import one_in
from otel_torchprof._cli import show
from otel_torchprof._cli.show import TraceSums
from otel_torchprof._files import self_times

ROOT = Path(__file__).resolve().parents[2]
MOST_MEMORY = 256 << 20
GOOD = {"ph": "X", "name": "good", "ts": 1, "dur": 2, "pid": 1, "tid": 1}


def field(tag: int, value: bytes) -> bytes:
    size, varint = len(value), b""
    while size > 0x7F:
        varint, size = varint + bytes([size & 0x7F | 0x80]), size >> 7
    return bytes([tag]) + varint + bytes([size]) + value


MEASURED = """
import pathlib, re, sys
from otel_torchprof._cli import main as cli
code = cli.main(sys.argv[1:])
print(re.search(r"VmHWM:\\s+(\\d+)", pathlib.Path("/proc/self/status").read_text())[1])
sys.exit(code)
"""
"""Of this program only: what ``getrusage`` tells begins with the memory of the process that forked it."""
SPAN = field(0x0A, b"t" * 16) + field(0x12, b"s" * 8)
MB = 1 << 20
BOMBS = {
    "spans of nothing": lambda: field(0x0A, field(0x12, b"\x12\x00" * MB)),
    "resources of nothing": lambda: field(0x0A, b"\x0a\x00" * MB),
    "a span with very many attributes": lambda: field(0x0A, field(0x12, field(0x12, SPAN + b"\x4a\x00" * 7 * MB))),
    "a span with very many links": lambda: field(0x0A, field(0x12, field(0x12, SPAN + b"\x6a\x00" * (MB // 2 - 50)))),
    "very many spans": lambda: field(0x0A, field(0x12, field(0x12, SPAN) * 60_000)),
    "one endless line": lambda: b'{"resourceSpans":[' + b" " * 20 * MB,
    "a line of objects": lambda: b'{"resourceSpans":[{"scopeSpans":[{"spans":[' + b"{}," * (MB // 4) + b"{}]}]}]}",
    "a line of scopes": lambda: b'{"resourceSpans":[{"scopeSpans":[' + b"{}," * (MB // 2) + b"{}]}]}",
    "an event of objects": lambda: b'[{"ph":"X","args":[' + b"{}," * MB,
    "names": lambda: b"[" + b",".join(json.dumps({**GOOD, "name": f"{n} " + "\U0001f600" * 900}).encode() for n in range(12_000)),
    "threads and steps": lambda: b"[" + b",".join(
        b'{"ph":"X","name":"ProfilerStep#%d","ts":%d,"dur":9,"pid":"%d","tid":1}' % (n, n, n) for n in range(210_000)
    ),
    "deep": lambda: b"[" + b"[" * 20 * MB,
    "white space": lambda: b"[" + b" " * 20 * MB,
}  # fmt: skip


@pytest.mark.parametrize("name", one_in(3, BOMBS))
def test_memory_is_bounded(tmp_path, name):
    """Small files that grow when they are read stay under 256 MB; both commands read OTLP with the same code."""
    content = BOMBS[name]()
    (tmp_path / "bomb.gz").write_bytes(gzip.compress(content, 1))
    send = ("send", "--endpoint", "http://127.0.0.1:9", "--timeout", "0.01")
    command = ("show",) if content[:1] == b"[" or "objects" in name or "links" in name else send
    words = (sys.executable, "-c", MEASURED, *command, str(tmp_path / "bomb.gz"))
    done = forked_programs.run(words, cwd=ROOT)
    assert done.returncode in {0, 1}
    assert "Traceback" not in done.stderr
    assert int(done.stdout.split()[-1]) << 10 < MOST_MEMORY


def test_memory_of_an_endless_file():
    """A stream without an end is read in constant memory until the user has seen enough, and what was read is shown."""
    source = subprocess.Popen(["yes", f"{json.dumps(GOOD)},"], stdout=subprocess.PIPE)
    program = (
        "import signal, otel_torchprof._files.self_times as times\n"
        "settle, turns = times.SelfTimes.settle, []\n"
        "def counted(*words):\n"
        "    turns.append(1)\n"
        "    if len(turns) == 2: signal.raise_signal(signal.SIGINT)\n"
        "    return settle(*words)\n"
        "times.SelfTimes.settle = counted\n"
    )
    words = [sys.executable, "-c", program + MEASURED, "show", "/dev/stdin"]
    # Nothing but commas and events: a list whose begin is given by hand.
    begin = subprocess.Popen(["bash", "-c", "printf '['; cat"], stdin=source.stdout, stdout=subprocess.PIPE)
    done = subprocess.run(words, stdin=begin.stdout, capture_output=True, text=True, cwd=ROOT, check=False)
    for process in (begin, source):
        process.kill()
        process.wait()
        process.stdout.close()
    assert "interrupted; what was read before that is counted" in done.stderr
    assert " good " in done.stdout
    assert done.returncode == 1
    assert int(done.stdout.split()[-1]) << 10 < MOST_MEMORY


@given(st.lists(st.integers(-2, 3), min_size=50, max_size=200), st.booleans(), st.integers(12, 30))
def test_sums_of_pieces(turns, by_id, most):
    """Adding up from time to time what ended gives the self times of all at once, where parents are on at most five levels."""
    rows, open_rows, now = [], [], 0
    for turn in (*turns, *[-2] * 5):
        for _ in range(abs(turn)):
            now += 1
            if turn < 0 and open_rows:
                row = open_rows.pop()
                row[2] = now - row[1]
            elif turn > 0 and len(open_rows) < 5:
                parent = open_rows[-1][3] if open_rows else 0
                open_rows.append([f"n{now % 5}", now, 0, len(rows) + 1, parent])
                rows.append(open_rows[-1])
    whole, pieces = TraceSums(), TraceSums()
    for sums, limit in ((whole, 10**6), (pieces, most)):
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(self_times, "MOST_ROWS", limit)
            for name, start, duration, span_id, parent in rows:
                if by_id:
                    sums.add_span(name, start, duration, (span_id, parent, "t"), {})
                else:
                    sums.add_slice(name, start, duration, "track")
    assert pieces.averages() == whole.averages()


def test_sums_of_a_long_file(monkeypatch):
    """Of a hundred times what fits, calls, totals and self times are exact where parents are near, and a parent of all is too."""
    monkeypatch.setattr(self_times, "MOST_ROWS", 20)
    by_time, by_id = TraceSums(), TraceSums()
    by_time.add_slice("all", 0, 10_000, "t")
    by_id.add_span("all", 0, 10_000, (1, 0, "t"), {})
    for number in range(1000):
        start = number * 10
        by_time.add_slice("parent", start, 9, "t")
        by_time.add_slice("child", start + 1, 4, "t")
        by_id.add_span("child", start + 1, 4, (2 * number + 3, 2 * number + 2, "t"), {})
        by_id.add_span("parent", start, 9, (2 * number + 2, 1, "t"), {})
    for sums in (by_time, by_id):
        assert {row.name: row[2:5] for row in sums.averages()} == {
            "all": (1, 10_000, 1000),
            "parent": (1000, 9000, 5000),
            "child": (1000, 4000, 4000),
        }
        assert sums.averages() == sums.averages()
        assert sums.limits == []
    by_time.add_slice("late", 5, 1, "t")
    by_id.add_span("late", 5, 1, (5000, 2, "t"), {})
    for sums in (by_time, by_id):
        assert sums.limits == ["self times do not see children that are more than 10 events away"]


@pytest.mark.parametrize("by_id", [False, True])
def test_self_times_without_a_note_are_exact(monkeypatch, by_id):
    """However late events come, self times that no note restricts are those of the same events in one piece."""
    exact = 0
    for seed in range(200):
        chance = random.Random(seed)
        spans = [(f"{n % 3}", n // 4 * 40 + n % 4, 30 - n % 4 * 2, n + 1, n if n % 4 else 0) for n in range(80)]
        reach = chance.choice((0, 5, 30, 200))
        order = sorted(range(80), key=lambda n: n + chance.uniform(0, reach))
        found = []
        for most in (10**6, 16):
            monkeypatch.setattr(self_times, "MOST_ROWS", most)
            sums = TraceSums()
            for name, start, duration, span_id, parent in (spans[n] for n in order):
                if by_id:
                    sums.add_span(name, start, duration, (span_id, parent, "t"), {})
                else:
                    sums.add_slice(name, start, duration, "track")
            found.append((sums.limits, sorted(sums.averages())))
        assert found[0][0] == []
        if not found[1][0]:
            exact += 1
            assert found[1][1] == found[0][1]
    assert 20 < exact < 190


def test_names_have_a_limit(monkeypatch):
    """Names beyond the limit share one entry, and it is said."""
    monkeypatch.setattr(show, "MOST_NAMES", 2)
    sums = TraceSums()
    for name in ("a", "b", "c", "d", "a", "x" * 600):
        sums.add_slice(name, 0, 5, 1)
    assert {row.name: row.calls for row in sums.averages()} == {"a": 2, "b": 1, "(other spans)": 3}
    assert any("more than 2 names" in limit for limit in sums.limits)
