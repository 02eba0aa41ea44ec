"""What the tests on a GPU measure with, tried without one: our side on the simulated device, torch's as it would tell."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "gpu"))

import findings  # noqa: E402 - found by the line before
import measuring  # noqa: E402 - likewise
import programs  # noqa: E402 - likewise
import test_gpu_times  # noqa: E402 - likewise

import otel_torchprof as otp  # noqa: E402 - likewise

pytestmark = pytest.mark.simulated_device

DEVICE = "privateuseone"
LAUNCHING = {"aten::mm", "aten::bmm", "aten::addmm", "aten::copy_", "aten::convolution_overrideable"}


class SimulatedGpu(measuring.Gpu):
    """The simulated device in a GPU's place; ``longer`` is what torch.profiler's kernels take beyond ours."""

    device = DEVICE

    def __init__(self, simulated, longer=0.0):
        self.simulated = simulated
        self.longer = longer

    def saturate(self, ms):
        self.simulated.manual()
        self.simulated.kernel("busy")

    def wait(self):
        self.simulated.complete_all()
        self.simulated.instant()

    def kernels(self, work):
        return [
            one._replace(
                duration=one.duration + self.longer if one.name in LAUNCHING and one.duration else 0.0,
                room=measuring.OF_A_KERNEL,
            )
            for one in self.marks(work)
        ]


@pytest.fixture
def rows(monkeypatch):
    """The table, empty."""
    monkeypatch.setattr(findings, "rows", [])
    monkeypatch.setattr(findings, "notes", [])
    return findings


SMALL = {
    "products": lambda: programs.products(DEVICE, 8),
    "copies": lambda: programs.copies(DEVICE, 1),
    "transformer step": lambda: programs.transformer_step(DEVICE, 16, 4, 2),
}


@pytest.mark.parametrize("name", SMALL)
def test_programs_are_the_same_every_time(simulated, rows, name):
    """Every program has the same operators in each repetition, and its times agree where both tell the same."""
    gpu = SimulatedGpu(simulated)
    measuring.agree(gpu, name, SMALL[name](), 1.0, repetitions=4)
    assert {row.what for row in rows.rows} == {f"{name}, ours first", f"{name}, torch's first"}
    assert all(row.holds for row in rows.rows)


def test_what_differs_is_found(simulated, rows):
    """Times that are further apart than allowed fail, by name, and are in the table as such."""
    gpu = SimulatedGpu(simulated, longer=7.5)
    with pytest.raises(AssertionError, match=r"aten::mm, no\. 1"):
        measuring.agree(gpu, "products", SMALL["products"](), 1.0, repetitions=4)
    text = findings.markdown({"GPUs": "none"})
    assert text.startswith("- GPUs: none\n\n| what | of |")
    assert text.count("**does not hold**") == len(rows.rows) == 6


def test_what_was_not_marked_is_found(rows):
    """An operator that torch.profiler saw kernels of and that has no marks fails."""
    with pytest.raises(AssertionError, match="no time of"):
        measuring.compare("products", {}, {("aten::mm", 0): 5.0}, {("aten::mm", 0): 4.0})


def small(monkeypatch):
    """Work as small as the CPU's, and no word on who was early: a machine with other work reads its clocks late."""
    monkeypatch.setattr(test_gpu_times, "SHORT_MS", 1.0)
    monkeypatch.setattr(test_gpu_times, "SIZE", 8)
    monkeypatch.setattr(test_gpu_times, "EARLIEST", -1e9)


def test_kernels_are_those_of_the_operator_and_below():
    """Of torch.profiler's events an operator has the kernels of all that is inside of it; kernels and labels are no operators."""
    from torch.autograd import DeviceType
    from torch.autograd.profiler_util import FunctionEvent

    def event(name, start, device=DeviceType.CPU):
        return FunctionEvent(len(events), name, 0, start, start + 10, device_type=device, use_device="cuda")

    events = []
    outer, inner, label, kernel = (
        event("aten::linear", 0),
        event("aten::addmm", 1),
        event("label", 2),
        event("gemm", 3, DeviceType.CUDA),
    )
    outer.append_cpu_child(inner)
    inner.append_kernel("gemm", 0, 7.0)
    inner.append_kernel("bias", 0, 2.0)
    label.append_kernel("gemm", 0, 7.0)

    class Told(measuring.Gpu):
        def __init__(self):
            pass

        def torch_events(self, work):
            return [inner, outer, label, kernel]

    seen = Told().kernels(lambda: None)
    assert measuring.medians(seen, 1) == {("aten::linear", 0): 9.0, ("aten::addmm", 0): 9.0}
    rooms = measuring.medians(seen, 1, of="room")
    assert rooms == dict.fromkeys(rooms, 2 * measuring.OF_A_KERNEL), "one for each kernel"


@pytest.mark.parametrize("name", ["test_backward", "test_memory_beside_times", "test_never_before_it_was_asked_for"])
def test_tests_of_one_stream_hold_here(simulated, rows, monkeypatch, name):
    """What asks nothing of CUDA alone holds on the simulated device too, so what it asks of us is there."""
    small(monkeypatch)
    gpu = SimulatedGpu(simulated)
    if "before" in name:
        simulated.automatic()
        monkeypatch.setattr(gpu, "wait", torch.accelerator.synchronize)
    getattr(test_gpu_times, name)(gpu)


@pytest.fixture
def as_cuda(simulated, monkeypatch):
    """What the tests ask of ``torch.cuda``, from the simulated device."""

    class Graph:
        def capture_begin(self):
            self.capture = simulated.capture()
            self.capture.__enter__()

        def capture_end(self):
            self.capture.__exit__(None, None, None)

        def replay(self):
            for _ in range(5):
                simulated.kernel("aten::mm")

    @contextlib.contextmanager
    def capturing(graph, **options):
        graph.capture_begin()
        yield
        graph.capture_end()

    fakes = {
        "Stream": simulated.new_stream,
        "stream": simulated.stream,
        "current_stream": torch.privateuseone.current_stream,
        "default_stream": torch.privateuseone.current_stream,
        "CUDAGraph": Graph,
        "graph": capturing,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    small(monkeypatch)
    return SimulatedGpu(simulated)


@pytest.mark.parametrize("own", [True, False])
def test_tests_of_streams_hold_here(as_cuda, rows, own):
    """Two streams, and two threads on two streams or one, hold on the simulated device."""
    test_gpu_times.test_two_threads(as_cuda, own)
    test_gpu_times.test_two_streams(as_cuda)


def test_test_of_graphs_holds_here(as_cuda, rows, monkeypatch):
    """A graph whose replay takes as long as torch.profiler's kernels holds, and one that takes twice as long does not."""
    from torch.autograd import DeviceType
    from torch.autograd.profiler_util import FunctionEvent

    def kernels(each):
        count = 5 * measuring.REPETITIONS
        return lambda work: [
            FunctionEvent(i, "gemm", 0, i * each, (i + 1) * each, device_type=DeviceType.CUDA) for i in range(count)
        ]

    monkeypatch.setattr(as_cuda, "torch_events", kernels(5.0), raising=False)
    test_gpu_times.test_graphs(as_cuda)
    monkeypatch.setattr(as_cuda, "torch_events", kernels(10.0))
    with pytest.raises(AssertionError, match=r"5 x aten::mm: 25\.00 us, by torch 50\.00 us"):
        test_gpu_times.test_graphs(as_cuda)


def test_timeline_is_compared_by_the_clock(simulated, rows, monkeypatch):
    """A timeline that is 19 us away from torch.profiler's kernels holds, and one that is 21 us away does not."""
    small(monkeypatch)
    made = []

    class Told:
        """Torch's profiler, which tells of a kernel so long after each mark."""

        def __init__(self, apart_ns):
            self.apart = apart_ns
            self.profiler = self.kineto_results = self

        def __enter__(self):
            return self

        def __exit__(self, *error):
            pass

        def events(self):
            return [Kernel(int(start) + self.apart) for start in made[-1].devices["start"]] if made else []

    class Kernel:
        def __init__(self, start):
            self.start_ns = lambda: start
            self.device_type = lambda: torch.autograd.DeviceType.CUDA
            self.name = lambda: "gemm"

    original = otp.profile
    monkeypatch.setattr(otp, "profile", lambda **options: made.append(original(**options)) or made[-1])
    gpu = SimulatedGpu(simulated)
    monkeypatch.setattr(gpu, "torch_events", lambda work: [], raising=False)
    simulated.automatic()
    monkeypatch.setattr(gpu, "wait", torch.accelerator.synchronize)
    monkeypatch.setattr(gpu, "saturate", lambda ms: simulated.kernel("busy"))
    monkeypatch.setattr(test_gpu_times, "torch_profile", lambda: Told(19_000))
    test_gpu_times.test_timeline(gpu)
    monkeypatch.setattr(test_gpu_times, "torch_profile", lambda: Told(21_000))
    with pytest.raises(AssertionError):
        test_gpu_times.test_timeline(gpu)


def test_repetitions_that_differ_are_found():
    """An operator that is not in every repetition fails, since nothing could be set against it."""
    seen = [measuring.Seen("aten::mm", float(i), 1.0) for i in range(5)]
    with pytest.raises(AssertionError, match="5 times aten::mm in 2 repetitions"):
        measuring.medians(seen, 2)


def test_filling_the_page(tmp_path):
    """The table goes between the two marks of the page, again and again; a page without them is refused."""
    page = tmp_path / "measurements.md"
    page.write_text((ROOT / "docs" / "measurements.md").read_text())
    before = page.read_text().partition(findings.BEGIN)[0]
    for text in ("first\n", "second\n"):
        findings.fill(page, text)
    assert page.read_text().startswith(before)
    assert "second" in page.read_text()
    assert "first\n\n<!--" not in page.read_text()
    page.write_text("nothing")
    with pytest.raises(ValueError, match="one of them is missing"):
        findings.fill(page, "text")


def test_without_a_gpu_the_tests_say_why():
    """Where there is no GPU every test is skipped with the reason, and nothing is measured or written."""
    if torch.cuda.is_available():
        pytest.skip("here is a GPU")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", "tests/gpu"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        env={key: value for key, value in os.environ.items() if key != "SIMULATED_DEVICE_REPORTS"},
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert "was built for no GPU" in done.stdout or "no GPU:" in done.stdout
    assert " passed" not in done.stdout
