"""The simulated device itself: its numbers are the CPU's, its times exact, its misuse noticed."""

from __future__ import annotations

import threading

import pytest
from threaded import in_threads

torch = pytest.importorskip("torch", minversion="2.6")

from simulated_device import run_on_device  # noqa: E402

pytestmark = pytest.mark.simulated_device


def event(timing=True):
    """An event of the device."""
    return torch.Event("privateuseone", enable_timing=timing)


def trained(device):
    """Loss, gradients and parameters of a step of a small model."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    inputs = torch.arange(12.0).reshape(4, 3).to(device)
    loss = torch.nn.functional.mse_loss(model(inputs), torch.zeros(4, 2, device=device))
    loss.backward()
    optimizer.step()
    values = [loss, *(one.grad for one in model.parameters()), *model.parameters()]
    return [one.detach().cpu() for one in values]


def test_a_step_gives_the_numbers_of_the_cpu(simulated):
    """Forward, backward and optimizer compute on the device what they compute on the CPU."""
    for cpu, own in zip(trained("cpu"), trained("privateuseone"), strict=True):
        torch.testing.assert_close(cpu, own)


def test_operators_nest_as_on_a_device(simulated):
    """A profiler sees no operator of the CPU inside a kernel of the device, and the device's memory only."""
    a = torch.ones(4, 4, device="privateuseone")
    a.mm(a)
    with torch.autograd.profiler.profile(use_kineto=True, profile_memory=True) as prof:
        b = a.mm(a).t()
        del b
    assert [one.name for one in prof.function_events if one.name.startswith("aten::")] == [
        "aten::mm",
        "aten::t",
        "aten::transpose",
        "aten::as_strided",
    ]
    assert sum(one.self_cpu_memory_usage for one in prof.function_events) == 0
    assert {one.device_memory_usage for one in prof.function_events if one.name == "aten::mm"} == {512}


def test_a_view_takes_no_time(simulated):
    """Views share the memory and enqueue no work; what is written through one is seen through the other."""
    base = torch.zeros(4, 4, device="privateuseone")
    before = simulated.counts()["kernels"]
    view = base.t()[1].reshape(2, 2).unsqueeze(0).expand(3, 2, 2)
    assert simulated.counts()["kernels"] == before
    view[0, 0, 0] = 7.0
    assert base.cpu()[0, 1] == 7.0


def test_elapsed_is_exact(simulated):
    """Between two events lies what was enqueued between them, to the nanosecond."""
    simulated.duration(1234, "aten::mm")
    a = torch.ones(2, 2, device="privateuseone")
    begin, end = event(), event()
    begin.record()
    a.mm(a).mm(a).add(a)
    end.record()
    assert begin.elapsed_time(end) == (1234 + 1234 + 5000) / 1e6


def test_nothing_completes_before_the_test_says_so(simulated):
    """In manual time events wait for ``complete`` or ``advance``, and elapsed throws until then."""
    simulated.manual()
    begin, end = event(), event()
    begin.record()
    simulated.kernel()
    end.record()
    assert (begin.query(), end.query()) == (False, False)
    with pytest.raises(RuntimeError, match="must be completed"):
        begin.elapsed_time(end)
    assert simulated.complete(n=1) == 1
    assert (begin.query(), end.query()) == (True, False)
    simulated.advance(4999)
    assert not end.query()
    simulated.advance(1)
    assert end.query()
    assert begin.elapsed_time(end) == 0.005


def test_streams_complete_in_any_order(simulated):
    """Of two streams the later one may complete first; one that waits for the other does not."""
    simulated.manual()
    first, second, waits = simulated.new_stream(), simulated.new_stream(), simulated.new_stream()
    events = []
    for stream in (first, second):
        with simulated.stream(stream):
            simulated.kernel()
            events.append(event())
            events[-1].record()
    waits.wait_event(events[0])
    assert simulated.complete(second) == 2
    assert [one.query() for one in events] == [False, True]
    assert simulated.complete(waits) == 0
    simulated.complete(first)
    assert simulated.complete(waits) == 1
    assert events[0].query()


def test_synchronising_completes_and_is_counted_by_thread(simulated):
    """Who waits for the device gets it, and every call is counted for the thread that made it."""
    simulated.manual()
    mark = event()
    mark.record()

    def other():
        mark.query()
        torch.privateuseone.synchronize()
        numbers.append(threading.get_native_id())

    numbers = []
    in_threads(other)
    assert mark.query()
    mine, theirs = (simulated.counts(number) for number in (threading.get_native_id(), numbers[0]))
    assert (mine["records"], mine["queries"], mine["synchronizes"]) == (1, 1, 0)
    assert (theirs["records"], theirs["queries"], theirs["synchronizes"]) == (0, 1, 1)


def test_a_capture_forbids_questions(simulated):
    """While a stream captures, asking any event throws and is a violation, as is an event on that stream."""
    before = event()
    before.record()
    with simulated.stream() as stream, simulated.capture(stream):
        with pytest.raises(RuntimeError, match="while a stream is capturing"):
            before.query()
        with pytest.raises(RuntimeError, match="while a stream is capturing"):
            torch.privateuseone.synchronize()
        inside = event()
        inside.record()
    assert simulated.violations() == [
        "an event was queried",
        "a device was waited for",
        "an event was recorded on a stream that is capturing",
    ]
    assert before.query()
    torch.privateuseone.synchronize()
    with pytest.raises(RuntimeError, match="belongs to a capture"):
        inside.query()


def test_failures_are_made_to_order(simulated):
    """A call fails as often as was said, with the text that was said, and works again after that."""
    simulated.fail("record", "no luck", times=1)
    mark = event()
    with pytest.raises(RuntimeError, match="no luck"):
        mark.record()
    mark.record()
    simulated.fail("query")
    for _ in range(3):
        with pytest.raises(RuntimeError, match="the simulated device failed"):
            mark.query()
    simulated.fail("query", times=0)
    assert mark.query()
    assert simulated.counts()["failures"] == 4


def test_events_and_memory_are_counted(simulated):
    """What is alive, what was at most, and what has gone again."""
    before = simulated.counts()
    events = [event(timing) for timing in (True, True, False)]
    for one in events:
        one.record()
    held = torch.empty(1000, device="privateuseone:1")
    assert simulated.counts()["memory"] == before["memory"] + 4096
    del events, one, held
    found = simulated.counts()
    assert (found["created"], found["created_timed"], found["records_timed"]) == (3, 2, 2)
    assert (found["destroyed"], found["alive"], found["alive_most"]) == (3, before["alive"], before["alive"] + 3)
    assert (found["memory"], found["violations"]) == (before["memory"], 0)


def test_work_completes_with_the_machines_clock(simulated):
    """In automatic time nobody has to do anything for work to complete."""
    simulated.automatic()
    simulated.duration(1_000_000)
    begin, end = event(), event()
    begin.record()
    simulated.kernel()
    end.record()
    end.synchronize()
    assert begin.query()
    assert begin.elapsed_time(end) >= 1.0


def test_a_script_runs_on_the_device():
    """A script in a process of its own has the device as ``sim``."""
    done = run_on_device("print(torch.ones(2, device=sim.name).sum().item(), torch.accelerator.current_accelerator())")
    assert (done.returncode, done.stdout.split()) == (0, ["2.0", "privateuseone"]), done.stderr
