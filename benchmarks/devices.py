"""What the times of a device add to one operator on the host: to the asking, not to the work.

On a GPU beside torch's profiler with the GPU's activity and torch's legacy engine, on a stream without work and on one that
has some all the while; then a training step. Without a GPU on the device that the tests simulate, where what a device's
library takes for a mark is next to nothing and only our own part shows.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import statistics
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from harness import OURS, Recorder, Row, Settings, against_nothing, in_abba, rows, timed
from recorders import empty_callback, ours, quietly
from workloads import gpt2_step

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_WARM_UP, _COUNT = 50, 200
_BLOCKS = 5
_ROUNDS, _STEP_ROUNDS = 100, 20
_BUSY_MS = 10
KINETO_GPU = "Kineto, CPU and CUDA"
LEGACY = "torch's legacy engine, use_cuda"
_EVENTS = ("off", "labels", "ops", "all")


def measure(settings: Settings) -> list[Row]:
    """On a GPU where there is one, else on the simulated device, with rows that say what is left out."""
    return _on_gpu(settings) if torch.cuda.is_available() else _simulated(settings)


def _on_gpu(settings: Settings) -> list[Row]:
    table: list[Row] = []
    peers = {KINETO_GPU: kineto_gpu, LEGACY: legacy}
    for state in ("a stream without work", "a busy stream"):
        busy = _keep_busy if state == "a busy stream" else _wait
        added = against_nothing(_run("cuda", busy), {**_ours("cuda"), **peers}, settings.rounds_or(_ROUNDS))
        table += rows(f"one operator on a GPU, {state}", "ns", added)
    step = gpt2_step("cuda")
    for _ in range(5):
        step()

    def run(recorder: Recorder) -> float:
        with recorder():
            step()
            _wait()
            return timed(lambda: (step(), _wait()))

    contestants = {**_ours("cuda"), **peers}
    added = in_abba(run, contestants, settings.rounds_or(_STEP_ROUNDS), percent=True)
    return [*table, *rows("GPT-2 training step on a GPU, added time", "%", added)]


def _simulated(settings: Settings) -> list[Row]:
    sys.path.append(str(Path(__file__).resolve().parent.parent / "tests" / "helpers"))
    from simulated_device import device

    simulated = device()
    simulated.reset()
    simulated.duration(0)
    name, why = simulated.name, "no GPU here"
    added = against_nothing(_run(name, simulated.complete_all), _ours(name), settings.rounds_or(_ROUNDS // 2))
    marks = [_marks(simulated)]
    return [
        *rows("one operator on the simulated device", "ns", added),
        *rows("two marks of that, by the simulated device itself", "ns", {"the device": marks}),
        *(Row("one operator on a GPU", who, (), "", absent=why) for who in (OURS, KINETO_GPU, LEGACY)),
        Row("GPT-2 training step on a GPU, added time", OURS, (), "", absent=why),
    ]


def _marks(simulated: Any) -> float:
    """What recording two events costs with the simulated device, which is none of ours."""
    events = [torch.Event(device=simulated.name, enable_timing=True) for _ in range(2)]
    stream = torch.accelerator.current_stream()

    def both() -> None:
        for _ in range(1000):
            events[0].record(stream)
            events[1].record(stream)

    return statistics.median(timed(both, 1000) for _ in range(_BLOCKS))


def _ours(device: str) -> dict[str, Recorder]:
    found: dict[str, Recorder] = {"empty callback": functools.partial(empty_callback, shapes=False)}
    found[OURS] = ours
    for events in _EVENTS:
        found[f"{OURS}, use_device, device_events={events}"] = functools.partial(
            ours, use_device=device, device_events=events
        )
    return found


@contextlib.contextmanager
def kineto_gpu() -> Iterator[Any]:
    """Torch's own profiler, of the CPU and the GPU."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    profiler = torch.profiler.profile(activities=activities)
    with quietly(profiler):
        yield profiler


@contextlib.contextmanager
def legacy() -> Iterator[Any]:
    """Torch's engine of before, which marks operators by pairs of events as we do."""
    from torch.autograd import profiler_legacy

    with profiler_legacy.profile(use_cuda=True) as profiler:
        yield profiler


def _run(device: str, ready: Callable[[], None]) -> Callable[[Recorder], float]:
    one = torch.ones(4, 4).to(device)
    add = torch.add

    def work(count: int) -> None:
        for _ in itertools.repeat(None, count):
            add(one, one)

    def block() -> float:
        ready()
        return timed(lambda: work(_COUNT), _COUNT)

    def run(recorder: Recorder) -> float:
        with recorder():
            work(_WARM_UP)
            return statistics.median(block() for _ in range(_BLOCKS))

    return run


def _wait() -> None:
    torch.cuda.synchronize()


def _keep_busy() -> None:
    """Work that ends after the block, for any clock that a GPU may have: some 2 GHz."""
    torch.cuda.synchronize()
    torch.cuda._sleep(_BUSY_MS * 2_000_000)  # noqa: SLF001 - what torch tests itself with; there is no public one
