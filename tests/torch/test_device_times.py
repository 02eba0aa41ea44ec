"""Times of a device, against one whose work takes exactly what the test says."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from device_profiles import DEVICE, pairs_of, profile, tensor, times_of
from threaded import in_threads

import otel_torchprof as otp

pytestmark = pytest.mark.simulated_device


def test_durations_are_exact(simulated):
    """Each operator has the time that its kernels took, and a label that of all that ran inside of it."""
    a = tensor(4, 4)
    simulated.duration(7_000)
    simulated.duration(31_000, "aten::mm")
    with profile() as prof, otp.record_function("label"):
        torch.mm(a, a)
        torch.add(a, a)
    assert times_of(prof) == [("label", 38_000, 38_000), ("aten::mm", 31_000, 31_000), ("aten::add", 7_000, 7_000)]
    assert prof.health.devices == "on"


def test_nested_operators_and_modules(simulated):
    """A module's pair holds what its operators took; an operator that is made of others has no pair, and the time of these."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()).to(DEVICE)
    x = tensor(2, 4)
    simulated.duration(5_000)
    with profile(with_modules=True) as prof, torch.no_grad():
        model(x)
    found = {name: (own, total) for name, own, total in times_of(prof)}
    assert found["Sequential"] == (10_000, 10_000)
    assert found["0"] == found["aten::addmm"] == (5_000, 5_000)
    assert found["aten::linear"] == (None, 5_000)
    assert found["aten::t"] == (None, 0), "view-like operators launch nothing"
    averages = prof.key_averages(group_by_module=True)
    by_module = {each.key: (each.self_device_time_total, each.device_time_total) for each in averages}
    assert by_module == {"Sequential": (0, 10), "Sequential.0": (5, 5), "Sequential.1": (5, 5)}
    assert "Self PRIVATEUSEONE time total: 10.000us" in averages.table()


def test_events_and_table_show_the_device(simulated):
    """What the profile tells in code has the device's time in microseconds."""
    a = tensor(4, 4)
    simulated.duration(31_000, "aten::mm")
    with profile() as prof:
        torch.mm(a, a)
        torch.mm(a, a)
    (average,) = [one for one in prof.key_averages() if one.key == "aten::mm"]
    assert average.device_time_total == pytest.approx(62.0)
    assert average.self_device_time_total == pytest.approx(62.0)
    assert "Self PRIVATEUSEONE" in prof.key_averages().table()


def test_recording_never_waits_and_never_asks(simulated):
    """A recording thread neither waits for the device nor asks it, however late it is, and all times are there at the end."""
    a = tensor(4, 4)
    simulated.duration(9_000)
    me = threading.get_native_id()
    with profile() as prof:
        simulated.manual()
        before = simulated.counts(me)
        for _ in range(500):
            torch.add(a, a)
        after = simulated.counts(me)
        for what in ("queries", "synchronizes", "elapsed"):
            assert after[what] == before[what]
        assert after["records_timed"] - before["records_timed"] == 1000
    assert [own for _, own, _ in times_of(prof)] == [9_000] * 500


def test_what_is_late_is_given_up_and_counted(simulated):
    """Where the device has not come to it at the stop, an event has no time, the profile says so, and nothing is left over."""
    from otel_torchprof._native import torch_library
    from otel_torchprof._native.recorder import Session

    a = tensor(4, 4)
    library = torch_library.load()
    session = Session(1 << 20, devices=True)
    session.start()
    timing = library.time_devices(session, DEVICE, "ops", 1000)
    observation = library.observe(session)
    simulated.manual()
    torch.add(a, a)
    simulated.complete_all()
    torch.mul(a, a)
    assert timing.collect(0.0) == 1
    observation.stop()
    session.stop()
    times = timing.stop(0.01)
    assert len(times["event"]) == 1
    counts = timing.counts()
    assert (counts.timed, counts.late) == (1, 1)
    assert simulated.counts()["alive"] == 0


def test_streams_that_end_out_of_order(simulated):
    """Of two streams the later one may be done first; each event has the time and the stream of its own."""
    a = tensor(4, 4)
    simulated.duration(11_000, "aten::add")
    simulated.duration(23_000, "aten::mul")
    one, other = simulated.new_stream(), simulated.new_stream()
    with profile() as prof:
        simulated.manual()
        with simulated.stream(one):
            torch.add(a, a)
        with simulated.stream(other):
            torch.mul(a, a)
        simulated.complete(other)
        simulated.complete(one)
    (add,), (mul,) = pairs_of(prof, "aten::add"), pairs_of(prof, "aten::mul")
    assert (add["duration"], add["stream"]) == (11_000, one.stream_id)
    assert (mul["duration"], mul["stream"]) == (23_000, other.stream_id)
    assert {add["device_type"], mul["device_type"]} == {20}


def test_label_over_two_streams(simulated):
    """A label has the time on its own stream, and what ran inside of it on another one is added."""
    a = tensor(4, 4)
    simulated.duration(10_000)
    with profile() as prof, otp.record_function("label"):
        torch.add(a, a)
        with simulated.stream():
            torch.mul(a, a)
    assert times_of(prof)[0] == ("label", 10_000, 20_000)


def test_operators_of_another_device(simulated):
    """An operator on tensors of another device than the current one is timed on that device."""
    a, b = tensor(4, 4, device=f"{DEVICE}:0"), tensor(4, 4, device=f"{DEVICE}:1")
    simulated.duration(10_000)
    with profile() as prof:
        torch.add(a, a)
        torch.mul(b, b)
        torch.stack([b, b])
    assert [pair["device_index"] for pair in pairs_of(prof, "aten::add")] == [0]
    assert [pair["device_index"] for pair in pairs_of(prof, "aten::mul")] == [1]
    assert {pair["device_index"] for pair in pairs_of(prof, "aten::stack")} == {1}
    assert {own for name, own, _ in times_of(prof) if name in {"aten::add", "aten::mul"}} == {10_000}


def test_operators_of_the_cpu_are_not_timed(simulated):
    """What works on tensors of the CPU leaves no mark on the device; a copy between the two does."""
    a, b = torch.ones(4, 4), tensor(4, 4)
    with profile() as prof:
        torch.mm(a, a)
        b.copy_(a)
    found = {name: own for name, own, _ in times_of(prof)}
    assert found["aten::mm"] is None
    assert found["aten::copy_"] is not None


def test_backward_on_its_own_threads(simulated):
    """Backward functions are timed on autograd's threads, below what ran them."""
    w = tensor(4, 4).requires_grad_()
    simulated.duration(10_000)
    with profile() as prof:
        torch.mm(w, w).sum().backward()
    found = {name: total for name, _, total in times_of(prof)}
    assert found["MmBackward0"] >= 20_000
    assert len({int(thread) for thread in prof._batch()["thread"]}) > 1


def test_many_threads(simulated):
    """Threads that come and go, each on a stream of its own, have their events timed, the last ones of a thread too."""
    a = tensor(4, 4)
    simulated.duration(3_000)

    def work():
        with simulated.stream():
            for _ in range(100):
                torch.add(a, a)

    with profile(all_threads=True) as prof:
        for _ in range(3):
            in_threads(*[work] * 4)
    assert [own for name, own, _ in times_of(prof) if name == "aten::add"] == [3_000] * 1200
    assert simulated.counts()["alive"] == 0


def test_all_operators(simulated):
    """With all of them timed, as torch's legacy engine has it, what is made of other operators has a pair too, views have none."""
    linear = torch.nn.Linear(4, 4).to(DEVICE)
    x = tensor(2, 4)
    simulated.duration(5_000)
    with profile(device_events="all") as prof, torch.no_grad(), otp.record_function("label"):
        linear(x)
        torch.add(x, x)
    found = {name: (own, total) for name, own, total in times_of(prof)}
    assert found["label"] == (10_000, 10_000)
    assert found["aten::linear"] == found["aten::addmm"] == found["aten::add"] == (5_000, 5_000)
    assert found["aten::t"] == (None, 0)


def test_labels_only(simulated):
    """With labels alone, operators have no pair, and cost the device nothing."""
    a = tensor(4, 4)
    simulated.duration(5_000)
    before = simulated.counts()["records_timed"]
    with profile(device_events="labels") as prof:
        with otp.record_function("ours"):
            torch.add(a, a)
        with torch.profiler.record_function("torchs"):
            torch.add(a, a)
    assert {name: own for name, own, _ in times_of(prof)} == {"ours": 5_000, "torchs": 5_000, "aten::add": None}
    calibrations = 2 * 5
    assert simulated.counts()["records_timed"] - before <= 4 + calibrations


def test_off(simulated):
    """With device events off nothing is marked, and health says that no device is used."""
    a = tensor(4, 4)
    with profile(device_events="off") as prof:
        torch.add(a, a)
    assert simulated.counts()["records_timed"] == 0
    assert prof._batch().devices is None
    assert prof.health.devices == "off: device_events='off'"


def test_every_third_step(simulated):
    """One step in three has times, from the first recorded one on; the others have their operators without."""
    a = tensor(4, 4)
    simulated.duration(5_000)
    with profile(device_events_every=3) as prof:
        for _ in range(7):
            torch.add(a, a)
            prof.step()
    assert [own for _, own, _ in times_of(prof)] == [5_000, None, None, 5_000, None, None, 5_000]


def test_every_second_step_of_a_cycle(simulated):
    """A cycle of a schedule begins with a timed step, also after steps that were not recorded."""
    a, cycles = tensor(4, 4), []

    def ready(prof):
        cycles.append([own for name, own, _ in times_of(prof) if name == "aten::add"])

    schedule = otp.schedule(wait=0, warmup=1, active=2, repeat=1)
    with profile(device_events_every=2, schedule=schedule, on_trace_ready=ready) as prof:
        for _ in range(3):
            torch.add(a, a)
            prof.step()
    assert cycles == [[5_000, None]]


def test_a_pause_in_a_step_without_times(simulated):
    """What follows a pause has times where its step has."""
    a = tensor(4, 4)
    with profile(device_events_every=2) as prof:
        for _ in range(3):
            torch.add(a, a)
            for on in (False, True):
                prof.toggle_collection_dynamic(on, [otp.ProfilerActivity.CPU])
            torch.add(a, a)
            prof.step()
    assert [own for _, own, _ in times_of(prof)] == [5_000, 5_000, None, None, 5_000, 5_000]


def test_overlapping_profiles(simulated):
    """Profiles that overlap each have the times that they asked for, in whatever order they end."""
    a = tensor(4, 4)
    simulated.duration(5_000)
    plain, first, second = otp.profile(), profile(), profile(device_events="labels")
    plain.start()
    first.start()
    torch.add(a, a)
    second.start()
    with otp.record_function("label"):
        torch.add(a, a)
    first.stop()
    with otp.record_function("label"):
        torch.add(a, a)
    second.stop()
    plain.stop()
    assert plain._batch().devices is None
    assert [own for _, own, _ in times_of(first)] == [5_000, 5_000, 5_000]
    assert [own for _, own, _ in times_of(second)] == [5_000, None, 5_000, None]
    assert simulated.counts()["alive"] == 0


def test_two_hundred_thousand_operators_leave_nothing(simulated):
    """The number of the device's events is bounded by what is under way, not by what was recorded, and all are freed."""
    a = tensor(1)
    simulated.duration(0)
    add, out = torch.ops.aten.add_.Tensor, tensor(1)
    with profile(memory_limit=1 << 30) as prof:
        for _ in range(200_000):
            add(out, a)
    batch = prof._batch()
    assert len(batch.devices["event"]) == len(batch) == 200_000
    counts = simulated.counts()
    assert counts["alive"] == 0
    assert counts["alive_most"] < 3 * 4096 * 2
    assert len(np.unique(batch.devices["event"])) == 200_000


def test_times_beyond_the_memory_limit_are_counted(simulated):
    """Times that would need more memory than the profile may hold are left out, and health says how many."""
    a = tensor(1)
    out = tensor(1)
    with profile(memory_limit=1 << 16) as prof:
        for _ in range(5000):
            out.add_(a)
    assert prof.health.dropped["budget"] > 0
    assert len(prof._batch().devices["event"]) <= len(prof._batch())


def test_clocks_agree(simulated):
    """With a device that runs by the machine's clock, what it did lies behind the begin of the operator and before the end of the profile."""
    a = tensor(4, 4)
    simulated.automatic()
    simulated.duration(50_000)
    with profile() as prof:
        for _ in range(100):
            torch.add(a, a)
    batch = prof._batch()
    tolerance = 1_000_000
    order = np.argsort(batch.devices["event"])
    start, duration = batch.devices["start"][order], batch.devices["duration"][order]
    assert (start >= batch["start"]).all()
    assert (start + duration < prof.health.stop_ns + tolerance).all()
    assert (np.diff(start) >= 0).all()


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"device_events": "kernels"}, ValueError, "device_events is 'kernels'"),
        ({"device_events_every": 0}, ValueError, "device_events_every is 0"),
        ({"device_events_every": 1.5}, TypeError, "device_events_every is 1.5"),
    ],
)
def test_bad_arguments(simulated, options, error, text):
    """A bad choice of what is timed is an error that names it and what is allowed."""
    with pytest.raises(error, match=text):
        profile(**options)


def test_the_legacy_engine_on_a_device(simulated, monkeypatch):
    """The legacy engine's events have the device's times of its own recording, as torch's CUDA mode has them."""
    from otel_torchprof import legacy
    from otel_torchprof._profile import legacy_state

    monkeypatch.setattr(legacy_state, "DEVICE", DEVICE)
    monkeypatch.setattr("otel_torchprof._profile.legacy._has_cuda", lambda: True)
    monkeypatch.setattr("otel_torchprof._profile.legacy._synchronize", torch.accelerator.synchronize)
    a = tensor(4, 4)
    simulated.duration(31_000, "aten::mm")
    with legacy.profile(use_cuda=True) as prof:
        torch.mm(a, a)
    (event,) = [one for one in prof.function_events if one.name == "aten::mm"]
    assert event.device_time_total == pytest.approx(31.0)
    assert "Self CUDA" in prof.function_events.table()


def test_energy_waits_for_nobody(simulated):
    """Without an energy counter the times of devices are there all the same, and health says why there are no joules."""
    a = tensor(4, 4)
    with profile(energy=True) as prof:
        torch.add(a, a)
    assert prof.health.energy.startswith("off: ")
    assert len(prof.devices["event"]) == 1


def test_a_thread_that_goes_on_to_another_device(simulated):
    """A thread whose events for one device are used up and freed may go on with another device, with times of its own."""
    a, b = tensor(4, 4, device=f"{DEVICE}:0"), tensor(4, 4, device=f"{DEVICE}:1")
    simulated.duration(5_000)
    with profile() as prof:
        for _ in range(200):
            torch.add(a, a)
        for _ in range(200):
            torch.mul(b, b)
    assert [pair["duration"] for pair in pairs_of(prof, "aten::mul")] == [5_000] * 200
    assert {pair["device_index"] for pair in pairs_of(prof, "aten::mul")} == {1}
    assert simulated.counts()["alive"] == 0
