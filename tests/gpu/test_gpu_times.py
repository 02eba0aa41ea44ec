"""Times of a GPU beside those of torch.profiler's kernels, for the same programs on the same GPU."""

from __future__ import annotations

import statistics
import threading

import findings
import numpy as np
import programs
import pytest
import torch
from measuring import OF_A_KERNEL, REPETITIONS, Gpu, agree, allowed, require, torch_profile

import otel_torchprof as otp
from otel_torchprof._model.devices import drained_between
from otel_torchprof._native.recorder import now_ns

LONG_MS, SHORT_MS = 200.0, 20.0
"""What keeps a stream busy while a step, or a few operators, are asked for."""

SIZE = 1024
"""Of the matrices, or half of theirs: a product of two takes longer than asking for it."""

EARLIEST = 0.0
"""Microseconds after it was asked for before which a device cannot have begun with it."""

REPLAY = "torch.cuda.CUDAGraph.replay"


@pytest.fixture(scope="module")
def gpu():
    return Gpu()


def works(prof, name):
    """What a device did for each event of a name, in order; None for one without marks."""
    return [event.device_work for event in prof.events() if event.name == name]


@pytest.mark.parametrize(
    ("program", "ms", "repetitions"),
    [
        (programs.products, SHORT_MS, REPETITIONS),
        (programs.convolutions, SHORT_MS, REPETITIONS),
        (programs.copies, SHORT_MS, REPETITIONS),
        (programs.transformer_step, LONG_MS, REPETITIONS // 2),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_durations(gpu, program, ms, repetitions):
    """On a stream that is full an operator takes as long as its kernels do by torch.profiler, whoever measures first."""
    agree(gpu, program.__name__.replace("_", " "), program(gpu.device), ms, repetitions)


def test_two_streams(gpu):
    """Operators on two streams have the time and the stream of their own."""
    a = torch.randn(2 * SIZE, 2 * SIZE, device=gpu.device)
    one, other = torch.cuda.Stream(), torch.cuda.Stream()

    def program():
        # One after the other on the device too: what runs at the same time slows each other.
        for stream, before in ((one, torch.cuda.current_stream()), (other, one)):
            stream.wait_stream(before)
            with torch.cuda.stream(stream):
                torch.mm(a, a)
        torch.cuda.current_stream().wait_stream(other)

    agree(gpu, "two streams", program, SHORT_MS)
    with otp.profile(use_device=gpu.device) as prof:
        program()
    assert [work.stream for work in works(prof, "aten::mm")] == [one.stream_id, other.stream_id]


@pytest.mark.parametrize("own", [True, False], ids=["own streams", "one stream"])
def test_two_threads(gpu, own):
    """Two threads at once have all their operators timed, on the streams that they used, none of them too short."""
    a = torch.randn(SIZE, SIZE, device=gpu.device)
    alone = statistics.median(seen.duration for seen in gpu.kernels(lambda: [torch.mm(a, a) for _ in range(50)]))
    streams = [torch.cuda.Stream() if own else torch.cuda.default_stream() for _ in range(2)]

    def work(stream):
        with torch.cuda.stream(stream):
            for _ in range(500):
                torch.mm(a, a)

    with otp.profile(use_device=gpu.device, all_threads=True) as prof:
        threads = [threading.Thread(target=work, args=[stream]) for stream in streams]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert prof.health.devices == "on", prof.health.devices
    found = works(prof, "aten::mm")
    assert len(found) == 1000
    assert {one.stream for one in found} == {stream.stream_id for stream in streams}
    assert min(one.duration for one in found) > 0.8 * alone - 3


def test_backward(gpu):
    """Operators of the backward pass, on autograd's own thread, take as long as their kernels."""
    layer = torch.nn.Linear(2 * SIZE, 2 * SIZE).to(gpu.device)
    data = torch.randn(2 * SIZE, 2 * SIZE, device=gpu.device, requires_grad=True)
    agree(gpu, "backward", lambda: layer(data).relu().sum().backward(), SHORT_MS)


def captured(a, mode="global"):
    """A graph of five products, and where its result is."""
    graph, out = torch.cuda.CUDAGraph(), a
    with torch.cuda.graph(graph, capture_error_mode=mode):
        for _ in range(5):
            out = torch.mm(out, a)
    return graph, out


def test_graphs(gpu):
    """A capture is as without a profile, nothing of it is timed, and a replay is one event with the time of its kernels."""
    a = torch.eye(2 * SIZE, device=gpu.device)
    captured(a)
    with otp.profile(use_device=gpu.device) as prof:
        graph, out = captured(a)
        for _ in range(REPETITIONS):
            gpu.wait()
            gpu.saturate(SHORT_MS)
            graph.replay()
        gpu.wait()
    assert torch.equal(out, a)
    assert prof.health.devices == "on", prof.health.devices
    assert any("captured" in note for note in prof.health.notes), prof.health.notes
    assert set(works(prof, "aten::mm")) == {None}
    replays = works(prof, REPLAY)
    assert len(replays) == REPETITIONS
    kernels = [
        event
        for event in gpu.torch_events(lambda: [graph.replay() for _ in range(REPETITIONS)])
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    theirs = sum(event.time_range.elapsed_us() for event in kernels) / REPETITIONS
    ours = statistics.median(one.duration for one in replays)
    found = findings.Finding("replay of a graph", "5 x aten::mm", ours, theirs, allowed(theirs, OF_A_KERNEL))
    findings.rows.append(found)
    require([found])


def test_a_profile_within_a_capture(gpu):
    """A profile that begins and ends while its stream is captured leaves the capture whole, and says what it did not time."""
    a = torch.eye(256, device=gpu.device)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    gpu.wait()
    with torch.cuda.stream(stream):
        graph.capture_begin()
        with otp.profile(use_device=gpu.device) as prof:
            out = torch.mm(a, a)
        graph.capture_end()
    out.zero_()
    graph.replay()
    gpu.wait()
    assert torch.equal(out, a)
    assert prof.health.devices == "on", prof.health.devices
    assert works(prof, "aten::mm") == [None]
    assert any("captured" in note for note in prof.health.notes), prof.health.notes


@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
def test_capture_beside_other_threads(gpu, mode):
    """A capture in any of torch's modes is whole while another thread's operators are timed."""
    a = torch.eye(256, device=gpu.device)
    ended = threading.Event()

    def work():
        out = torch.empty_like(a)
        with torch.cuda.stream(torch.cuda.Stream()):
            while not ended.is_set():
                torch.add(a, a, out=out)  # allocates nothing, which CUDA's strictest mode forbids all threads

    with otp.profile(use_device=gpu.device, all_threads=True) as prof:
        thread = threading.Thread(target=work)
        thread.start()
        try:
            graphs = [captured(a, mode) for _ in range(20)]
        finally:
            ended.set()
            thread.join()
    assert prof.health.devices == "on", prof.health.devices
    for graph, out in graphs:
        out.zero_()
        graph.replay()
        assert torch.equal(out, a)


def test_compiled_with_graphs(gpu):
    """A model compiled with graphs of its own runs under a profile as without, and the profile has its replays."""
    pytest.importorskip("triton", reason="torch.compile makes kernels for GPUs with triton, which is not installed")
    torch.compiler.reset()
    model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 256)).to(gpu.device)
    compiled = torch.compile(model, mode="reduce-overhead")
    data = torch.randn(64, 256, device=gpu.device)
    with torch.no_grad(), otp.profile(use_device=gpu.device) as prof:
        expected = model(data)
        for _ in range(6):
            torch.compiler.cudagraph_mark_step_begin()
            found = compiled(data).clone()
    assert prof.health.devices == "on", prof.health.devices
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)
    replays = works(prof, REPLAY)
    assert replays
    assert all(one is not None and one.duration > 0 for one in replays)


def test_memory_beside_times(gpu):
    """With memory and times at once an operator has both: the bytes that it allocated and how long it took."""
    a = torch.randn(SIZE, SIZE, device=gpu.device)
    torch.mm(a, a)  # what a library keeps for itself it has from now on
    with otp.profile(use_device=gpu.device, profile_memory=True) as prof:
        kept = torch.mm(a, a)
    (event,) = [event for event in prof.events() if event.name == "aten::mm"]
    size = kept.numel() * kept.element_size()
    assert size <= event.device_memory_usage <= size + (2 << 20), "as much as was asked for, or rounded up"
    assert event.device_time_total > 0


def test_timeline(gpu):
    """On a full stream an operator's time lies where its first kernel is by torch.profiler, within 20 us, in the same run.

    Only one run can be asked where on the clock it was; what torch.profiler adds to it moves both.
    """
    a = torch.randn(SIZE, SIZE, device=gpu.device)
    gpu.torch_events(lambda: torch.mm(a, a))
    with torch_profile() as theirs, otp.profile(use_device=gpu.device) as prof:
        gpu.saturate(SHORT_MS)
        for _ in range(100):
            torch.mm(a, a)
        gpu.wait()
    kernels = sorted(
        event.start_ns()
        for event in theirs.profiler.kineto_results.events()
        if event.device_type() == torch.autograd.DeviceType.CUDA and "spin_kernel" not in event.name()
    )
    batch, devices = prof.columns, prof.devices
    starts = sorted(int(value) for value in devices["start"])
    assert len(starts) == len(kernels) == 100
    apart = [(ours - kernel) / 1e3 for ours, kernel in zip(starts, kernels, strict=True)]
    worst = max(apart, key=abs)
    findings.rows.append(findings.Finding("start on the CPU's clock", "100 x aten::mm, the worst", worst, 0.0, 20.0))
    begins = {int(event): int(start) for event, start in zip(batch["id"], batch["start"], strict=True)}
    early = min(
        int(start) - begins[int(event)] for event, start in zip(devices["event"], devices["start"], strict=True)
    )
    findings.notes.append(
        f"full stream: the earliest of 100 operators began {early / 1e3:.2f} us after it was asked for"
    )
    assert abs(worst) <= 20
    assert early / 1e3 >= EARLIEST


@pytest.mark.parametrize("is_full", [True, False], ids=["full", "empty"])
def test_who_waits_for_whom(gpu, is_full):
    """A stream that is full never waits for the host, and one that does each operator at once waits nearly all the time."""
    a = torch.randn(64, 64, device=gpu.device)
    torch.mm(a, a)
    with otp.profile(use_device=gpu.device) as prof:
        if is_full:
            gpu.saturate(SHORT_MS)
        for _ in range(300):
            torch.mm(a, a)
            if not is_full:
                gpu.wait()
        last = now_ns()
        gpu.wait()
    first = int(prof.columns["start"].min())
    (waited,) = drained_between(prof._batch(), np.array([first]), np.array([last]))
    share = float(waited) / (last - first)
    findings.notes.append(
        f"{'full stream' if is_full else 'stream without work'}: the device waits for {share:.0%} of the time"
    )
    assert share < 0.05 if is_full else share > 0.5


def test_never_before_it_was_asked_for(gpu):
    """On a stream without work no operator begins on the device before it does on the host."""
    a = torch.randn(64, 64, device=gpu.device)
    with otp.profile(use_device=gpu.device) as prof:
        for _ in range(500):
            gpu.wait()
            torch.mm(a, a)
    delays = [event.device_work.start - event.time_range.start for event in prof.events() if event.name == "aten::mm"]
    findings.notes.append(
        f"stream without work: from the operator's begin to its mark on the device {min(delays):.2f} us at least, "
        f"{statistics.median(delays):.2f} us in the middle"
    )
    assert min(delays) >= EARLIEST
