"""The slot that torch has for one receiver of the allocator's events per thread: who is in it, and that it is left clean."""

from __future__ import annotations

import gc
import threading

import pytest
from threaded import in_threads

torch = pytest.importorskip("torch", minversion="2.6")

from forked import in_child  # noqa: E402
from observed import torchs  # noqa: E402

import otel_torchprof as otp  # noqa: E402
from otel_torchprof._record.recording import ProfileSegment  # noqa: E402
from otel_torchprof._record.source import RecordingOptions  # noqa: E402
from otel_torchprof.errors import TorchProfError  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


def block(floats=5):
    """An allocation, freed at once."""
    torch.empty(floats)


def sizes(prof):
    """What was allocated, in floats."""
    return [size // 4 for size in prof.memory["bytes"].tolist() if size > 0]


def torchs_work():
    """Torch's profiler with memory, on this thread: starts, sees, stops."""
    with torchs(profile_memory=True) as theirs:
        block()
    return [event.cpu_memory_usage for event in theirs.events() if event.name == "aten::empty"] == [20]


def test_torchs_is_running():
    """Ours refuses to start beside torch's, says what to do, leaves nothing behind, and starts once torch's has stopped."""
    ours = otp.profile(profile_memory=True)
    with torchs(profile_memory=True) as theirs:
        with pytest.raises(
            TorchProfError, match=r"another profiler of torch's .* Stop that one first, or record without"
        ):
            ours.start()
        block()
        with otp.profile() as without:
            block()
    assert [event.cpu_memory_usage for event in theirs.events() if event.name == "aten::empty"] == [20, 20]
    assert [event.name for event in without.events()] == ["aten::empty"]
    assert not torch.autograd.profiler._is_profiler_enabled
    with ours:
        block(7)
    assert sizes(ours) == [7]


def test_ours_is_running():
    """Torch's own error comes where its profiler is second, with memory or without; ours goes on; later torch's runs."""
    for memory in (True, False):
        with otp.profile(profile_memory=True) as ours:
            block(1)
            with pytest.raises(RuntimeError, match="already enabled on this thread"):
                torchs(profile_memory=memory).start()
            block(2)
        assert sizes(ours) == [1, 2]
        assert not ours.health.notes
        assert torchs_work()


def test_torchs_is_started_again_and_again():
    """Started again after it was refused, torch's profiler takes the slot from ours: no crash, and ``health`` says so."""
    with otp.profile(profile_memory=True) as ours:
        block(1)
        for _ in range(2):
            with pytest.raises(RuntimeError):
                torchs(profile_memory=True).start()
        block(2)
        with torchs(profile_memory=True) as theirs:
            block(3)
    assert sizes(ours) == [1]
    assert [event.name for event in ours.events()].count("aten::empty") == 3
    assert [event.cpu_memory_usage for event in theirs.events() if event.name == "aten::empty"] == [12]
    assert any("memory was recorded in part only" in note for note in ours.health.notes)
    with otp.profile(profile_memory=True) as again:
        block(4)
    assert sizes(again) == [4]
    assert torchs_work()


def test_no_profiler_of_torchs_is_said_to_run():
    """To whoever asks torch, ours in the slot is no profiler of torch's."""
    with otp.profile(profile_memory=True):
        assert not torch._C._autograd._profiler_enabled()
        assert torch._C._autograd._profiler_type() == torch._C._profiler.ActiveProfilerType.NONE


def test_other_threads_are_free():
    """Torch's profiler runs with memory on another thread than ours, at the same time."""
    with otp.profile(profile_memory=True) as ours:
        block(1)
        assert in_threads(torchs_work) == [True]
    assert sizes(ours) == [1]


def test_alternating():
    """Two hundred times ours and torch's one after the other: each sees its own."""
    for _ in range(200):
        with otp.profile(profile_memory=True) as ours:
            block()
        assert sizes(ours) == [5]
    assert torchs_work()


def test_stopped_on_another_thread():
    """Ours is stopped on another thread; on the first one torch's profiler can start at once, and then ours again."""
    for _ in range(20):
        ours = otp.profile(profile_memory=True)
        ours.start()
        block(3)
        in_threads(ours.stop)
        assert sizes(ours) == [3]
        assert torchs_work()
        with otp.profile(profile_memory=True) as again:
            block(4)
        assert sizes(again) == [4]


def test_collected_instead_of_stopped():
    """A recording that nobody stops gives the slot back when it is collected."""
    ours = ProfileSegment(RecordingOptions(memory=True))
    ours.start()
    block()
    del ours
    gc.collect()
    assert torchs_work()


@pytest.mark.parametrize("order", ["abcABC", "abcCBA", "abcBAC", "abAcBC", "abBcCA", "abcACB", "abAcCB", "aAbBcC"])
@pytest.mark.parametrize("elsewhere", ["", "A", "B", "C", "AB", "ABC"])
def test_several(order, elsewhere):
    """Profiles on one thread that overlap in any way, some of them stopped elsewhere, see what lies between their ends."""
    profiles = {name: otp.profile(profile_memory=True) for name in "abc"}
    expected = {name: [] for name in "abc"}
    running = set()
    for size, move in enumerate(order, start=1):
        prof = profiles[move.lower()]
        if move.islower():
            prof.start()
        else:
            in_threads(prof.stop) if move in elsewhere else prof.stop()
        running ^= {move.lower()}
        block(size)
        for name in running:
            expected[name].append(size)
    assert {name: sizes(prof) for name, prof in profiles.items()} == expected
    assert torchs_work()


def test_each_has_its_own_thread():
    """A profile that another thread starts sees that thread's memory and not ours, and ours not that one's."""
    go_on, started = threading.Event(), threading.Event()

    def body():
        with otp.profile(profile_memory=True) as theirs:
            started.set()
            block(8)
            assert go_on.wait(60)
        return sizes(theirs)

    found = []
    with otp.profile(profile_memory=True) as ours:
        thread = threading.Thread(target=lambda: found.append(body()))
        thread.start()
        assert started.wait(60)
        block(9)
        go_on.set()
        thread.join()
    assert (sizes(ours), found) == ([9], [[8]])


def test_all_threads_sees_memory_where_it_started():
    """With ``all_threads`` operators of other threads come without their memory, and ``health`` says so."""
    with otp.profile(all_threads=True, profile_memory=True) as prof:
        in_threads(lambda: block(6))
        block(7)
    assert sorted(event.name for event in prof.events() if event.name != "[memory]") == ["aten::empty"] * 2
    assert sizes(prof) == [7]
    assert any("memory is recorded on the thread that started the profile" in note for note in prof.health.notes)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_fork():
    """A child is off and its slot free: torch's profiler and ours run there; the parent goes on."""

    def child():
        block(1)
        works = torchs_work()
        with otp.profile(profile_memory=True) as own:
            block(2)
        return works, sizes(own), torchs_work()

    with otp.profile(profile_memory=True) as prof:
        block(3)
        said = in_child(child)
        block(4)
    assert said.endswith("(True, [2], True)"), said
    assert sizes(prof) == [3, 4]
