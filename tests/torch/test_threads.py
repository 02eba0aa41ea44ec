"""Which threads a profile sees, what ends on another thread than it began on, and what is left behind when it stops."""

from __future__ import annotations

import gc
import sys
import threading
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
from threaded import in_threads

torch = pytest.importorskip("torch", minversion="2.6")

from followed_calls import is_followed  # noqa: E402
from observed import callbacks, info, recorded_names, run, torchs  # noqa: E402
from odd_programs import ended_by_future, left_elsewhere, misnested  # noqa: E402

import otel_torchprof as otp  # noqa: E402
from otel_torchprof._native import recorder  # noqa: E402

X = torch.ones(3)


@pytest.fixture(autouse=True)
def _nothing_is_left_behind():
    """No test here leaves an observer at torch."""
    yield
    gc.collect()
    X.neg()  # lets one that was stopped on another thread take itself away
    assert callbacks() == (False, False)


def test_observers_are_registered_while_recording_only():
    """Off is free: torch has our observer between start and stop, and at no other time."""
    for all_threads in (False, True):
        prof = otp.profile(all_threads=all_threads)
        assert callbacks() == (False, False)
        with prof:
            assert callbacks() == (all_threads, not all_threads)
        assert callbacks() == (False, False)


def test_other_threads_are_not_seen():
    """By default, operators of a thread that torch does not know to belong here are not recorded, as in torch."""
    with otp.profile() as ours:
        run(lambda: in_threads(X.neg))
    assert recorded_names(ours) == ["## step ##"]


@pytest.mark.parametrize("start", [in_threads, lambda body: ThreadPoolExecutor(1).submit(body).result()])
def test_all_threads_are_seen(start):
    """all_threads=True records plain threads and pools, also with a second profile of this thread beside it."""
    with otp.profile(all_threads=True) as everywhere, otp.profile() as here:
        run(lambda: start(X.neg))
        X.tan()
    assert sorted(recorded_names(everywhere)) == ["## step ##", "aten::neg", "aten::tan"]
    assert recorded_names(here) == ["## step ##", "aten::tan"]
    assert len({event.thread for event in everywhere.events()}) == 2


def test_backward_on_a_thread_of_the_engine_is_seen():
    """A backward pass that is started here belongs to this profile; one that another thread starts does not."""
    weight = torch.ones(3, requires_grad=True)
    with otp.profile() as ours:
        weight.sum().backward()
        in_threads(lambda: weight.prod().backward())
    assert "SumBackward0" in recorded_names(ours)
    assert "ProdBackward0" not in recorded_names(ours)


def _forked(x: torch.Tensor, n: int) -> torch.Tensor:
    for _ in range(n):
        x = x + 1.0
    return x


@pytest.fixture(scope="module")
def forks():
    """A TorchScript function that forks ``n`` additions and waits for them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's, of TorchScript
        forked = torch.jit.script(_forked)

        @torch.jit.script
        def function(x: torch.Tensor, n: int) -> torch.Tensor:
            return torch.jit.wait(torch.jit.fork(forked, x, n))

    for _ in range(3):
        function(X, 1)
    return function


def test_a_callback_in_a_running_fork_records_nothing_after_the_stop(forks):
    """A fork that still runs when the profile stops adds nothing to it, nor to the profile of another thread that follows."""
    first, second = otp.profile(), otp.profile()
    running = threading.Event()

    def start_forking():
        first.start()
        running.set()
        forks(X, 500_000)

    thread = threading.Thread(target=start_forking)
    thread.start()
    running.wait()
    while first.health.memory_bytes < 1 << 17:  # until the fork has begun to record
        pass
    first.stop()
    with second:
        X.neg()
    assert thread.is_alive()
    assert recorded_names(second) == ["aten::neg"]
    thread.join()
    assert (first.columns["end"] <= first.health.stop_ns).all()
    assert 0 < recorded_names(first).count("aten::add") < 1_000_000


def test_two_threads_profile_themselves():
    """Profiles that run at the same time on two threads see their own operators each, and none of the other's."""
    barrier = threading.Barrier(2)
    seen = {}

    def work(name):
        barrier.wait()
        with otp.profile() as prof:
            barrier.wait()
            for _ in range(50):
                getattr(X, name)()
            barrier.wait()
        seen[name] = recorded_names(prof)

    other = threading.Thread(target=work, args=("neg",))
    other.start()
    work("tan")
    other.join()
    assert seen == {"tan": ["aten::tan"] * 50, "neg": ["aten::neg"] * 50}


@pytest.mark.parametrize("all_threads", [False, True])
def test_starts_and_stops_in_any_order(all_threads):
    """Nested and overlapping profiles on one thread each have exactly what ran between their start and stop."""
    a, b, c = (otp.profile(all_threads=all_threads) for _ in range(3))
    a.start()
    X.neg()
    b.start()
    X.tan()
    c.start()
    X.sin()
    a.stop()
    X.cos()
    c.stop()
    X.exp()
    b.stop()
    X.log()
    assert [recorded_names(prof) for prof in (a, b, c)] == [
        ["aten::neg", "aten::tan", "aten::sin"],
        ["aten::tan", "aten::sin", "aten::cos", "aten::exp"],
        ["aten::sin", "aten::cos"],
    ]


def test_stop_on_another_thread(capfd):
    """A profile may be stopped on another thread: its data is right, torch says nothing, and the next operator clears up."""
    prof = otp.profile()
    prof.start()
    X.neg()
    in_threads(prof.stop)
    assert callbacks() == (False, True)
    X.tan()
    assert callbacks() == (False, False)
    assert recorded_names(prof) == ["aten::neg"]
    assert capfd.readouterr().err == ""


def test_stop_within_an_operator():
    """An operator that is open at the stop ends there, marked unfinished; the next profile is not disturbed."""
    prof = otp.profile()

    class Stops(torch.autograd.Function):
        @staticmethod
        def forward(context, x):
            prof.stop()
            return x * 2

    prof.start()
    Stops.apply(X)
    X.neg()
    assert recorded_names(prof) == ["Stops"]
    assert prof.columns["flags"].tolist() == [2]
    with otp.profile() as after:
        X.neg()
    assert after.columns["parent"].tolist() == [-1]


def test_start_within_an_operator():
    """What is open at the start is not recorded; what begins inside has no parent."""
    prof = otp.profile()

    class Starts(torch.autograd.Function):
        @staticmethod
        def forward(context, x):
            prof.start()
            return x.neg()

    Starts.apply(X)
    prof.stop()
    assert recorded_names(prof) == ["aten::neg"]


def test_a_thread_of_torch_is_not_named_after_a_dead_one():
    """An ident that a Python thread had before is no reason to give its name to a thread of torch's."""
    done, go_on = threading.Event(), threading.Event()
    worker = threading.Thread(target=lambda: (X.neg(), done.set(), go_on.wait()), name="a worker")
    with otp.profile(all_threads=True) as first:
        worker.start()
        done.wait()
    go_on.set()
    worker.join()
    assert "a worker" in [thread.name for thread in first.threads]
    dead = next(thread for thread in first.threads if thread.name == "a worker")
    assert recorder._thread_names.get(dead.ident, dead.os_tid, "system") == "a worker"
    assert recorder._thread_names.get(dead.ident, dead.os_tid + 1, "system") == "system"


def test_more_than_sixteen_at_a_time():
    """The seventeenth profile that runs at the same time is refused by name; the sixteen have all they should."""
    profiles = [otp.profile() for _ in range(16)]
    for prof in profiles:
        prof.start()
    with pytest.raises(otp.NativeError, match="starting a recording"):
        otp.profile().start()
    X.neg()
    for prof in profiles:
        prof.stop()
    assert [recorded_names(prof) for prof in profiles] == [["aten::neg"]] * 16


@pytest.mark.parametrize("in_a_cycle", [False, True])
def test_profile_that_is_dropped_takes_everything_back(in_a_cycle):
    """A running profile that is collected instead of stopped leaves no profile function, hook or flag behind."""

    def drop():
        dropped = otp.profile(
            with_stack=True, with_modules=True, profile_memory=True, record_shapes=True, all_threads=True
        )
        dropped.start()
        dropped.itself = dropped if in_a_cycle else None

    drop()
    gc.collect()
    assert sys.getprofile() is None
    assert threading.getprofile() is None
    assert torch.autograd.profiler._is_profiler_enabled is False
    assert not torch.autograd._profiler_enabled()
    assert not is_followed(torch.nn.Module._call_impl)
    with torch.profiler.profile(profile_memory=True) as other:
        torch.ones(3)
    assert any(event.name == "aten::ones" for event in other.events())


@pytest.mark.parametrize("read", [False, True])
@pytest.mark.parametrize("arguments", [{}, {"schedule": lambda _: otp.ProfilerAction.RECORD}, {"record_shapes": True}])
def test_a_profile_that_has_ended_goes_with_its_last_reference(arguments, read):
    """What it has recorded is freed where the program drops it, not when the garbage collector next comes by."""
    with otp.profile(**arguments) as first:  # what is made with the first profile of a process stays
        torch.ones(1)
    with otp.profile(**arguments) as second:
        torch.ones(1)
        second.step()
    if read:
        second.key_averages()
    reference = weakref.ref(second)
    gc.disable()
    try:
        del second, first
        assert reference() is None
    finally:
        gc.enable()


# ---- operators and labels of torch that end on another thread ----


def fast():
    """The label that dynamo's generated code uses."""
    with torch._C._profiler._RecordFunctionFast("fast", [X], {"key": 1}):
        X.neg()


def through_the_dispatcher():
    """The operators behind record_function, used directly."""
    record = torch.ops.profiler._record_function_enter_new("by hand", None)
    X.neg()
    torch.ops.profiler._record_function_exit._RecordFunction(record)


@pytest.mark.parametrize("body", [ended_by_future, fast, through_the_dispatcher, left_elsewhere, misnested])
def test_what_ends_elsewhere_is_as_in_torchs_profiler(body):
    """The same tree and the same asynchronous events as in torch's profiler."""
    body()
    with otp.profile() as ours, torchs() as theirs:
        run(body)
    assert info(ours.events()) == info(theirs.events())


def test_an_end_on_another_thread_says_where():
    """The columns name the thread that ended an event, and flag the event as asynchronous."""
    with otp.profile() as ours:
        ended_by_future()
    row = [ours.names[name] for name in ours.columns["name"]].index("until the future")
    assert ours.columns["flags"][row] == 1
    began, ended = (ours.threads[ours.columns[column][row]] for column in ("thread", "end_thread"))
    assert began.ident == threading.get_ident() != ended.ident
    assert (ours.columns["end"] > 0).all()
