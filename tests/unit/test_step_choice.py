"""Which steps a recording keeps: slow ones, those that wait long or raise the memory, and the step that all ranks keep."""

from __future__ import annotations

import pytest

from otel_torchprof._columns.phases import DEVICE_PEAK, PEAK, RESIDENT
from otel_torchprof._files.attribute_keys import COLLECTIVE_PHASE
from otel_torchprof._instrument.step_choice import KeptSteps, StepRequest
from otel_torchprof._instrument.step_log import StepLog
from otel_torchprof._model.step_spans import RecordedStep
from otel_torchprof.errors import TorchProfError


def test_a_slow_step_that_is_too_large():
    """Of a slow step whose begin had to be dropped it is said that it was slow, and what to set."""
    choice = KeptSteps(StepRequest.checked(keep="slow", slow_limit=1), ())
    choice.add(RecordedStep(7, 10**9, 3 * 10**9))
    with pytest.raises(TorchProfError, match=r"step 7 took 2.00s.*OTEL_TORCHPROF_MEMORY_LIMIT"):
        choice.check([])


def judged(keep, before, later, *, least=10, **request):
    """Numbers of the steps that are chosen of those with these durations, in ms, after those that the log has; None: none is slow."""
    log, times = (
        StepLog(),
        [(number * 10**9, int(duration * 10**6)) for number, duration in enumerate((*before, *later))],
    )
    for number, (start, duration) in enumerate(times[: len(before)]):
        log.add_step(RecordedStep(number, start, start + duration))
    request = StepRequest.checked(keep=keep, **request)
    choice = KeptSteps(request, log.latest)
    for number, (start, duration) in list(enumerate(times))[len(before) :]:
        choice.add(
            RecordedStep(
                number, start, start + max(duration, least * 10**6), attributes={COLLECTIVE_PHASE: duration / 1e9}
            )
        )
    return [step.number for step in choice.steps] if choice.is_complete else None


def test_what_is_slow():
    """A step is slow at more than three times the median, also of the steps before the recording, or from the limit on."""
    ordinary = [10, 11] * 20
    assert judged("slow", ordinary, [10, 11, 29, 50]) == [40, 41, 42, 43]
    assert judged("slow", ordinary, [10, 11, 40], steps=2) == [41, 42]
    assert judged("slow", ordinary, [10, 11, 30]) is None
    assert judged("slow", [], [10, 29, 10, 29, 10, 31]) == [0, 1, 2, 3, 4, 5]
    assert judged("slow", ordinary, [12, 19, 20], slow_limit=0.02, steps=1) == [42]
    assert judged("slow", ordinary, [50] * 9, at_step=45, steps=1) == [45]
    assert judged("all", ordinary, [10, 50, 10, 10], steps=3) == [40, 41, 42]


def test_what_is_a_long_wait():
    """A wait is long at more than three times the median and 10 ms more, if it is a tenth of its step at least, or from the limit on."""
    assert judged("wait", [], [1] * 5 + [30], least=300) == [0, 1, 2, 3, 4, 5]
    assert judged("wait", [], [1] * 5 + [30], least=301) is None
    assert judged("wait", [], [1] * 5 + [10]) is None
    assert judged("wait", [], [1] * 5 + [10], slow_limit=0.01, steps=1) == [5]


def raised(before, later, **attributes):
    """The note on the step that is kept of steps of a second whose memory, in MiB, is this; None: none is kept."""
    choice = KeptSteps(StepRequest.checked(keep="memory", steps=3), ())
    for number, size in enumerate((*before, *later)):
        memory = size if isinstance(size, dict) else {RESIDENT: size, PEAK: max(size, 1000)}
        start = number * 10**9
        values = {name: mebibytes << 20 for name, mebibytes in memory.items()}
        choice.add(RecordedStep(number, start, start + 10**9, attributes={**values, **attributes}))
    return choice.notes[0] if choice.is_complete else None


def test_what_raises_the_memory():
    """A rise is above all of the last 200 steps: 16 MiB, 1 % and three times the median, of the end, the peak or a device's peak."""
    ordinary = [100, 180] * 15
    assert raised(ordinary, [195]) is None
    assert raised(ordinary, [196]) == "step 30 raised the memory by 16.00 MB, the median is 0 B"
    assert raised(ordinary, [100, 180, 250, 900]).startswith("step 32 raised the memory by 70.00 MB")
    assert raised([100], [900]) is None  # what a process needs shows in its first steps
    growing = [100 + 20 * number for number in range(30)]
    assert raised(growing, [growing[-1] + 60]) is None
    assert raised(growing, [growing[-1] + 61]) == "step 30 raised the memory by 61.00 MB, the median is 20.00 MB"
    assert raised([{RESIDENT: 10, PEAK: 20}] * 30, [{RESIDENT: 10, PEAK: 52}]).startswith("step 30 raised")
    device = [{DEVICE_PEAK: 8000}] * 30
    assert raised(device, [{DEVICE_PEAK: 8080}]) is None
    assert raised(device, [{}, {DEVICE_PEAK: 8081}]).startswith("step 31 raised the memory by 81.00 MB")


def test_pauses_raise_the_memory_too():
    """What an evaluation needs is not that of the step after it."""
    choice = KeptSteps(StepRequest.checked(keep="memory"), ())
    for number in range(40):
        size = (100 if number < 30 else 900) << 20
        if number == 30:
            pause = RecordedStep(-1, 0, 1, name="torch.evaluation", attributes={RESIDENT: size})
            choice.add(pause)
        choice.add(RecordedStep(number, number * 10**9, (number + 1) * 10**9, attributes={RESIDENT: size}))
    assert not choice.is_complete
    with pytest.raises(TorchProfError, match="none of 40 steps raised the memory by much"):
        choice.check([])


def test_memory_that_is_not_told():
    """Without memory in the steps, as on macOS, the error says so; a limit in seconds is none of memory."""
    choice = KeptSteps(StepRequest.checked(keep="memory"), ())
    choice.add(RecordedStep(7, 10**9, 3 * 10**9))
    with pytest.raises(TorchProfError, match="does not tell how much memory"):
        choice.check([])
    with pytest.raises(ValueError, match="slow_limit is 1"):
        StepRequest.checked(keep="memory", slow_limit=1)


def shared(count, *, steps=3, milliseconds=1000):
    """A choice that other ranks share, after so many steps of this length."""
    choice = KeptSteps(StepRequest.checked(keep="slow", slow_limit=5, steps=steps, shared="word"), ())
    length = milliseconds * 10**6
    for number in range(count):
        choice.add(RecordedStep(number, number * length, (number + 1) * length))
    return choice


def test_the_step_that_all_ranks_keep():
    """A rank has the steps of some seconds until it is told which one is kept, also one that has not ended here yet."""
    choice = shared(100, milliseconds=100)
    choice.end_at(40, "rank 1: step 40 took 6 s")
    assert [step.number for step in choice.steps] == [38, 39, 40]
    assert choice.notes == ("rank 1: step 40 took 6 s",)
    assert choice.found is None
    early = shared(10)
    early.end_at(10, "slow there")
    assert not early.is_complete
    early.add(RecordedStep(10, 10**10, 2 * 10**10))
    early.add(RecordedStep(-1, 2 * 10**10, 3 * 10**10, name="torch.checkpoint"))
    assert early.found[0] == 10
    early.end_at(10, "slow there")
    assert [step.number for step in early.steps] == [8, 9, 10, -1]


def test_a_step_that_a_rank_has_dropped():
    """What is told too late is no longer there, and the error says so; what this rank found itself is kept if nobody chooses."""
    choice = shared(100)
    with pytest.raises(
        TorchProfError, match="nothing is kept: slow there; that step was not recorded here, or is dropped"
    ):
        choice.end_at(40, "slow there")
    choice.add(RecordedStep(100, 100 * 10**9, 110 * 10**9))
    assert not choice.is_complete
    choice.add(RecordedStep(101, 110 * 10**9, 111 * 10**9))
    choice.settle()
    assert [step.number for step in choice.steps] == [98, 99, 100]
    assert choice.notes[0].startswith("step 100 took 10.0s")
    with pytest.raises(ValueError, match="shared is 'word'"):
        StepRequest.checked(shared="word")
