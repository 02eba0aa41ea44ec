"""A Chrome trace in several files: when the next one begins, what is in each, and which are kept."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
from chrome_files import RESOURCE, events_in, metadata, slices, span
from opentelemetry.sdk.trace.export import SpanExportResult
from span_tables import span_rows

from otel_torchprof import ChromeTraceExporter
from otel_torchprof._encode.spans import SpanList, picked, step_ends
from otel_torchprof._export.sdk import instrumentation_scope
from otel_torchprof._model.span_table import LINK, AttributeColumn, AttributeType

STEP = 1_000
"""Nanoseconds that a step of these tests takes."""


def steps(first: int, count: int, operators: int = 3) -> SpanList:
    """Steps one after another, the spans of steps first, then the operators by thread: as a live recording gives them."""
    total = count * (1 + operators)
    number = np.concatenate((np.arange(count), np.repeat(np.arange(count), operators))) + first
    place = np.concatenate((np.zeros(count, int), np.tile(np.arange(operators), count)))
    is_step = np.arange(total) < count
    ids = (number + 1) * 100 + np.where(is_step, 0, place + 1)
    links = np.zeros(1, dtype=LINK)
    links["row"], links["span_id"] = total - 1, ids[-1] - 1
    table = span_rows(
        [f"step {n}" if s else f"op {n}.{p}" for n, p, s in zip(number, place, is_step, strict=True)],
        start=number * STEP + np.where(is_step, 0, place * 10 + 1),
        end=number * STEP + np.where(is_step, STEP, place * 10 + 9),
        span_id=ids.astype(np.uint64),
        parent_span_id=np.where(is_step, 0, (number + 1) * 100).astype(np.uint64),
        step=np.where(is_step, number, -1),
        links=links,
        attributes=(AttributeColumn("thread.id", AttributeType.INT64, np.full(total, 7)),),
    )
    return SpanList(table, resource=RESOURCE, scope=instrumentation_scope())


def names(path: str | Path) -> list[str]:
    return [event["name"] for event in slices(events_in(path))]


def step_names(path: str | Path) -> list[str]:
    return [name for name in names(path) if name.startswith("step")]


def of_step(name: str) -> str:
    return name.replace("step ", "").replace("op ", "").partition(".")[0]


@pytest.mark.parametrize("suffix", [".json", ".json.gz"])
def test_a_file_holds_so_many_steps(tmp_path, suffix):
    """Steps that come three at a time go two to a file, each with all that is in it, and each file is whole by itself."""
    exporter = ChromeTraceExporter(tmp_path / f"trace{suffix}", steps_per_file=2)
    for first in (0, 3):
        assert exporter.export(steps(first, 3)) is SpanExportResult.SUCCESS
    exporter.shutdown()
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == [f"trace.00000{part}{suffix}" for part in range(3)]
    assert exporter.files == tuple(map(str, files))
    for part, file in enumerate(files):
        assert step_names(file) == [f"step {2 * part}", f"step {2 * part + 1}"]
        assert len(names(file)) == 8
        assert {of_step(name) for name in names(file)} == {f"{2 * part}", f"{2 * part + 1}"}
        assert metadata(events_in(file), "process_name") == [{"name": "shop"}]
        assert len(metadata(events_in(file), "thread_name")) == 1


def test_events_of_the_running_step_go_to_the_next_file(tmp_path):
    """What comes with the end of a step, and belongs to the one that has begun since, is where the end of that will be."""
    exporter = ChromeTraceExporter(tmp_path / "t.json", steps_per_file=1)
    both = steps(0, 2)
    without_second = picked(both.table, np.array([0, *range(2, 8)]))
    exporter.export(SpanList(without_second, resource=RESOURCE, scope=instrumentation_scope()))
    exporter.export(both[1:2])
    exporter.shutdown()
    assert [sorted(names(file)) for file in exporter.files] == [
        ["op 0.0", "op 0.1", "op 0.2", "step 0"],
        ["op 1.0", "op 1.1", "op 1.2", "step 1"],
    ]


def test_files_stay_below_their_size(tmp_path):
    """Whatever comes at a time, no file is larger than it may be, none is cut inside a step, and nothing is missing."""
    most = 6_000
    exporter = ChromeTraceExporter(tmp_path / "t-{part}.json", max_bytes=most)
    written = [steps(0, 40), steps(40, 1), steps(41, 9)]
    assert [exporter.export(spans) for spans in written] == [SpanExportResult.SUCCESS] * 3
    exporter.shutdown()
    files = [Path(file) for file in exporter.files]
    assert [file.name for file in files] == [f"t-{part:06}.json" for part in range(len(files))]
    assert all(file.stat().st_size <= most for file in files)
    assert min(file.stat().st_size for file in files[:-1]) > most * 0.6
    assert exporter.bytes_written == sum(file.stat().st_size for file in files)
    found = [names(file) for file in files]
    assert sorted(name for each in found for name in each) == sorted(span.name for each in written for span in each)
    in_files = [{of_step(name) for name in each} for each in found]
    assert sum(map(len, in_files)) == 50


def test_what_is_larger_than_a_file_has_one_of_its_own(tmp_path):
    """A step that cannot fit anywhere is written all the same, alone; so is a span of the SDK, and those after it go on."""
    exporter = ChromeTraceExporter(tmp_path / "t.json", max_bytes=2_000)
    large = [span("x" * 3_000, 1, 2), span("y", 3, 4), span("z", 5, 6)]
    for spans in (steps(0, 1, 2), steps(1, 1, 50), steps(2, 1, 2), large):
        assert exporter.export(spans) is SpanExportResult.SUCCESS
    exporter.shutdown()
    assert [len(names(file)) for file in exporter.files] == [3, 51, 3, 1, 2]


def test_without_steps_files_are_cut_between_trees(tmp_path):
    """Where there are only trees of spans, each is in one file."""
    count = 60
    is_root = np.arange(count) % 3 == 0
    ids = np.arange(1, count + 1)
    table = span_rows(
        [f"n{i // 3}" for i in range(count)],
        start=np.arange(count) * 10,
        end=np.where(is_root, np.arange(count) * 10 + 29, np.arange(count) * 10 + 5),
        parent_span_id=np.where(is_root, 0, ids - np.arange(count) % 3).astype(np.uint64),
    )
    exporter = ChromeTraceExporter(tmp_path / "t.json", max_bytes=3_000)
    exporter.export(SpanList(table, resource=RESOURCE, scope=instrumentation_scope()))
    exporter.shutdown()
    trees = [set(names(file)) for file in exporter.files]
    assert len(trees) > 2
    assert sum(map(len, trees)) == 20


def test_the_oldest_files_are_deleted(tmp_path):
    """No more are kept than may be, what others wrote stays, and something of the trace is there all the time."""
    (tmp_path / "t.000009.json").write_text("somebody's")
    exporter = ChromeTraceExporter(tmp_path / "t.json", steps_per_file=1, max_files=2)
    for number in range(4):
        exporter.export(steps(number, 1))
        assert len(exporter.files) <= 2
    exporter.shutdown()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["t.000002.json", "t.000003.json", "t.000009.json"]
    assert exporter.bytes_written == 4 * (tmp_path / "t.000003.json").stat().st_size


def test_a_file_that_cannot_be_deleted_is_said(tmp_path, caplog):
    """The trace goes on beside it."""
    exporter = ChromeTraceExporter(tmp_path / "t.json", steps_per_file=1, max_files=1)
    exporter.export(steps(0, 1))
    Path(exporter.files[0]).unlink()
    (tmp_path / "t.000000.json").mkdir()
    with caplog.at_level(logging.WARNING, "otel_torchprof"):
        exporter.export(steps(1, 1))
    exporter.shutdown()
    assert "could not be deleted" in caplog.text
    assert step_names(exporter.files[-1]) == ["step 1"]


def test_settings_come_from_the_environment_too(tmp_path, monkeypatch, caplog):
    """A keyword counts before its variable; a bad variable is warned of, a bad keyword an error that names it."""
    monkeypatch.setenv("OTEL_TORCHPROF_CHROME_TRACE", "max_bytes=2K, steps_per_file=3,max_files=none of them")
    exporter = ChromeTraceExporter(tmp_path / "t.json", steps_per_file=1)
    assert "OTEL_TORCHPROF_CHROME_TRACE: max_files='none of them' is ignored: allowed is a whole number" in caplog.text
    exporter.export(steps(0, 2))
    exporter.shutdown()
    assert len(exporter.files) == 2
    for name, value in (("max_bytes", "10X"), ("max_bytes", 0), ("steps_per_file", -1), ("max_files", 1.5)):
        with pytest.raises(ValueError, match=f"{name} is {value!r}; allowed is a whole number"):
            ChromeTraceExporter(tmp_path / "u.json", **{name: value})


def test_a_step_in_two_contexts_is_one(tmp_path):
    """A step that has a span in a request and one outside counts once, at the later end."""
    table = span_rows(["a", "b", "c"], start=np.array([0, 0, 10]), end=np.array([9, 10, 20]), step=np.array([0, 0, 1]))
    assert step_ends(SpanList(table, resource=RESOURCE, scope=instrumentation_scope())).tolist() == [10, 20]
    assert step_ends([span("x", 1, 2)]).tolist() == []
