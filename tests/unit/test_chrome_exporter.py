"""``ChromeTraceExporter``: which file, who shares it, and what is in it whatever happens to the process."""

from __future__ import annotations

import functools
import json
import logging
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import forked_programs
import numpy as np
import pytest
from chrome_files import RESOURCE, events_in, names_by_track, slices, span
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult
from span_tables import span_rows
from threaded import in_threads

from otel_torchprof import ChromeTraceExporter, ExportError, OTLPFileExporter
from otel_torchprof._encode.chrome_spans import ChromeSpans
from otel_torchprof._encode.spans import SpanList
from otel_torchprof._export.sdk import instrumentation_scope

VARIABLE = "OTEL_TORCHPROF_CHROME_TRACE"
ROOT = Path(__file__).resolve().parents[2]
SUCCESS, FAILURE = SpanExportResult.SUCCESS, SpanExportResult.FAILURE


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each test has a working directory of its own, and no variable."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(VARIABLE, raising=False)


def names(path: str | Path) -> list[str]:
    return [event["name"] for event in slices(events_in(path))]


def test_spans_of_a_service_arrive(tmp_path):
    """Behind the SDK's batch processor, whole after each flush, valid JSON at the end."""
    path = tmp_path / "trace.json"
    provider = TracerProvider(resource=RESOURCE)
    provider.add_span_processor(BatchSpanProcessor(ChromeTraceExporter(path)))
    tracer = provider.get_tracer("app")
    with tracer.start_as_current_span("GET /"), tracer.start_as_current_span("handler"):
        pass
    provider.force_flush()
    assert names(path) == ["GET /", "handler"]
    tracer.start_span("last").end()
    provider.shutdown()
    assert names_by_track(events_in(path)) == {"spans 1": ["GET /", "handler", "last"]}


def test_columns_and_objects_share_a_file(tmp_path):
    """Torch's spans come as columns, the service's as objects; both go into one file, compressed here."""
    exporter = ChromeTraceExporter(tmp_path / "trace.json.gz")
    columns = SpanList(span_rows(["aten::mm"]), resource=RESOURCE, scope=instrumentation_scope())
    assert exporter.takes_span_lists
    assert [exporter.export(spans) for spans in (columns, [span("GET", 5, 9)], columns[:0], ())] == [SUCCESS] * 4
    exporter.shutdown()
    assert names(exporter.path) == ["aten::mm", "GET"]


@pytest.mark.parametrize(
    ("given", "variable", "expected"),
    [
        ("a.json", "b.json", "a.json"),
        (Path("a-{pid}.json"), None, f"a-{os.getpid()}.json"),
        (None, "b-{pid}.json.gz", f"b-{os.getpid()}.json.gz"),
        ("a-{rank}.json", None, "a-0.json"),
        (None, None, f"trace-{os.getpid()}.json"),
        (None, " ", f"trace-{os.getpid()}.json"),
        (None, "~/c.json", "c.json"),
    ],
)
def test_which_file(monkeypatch, tmp_path, given, variable, expected):
    """The keyword counts, then the variable, then the default; it is made by the first export, where it was asked for."""
    monkeypatch.setenv("HOME", str(tmp_path))
    if variable is not None:
        monkeypatch.setenv(VARIABLE, variable)
    exporter = ChromeTraceExporter(given)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["elsewhere"]
    assert exporter.export([span("x", 1, 2)]) is SUCCESS
    exporter.shutdown()
    assert exporter.path == str(tmp_path / expected)
    assert names(tmp_path / expected) == ["x"]


def test_a_path_that_cannot_be_written_is_an_error_at_once(tmp_path):
    """The error names path, reason and way out, before any span is lost."""
    (tmp_path / "file").touch()
    for path, reason in (
        (tmp_path / "no" / "t.json", "No such file or directory; create the folder first"),
        (tmp_path / "file" / "t.json", "Not a directory; a part of the path is a file"),
        (tmp_path, "Is a directory; give the name of a file in it"),
        ("", "Is a directory; give the name of a file in it"),
    ):
        with pytest.raises(ExportError, match=reason):
            ChromeTraceExporter(path)
    with pytest.raises(TypeError, match="of type bytes: give a str"):
        ChromeTraceExporter(b"t.json")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_bad_variable_is_warned_of_once(monkeypatch, tmp_path, caplog):
    """The application starts, exports answer FAILURE, and as soon as there is a folder the spans arrive."""
    monkeypatch.setenv(VARIABLE, "no/t.json")
    exporters = [ChromeTraceExporter(), ChromeTraceExporter()]
    (warning,) = caplog.records
    assert "create the folder first" in warning.getMessage()
    assert VARIABLE in warning.getMessage()
    assert [exporter.export([span("lost", 1, 2)]) for exporter in exporters] == [FAILURE] * 2
    assert len(caplog.records) == 2
    assert "1 spans are not written: cannot write" in caplog.records[1].getMessage()
    (tmp_path / "no").mkdir()
    assert exporters[0].export([span("kept", 1, 2)]) is SUCCESS
    assert names(tmp_path / "no" / "t.json") == ["kept"]
    for exporter in exporters:
        exporter.shutdown()


def test_a_working_directory_that_is_gone(monkeypatch, tmp_path):
    """A keyword that counts from it is an error; the default lets the application start."""
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(ExportError, match="No such file or directory"):
        ChromeTraceExporter("t.json")
    exporter = ChromeTraceExporter()
    assert exporter.export([span("x", 1, 2)]) is FAILURE
    exporter.shutdown()


def test_a_full_device_is_failure_and_asked_again(caplog):
    """No exception, one warning a minute, and the next export is tried."""
    exporter = ChromeTraceExporter("/dev/full")
    assert [exporter.export([span("x", 1, 2)]) for _ in range(3)] == [FAILURE] * 3
    (warning,) = caplog.records
    assert warning.name == "otel_torchprof"
    assert warning.levelno == logging.WARNING
    assert "No space left on device; free some space" in warning.getMessage()
    exporter.shutdown()


def test_spans_that_break_the_encoder_are_failure(tmp_path, caplog):
    """Nothing of a failed export is in the file; names that were lost with it are told by the next one."""

    class Broken:
        def __str__(self) -> str:
            raise RuntimeError("broken")

    exporter = ChromeTraceExporter(tmp_path / "t.json")
    broken = [span("good", 1, 2), span("bad", 3, 4, attributes={"key": Broken()})]
    assert [exporter.export(spans) for spans in (broken, [span("x", 5, 6)], broken, [span("y", 7, 8)])] == [
        FAILURE,
        SUCCESS,
        FAILURE,
        SUCCESS,
    ]
    exporter.shutdown()
    text = (tmp_path / "t.json").read_text()
    assert [e["name"] for e in slices(json.loads(text)["traceEvents"])] == ["x", "y"]
    assert "broken" in caplog.records[0].getMessage()


def test_exporters_of_one_file_share_it(tmp_path):
    """By whatever path they know it; the last to be shut down closes it, and the first is heard no more."""
    (tmp_path / "link").symlink_to(tmp_path)
    first, second = ChromeTraceExporter(tmp_path / "t.json"), ChromeTraceExporter(tmp_path / "link" / "t.json")
    assert first.export([span("first", 1, 2, number=1)]) is SUCCESS
    first.shutdown()
    first.shutdown()
    assert second.export([span("second", 1, 2, number=2)]) is SUCCESS
    assert first.export([span("too late", 1, 2)]) is FAILURE
    second.shutdown()
    assert second.export([span("too late", 1, 2)]) is FAILURE
    assert names_by_track(events_in(tmp_path / "t.json")) == {"spans 1": ["first"], "spans 2": ["second"]}


def test_the_next_run_replaces_the_file(tmp_path):
    """Once all exporters of a file are shut down, a new one begins a new file."""
    for name in ("old", "new"):
        exporter = ChromeTraceExporter(tmp_path / "t.json")
        exporter.export([span(name, 1, 2)])
        exporter.shutdown()
    assert names(tmp_path / "t.json") == ["new"]


def test_force_flush_waits_for_another_threads_export(tmp_path, monkeypatch):
    """False when the time is over before the export is."""
    exporter = ChromeTraceExporter(tmp_path / "t.json")
    inside, go_on = threading.Event(), threading.Event()
    encode = ChromeSpans.encode

    def slow(self: ChromeSpans, spans: Any, *, begin: bool) -> Any:
        inside.set()
        go_on.wait()
        return encode(self, spans, begin=begin)

    monkeypatch.setattr(ChromeSpans, "encode", slow)
    thread = threading.Thread(target=exporter.export, args=([span("x", 1, 2)],))
    thread.start()
    inside.wait()
    assert exporter.force_flush(1) is False
    go_on.set()
    assert exporter.force_flush() is True
    thread.join()
    assert names(tmp_path / "t.json") == ["x"]
    exporter.shutdown()


def test_four_threads_at_once(tmp_path):
    """Two exporters of one file, two threads each, columns and objects: everything is there once, and the file is sound."""
    exporters = [ChromeTraceExporter(tmp_path / "t.json.gz") for _ in range(2)]
    results: list[SpanExportResult] = []

    def work(number: int) -> None:
        for i in range(25):
            start = 1000 * i + number
            objects = [
                span(f"{number}.{i}.{j}", start + j, start + j + 5, number=4 * (25 * i + j) + number + 1)
                for j in range(4)
            ]
            table = span_rows(
                [s.name for s in objects], span_id=np.array([s.context.span_id for s in objects], np.uint64)
            )
            spans = SpanList(table, resource=RESOURCE, scope=instrumentation_scope()) if number % 2 else objects
            results.append(exporters[number // 2].export(spans))

    in_threads(*(functools.partial(work, number) for number in range(4)))
    for exporter in exporters:
        exporter.shutdown()
    assert results == [SUCCESS] * 100
    assert sorted(names(tmp_path / "t.json.gz")) == sorted(
        f"{n}.{i}.{j}" for n in range(4) for i in range(25) for j in range(4)
    )


@pytest.mark.parametrize("exporter", [ChromeTraceExporter, OTLPFileExporter])
def test_the_rank_in_the_name(monkeypatch, tmp_path, exporter):
    """Each rank that a launcher starts writes a file of its own, with the number that the launcher gave it."""
    for variable, value in {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(variable, value)
    made = exporter(tmp_path / "rank{rank}.json")
    made.export([span("a", 1, 2)])
    made.shutdown()
    assert [path.name for path in tmp_path.iterdir()] == ["rank3.json"]


NAMES = ("t.json", "t.json.gz", "u-{pid}.json")
FORK = """
import os, signal, sys
sys.path[:0] = ["tests/helpers", "tests/unit"]
from chrome_files import span
from otel_torchprof import ChromeTraceExporter
from otel_torchprof._export.file_exporter import FileSpanExporter
for name in sys.argv[2:]:
    exporter, other = (ChromeTraceExporter(f"{sys.argv[1]}/{name}") for _ in range(2))
    exporter.export([span("parent", 1, 2)])
    with exporter._files._lock, FileSpanExporter._lock:  # as if another thread were in an export
        child = os.fork()
        if child == 0:
            exporter.export([span("child", 1, 2)])
            exporter.shutdown()
            other.export([span("child's other", 3, 4)])
            other.shutdown()
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    exporter.export([span("parent again", 3, 4)])
    print(exporter.path, child, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_forked_child_writes_a_file_of_its_own(tmp_path):
    """The parent's file, whole though it is killed, is untouched by the child, which shares its own among its exporters and waits for no lost lock."""
    command = [sys.executable, "-c", FORK, str(tmp_path), *NAMES]
    done = forked_programs.run(command, cwd=ROOT)
    assert (done.returncode, done.stderr) == (-signal.SIGKILL, "")
    for name, (path, child) in zip(NAMES, map(str.split, done.stdout.splitlines()), strict=True):
        stem, _, suffix = name.partition(".")
        childs = tmp_path / (f"u-{child}.json" if "{pid}" in name else f"{stem}.{child}.{suffix}")
        assert names(path) == ["parent", "parent again"]
        assert names(childs) == ["child", "child's other"]
        assert {event["pid"] for event in events_in(childs)} == {int(child)}
    assert len(list(tmp_path.iterdir())) == 6
