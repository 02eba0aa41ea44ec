"""Times of operators on a GPU by two profilers, of the same program, one after the other.

An operator is known by its name and by which of its name it is in one repetition. The two are never on at the same time
where durations are compared: what torch.profiler asks of the driver changes them.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple

import findings
import torch

import otel_torchprof as otp

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    Operator = tuple[str, int]
    Times = Mapping[Operator, float]

REPETITIONS = 20
RELATIVE, OF_A_KERNEL, OF_A_COPY = 0.05, 7.0, 9.0
"""How far two durations may be apart: 5 %, or so many microseconds for each kernel and each copy where that is more.

On an H200 a mark takes the stream 1.25 us, and a kernel begins as long after it: 2.4 to 3.3 us for a pair around one kernel, and 2.5 us
for each pair inside of it. Copies begin and end 5 to 8 us apart from the marks.
"""


class Seen(NamedTuple):
    """An operator, and how long a device worked for it: 0 where it did not; microseconds."""

    name: str
    begin: float
    duration: float
    room: float = 0.0
    """For the gaps around its kernels and copies."""


def torch_profile() -> Any:
    """Torch's profiler, of the CPU and the GPU."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    return torch.profiler.profile(activities=activities)


class Gpu:
    """One GPU as the current device."""

    device = "cuda"

    def __init__(self) -> None:
        self._cycles_per_ms = self._measure_cycles()

    @staticmethod
    def _measure_cycles() -> float:
        cycles = 50_000_000
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(cycles)
        begin.record()
        torch.cuda._sleep(cycles)
        end.record()
        end.synchronize()
        return cycles / begin.elapsed_time(end)

    def saturate(self, ms: float) -> None:
        """Gives the current stream work for so long, from now on."""
        torch.cuda._sleep(int(ms * self._cycles_per_ms))

    def wait(self) -> None:
        """Until all is done."""
        torch.cuda.synchronize()

    def kernels(self, work: Callable[[], None]) -> list[Seen]:
        """By torch.profiler: all operators, with the sum of the kernels and copies of each."""
        return [
            Seen(event.name, event.time_range.start, event.device_time_total, room(event))
            for event in self.torch_events(work)
            if event.device_type == torch.autograd.DeviceType.CPU and event.name.startswith("aten::")
        ]

    def torch_events(self, work: Callable[[], None]) -> Any:
        """All events of torch.profiler, kernels and copies among them."""
        with torch_profile() as prof:
            work()
            self.wait()
        return prof.events()

    def marks(self, work: Callable[[], None], **options: Any) -> list[Seen]:
        """By this package: all operators, with the time between the marks of each, or of those inside of it."""
        with otp.profile(use_device=self.device, **options) as prof:
            work()
            self.wait()
        assert prof.health.devices == "on", prof.health.devices
        return [
            Seen(event.name, event.time_range.start, event.device_time_total)
            for event in prof.events()
            if event.name.startswith("aten::")
        ]


def repeated(gpu: Gpu, program: Callable[[], Any], ms: float, repetitions: int = REPETITIONS) -> Callable[[], None]:
    """The program so many times, each on a stream that is busy while it is asked for."""

    def work() -> None:
        for _ in range(repetitions):
            gpu.wait()
            gpu.saturate(ms)
            program()

    return work


def room(event: Any) -> float:
    """How far apart durations of an operator may be that are no longer than that, by torch.profiler's event."""
    own = sum(OF_A_COPY if kernel.name.startswith("Mem") else OF_A_KERNEL for kernel in event.kernels)
    return own + sum(room(child) for child in event.cpu_children)


def medians(seen: Iterable[Seen], repetitions: int = REPETITIONS, of: str = "duration") -> dict[Operator, float]:
    """Of each operator of one repetition, over all of them."""
    by_name: dict[str, list[Seen]] = defaultdict(list)
    for one in sorted(seen, key=lambda one: one.begin):
        by_name[one.name].append(one)
    found = {}
    for name, all_of_it in by_name.items():
        each, rest = divmod(len(all_of_it), repetitions)
        assert rest == 0, f"{len(all_of_it)} times {name} in {repetitions} repetitions, which are not all the same"
        for place in range(each):
            found[name, place] = statistics.median(getattr(one, of) for one in all_of_it[place::each])
    return found


def allowed(theirs: float, room: float) -> float:
    """How far ours may be from theirs."""
    return max(RELATIVE * theirs, room)


def compare(what: str, ours: Times, theirs: Times, rooms: Times, most_rows: int = 8) -> list[findings.Finding]:
    """A finding per operator that torch.profiler saw kernels of; the longest and those that fail go to the table."""
    worked = {operator: time for operator, time in theirs.items() if time > 0}
    assert worked, f"{what}: torch.profiler saw no kernel"
    missing = sorted(operator for operator in worked if not ours.get(operator))
    assert not missing, f"{what}: no time of {missing}"
    found = [
        findings.Finding(what, f"{name}, no. {place + 1}", ours[name, place], time, allowed(time, rooms[name, place]))
        for (name, place), time in sorted(worked.items(), key=lambda item: -item[1])
    ]
    findings.rows += [one for i, one in enumerate(found) if i < most_rows or not one.holds]
    apart = statistics.median(abs(one.ours - one.theirs) for one in found)
    findings.notes.append(f"{what}: {len(found)} operators, half of them within {apart:.2f} us")
    return found


def require(found: Iterable[findings.Finding]) -> None:
    """Fails where one of them does not hold, and names all of these."""
    wrong = [f"{one.of}: {one.ours:.2f} us, by torch {one.theirs:.2f} us" for one in found if not one.holds]
    assert not wrong, "\n".join(wrong)


def agree(gpu: Gpu, what: str, program: Callable[[], Any], ms: float, repetitions: int = REPETITIONS) -> None:
    """Compares them in both orders."""
    for _ in range(3):
        program()
    work = repeated(gpu, program, ms, repetitions)
    found = []
    for order in ("ours first", "torch's first"):
        if order == "ours first":
            ours, theirs = gpu.marks(work), gpu.kernels(work)
        else:
            theirs, ours = gpu.kernels(work), gpu.marks(work)
        durations = [medians(seen, repetitions) for seen in (ours, theirs)]
        found += compare(f"{what}, {order}", *durations, medians(theirs, repetitions, of="room"))
    require(found)
