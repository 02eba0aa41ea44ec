"""Times of devices in prof.events(), averages, tables, stacks and frames: from columns as from objects, as torch reads them."""

from __future__ import annotations

import copy
import pickle

import pytest
from device_runs import cuda_pairs
from hypothesis import given
from hypothesis import strategies as st
from torch_forests import timed

from otel_torchprof import DeviceType, EventList, FunctionEvent, Kernel
from otel_torchprof._columns.batch import Batch
from otel_torchprof._columns.schema import Kind
from otel_torchprof._model.devices import device_times
from otel_torchprof._model.tree import HIDDEN_NAMES
from otel_torchprof._profile.function_event import DeviceWork
from otel_torchprof.errors import TorchProfError

US = 1000


def batch_of(names, parents, pairs, **columns):
    """Events of these names, each within its parent, and ids from 1; 100 us and less."""
    rows = range(len(names))
    columns = {"start": [row * US for row in rows], "end": [(100 - row) * US for row in rows], **columns}
    known = ["", *dict.fromkeys(names)]
    name = [known.index(name) for name in names]
    return Batch.of({**columns, "name": name, "parent": parents}, known, devices=cuda_pairs(*pairs) if pairs else None)


def listed(batch, use_device="cuda", **options):
    """The events of a batch."""
    return EventList.of(batch, origin_ns=0, use_device=use_device, **options)


# ---- events ----


def test_the_pair_of_an_event():
    """Where and how long its own pair was is in one attribute beside torch's, which stay those of the CPU's event."""
    found = listed(batch_of("ab", [-1, 0], [(2, 3, 20, 1)]))
    assert found[0].device_work is None
    assert found[1].device_work == DeviceWork(DeviceType.CUDA, 1, 3, 7, 20)
    assert (found[1].device_type, found[1].device_resource_id) == (DeviceType.CPU, 1)
    unknown = batch_of("a", [-1], [(1, 3, 20, 1)])
    unknown.devices["device_type"][:] = 99
    assert listed(unknown)[0].device_work.device_type == 99


def test_kernels_are_as_those_of_the_legacy_engine():
    """Each event with device time has one kernel that stands for it, of the device of the first pair, and is marked as legacy."""
    found = listed(batch_of("abcd", [-1, 0, 0, -1], [(2, 3, 20, 1), (3, 0, 5, 2)]))
    assert [event.kernels for event in found] == [[Kernel("a", 1, 25)], [Kernel("b", 1, 20)], [Kernel("c", 2, 5)], []]
    assert all(event.is_legacy for event in found)
    assert listed(batch_of("a", [-1], None))[0].is_legacy is False


def test_nothing_without_a_device():
    """As in torch, events that are of no device have no device times, whatever was recorded; their table has no columns."""
    found = listed(batch_of("ab", [-1, 0], [(2, 3, 20, 1)]), use_device=None)
    assert [(e.device_time_total, e.self_device_time_total, e.kernels) for e in found] == [(0, 0, [])] * 2
    assert "None" not in found.table()
    assert "CUDA" not in found.table()
    assert not any(average.device_time_total for average in found.key_averages())


def test_pairs_of_what_was_dropped_belong_to_nobody():
    """A pair whose event was dropped is no memory event's, whatever number that one gets."""
    memory = {
        "time": [200 * US], "bytes": [8], "address": [1], "total_allocated": [8], "total_reserved": [8], "event": [0],
        "thread": [0], "device_type": [0], "device_index": [0], "flags": [0],
    }  # fmt: skip
    whole = batch_of("a", [-1], [(2, 0, 5, 0)])
    whole = Batch.of({"start": [0], "end": [5], "name": [1]}, ["", "a"], memory=memory, devices=dict(whole.devices))
    assert [(e.name, e.device_time_total) for e in listed(whole)] == [("a", 0), ("[memory]", 0)]


@given(timed())
def test_copies_say_the_same(batch):
    """Copies and pickles, which are computed from kernels and children, have the same times in torch's own arithmetic."""
    found = listed(batch)
    attributes = ("device_time_total", "self_device_time_total", "device_time", "kernels", "device_work", "is_legacy")
    expected = [[getattr(event, name) for name in attributes] for event in found]
    for copied in (copy.deepcopy(found), pickle.loads(pickle.dumps(found))):  # noqa: S301 - its own
        assert type(copied[0] if copied else None) in {FunctionEvent, type(None)}
        assert [[getattr(event, name) for name in attributes] for event in copied] == expected
    if found:
        found[0].count = 1  # edited: the same objects compute now
        assert [[getattr(event, name) for name in attributes] for event in found] == expected


@given(timed())
def test_no_time_is_lost_or_counted_twice(batch):
    """All self times are all that any row has for itself, but for what is in nothing that is listed; totals are sums of them."""
    found, times = listed(batch), device_times(batch)
    below = lambda event: event.self_device_time_total + sum(below(child) for child in event.cpu_children)  # noqa: E731
    assert [event.device_time_total for event in found] == [below(event) for event in found]
    if times is None:
        return
    displayed = {event.id for event in found if not event.is_async}
    kept = 0
    for row, own in enumerate(times.own.tolist()):
        above = row
        while above >= 0 and batch["id"][above] not in displayed:
            above = batch["parent"][above]
        kept += own if above >= 0 else 0
    assert sum(event.self_device_time_total for event in found) * US == kept


def test_hidden_rows_and_modules_pass_their_times_on():
    """What torch's list leaves out gives its time to the nearest event around it, or to nobody where there is none."""
    hidden = HIDDEN_NAMES[3]
    kinds = [Kind.MODULE, Kind.LABEL, Kind.MODULE, Kind.OPERATOR, Kind.OPERATOR]
    batch = batch_of(
        ["root", "label", "child", "aten::mm", hidden],
        [-1, 0, 1, 2, 3],
        [(1, 0, 90, 0), (2, 0, 70, 0), (3, 0, 60, 0), (4, 0, 50, 0), (5, 0, 10, 0)],
        kind=kinds,
    )
    found = {event.name: event for event in listed(batch)}
    assert {name: event.self_device_time_total for name, event in found.items()} == {"label": 20, "aten::mm": 50}
    assert found["label"].device_time_total == 70


def test_asynchronous_events_have_none():
    """As in torch an asynchronous event has no device time; its marks still tell, and who is around it has what they say."""
    found = listed(batch_of("abc", [-1, 0, 1], [(2, 0, 50, 0), (3, 0, 20, 0)], flags=[0, 1, 0]))
    assert {event.name: event.device_time_total for event in found} == {"a": 50, "b": 0, "c": 20}
    assert {event.name: event.self_device_time_total for event in found} == {"a": 30, "b": 0, "c": 20}
    assert [event.device_work.duration for event in found if event.device_work] == [50, 20]


# ---- averages, tables ----


def fields(text):
    """The rows of a table as the texts between two spaces and more, by name."""
    lines = [line.split() for line in text.splitlines()]
    return {line[0]: line[1:] for line in lines if line}


def test_the_columns_of_a_table():
    """The device's columns stand where torch has them, are of the device's name, and shares are of all self time."""
    found = listed(batch_of("abb", [-1, 0, 0], [(1, 0, 50, 0), (2, 0, 20, 0), (3, 0, 10, 0)]), "xpu")
    text = found.key_averages().table(sort_by="self_xpu_time_total")
    heading = next(line for line in text.splitlines() if line.lstrip().startswith("Name"))
    titles = [title.strip() for title in heading.split("  ") if title.strip()]
    assert titles[6:] == ["Self XPU", "Self XPU %", "XPU total", "XPU time avg", "# of Calls"]
    assert fields(text)["b"][5:] == ["30.000us", "60.00%", "30.000us", "15.000us", "2"]
    assert fields(text)["a"][5:] == ["20.000us", "40.00%", "50.000us", "50.000us", "1"]
    assert text.endswith("Self XPU time total: 50.000us\n")
    assert list(fields(text)).index("b") < list(fields(text)).index("a")


def test_a_table_of_averages_without_a_device():
    """Device times of averages that name no device are an error that says what to set, and the averages are as before."""
    averages = listed(batch_of("a", [-1], [(1, 0, 50, 0)])).key_averages()
    averages[0].use_device = None
    with pytest.raises(TorchProfError, match="use_device"):
        averages.table()
    assert averages[0].device_time_total == 50


# ---- files, frames ----


def test_stacks_by_device_time(tmp_path):
    """export_stacks writes whole microseconds of self device time under every name of the metric, per event or merged."""
    batch = batch_of(
        ["f.py(1): f", "a", "b", "a"],
        [-1, 0, 1, 0],
        [(2, 0, 50, 0), (3, 0, 20, 0), (4, 0, 5, 0)],
        kind=[Kind.FRAME, 1, 1, 1],
    )
    found = listed(batch)
    assert found[1].stack == ["f.py(1): f"]
    for metric in ("self_cuda_time_total", "self_device_time_total", "self_privateuse1_time_total"):
        found.export_stacks(tmp_path / "stacks", metric)
        assert (tmp_path / "stacks").read_text() == "f.py(1):_f 30\nf.py(1):_f 20\nf.py(1):_f 5\n"
    found.export_stacks(tmp_path / "stacks", "self_cuda_time_total", merged=True)
    assert (tmp_path / "stacks").read_text() == "f.py(1):_f 55\n"
    copy.deepcopy(found).export_stacks(tmp_path / "objects", "self_cuda_time_total", merged=True)
    assert (tmp_path / "objects").read_text() == "f.py(1):_f 55\n"


def test_no_device_no_stacks(tmp_path):
    """Where no device told of times, a device's metric writes an empty file."""
    batch = batch_of(["f.py(1): f", "a"], [-1, 0], None, kind=[Kind.FRAME, 1])
    listed(batch).export_stacks(tmp_path / "stacks", "self_cuda_time_total")
    assert (tmp_path / "stacks").read_text() == ""


# ---- beside torch ----


def as_torchs(events):
    """The same events as torch's own objects, with our kernels and our tree."""
    util = pytest.importorskip("torch.autograd.profiler_util", reason="torch is not installed for this interpreter")
    made = {}
    for event in events:
        made[id(event)] = own = util.FunctionEvent(
            id=event.id,
            name=event.name,
            overload_name="",
            thread=event.thread,
            start_us=event.time_range.start,
            end_us=event.time_range.end,
            scope=event.scope,
            is_async=event.is_async,
            is_legacy=event.is_legacy,
            is_user_annotation=event.is_user_annotation,
            use_device=event.use_device,
            input_shapes=event.input_shapes,
            structured_input_shapes=event.structured_input_shapes,
            stack=[],
        )
        for kernel in event.kernels:
            own.append_kernel(*kernel)
    for event in events:
        for child in event.cpu_children:
            made[id(event)].append_cpu_child(made[id(child)])
            made[id(child)].set_cpu_parent(made[id(event)])
    found = util.EventList(made.values(), use_device="cuda")
    found._tree_built = True
    return found


@given(
    timed(), st.sampled_from((None, "self_cuda_time_total", "device_time_total", "device_time", "count")), st.booleans()
)
def test_torch_adds_up_and_prints_the_same(batch, sort_by, by_shapes):
    """Torch's own code makes of the kernels and the tree the same times, averages and tables, the device's columns among them."""
    found = listed(batch)
    torchs = as_torchs(found)
    assert [event.device_time_total for event in torchs] == [event.device_time_total for event in found]
    assert [event.self_device_time_total for event in torchs] == [event.self_device_time_total for event in found]
    assert torchs.table(sort_by=sort_by) == found.table(sort_by=sort_by)
    averages = found.key_averages(by_shapes)
    assert torchs.key_averages(by_shapes).table(sort_by=sort_by) == averages.table(sort_by=sort_by)
