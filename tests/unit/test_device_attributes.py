"""Times of devices as attributes of spans: of a profile at every detail, and of a batch as it is."""

from __future__ import annotations

import itertools
import json
import sys
from dataclasses import replace

import numpy as np
import pytest
from device_runs import cuda_pairs
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from recorded_tables import recorded_table

import otel_torchprof as otp
from otel_torchprof._columns.batch import Batch
from otel_torchprof._columns.joined import without
from otel_torchprof._columns.schema import Kind
from otel_torchprof._encode.attributes import add_attributes
from otel_torchprof._model.devices import device_name, device_times, remaining_times
from otel_torchprof._model.span_table import AttributeType

US = 1000
KEY = "torch.device."


def attributes(batch, **options):
    """What each span has of devices, the root first."""
    ids = itertools.count(1)
    table = recorded_table(batch, start=0, end=100 * US, new_trace_id=lambda: next(ids), new_span_id=lambda: next(ids))
    table = add_attributes(table, batch, **options)
    found = [{} for _ in range(len(table))]
    for column in table.attributes:
        rows = range(len(table)) if column.rows is None else column.rows.tolist()
        for row, value in zip(rows, column.values.tolist(), strict=True):
            if column.key.startswith(KEY):
                is_name = column.type == AttributeType.NAME
                found[row][column.key.removeprefix(KEY)] = table.names[value] if is_name else value
    return found


def batch_of(parents, *pairs, **columns):
    """Events with these parents and pairs, and ids from 1."""
    rows = range(len(parents))
    start, end = [row * US for row in rows], [(90 - row) * US for row in rows]
    return Batch.of({"start": start, "end": end, "parent": parents, **columns}, [""], devices=cuda_pairs(*pairs))


def test_what_a_span_has_of_its_pair():
    """A pair gives its duration, what nothing inside of it tells of, and the device and stream; a parent without one a sum."""
    root, enclosing, timed, inner = attributes(batch_of([-1, 0, 1], (2, 3, 50, 1), (3, 3, 20, 1)))
    assert root == {"duration": 50e-6, "drained_duration": 82e-6}, (
        "of a root, what all pairs cover; between the marks it waited"
    )
    assert enclosing == {"duration": 50e-6}
    assert timed == {"duration": 50e-6, "self_duration": 30e-6, "type": "cuda", "index": 1, "stream": 3}
    assert inner == {"duration": 20e-6, "self_duration": 20e-6, "type": "cuda", "index": 1, "stream": 3}


def test_its_own_pair_stands_for_itself():
    """What ran inside on another stream is not in the duration of a pair; more inside than the pair says leaves nothing of its own."""
    _, enclosing, _, _ = attributes(batch_of([-1, 0, 0], (1, 0, 10, 0), (2, 1, 50, 0), (3, 0, 12, 0)))
    assert (enclosing["duration"], enclosing["self_duration"]) == (10e-6, 0)


def test_nothing_where_no_device_told_of_anything():
    """Spans have none of these attributes without times, nor where all pairs are of other events."""
    assert not any(attributes(replace(batch_of([-1, 0], (1, 0, 5, 0)), devices=None)))
    assert not any(attributes(batch_of([-1, 0], (9, 0, 5, 0))))


def test_hidden_attributes_stay_hidden(monkeypatch):
    """An attribute of devices that a variable names is on no span; the others stay."""
    monkeypatch.setenv("OTEL_TORCHPROF_HIDDEN_ATTRIBUTES", "torch.device.stream,torch.device.duration")
    assert attributes(batch_of([-1], (1, 3, 50, 1)))[1] == {"self_duration": 50e-6, "type": "cuda", "index": 1}


@pytest.mark.parametrize(("number", "name"), [(1, "cuda"), (12, "xpu"), (19, "mtia"), (99, "99")])
def test_names_of_devices(number, name):
    """A device has torch's name for its type, and the number where there is no name."""
    assert device_name(number) == name


def test_a_private_backend_has_its_own_name(monkeypatch):
    """The name of PrivateUse1 is the one that the backend gave itself, without an import of torch."""
    monkeypatch.setitem(sys.modules, "torch", None)
    assert device_name(20) == "privateuseone"

    class Torch:
        class _C:
            @staticmethod
            def _get_privateuse1_backend_name():
                return "npu"

    monkeypatch.setitem(sys.modules, "torch", Torch)
    assert device_name(20) == "npu"


def test_what_is_left_out_gives_its_times_to_what_remains():
    """For random trees and any rows left out, totals stay as they are and all own times are somewhere in the remaining trees."""
    random = np.random.default_rng(3)
    for _ in range(100):
        count = int(random.integers(1, 25))
        parents = [int(random.integers(-1, row)) if row else -1 for row in range(count)]
        pairs = [
            (row + 1, int(random.integers(0, 2)), int(random.integers(0, 50)), 0)
            for row in range(count)
            if random.random() < 0.6
        ]
        if not pairs:
            continue
        whole = batch_of(parents, *pairs)
        gone = random.random(count) < 0.4
        left = without(whole, gone)
        times, found = device_times(whole), remaining_times(whole, left)
        assert found.total.tolist() == times.total[~gone].tolist()
        below = found.own.copy()
        for row in reversed(range(len(left))):
            if left["parent"][row] >= 0:
                below[left["parent"][row]] += below[row]
        assert below.tolist() == found.total.tolist()
        assert found.pair.tolist() == times.pair[~gone].tolist()
    assert remaining_times(replace(whole, devices=None), left) is None


@pytest.fixture
def profiled():
    """A profile of a label in a label, of which devices told: 50 us of the outer, 20 of the inner and 5 on another stream."""
    with otp.profile(use_cpu=True) as prof, otp.record_function("outer"), otp.record_function("inner"):
        pass
    batch = prof._segments.batch()
    ids = batch["id"].tolist()
    prof._segments._kept = replace(batch, devices=cuda_pairs((ids[0], 3, 50, 1), (ids[1], 3, 20, 1)))
    return prof


def test_spans_of_a_profile(profiled, tmp_path):
    """The spans that a profile gives out have the attributes, as objects, for an exporter and in a Chrome trace."""
    exporter, chrome = InMemorySpanExporter(), otp.ChromeTraceExporter(tmp_path / "trace.json")
    for each in (exporter, chrome):
        profiled.export(each)
    chrome.shutdown()
    slices = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    inner = next(slice_ for slice_ in slices if slice_.get("name") == "inner")
    assert inner["args"]["attributes"]["torch.device.duration"] == 20e-6
    for spans in (profiled.spans(), exporter.get_finished_spans()):
        outer = next(span for span in spans if span.name == "outer")
        found = {key.removeprefix(KEY): value for key, value in outer.attributes.items() if key.startswith(KEY)}
        assert found == {"duration": 50e-6, "self_duration": 30e-6, "type": "cuda", "index": 1, "stream": 3}


def test_pairs_as_arrays(profiled):
    """prof.devices is the table of pairs, and None where no device reported anything."""
    assert profiled.devices["duration"].tolist() == [50 * US, 20 * US]
    with otp.profile() as plain:
        pass
    assert plain.devices is None


def test_less_detail_loses_no_time(profiled):
    """Where operators are no spans, the module around them has their time, though they are not there to be asked."""
    batch = profiled._segments._kept
    kinds = np.array([Kind.MODULE, Kind.OPERATOR], batch["kind"].dtype)
    only = {name: column[1:] for name, column in batch.devices.items()}
    columns = {**batch.columns, "kind": kinds, "scope": np.zeros(2, batch["scope"].dtype)}
    profiled._segments._kept = replace(batch, columns=columns, devices=only)
    module = next(span for span in profiled.spans(detail="modules") if span.name == "outer")
    assert len(profiled.spans(detail="modules")) == len(profiled.spans()) - 1
    assert module.attributes["torch.device.duration"] == 20e-6
    assert "torch.device.type" not in module.attributes
