"""profile() itself: bad input, the switch, the memory limit."""

from __future__ import annotations

import gzip
import json
import os

import pytest

import otel_torchprof as otp
from otel_torchprof._export.formats import FORMATS
from otel_torchprof._process.profiler_flag import profiler_flag
from otel_torchprof.errors import forget_warnings

CHUNK = 65536


def recorded(**rest):
    """A finished profile with one label."""
    with otp.profile(operators=False, **rest) as prof, otp.record_function("label"):
        pass
    return prof


def test_not_reentrant():
    """A profile that runs cannot be entered, with torch's error; a second stop does nothing."""
    prof = recorded()
    prof.stop()
    with prof, pytest.raises(RuntimeError, match=r"^Profiler context manager is not reentrant"):
        prof.start()
    assert len(prof.events()) == 1


def test_entered_again():
    """A profile that is entered again keeps the events that it has, in averages, columns, spans and trace."""
    prof = recorded()
    first = prof.events()
    with prof, otp.record_function("label"), otp.record_function("inner"):
        pass
    assert [event.name for event in first] == ["label"]
    assert [event.name for event in prof.events()] == ["label", "label", "inner"]
    assert [event.cpu_parent and event.cpu_parent.name for event in prof.events()] == [None, None, "label"]
    assert {row.key: row.count for row in prof.key_averages()} == {"label": 2, "inner": 1}
    assert prof.columns["parent"].tolist() == [-1, -1, 1]
    assert [span.name for span in prof.spans()] == ["torch.profile", "label", "label", "inner"]
    assert prof.health.recorded == 3


def test_stop_without_start():
    """Stopping what never started says what to do."""
    with pytest.raises(RuntimeError, match="was not started"):
        otp.profile(operators=False).stop()


READERS = [
    lambda p: p.events(),
    lambda p: p.columns,
    lambda p: p.key_averages(),
    lambda p: p.table(),
    lambda p: p.spans(),
    lambda p: list(p.to_otlp()),
    lambda p: p.self_cpu_time_total,
    lambda p: p.export_chrome_trace(os.devnull),
]


@pytest.mark.parametrize("read", READERS)
def test_reading_too_early(read):
    """Reading before the start or while it runs is an error that says when to; the recording is not harmed by it."""
    prof = otp.profile(operators=False)
    with pytest.raises(RuntimeError, match="nothing was recorded"):
        read(prof)
    with prof:
        with pytest.raises(RuntimeError, match="still recording"):
            read(prof)
        with otp.record_function("label"):
            pass
    assert [event.name for event in prof.events()] == ["label"]


def test_step_outside(caplog):
    """step() outside of the recording has no effect, as in torch, and says so once."""
    forget_warnings()
    prof = otp.profile(operators=False)
    prof.step()
    with prof:
        prof.step()
    prof.step()
    assert prof.step_num == 1
    assert caplog.text.count("step() was called before the start") == 1


@pytest.mark.parametrize("limit", [0, -1, CHUNK - 1, 1 << 70])
def test_a_memory_limit_out_of_range(limit):
    """A limit that no recording can keep is refused with its value and the least allowed."""
    with pytest.raises(ValueError, match=rf"memory_limit is {limit} bytes.*{CHUNK}"):
        otp.profile(operators=False, memory_limit=limit)


@pytest.mark.parametrize("limit", ["1G", 1e9])
def test_a_memory_limit_of_another_type(limit):
    """A limit that is no whole number is refused with its value."""
    with pytest.raises(TypeError, match=r"memory_limit is .*whole number"):
        otp.profile(operators=False, memory_limit=limit)


def test_span_limits(monkeypatch):
    """The limits of the TracerProvider in use hold for the spans of a profile."""
    from opentelemetry import trace
    from opentelemetry.sdk.trace import SpanLimits, TracerProvider

    provider = TracerProvider(span_limits=SpanLimits(max_span_attributes=2, max_span_attribute_length=4))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    spans = recorded().spans()
    assert [span.attributes.get("torch.op.scope") for span in spans] == [None, "user"]
    assert [len(span.attributes) for span in spans] == [0, 2]
    assert spans[0].dropped_attributes == 0 < spans[1].dropped_attributes


def test_unknown_arguments():
    """A misspelt argument is an error."""
    with pytest.raises(TypeError, match="record_shape"):
        otp.profile(record_shape=True)


def test_arguments_of_a_wrong_type():
    """What reads a profile names an argument that it cannot use, and its value."""
    prof = recorded()
    with pytest.raises(TypeError, match="group_by_stack_n is '3'"):
        prof.key_averages(group_by_stack_n="3")
    with pytest.raises(TypeError, match=r"exporter is 3; .*SpanExporter"):
        prof.export(3)
    with pytest.raises(TypeError, match=r"dir_name is 3; .*folder"):
        otp.tensorboard_trace_handler(3)


def test_a_schedule_that_never_records():
    """Where no step was recorded the error speaks of the schedule, not of a start that was forgotten."""
    with otp.profile(operators=False, schedule=otp.schedule(wait=2, warmup=1, active=1)) as prof:
        prof.step()
    with pytest.raises(RuntimeError, match=r"nothing was recorded: the schedule .* prof\.step\(\)"):
        prof.events()


def test_an_unknown_sort_key():
    """A sort key that no event has is refused with the key."""
    with pytest.raises(ValueError, match="no_such_key"):
        recorded().table(sort_by="no_such_key")


@pytest.mark.parametrize("write", ["export_chrome_trace", "export_otlp"])
@pytest.mark.parametrize("path", ["/no/such/folder/trace", "/dev/full", "/proc/trace", "/"])
def test_what_cannot_be_written(write, path):
    """A path that cannot be written is named, and what was recorded is still there."""
    prof = recorded()
    with pytest.raises(otp.ExportError, match=path):
        getattr(prof, write)(path)
    assert len(prof.events()) == 1


@pytest.mark.parametrize("name", [name for name, each in FORMATS.items() if not each.is_compressed])
def test_a_format_by_name(name, tmp_path):
    """Every format is written by its name, compressed where the path says so."""
    prof = recorded()
    prof.export_as(tmp_path / "trace", name)
    prof.export_as(tmp_path / "trace.gz", name)
    assert gzip.decompress((tmp_path / "trace.gz").read_bytes()) == (tmp_path / "trace").read_bytes()


@pytest.mark.parametrize(
    ("name", "write", "suffix"),
    [
        ("chrome", "export_chrome_trace", ".json"),
        ("otlp", "export_otlp", ".otlp"),
        ("otlp_json", "export_otlp", ".json"),
    ],
)
def test_a_format_of_its_own_method(name, write, suffix, tmp_path):
    """What has a method of its own writes the same by its name."""
    prof = recorded()
    prof.export_as(tmp_path / "trace", name)
    getattr(prof, write)(path := tmp_path / f"again{suffix}")
    assert path.read_bytes() == (tmp_path / "trace").read_bytes()


def test_an_unknown_format(tmp_path):
    """Another format is refused with those that there are, and no file is made."""
    with pytest.raises(ValueError, match="the format is 'svg'; it must be one of 'chrome', 'otlp', 'otlp_json'"):
        recorded().export_as(tmp_path / "trace", "svg")
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_leaves_the_old_file(tmp_path):
    """A trace that cannot be written whole leaves the file that was there."""
    prof, path = recorded(), tmp_path / "trace.json"
    prof.export_chrome_trace(path)
    before = path.read_bytes()
    with pytest.raises((TypeError, ValueError)):
        prof.export_chrome_trace(path, metadata={"no": object()})
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_disabled():
    """enabled=False records nothing and costs no check in the caller's code: everything can be called."""
    prof = otp.profile(enabled=False, operators=True)
    assert prof.health.recorded == 0
    with prof:
        prof.step()
        with otp.record_function("label"):
            pass
    assert len(prof.events()) == len(prof.key_averages()) == len(prof.columns["start"]) == 0
    assert isinstance(prof.table(), str)
    assert str(prof.health)
    assert prof.step_num == 1


def test_the_kill_switch(monkeypatch, tmp_path):
    """OTEL_TORCHPROF_ENABLED=false records nothing, breaks nothing, and health says why."""
    monkeypatch.setenv("OTEL_TORCHPROF_ENABLED", "false")
    with otp.profile(all_threads=True, record_shapes=True) as prof, otp.record_function("label"):
        prof.step()
    assert "OTEL_TORCHPROF_ENABLED is false" in prof.health.operators
    assert "OTEL_TORCHPROF_ENABLED is false" in prof.health.labels
    assert not profiler_flag._users
    assert len(prof.events()) == 0
    prof.export_chrome_trace(tmp_path / "trace.json")
    assert json.loads((tmp_path / "trace.json").read_text())["schemaVersion"] == 1
    prof.export_otlp(tmp_path / "trace.otlp")
    prof.export_otlp(tmp_path / "trace.json")


def test_texts_of_a_profile():
    """A profile shows how far it is; a finished one, as str, its table."""
    prof = otp.profile(operators=False)
    assert repr(prof) == str(prof) == "<unfinished otel_torchprof.profile>"
    with prof, otp.record_function("a label"):
        assert "unfinished" in repr(prof)
    assert repr(prof) == "<profile of 1 events>"
    assert "a label" in str(prof)


def test_a_small_memory_limit(tmp_path):
    """What does not fit is counted: recorded + dropped is what was produced, and every output says that some is missing."""
    whole, small = otp.profile(operators=False), otp.profile(operators=False, memory_limit=2 * CHUNK)
    with whole, small, otp.record_function("around everything"):
        for _ in range(5000):
            with otp.record_function("outer"), otp.record_function("inner"):
                pass
    assert len(whole.events()) == 10_001
    assert whole.health.dropped == {}
    kept, health = len(small.events()), small.health
    assert 500 < kept < 5000
    assert kept + health.dropped["budget"] == 10_001
    assert health.recorded == kept
    assert health.memory_bytes <= 2 * CHUNK == health.memory_limit
    assert f"{health.dropped['budget']} (budget)" in str(health)
    assert (small.columns["flags"] == 0).all()
    by_id = dict(zip(whole.columns["id"].tolist(), whole.columns["end"].tolist(), strict=True))
    assert [by_id[event] for event in small.columns["id"].tolist()] == small.columns["end"].tolist()
    roots = [span for span in small.spans() if span.parent is None]
    assert [span.attributes["torch.dropped_events"] for span in roots] == [health.dropped["budget"]]
    small.export_chrome_trace(tmp_path / "trace.json")
    marks = [e for e in json.loads((tmp_path / "trace.json").read_text())["traceEvents"] if e["ph"] == "i"]
    assert str(health.dropped["budget"]) in json.dumps(marks)


def test_reading_from_many_threads():
    """A finished profile may be read by several threads at once; all get the same events."""
    from concurrent.futures import ThreadPoolExecutor

    with otp.profile(operators=False) as prof:
        for _ in range(3000):
            with otp.record_function("label"):
                pass
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: prof.events(), range(8)))
        objects = list(pool.map(lambda events: [id(event) for event in events], found))
    assert all(ids == objects[0] for ids in objects)


def test_stops_from_many_threads():
    """Of many threads that stop a profile at once one does, and none gets an error."""
    from concurrent.futures import ThreadPoolExecutor

    prof = otp.profile(operators=False)
    prof.start()
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: prof.stop(), range(32)))
    assert len(prof.events()) == 0
