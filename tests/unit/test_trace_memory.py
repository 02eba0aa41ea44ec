"""Reading trace files takes bounded memory whatever they hold, and what is added up in pieces is what all at once would be."""

from __future__ import annotations

import gzip
import itertools
import json
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import forked_programs
import pytest
from explained_files import otlp_line
from hypothesis import given
from hypothesis import strategies as st

from examples import one_in
from otel_torchprof._cli import show
from otel_torchprof._cli.show import TraceSums
from otel_torchprof._files.reading import read_events

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
    """A stream without an end is read until the user has seen enough, and what was read is shown; an event costs some bytes."""
    source = subprocess.Popen(["yes", f"{json.dumps(GOOD)},"], stdout=subprocess.PIPE)
    program = (
        "import signal, otel_torchprof._files.trace_columns as columns\n"
        "read, turns = columns.ChromeReading._read_piece, []\n"
        "def counted(*words, **options):\n"
        "    turns.append(1)\n"
        "    if len(turns) == 1000: signal.raise_signal(signal.SIGINT)\n"
        "    return read(*words, **options)\n"
        "columns.ChromeReading._read_piece = counted\n"
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


def events_of(*contents):
    """The events of files."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / str(number) for number in range(len(contents))]
        for path, content in zip(paths, contents, strict=True):
            path.write_text(content)
        return read_events(list(map(str, paths)))


@given(st.lists(st.integers(-2, 3), min_size=50, max_size=200))
def test_parents_by_id_and_by_time(turns):
    """Self times are the same whether events have ids, of parents too, or are only in one another on a track."""
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
    spans, slices, expected = [("good", 1000, 3000, 2**60, 0, {})], [GOOD], Counter({"good": 2000})
    for name, start, duration, span_id, parent in rows:
        spans.append((name, start, start + duration, span_id, parent, {}))
        slices.append({**GOOD, "tid": 2, "name": name, "ts": start / 1000, "dur": duration / 1000})
        expected[name] += duration
        if parent:
            expected[rows[parent - 1][0]] -= duration
    averages = TraceSums(events_of(json.dumps(slices))).averages()
    assert TraceSums(events_of(otlp_line(spans))).averages() == averages
    assert {row.name: row.self_time for row in averages} == expected


def test_files_of_one_recording():
    """Names, tracks, attributes and parents of several files are those of the same events in one."""
    pairs = [
        [
            (f"n{number % 3}", number, 9, number + 1, number, {}),
            ("sum", number, number + 1, number + 10, 0, {"torch.aggregated.count": number + 1}),
        ]
        for number in range(4)
    ]
    whole = events_of(otlp_line(itertools.chain(*pairs)))
    of_parts = events_of(*(otlp_line([*pairs[first], *pairs[first + 2]]) for first in (0, 1)))
    assert sorted(TraceSums(of_parts).averages()) == sorted(TraceSums(whole).averages())


def test_names_have_a_limit(monkeypatch):
    """Names beyond the limit share one entry, and it is said."""
    monkeypatch.setattr(show, "MOST_NAMES", 2)
    names = ("a", "b", "c", "d", "a", "x" * 600)
    sums = TraceSums(events_of(json.dumps([{**GOOD, "name": name} for name in names])))
    assert {row.name: row.calls for row in sums.averages()} == {"a": 2, "b": 1, "(other spans)": 3}
    assert any("more than 2 names" in limit for limit in sums.limits)
