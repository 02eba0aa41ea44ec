"""Chrome traces as columns: every event of a file, whatever the file is packed in, and what cannot be read, with its place."""

from __future__ import annotations

import gzip
import json
import sys
import tracemalloc

import pytest

from otel_torchprof._files.trace_columns import read_columns
from otel_torchprof.errors import TorchProfError

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

EVENT = {"ph": "X", "cat": "cpu_op", "name": "a", "pid": 1, "tid": 2, "ts": 1.5, "dur": 2}


def written(tmp_path, text):
    path = tmp_path / "trace.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


def document(*events, **members) -> str:
    return json.dumps({**members, "traceEvents": events})


@pytest.mark.parametrize(
    "packed",
    [
        str.encode,
        lambda text: gzip.compress(text.encode()),
        lambda text: zstd.compress(text[:1000].encode()) + zstd.compress(text[1000:].encode()),
        lambda text: b"\xef\xbb\xbf \n" + text.encode(),
    ],
    ids=["plain", "gzip", "zstd", "byte order mark"],
)
def test_any_packing_has_the_same_columns(tmp_path, packed):
    """Events are the same from plain and compressed files, and behind a byte order mark; more than a block of them come in order."""
    events = [{**EVENT, "name": f"n{index % 7}", "ts": index} for index in range(70_000)]
    trace = read_columns(written(tmp_path, packed(document(*events, rank=3, other={"a": [1]}))))
    assert trace.problems == []
    assert trace.rows["start"].tolist() == [1000 * index for index in range(70_000)]
    assert [trace.names[name] for name in trace.rows["name"][:8]] == [f"n{index % 7}" for index in range(8)]
    assert trace.members == {"rank": 3, "other": {"a": [1]}}


@pytest.mark.parametrize("compress", [gzip.compress, zstd.compress])
def test_faults_of_compressed_files(tmp_path, compress):
    """Compressed data that is cut off or changed is reported after what could be decompressed; a bomb takes no memory."""
    packed = compress(document(*[{**EVENT, "ts": index * 7919 % 10007} for index in range(20_000)]).encode())
    for content in (packed[:-500], packed[: len(packed) // 2] + b"\xff" * 100 + packed[len(packed) // 2 + 100 :]):
        trace = read_columns(written(tmp_path, content))
        assert 0 < len(trace.rows["start"]) < 20_000
        assert "after decompression" in trace.problems[0]
    bomb = compress(document(EVENT).encode()[:-2] + b" " * (64 << 20))
    tracemalloc.start()
    assert len(read_columns(written(tmp_path, bomb)).rows["start"]) == 1
    assert tracemalloc.get_traced_memory()[1] < 20 << 20
    tracemalloc.stop()


def test_zstd_needs_a_library(tmp_path, monkeypatch):
    """Without the library the error says what to install."""
    path = written(tmp_path, zstd.compress(document(EVENT).encode()))
    for name in ("compression.zstd", "backports.zstd"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(TorchProfError, match=r"trace\.json': at byte 0: .*pip install 'otel-torchprof\[zstd\]'"):
        read_columns(path)


def test_columns_that_say_nothing_take_no_memory(tmp_path):
    """A column without a value is a view of one: a plain event takes the memory of what it says, whatever the size of the file."""
    trace = read_columns(written(tmp_path, document(*[EVENT] * 1000)))
    assert trace.rows["sequence_nr"].strides == (0,)
    assert trace.rows["sequence_nr"].tolist() == [-1] * 1000
    assert trace.nbytes < 40 * 1000


def test_what_is_cut_off_is_reported_with_its_place(tmp_path):
    """Of a file that ends early, compressed or not, the events before the end count, and the message names file and byte."""
    text = document(EVENT, EVENT)
    path = written(tmp_path, text[: text.rindex('"dur"')])
    trace = read_columns(path)
    assert len(trace.rows["start"]) == 1
    [problem] = trace.problems
    assert problem.startswith(f"{path!r}: at byte {text.rindex('{')}: the file is cut off")
    assert problem.endswith("what comes before that is counted")
    packed = gzip.compress(document(*[{**EVENT, "ts": index} for index in range(20_000)]).encode())
    trace = read_columns(written(tmp_path, packed[:-2000]))
    assert 0 < len(trace.rows["start"]) < 20_000
    assert len(trace.problems) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "at byte 0: the file is empty"),
        (b"hello", "at byte 0: expected a Chrome trace"),
        (
            b'{"a": 1}',
            "at byte 7: expected an object with traceEvents of a Chrome trace, or resourceSpans of OTLP, found '}'",
        ),
        (b'{"traceEvents": [{"ph": x', "at byte 17: the file is cut off: here begins a value that does not end"),
        (b'[{"ph" 1}]', "at byte 7: expected ':', found '1}]'"),
        (b"[}", "at byte 1: expected an element of an array, or its end, found '}'"),
    ],
)
def test_a_file_without_an_event_is_refused(tmp_path, text, message):
    """If nothing can be read, the error names the file, the byte and what was expected there."""
    path = written(tmp_path, text)
    with pytest.raises(TorchProfError) as raised:
        read_columns(path)
    assert str(raised.value).startswith(f"{path!r}: ")
    assert message in str(raised.value)


def test_unusable_events_are_counted(tmp_path):
    """Events with a value that cannot be used are left out; the first is named by its number, its place and its fault."""
    bad = {**EVENT, "ts": "soon"}
    text = document(EVENT, bad, bad, 5, EVENT)
    path = written(tmp_path, text)
    trace = read_columns(path)
    assert len(trace.rows["start"]) == 2
    place = text.index("{", text.index(json.dumps(EVENT)) + len(json.dumps(EVENT)))
    assert trace.problems == [
        f"{path!r}: not counted: 3; the first: ts is 'soon', expected a number up to 2305843009213693, event 2, at byte {place}"
    ]


def test_large_and_broken_members_are_reported(tmp_path):
    """A member that is too large or no JSON is named, and the events are read all the same."""
    head = '{"large": "' + "x" * (2 << 20) + '", "broken": [nothing], "infinite": [1e999], "traceEvents": ['
    text = head + json.dumps(EVENT) + "]} rest"
    path = written(tmp_path, text)
    trace = read_columns(path)
    assert len(trace.rows["start"]) == 1
    large, broken, infinite, rest = trace.problems
    assert large.startswith("large cannot be read (a value of more than")
    assert broken.startswith("broken cannot be read (")
    assert infinite == "infinite cannot be read (1e999 is no number of JSON)"
    assert rest.startswith(f"{path!r}: more follows the end of the document, at byte {len(text) - len(' rest')}")


@pytest.mark.parametrize("limit", [200_000, 1_500_000], ids=["names", "columns"])
def test_memory_stays_below_the_limit(tmp_path, limit):
    """At the limit of memory reading stops; the events before that count, and the message says the limit."""
    events = [{**EVENT, "name": f"n{index if limit < 1_000_000 else 0}"} for index in range(300_000)]
    trace = read_columns(written(tmp_path, document(*events)), limit)
    assert 0 < len(trace.rows["start"]) < 300_000
    [problem] = trace.problems
    assert "the columns would need more than the limit of" in problem
