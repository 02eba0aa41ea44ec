"""``profile_memory``: what programs allocate and free, under torch's profiler and under ours."""

from __future__ import annotations

import gc
import json
import re

import pytest

torch = pytest.importorskip("torch", minversion="2.6")

from memory_programs import train  # noqa: E402
from observed import torchs  # noqa: E402
from odd_programs import Nested, scripted_fork  # noqa: E402
from trace_validator import validate  # noqa: E402

import otel_torchprof as otp  # noqa: E402

TOO_MUCH = 10**15


def tensors():
    """Blocks that are allocated in an operator and freed outside of one, or inside another's label."""
    kept = torch.ones(100)
    with torch.profiler.record_function("label"):
        kept = torch.ones(50)  # gives the first one back
        torch.ones(7).add_(1)
    del kept


def fails():
    """More than there is, in the middle of something else."""
    torch.ones(3)
    with torch.profiler.record_function("too much"), pytest.raises(RuntimeError):
        torch.empty(TOO_MUCH)
    torch.ones(3)


def once_warm(body):
    body()
    gc.collect()
    return body


def lines(events):
    """What a list says of memory, in its order."""
    return [
        (
            event.name,
            event.cpu_memory_usage,
            event.self_cpu_memory_usage,
            event.device_memory_usage,
            event.self_device_memory_usage,
            None if event.cpu_parent is None else event.cpu_parent.name,
        )
        for event in events
    ]


def masked(table):
    """A table without its times."""
    return re.sub(r" *\d+\.\d+(us|ms|s|%)", " #", table)


@pytest.fixture(params=[train, tensors, fails], ids=lambda body: body.__name__)
def both(request):
    """The same program under torch's profiler and under ours."""
    body = once_warm(request.param)
    with torchs(profile_memory=True) as theirs:
        body()
    with otp.profile(profile_memory=True) as ours:
        body()
    return theirs, ours


def test_events_are_torchs(both):
    """Every event has torch's bytes, its own and with its children; [memory] and [OutOfMemory] stand where torch's do."""
    theirs, ours = both
    assert lines(ours.events()) == lines(theirs.events())
    assert any(name == "[memory]" for name, *_ in lines(ours.events()))


def test_averages_are_torchs(both):
    """Averages and the total add up to torch's bytes under torch's names."""
    theirs, ours = both

    def amounts(prof):
        averages = prof.key_averages()
        return {
            a.key: (a.count, a.cpu_memory_usage, a.self_cpu_memory_usage) for a in [*averages, averages.total_average()]
        }

    assert amounts(ours) == amounts(theirs)


def test_tables_are_torchs(both):
    """The text of a table sorted by memory is torch's, save for the times."""
    theirs, ours = both
    for key in ("cpu_memory_usage", "self_cpu_memory_usage"):
        found = [masked(prof.key_averages().table(sort_by=key, row_limit=-1)) for prof in (ours, theirs)]
        assert found[0] == found[1]
        found = [masked(prof.events().table(sort_by=key, row_limit=12)) for prof in (ours, theirs)]
        assert found[0] == found[1]


def test_instants_are_torchs(both, tmp_path):
    """The Chrome trace has torch's instants: as many, with the same arguments, in a trace that is valid."""
    theirs, ours = both

    def instants(prof, name):
        prof.export_chrome_trace(str(tmp_path / name))
        events = json.loads((tmp_path / name).read_text())["traceEvents"]
        return [event for event in events if event.get("cat") == "cpu_instant_event"]

    mine, torchs_own = (
        sorted(instants(prof, name), key=lambda event: event["ts"])
        for prof, name in ((ours, "o.json"), (theirs, "t.json"))
    )
    validate((tmp_path / "o.json").read_bytes())
    assert [event.keys() for event in mine] == [event.keys() for event in torchs_own]
    assert [event["args"].keys() for event in mine] == [event["args"].keys() for event in torchs_own]
    for key in ("name", "ph", "s", "pid", "tid"):
        assert [event[key] for event in mine] == [event[key] for event in torchs_own]
    for key in ("Bytes", "Device Id", "Device Type", "Total Reserved", "finished"):
        assert [event["args"][key] for event in mine] == [event["args"][key] for event in torchs_own]
    totals = [[event["args"]["Total Allocated"] for event in found] for found in (mine, torchs_own)]
    assert [total - totals[0][0] for total in totals[0]] == [total - totals[1][0] for total in totals[1]]


def test_events_of_memory_say_what_torchs_say():
    """A [memory] event has the attributes of torch's, down to those that are None."""
    once_warm(tensors)
    with torchs(profile_memory=True) as theirs:
        tensors()
    with otp.profile(profile_memory=True) as ours:
        tensors()

    def said(prof):
        event = next(event for event in prof.events() if event.name == "[memory]")
        assert event.time_range.elapsed_us() == 0
        names = (  # noqa: SIM905 - easier to read
            "trace_name overload_name fwd_thread thread input_shapes stack scope device_type device_index is_async sequence_nr "
            "device_resource_id concrete_inputs kwinputs flops activity_type external_id input_dtypes structured_input_shapes "
            "is_user_annotation node_id is_legacy"
        ).split()
        return {name: getattr(event, name) for name in names}

    assert said(ours) == said(theirs)
    ids = [event.id for event in ours.events()]
    assert len(set(ids)) == len(ids)


def test_what_was_allocated_is_there_as_arrays():
    """``memory`` names size, address, running totals and the operator of every block; what is freed names its address."""
    with otp.profile(profile_memory=True) as prof:
        block = torch.empty(100)
        address = block.data_ptr()
        del block
    memory = prof.memory
    assert memory["bytes"].tolist() == [400, -400]
    assert memory["address"].tolist() == [address, address]
    assert (memory["total_allocated"][0] - memory["total_allocated"][1]) == 400
    row = prof.columns["id"].tolist().index(memory["event"][0])
    assert prof.names[prof.columns["name"][row]] == "aten::empty"
    assert memory["event"][1] == 0
    assert prof.columns["start"][row] <= memory["time"][0] <= prof.columns["end"][row] <= memory["time"][1]


def test_without_it_there_is_nothing():
    """A profile without memory has none, no columns for it in tables, and no events of it."""
    with otp.profile() as prof:
        torch.ones(3)
    assert prof.memory is None
    assert "CPU Mem" not in prof.key_averages().table()
    assert all(event.cpu_memory_usage == 0 and event.name != "[memory]" for event in prof.events())


def test_labels_alone_have_memory():
    """``operators=False`` leaves labels, and these have what is allocated inside them."""
    with otp.profile(operators=False, profile_memory=True) as prof, otp.record_function("label"):
        kept = torch.ones(100)
    assert [(event.name, event.cpu_memory_usage) for event in prof.events()] == [("label", 400)]
    del kept


def test_memory_of_a_fork_is_there():
    """What ``jit.fork`` allocates on another thread is recorded there, inside the operator that did."""

    def work(x):
        return x + x

    forks, x = scripted_fork(work), torch.ones(100)
    for _ in range(3):
        forks(x)
    with otp.profile(profile_memory=True) as prof:
        forks(x)
    adds = [event for event in prof.events() if event.name == "aten::add"]
    assert [event.self_cpu_memory_usage for event in adds] == [400]


def test_memory_of_autograds_threads_is_there():
    """What autograd's own threads allocate is recorded there: a backward pass nested too deep for one thread."""
    with otp.profile(profile_memory=True) as prof:
        Nested.apply(torch.ones(10, requires_grad=True), 70).sum().backward()
    threads = set(prof.memory["thread"].tolist())
    assert len(threads) > 1
    assert sum(event.name == "aten::clone" and event.cpu_memory_usage == 40 for event in prof.events()) >= 71


def test_a_small_memory_limit():
    """Records of memory that do not fit are counted as dropped: kept + dropped is what another profile beside it kept."""
    body = once_warm(train)
    options = {"profile_memory": True, "record_shapes": True}
    with otp.profile(**options) as whole, otp.profile(memory_limit=65536, **options) as small:
        for _ in range(20):
            body()
    kept = [len(prof.columns["id"]) + len(prof.memory["time"]) for prof in (whole, small)]
    assert [prof.health.recorded for prof in (whole, small)] == kept
    assert not whole.health.dropped
    assert kept[1] + small.health.dropped["budget"] == kept[0]
    assert kept[1] < kept[0]
