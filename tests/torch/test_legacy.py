"""The legacy engine beside torch's own, which runs at the same time over the same programs."""

from __future__ import annotations

import threading

import pytest

torch = pytest.importorskip("torch", minversion="2.6")

from at_rest import wait_until_at_rest  # noqa: E402
from observed import STEP, info, run  # noqa: E402
from odd_programs import left_elsewhere, misnested, scripted_fork  # noqa: E402
from torch.autograd import profiler_legacy as torch_legacy  # noqa: E402

from otel_torchprof import legacy  # noqa: E402

X = torch.ones(2, 3, requires_grad=True)


def _forked(x: torch.Tensor) -> torch.Tensor:
    return torch.neg(x)


forking = scripted_fork(_forked)


def backward():
    """Forward and backward."""
    with torch.autograd.profiler.record_function("forward", "arguments"):
        loss = (X @ X.t()).sum()
    loss.backward()


def jit_fork():
    """A part of a graph on another thread."""
    forking(X)
    wait_until_at_rest()


def wrappers():
    """Operators that begin inside one of their name."""
    torch.sum(torch.cat([X, X]))
    X.detach()


PROGRAMS = [backward, wrappers, misnested]


def both(body, **options):
    """The same run under both."""
    body()
    with legacy.profile(**options) as ours, torch_legacy.profile(**options) as theirs:
        run(body)
    return ours.function_events, theirs.function_events


def both_lists(body):
    """The lists of the same run from both engines."""
    body()
    config = torch.autograd.ProfilerConfig(
        torch.autograd.ProfilerState.CPU, True, False, False, False, False, torch._C._profiler._ExperimentalConfig()
    )
    legacy.enable_profiler_legacy(legacy.ProfilerConfig(report_input_shapes=True))
    torch._C._autograd._enable_profiler_legacy(config)
    run(body)
    theirs = torch._C._autograd._disable_profiler_legacy()
    ours = legacy.disable_profiler_legacy()
    return ours, theirs


def records(lists):
    """What the lists say of what happened inside the marked step, by thread; handles as they come."""
    step = next(e for events in lists for e in events if e.name() == STEP)
    end = next(e for events in lists for e in events if e.kind() == "pop" and e.handle() == step.handle())
    numbers = {}
    return [
        [
            (numbers.setdefault(e.handle(), len(numbers)), *said(e))
            for e in events
            if step.start_us() <= e.start_us() <= end.start_us() and e.handle() != step.handle()
        ]
        for events in sorted(lists, key=lambda events: events[0].thread_id())
    ]


def said(e):
    """What one record says, without times."""
    own = (e.kind(), e.name(), e.thread_id(), e.node_id(), e.is_remote(), e.has_cuda(), e.device())
    numbers = (e.scope(), e.sequence_nr(), e.fwd_thread_id(), e.correlation_id(), e.flops())
    return (*own, *numbers, e.cpu_memory_usage(), e.cuda_memory_usage(), e.shapes())


@pytest.mark.parametrize("body", PROGRAMS)
def test_the_lists(body):
    """Per thread the same begins and ends in the same order, with all that they say."""
    ours, theirs = both_lists(body)
    assert records(ours) == records(theirs)


def test_jit_fork():
    """What a fork does is in the list of its thread, as in torch's; how its last ends fall is up to the threads."""

    def begun(lists):
        return [[line for line in lines if line[1] == "push"] for lines in records(lists)]

    ours, theirs = both_lists(jit_fork)
    assert begun(ours) == begun(theirs)
    names = [[line[2] for line in lines] for lines in begun(ours)]
    assert names == [["forking"], ["<forked function>", "aten::neg"]]
    tree, torchs = both(jit_fork)
    inside = [sorted((e.name, e.thread) for e in each if e.name.startswith("aten::")) for each in (tree, torchs)]
    assert inside[0] == inside[1]


@pytest.mark.parametrize("shapes", [False, True])
@pytest.mark.parametrize("body", PROGRAMS)
def test_the_events(body, shapes):
    """The same tree of function events, without the operators that only hand on."""
    ours, theirs = both(body, record_shapes=shapes)
    assert info(ours, shapes=shapes) == info(theirs, shapes=shapes)
    assert info(ours)


def test_an_end_on_a_thread_that_torch_does_not_know():
    """The end stands in the begin's list and names the other thread; torch's engine loses it."""
    legacy.enable_profiler_legacy(legacy.ProfilerConfig())
    left_elsewhere()
    (events,) = legacy.disable_profiler_legacy()
    begin, end = (e for e in events if e.handle() == events[1].handle())
    assert (begin.kind(), begin.name(), end.kind(), begin.is_async()) == ("push", "left elsewhere", "pop", True)
    assert begin.thread_id() == events[0].thread_id() != end.thread_id()
    inside = [e.name() for e in events[events.index(begin) : events.index(end)] if e.kind() == "push"]
    assert inside == ["left elsewhere", "aten::neg"]
    with legacy.profile() as prof:
        left_elsewhere()
    assert [(e.name, e.is_async, e.cpu_parent) for e in prof.function_events if not e.name.startswith("aten")] == [
        ("left elsewhere", True, None)
    ]


def remembering():
    """Allocates inside labels and operators, and outside of everything; gives all of it back."""
    with torch.profiler.record_function("label"):
        kept = torch.ones(300, 5) @ torch.ones(5, 7)
    del kept
    X.grad = None


def test_memory():
    """The same memory for every event, its own and all; what is freed outside of events is an event."""
    remembering()
    found = []
    for engine in (legacy, torch_legacy):
        with engine.profile(profile_memory=True) as prof:
            run(remembering)
            scratch = torch.ones(9)
        del scratch
        usage = [(e.name, e.cpu_memory_usage, e.self_cpu_memory_usage) for e in prof.function_events]
        found.append(usage)
    assert found[0] == found[1]
    assert ("aten::mm", 300 * 7 * 4, 300 * 7 * 4) in found[0]


def test_memory_inside_a_scope():
    """What a scope allocates is in its lists and not in those around it."""
    kept = []
    config = legacy.ProfilerConfig(profile_memory=True)
    with legacy.profile(profile_memory=True) as outer:
        before = torch.ones(7)
        with legacy.TLSLegacyProfilerGuard(config, kept.extend):
            inside = torch.ones(9)
        after = torch.ones(11)
    assert [e.cpu_memory_usage for e in outer.function_events if e.name == "aten::ones"] == [28, 44]
    assert sum(e.cpu_memory_usage for e in outer.function_events if e.name == "[memory]") == 0
    assert [e.cpu_memory_usage() for events in kept for e in events if e.kind() == "memory_alloc"] == [36]
    assert [len(tensor) for tensor in (before, inside, after)] == [7, 9, 11]


def test_ranges_that_cross_on_two_threads():
    """Labels of two threads that overlap in time are aggregated by name; each thread keeps its own tree."""
    turns = [threading.Event() for _ in range(3)]

    def other():
        with legacy.TLSLegacyProfilerGuard(legacy.ProfilerConfig(), kept.extend):
            turns[0].wait(10)
            with torch.profiler.record_function("crossing"):
                turns[1].set()
                turns[2].wait(10)
                X.neg()

    kept = []
    thread = threading.Thread(target=other)
    thread.start()
    with legacy.profile() as prof:
        with torch.profiler.record_function("crossing"):
            X.tan()
            turns[0].set()
            turns[1].wait(10)
        turns[2].set()
        thread.join()
    assert [e.name for e in prof.function_events] == ["crossing", "aten::tan"]
    assert [e.name() for events in kept for e in events if e.kind() == "push"] == ["crossing", "aten::neg"]
    legacy_averages = legacy.EventList(list(prof.function_events) + events_of(kept)).key_averages()
    assert {a.key: a.count for a in legacy_averages} == {"crossing": 2, "aten::tan": 1, "aten::neg": 1}


def events_of(lists):
    """The function events of lists that were kept."""
    from otel_torchprof._profile.legacy import function_events

    return function_events(lists)


def test_a_nested_scope_and_what_is_around_it():
    """A scope inside another takes all of its block, and the outer one goes on as if the block had not been."""
    inner = []
    with legacy.profile() as outer:
        X.neg()
        with torch.profiler.record_function("across"):
            with legacy.TLSLegacyProfilerGuard(legacy.ProfilerConfig(), inner.extend):
                X.tan()
                with legacy.TLSLegacyProfilerGuard(legacy.ProfilerConfig()):
                    X.cos()
                X.tanh()
            X.sin()
    assert [e.name for e in outer.function_events] == ["aten::neg", "across", "aten::sin"]
    assert outer.function_events[2].cpu_parent is outer.function_events[1]
    assert [e.name() for events in inner for e in events if e.kind() == "push"] == ["aten::tan", "aten::tanh"]


def test_view_like_operators():
    """The names that never get a device event are torch's: under CUDA, its engine fails for all others where CUDA is not."""
    if torch.cuda.is_available():
        pytest.skip("torch's engine shows what it leaves out only where it cannot record on a device")
    probes = [*legacy.VIEW_LIKE_OPERATORS, "aten::add", "aten::reshape", "a label"]
    config = torch.autograd.ProfilerConfig(
        torch.autograd.ProfilerState.CUDA, False, False, False, False, False, torch._C._profiler._ExperimentalConfig()
    )
    torch._C._autograd._enable_profiler_legacy(config)
    for name in probes:
        with torch._C._profiler._RecordFunctionFast(name):
            pass
    lists = torch._C._autograd._disable_profiler_legacy()
    recorded = {e.name() for events in lists for e in events if e.kind() == "push"}
    assert recorded == {name for name in probes if not legacy.may_have_device_event(name)}
    assert recorded == set(legacy.VIEW_LIKE_OPERATORS)
