"""Times of devices in a service: averages over the life of the process, and spans that are sent while it runs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from live_batches import Event, Service, label
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from providers import instrumented, new_provider

import otel_torchprof as otp
from otel_torchprof import EventList
from otel_torchprof._columns.batch import Batch
from otel_torchprof._columns.schema import DEVICE_COLUMNS
from otel_torchprof._instrument.live_recording import add_up
from otel_torchprof._model.averages import Average, RunningAverages
from otel_torchprof._model.devices import device_times
from otel_torchprof._native.recorder import Session
from otel_torchprof._profile.events import averages_list

US = 1000


def devices(*rows, device_type=1):
    """Pairs of (event, stream, duration in ns)."""
    event, stream, duration = zip(*rows, strict=True)
    found = {column.name: np.zeros(len(rows), column.dtype) for column in DEVICE_COLUMNS}
    found["event"][:], found["stream"][:], found["duration"][:] = event, stream, duration
    found["device_type"][:] = device_type
    return found


def random_batch(random, first_id):
    """A random tree of events of few names, some of which have pairs."""
    count = int(random.integers(1, 20))
    columns = {
        "id": np.arange(first_id, first_id + count),
        "start": np.arange(count) * 10,
        "end": 1000 - np.arange(count),
        "name": random.integers(1, 5, count),
        "parent": [int(random.integers(-1, row)) if row else -1 for row in range(count)],
    }
    pairs = [
        (first_id + row, row % 2, int(random.integers(0, 9)) * US) for row in range(count) if random.random() < 0.5
    ]
    return Batch.of(columns, ["", *"abcd"], devices=devices(*pairs) if pairs else None)


def test_random_batches_sum_to_what_their_lists_give():
    """The device sums of batch after batch are those of the lists of their events, by name."""
    random, running, expected = np.random.default_rng(11), RunningAverages(), {}
    for number in range(50):
        batch = random_batch(random, 1 + 100 * number)
        running.add(batch, devices=device_times(batch))
        for average in EventList.of(batch, origin_ns=0, use_device="cuda").key_averages():
            total, own = expected.get(average.key, (0, 0))
            expected[average.key] = (total + average.device_time_total, own + average.self_device_time_total)
    found = averages_list(running.read(), "cuda")
    assert {a.key: (a.device_time_total, a.self_device_time_total) for a in found} == expected
    assert running.device_type == 1


def test_nothing_where_no_device_told_of_anything():
    """Without times no column of a device is there, and no device is known; names that came later without times have none."""
    running = RunningAverages()
    batch = Batch.of({"start": [0], "end": [5], "name": [1]}, ["", "a"])
    running.add(batch, devices=device_times(batch))
    assert running.device_type is None
    assert running.read() == [Average("a", False, 1, 5, 5)]
    assert "CUDA" not in averages_list(running.read()).table()
    timed = Batch.of({"start": [0], "end": [5], "name": [1]}, ["", "a"], devices=devices((1, 0, 3)))
    running.add(timed, devices=device_times(timed))
    running.add(Batch.of({"start": [0], "end": [5], "name": [2]}, ["", "a", "b"]))
    assert running.read() == [Average("a", False, 2, 10, 10, 3, 3), Average("b", False, 1, 5, 5)]


@pytest.fixture
def service() -> Service:
    return Service()


def placed(service, *events, pairs=()):
    """One drain, with pairs of (name, stream, duration)."""
    batch = service.recorder.drain(*events)
    reported = [(service.recorder.id_of(name), stream, duration) for name, stream, duration in pairs]
    return service.trees.place(replace(batch, devices=devices(*reported) if reported else None))


def times(found):
    """Own and total time by name."""
    names = [found.batch.names[name] for name in found.batch["name"].tolist()]
    own, total = found.devices.own.tolist(), found.devices.total.tolist()
    return {name: pair for name, *pair in zip(names, own, total, strict=True)}


def test_children_of_earlier_drains(service):
    """What was drained before is in the totals of the events around it, and no longer their own, stream by stream."""
    drained = [
        placed(
            service,
            Event("mm", 20, 30, "module"),
            Event("copy", 31, 35, "module"),
            Event("loop", 0),
            Event("module", 10, None, "loop"),
            pairs=[("mm", 1, 50), ("copy", 2, 7)],
        ),
        placed(service, Event("module", 10, 40, "loop"), Event("loop", 0), pairs=[("module", 1, 60)]),
        placed(service, Event("loop", 0, 90)),
    ]
    assert [times(found) for found in drained] == [
        {"mm": [50, 50], "copy": [7, 7]},
        {"module": [10, 67]},
        {"loop": [0, 67]},
    ]
    assert not service.trees._devices._child_times
    running = RunningAverages()
    add_up(running, drained[-1], ())
    assert running.read() == [Average("loop", False, 1, 90, 60, 67, 0)]


def test_what_is_open_no_more_is_forgotten(service):
    """An event that is never drained, since it was dropped, leaves nothing behind."""
    placed(service, Event("mm", 20, 30, "lost"), Event("lost", 10), pairs=[("mm", 1, 50)])
    assert service.trees._devices._child_times
    assert placed(service, Event("later", 40, 50)).devices is None
    assert not service.trees._devices._child_times


def test_events_that_no_sampler_wants(service):
    """Averages have the device times of what is recorded only."""
    service.answers["refused"] = replace(service.new_trace("refused", -1, None), recorded=False)
    found = placed(service, label("refused", 0, 9), label("kept", 10, 19), pairs=[("refused", 0, 5), ("kept", 0, 7)])
    running = RunningAverages()
    add_up(running, found, ())
    assert [(average.name, average.device_total) for average in running.read()] == [("kept", 7)]


@pytest.fixture
def on_device(monkeypatch):
    """A recorder whose events all have a pair on CUDA device 0, stream 3: 50 us, but 20 us of what is called inner."""
    drain = Session.drain

    def with_pairs(session, max_bytes=0):
        batch = drain(session, max_bytes)
        names = [batch.names[name] for name in batch["name"].tolist()]
        rows = [
            (event, 3, 20 * US if name == "inner" else 50 * US)
            for event, name in zip(batch["id"].tolist(), names, strict=True)
        ]
        return replace(batch, devices=devices(*rows) if rows else None)

    monkeypatch.setattr(Session, "drain", with_pairs)


@pytest.mark.usefixtures("on_device")
def test_an_instrumented_program(monkeypatch):
    """What is drained while a label is open, its own span afterwards, and the averages' table all have device times."""
    monkeypatch.delenv("OTEL_TORCHPROF_HIDDEN_ATTRIBUTES", raising=False)
    exporter = InMemorySpanExporter()
    processor = otp.TorchSpanProcessor(exporter)
    provider = new_provider(processor)
    with instrumented(provider, detail="modules", skip_dep_check=True):
        with otp.record_function("outer"):
            with otp.record_function("inner"):
                pass
            provider.force_flush()
            assert not exporter.get_finished_spans()
        averages = processor.key_averages()
    spans = {span.name: span.attributes for span in exporter.get_finished_spans()}
    assert spans["inner"]["torch.device.duration"] == 20e-6
    assert spans["outer"]["torch.device.duration"] == 50e-6
    assert spans["outer"]["torch.device.self_duration"] == 30e-6
    assert (spans["outer"]["torch.device.type"], spans["outer"]["torch.device.stream"]) == ("cuda", 3)
    text = averages.table(sort_by="self_cuda_time_total")
    assert "Self CUDA %" in text
    assert text.endswith("Self CUDA time total: 50.000us\n")
    assert {a.key: (a.device_time_total, a.self_device_time_total) for a in averages} == {
        "outer": (50, 30),
        "inner": (20, 20),
    }
