"""When there are ranges, of what and on which thread; and what one is told where there can be none."""

from __future__ import annotations

import asyncio
import os
import re
import threading
import time

import pytest
from range_library import NVTX, Log, compiled
from threaded import in_threads

torch = pytest.importorskip("torch", minversion="2.6")

from odd_programs import Elsewhere, scripted_fork  # noqa: E402

import otel_torchprof as otp  # noqa: E402
from otel_torchprof._native import torch_ranges  # noqa: E402


def forked(tensor):
    """What jit.fork runs."""
    return torch.neg(tensor)


scripted = scripted_fork(forked)


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """A library that stands for NVTX."""
    return compiled(NVTX, tmp_path_factory.mktemp("nvtx"), "nvtx")


@pytest.fixture
def log(library, monkeypatch):
    """What arrives there, on a machine that is taken for one with CUDA."""
    monkeypatch.setenv("OTEL_TORCHPROF_NVTX_LIBRARY", str(library))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    log = Log(library)
    log.clear()
    yield log
    torch.neg(torch.ones(1))  # takes away what another test left on this thread
    assert not hasattr(otp.record_function, "__dict__") or "__enter__" not in vars(otp.record_function)


def bare(lines):
    """The names, without what stands behind them and without the marks."""
    return [line.partition(",")[0] for line in lines if not line.lstrip().startswith("!")]


def test_operators_and_labels_are_one_tree(log):
    """Operators, torch's labels and ours nest as they ran, between two marks."""
    with otp.emit_nvtx() as ranges, otp.record_function("ours"), torch.autograd.profiler.record_function("torch's"):
        torch.neg(torch.empty(2))
        ranges.mark("here")
    assert [line.partition(",")[0] for line in log.tree()] == [
        "!__start_profile",
        "ours",
        " torch's",
        "  aten::empty",
        "  aten::neg",
        "  !here",
        "!__stop_profile",
    ]


def test_python_is_never_asked_for_sizes(log):
    """A subclass that computes its sizes in Python is not called for a range, which shows none."""
    tensor = Elsewhere(torch.ones(2))
    with otp.emit_nvtx(record_shapes=True):
        asked = Elsewhere.asked
        tensor.neg()
        assert Elsewhere.asked == asked
    sizes = [line.partition("sizes = ")[2].partition(", input")[0] for line in log.tree() if "aten::neg" in line]
    assert sizes == ["[[]]", "[[2]]"]


def test_backward_functions_have_the_number_of_their_operator(log):
    """What the forward operator shows as seq, its backward function shows as stashed seq, and no other range does."""
    x = torch.ones(2, 3, requires_grad=True)
    with otp.emit_nvtx(record_shapes=True):
        y = torch.mm(x, torch.ones(3, 4))
        y.sum().backward()
    lines = log.tree()
    (forward,) = (line for line in lines if line.startswith("aten::mm, "))
    (backward,) = (line for line in lines if line.startswith(" MmBackward0"))
    number = forward.split(", ")[1].removeprefix("seq = ")
    assert f", stashed seq = {number}, op_id = " in backward
    assert ", sizes = [[2, 3], [3, 4]], input_op_ids = [(0,-1), (" in forward
    assert all("Backward0" in line for line in lines if "stashed" in line)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_sizes_that_cannot_be_told_are_empty(log):
    """Nested tensors and symbolic shapes have ranges too, with [] for their sizes; a scalar has [] as well."""
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.strided)
    with otp.emit_nvtx(record_shapes=True):
        torch.neg(nested)
        torch.neg(torch.tensor(1.0))
        torch.compile(torch.neg, dynamic=True, backend="eager")(torch.ones(3))
    sizes = [
        line.partition("sizes = ")[2].partition(", input")[0] for line in log.tree() if line.startswith("aten::neg,")
    ]
    assert sizes[:2] == ["[[]]", "[[]]"]


def test_what_is_too_long_is_cut(log):
    """A list of ten thousand tensors makes a text that ends in dots, not a missing range."""
    many = [torch.ones(1)] * 10_000
    with otp.emit_nvtx(record_shapes=True):
        torch.cat(many)
    (line,) = (line for line in log.tree() if line.startswith("aten::cat"))
    assert line.endswith("...")
    assert 65_000 < len(line) < 65_536


def test_only_this_thread_and_what_torch_carries_on_for_it(log):
    """A jit.fork has ranges on its own thread; a thread of the program's own has none, neither operators nor labels."""

    def other():
        with otp.record_function("other"):
            torch.neg(torch.ones(1))

    with otp.emit_nvtx():
        in_threads(other)
        with otp.record_function("mine"):
            scripted(torch.ones(2))
    log.wait_for(lambda counts: counts["push"] == counts["pop"])
    trees = log.trees()
    assert sorted(bare(lines)[-1].strip() for lines in trees.values()) == ["aten::neg", "forking"]
    assert len(trees) == 2
    assert not any("other" in line for lines in trees.values() for line in lines)


def test_an_operator_that_ends_elsewhere_is_ended_by_its_own_thread(log):
    """TorchScript that waits goes on in a thread of the pool; what runs here after its end is not inside it."""
    deadline = time.monotonic() + 30
    last = ""
    with otp.emit_nvtx():
        scripted(torch.ones(2))
        while last != "aten::neg":  # the pool's thread may end it a moment after it has handed the result over
            assert time.monotonic() < deadline
            torch.neg(torch.ones(1))
            last = bare(log.trees()[threading.get_native_id()])[-1]
    log.wait_for(lambda counts: counts["push"] == counts["pop"])


def test_labels_may_cross(log):
    """A label that ends before one inside it ends that one's range too, and never a range of somebody else."""
    first, second = otp.record_function("first"), otp.record_function("second")
    with otp.emit_nvtx(), otp.record_function("around"):
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        second.__exit__(None, None, None)
        torch.empty(1)
    assert bare(log.tree()) == ["around", " first", "  second", " aten::empty"]


def test_a_label_that_is_left_open_ends_with_the_ranges(log):
    """No range stays open after the block."""
    label = otp.record_function("open")
    with otp.emit_nvtx():
        label.__enter__()
    label.__exit__(None, None, None)
    assert bare(log.tree()) == ["open"]


def test_a_coroutine_that_waits_is_not_around_others(log):
    """Two that take turns are ranges of their own, each as often as it runs."""

    @otp.record_function("turn")
    async def turn():
        await asyncio.sleep(0)

    async def both():
        await asyncio.gather(turn(), turn())

    with otp.emit_nvtx():
        asyncio.run(both())
    assert bare(log.tree()) == ["turn"] * 4


def test_stopped_on_another_thread(log):
    """Leaving on another thread ends it here as well: no more ranges, and the observer is taken away."""
    ranges = otp.emit_nvtx()
    ranges.__enter__()
    torch.empty(1)
    in_threads(lambda: ranges.__exit__(None, None, None))
    torch.neg(torch.ones(1))
    assert "aten::neg" not in str(log.lines())
    with otp.emit_nvtx():
        torch.neg(torch.ones(1))
    assert "aten::neg" in str(log.lines())


def test_a_label_costs_nothing_once_it_is_over(log):
    """The class of labels has its own methods only while there are ranges."""
    plain = otp.record_function.__enter__
    with otp.emit_nvtx():
        assert otp.record_function.__enter__ is not plain
    assert otp.record_function.__enter__ is plain


def test_two_at_once_on_two_threads(log):
    """Each thread has its own; labels become ranges until the last is over."""
    entered, leave = threading.Event(), threading.Event()

    def other():
        with otp.emit_nvtx():
            entered.set()
            leave.wait(30)
            with otp.record_function("late"):
                torch.empty(1)

    thread = threading.Thread(target=other)
    with otp.emit_nvtx():
        thread.start()
        entered.wait(30)
        torch.empty(1)
    leave.set()
    thread.join()
    assert sorted(map(bare, log.trees().values())) == [["aten::empty"], ["late", " aten::empty"]]
    assert log.open == {}


def test_beside_profiles(log):
    """Our profile and torch's see the same operators whether there are ranges or not, and the ranges are whole."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with otp.profile() as ours, torch.profiler.profile(activities=activities) as theirs, otp.emit_nvtx():
        torch.neg(torch.empty(2))
    for profile in (ours, theirs):
        assert {"aten::neg", "aten::empty"} <= {event.name for event in profile.events()}
    assert bare(log.tree()) == ["aten::empty", "aten::neg"]


def test_a_forked_child_makes_none(log):
    """The child of a fork has no ranges and can leave the block; the parent goes on."""
    with otp.emit_nvtx() as ranges:
        log.clear()
        child = os.fork()
        if child == 0:
            with otp.record_function("child"):
                torch.neg(torch.ones(1))
            ranges.__exit__(None, None, None)
            os._exit(len(log.lines()))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        torch.empty(1)
    assert bare(log.tree()) == ["aten::empty"]


def test_torch_says_that_a_profiler_runs(log):
    """Code that asks torch before it labels goes on labelling."""
    with otp.emit_nvtx():
        assert torch.autograd.profiler._is_profiler_enabled
    assert not torch.autograd.profiler._is_profiler_enabled


def test_switched_off(log, monkeypatch):
    """enabled=False does nothing at all, and so does the switch of the whole package."""
    with otp.emit_nvtx(enabled=False) as ranges:
        assert ranges is None
        torch.empty(1)
    monkeypatch.setenv("OTEL_TORCHPROF_ENABLED", "false")
    with otp.emit_itt():
        torch.empty(1)
    assert log.lines() == []


def test_not_reentrant(log):
    """An object is for one use, with torch's words; a second one on the same thread is refused as torch refuses it."""
    ranges = otp.emit_nvtx()
    with ranges, pytest.raises(RuntimeError, match="Profiler is already enabled on this thread"), otp.emit_itt():
        pass
    with pytest.raises(RuntimeError, match=r"^NVTX annotation context manager is not reentrant$"), ranges:
        pass
    itt = otp.emit_itt()
    with itt, pytest.raises(RuntimeError, match=r"^ITT annotation context manager is not reentrant$"), itt:
        pass
    assert not torch.autograd.profiler._is_profiler_enabled


def test_no_more_than_sixteen(log):
    """The seventeenth thread is refused with a reason, and one that ends makes room."""
    everyone, over = threading.Barrier(17), threading.Event()

    def hold():
        with otp.emit_nvtx():
            everyone.wait(30)
            over.wait(30)

    threads = [threading.Thread(target=hold) for _ in range(16)]
    for thread in threads:
        thread.start()
    everyone.wait(30)
    with pytest.raises(otp.TorchProfError, match="16 others"), otp.emit_nvtx():
        pass
    over.set()
    for thread in threads:
        thread.join()
    with otp.emit_nvtx():
        pass


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a torch that has no device")
def test_without_cuda_it_is_torchs_error():
    """A torch without CUDA, or without a driver, says so itself, and the object can be tried again."""
    with pytest.raises((AssertionError, RuntimeError)) as theirs, torch.autograd.profiler.emit_nvtx():
        pass
    ranges = otp.emit_nvtx()
    for _ in range(2):
        with pytest.raises(theirs.type, match=re.escape(str(theirs.value))), ranges:
            pass


def test_an_error_of_the_device_on_exit_still_stops(log, monkeypatch):
    """When CUDA fails at the end the error is shown, and nothing is left running."""
    ranges = otp.emit_nvtx()
    ranges.__enter__()

    def fail():
        raise RuntimeError("device-side assert")

    monkeypatch.setattr(torch.cuda, "synchronize", fail)
    with pytest.raises(RuntimeError, match="device-side assert"):
        ranges.__exit__(None, None, None)
    log.clear()
    torch.empty(1)
    assert log.lines() == []


@pytest.mark.parametrize(("file", "why"), [("libc.so.6", "nvtxRangePushA"), ("/nowhere/nvtx.so", "No such file")])
def test_a_wrong_library_is_named(log, monkeypatch, file, why):
    """The variable, its value and what is wrong with it are in the error; nothing else is tried instead."""
    monkeypatch.setenv("OTEL_TORCHPROF_NVTX_LIBRARY", file)
    with pytest.raises(otp.TorchProfError, match=rf"OTEL_TORCHPROF_NVTX_LIBRARY='{file}'.*{why}"), otp.emit_nvtx():
        pass


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has NVTX itself, and nothing is looked for")
def test_an_installed_library_is_found(log, library, monkeypatch, tmp_path):
    """Without the variable, the packages that pip puts under nvidia/ are looked through; with none, the error lists them."""
    monkeypatch.delenv("OTEL_TORCHPROF_NVTX_LIBRARY")
    monkeypatch.setattr(torch_ranges, "_NVTX_NAMES", ("libnvtx-of-this-test.so.1",))
    with (
        pytest.raises(otp.TorchProfError, match=r"libnvtx-of-this-test.so.1 \(.*pip install nvidia-nvtx"),
        otp.emit_nvtx(),
    ):
        pass
    folder = tmp_path / "nvidia" / "nvtx" / "lib"
    folder.mkdir(parents=True)
    (folder / "libnvtx-of-this-test.so.1").symlink_to(library)
    monkeypatch.syspath_prepend(tmp_path)
    with otp.emit_nvtx():
        torch.empty(1)
    assert bare(log.tree()) == ["aten::empty"]


def test_a_torch_without_itt_is_told(monkeypatch):
    """The error says what is missing and where it is to be had."""
    monkeypatch.setattr(torch_ranges.TorchRanges, "of_torch", lambda *_, **__: None)
    with pytest.raises(otp.TorchProfError, match="built without"), otp.emit_itt():
        pass
