"""Records some steps of a running instrumentation in more detail, on a recording of their own; the instrumentation's is untouched.

A thread starts the recording shortly before the first step and stops it once the instrumentation knows that the last one has ended:
nothing is done on the threads of the program. What was recorded before and after the steps is removed: at the end, and while it waits
for a slow step also as the job runs.
"""

from __future__ import annotations

import sys
import time
import uuid
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

from otel_torchprof._columns.joined import without
from otel_torchprof._native import torch_library
from otel_torchprof._native.recorder import now_ns
from otel_torchprof._process import process_changes, threads
from otel_torchprof._profile.results import ProfileResults
from otel_torchprof._record.recording import ProfileSegment
from otel_torchprof.errors import TorchProfError

from .step_choice import ALL, MEMORY, WAIT, KeptSteps

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from typing import Protocol

    from opentelemetry.sdk.resources import Resource

    from otel_torchprof._columns.batch import Batch
    from otel_torchprof._model.step_spans import RecordedStep
    from otel_torchprof._record.source import RecordingOptions
    from otel_torchprof.health import Health

    from .step_choice import StepRequest
    from .step_log import StepLog

    class StepSource(Protocol):
        """A running instrumentation."""

        @property
        def is_running(self) -> bool:
            """Whether it was started and not stopped."""

        @property
        def step_log(self) -> StepLog:
            """The latest ended steps."""

        @property
        def raised(self) -> RecordingOptions:
            """What a recording in more detail takes over from it."""

        def ask_drain(self) -> None:
            """Lets it learn soon which steps have ended."""

        @property
        def resource(self) -> Resource:
            """Resource of the spans."""


_LOOK_SECONDS = 0.05
_WATCH_SECONDS = 1.0
"""Time between two looks while it waits for a slow step, maybe for hours: each asks for a drain, and may start a part of the recording."""
_LEAD_SECONDS = 1.0
"""Time between the start of the recording and its first step, or two steps if that is more: when it comes is an estimate."""
_STEPLESS_SECONDS = 30.0
"""Time for the first step that the process has ever ended, and for the next one."""
_PATIENCE_STEPS = 20
"""Time for the next step, in steps, if that is more."""
_SOON = 1_000
"""Number of a step that may come before the first drain tells how fast steps are."""
_MOST_UNKNOWN_SECONDS = 2.0
"""Time since the latest known step for which steps are assumed: drains are asked for more often."""
WAITING, RECORDING, READING, DONE = "waiting", "recording", "reading", "done"
"""States, in order."""


def check_torch() -> None:
    """Raises TorchProfError if the program has not imported torch yet: nothing here may do it first."""
    if "torch" not in sys.modules:
        raise TorchProfError("torch is not imported yet, so there is nothing to record: try again later")


class StepRecording(ProfileResults):
    """Some steps of a running instrumentation in more detail, made by :meth:`TorchInstrumentor.record`.

    Read it after :meth:`wait`, like a finished :class:`profile`: averages, events, files, spans, :meth:`explain`.
    Thread-safe.
    """

    def __init__(self, running: StepSource, request: StepRequest) -> None:
        check_torch()
        self.request = request
        """What is to be recorded."""
        self._running = running
        self._window = _StepWindow(
            replace(
                running.raised,
                operators=True,
                inputs=request.record_shapes,
                frames=request.detail == "frames",
                sources={**running.raised.sources, "energy": False},
            )
        )
        if request.keep in {WAIT, MEMORY} and not running.raised.phases:
            raise TorchProfError(
                f"keep is {request.keep!r}, and no phases are recorded: instrument with detail='steps' or higher"
            )
        self._choice = KeptSteps(request, running.step_log.latest)
        super().__init__(self._window)
        self.record_shapes, self.with_stack = request.record_shapes, request.detail == "frames"
        self.use_device = self._window.options.device if self._window.options.times_device else None
        self._has_modules = self._window.options.modules
        self.state = WAITING
        """``waiting`` for its first step, ``recording``, ``reading`` what was recorded, ``done``."""
        self.error = ""
        """Why there is nothing; empty as long as there is no reason."""
        self.end: tuple[int, str] | None = None
        """The step that all ranks keep, and why, once the client has chosen."""
        self._begun = 0
        """Since when steps are whole, Unix ns."""
        self._waited_since = 0.0
        self.is_cut = False
        """Whether it ended before the last step that was asked for: cancelled, at the time limit, or with the instrumentation."""
        self._cancelled, self._over = threads.Event(), threads.Event()
        self._thread = threads.Thread(target=self._run, name="otel-torchprof-record", daemon=True)

    def start(self) -> None:
        """Starts the thread.

        Raises:
            TorchProfError: another one is in progress in this process.
        """
        in_progress.begin(self)
        try:
            self._thread.start()
        except BaseException:
            in_progress.end(self)
            raise

    def cancel(self) -> None:
        """Ends it before its last step; the steps until then are kept, unless it waits for a slow one. Does not wait."""
        self._cancelled.set()

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until it is done, or failed: :attr:`error` says so. Not on the thread of the loop, whose steps it waits for.

        Args:
            timeout: limit in seconds. Default: none.

        Returns:
            False after the timeout.
        """
        return self._over.wait(timeout)

    def leave_to_parent(self) -> None:
        """Ends it in a forked child."""
        self.error, self.state, self._over = (
            "the process was forked: its parent records the steps",
            DONE,
            threads.Event(),
        )
        self._over.set()

    @property
    def ended_steps(self) -> int:
        """Number of its steps that have ended, or with ``keep`` of those that were looked at."""
        return self._choice.seen

    @property
    def found(self) -> tuple[int, str] | None:
        """With ``shared``, the step that this process has found, and how slow it is; None before."""
        return self._choice.found

    @property
    def health(self) -> Health:
        """State of every source, counts of events, and notes: a :class:`Health`."""
        health = self._window.health()
        return replace(health, stats=self._figures, notes=(*health.notes, *self._choice.notes))

    # ---- on its thread ----

    def _run(self) -> None:
        try:
            self._record()
            self._finish()
        except Exception as error:  # noqa: BLE001 - reported to whoever waits
            known = isinstance(error, TorchProfError)
            self.error = str(error) if known else f"the recording failed: {type(error).__name__}: {error}"
        finally:
            self._running.step_log.follow(on=False)
            self.state = DONE
            in_progress.end(self)
            self._over.set()

    def _record(self) -> None:
        torch_library.load()
        while self._is_early() and not self._is_stopped():
            self._cancelled.wait(_LOOK_SECONDS)
        self._running.step_log.follow(on=True)
        try:
            self._window.start()
            self._begun, self.state, begun = self._window.since, RECORDING, time.monotonic()
            while not self._is_complete(time.monotonic() - begun):
                if self._is_stopped():
                    self.is_cut = True
                    break
                if self.request.keep != ALL:
                    self._window.renew(self._choice.steps, self.request.steps or 0)
                self._running.ask_drain()
                self._cancelled.wait(_LOOK_SECONDS if self.request.keep == ALL else _WATCH_SECONDS)
        finally:
            self.state = READING
            self._window.stop()

    def _is_stopped(self) -> bool:
        return self._cancelled.is_set() or not self._running.is_running

    def _is_early(self) -> bool:
        """Whether the first step is so far away that the recording need not begin."""
        at_step, last, seconds = self.request.at_step, self._running.step_log.last, self._running.step_log.seconds
        if at_step is None:
            return False
        self._running.ask_drain()
        if last is None or seconds is None:
            return at_step > _SOON
        if last.number >= at_step:
            raise TorchProfError(f"step {at_step} has ended, the latest is {last.number}: choose a later one")
        since = min((now_ns() - last.end) / 1e9, _MOST_UNKNOWN_SECONDS)  # a pause between steps has none
        latest = last.number + since / max(seconds, 1e-9)
        return (at_step - 1 - latest) * seconds > max(_LEAD_SECONDS, 2 * seconds)

    def _take_steps(self) -> None:
        """Chooses among the steps that have ended since the last call and are recorded whole. Raises as :meth:`KeptSteps.add`."""
        until = self._window.limits()[1]
        for step in self._running.step_log.take():
            if self._begun <= step.start and step.end <= until:
                self._choice.add(step)
        if self.end is not None:
            self._choice.end_at(*self.end)

    def _is_complete(self, seconds: float) -> bool:
        before = self._choice.steps[-1:]
        self._take_steps()
        if self._choice.is_complete:
            return True
        if self.request.seconds is not None and seconds >= self.request.seconds:
            self.is_cut = self.request.steps is not None
            return True
        self._waited_since = seconds if self._choice.steps[-1:] != before else self._waited_since
        if self.request.steps is None:
            return False
        if self._running.step_log.last is None and seconds > _STEPLESS_SECONDS:
            raise TorchProfError(
                f"no step has ended for {seconds:.0f} seconds: the program has no steps, or longer ones; record by time (seconds)"
            )
        if self.request.keep != ALL:
            return False
        patience = max(_STEPLESS_SECONDS, _PATIENCE_STEPS * (self._running.step_log.seconds or 0.0))
        self.is_cut = seconds - self._waited_since > patience
        return self.is_cut

    def _finish(self) -> None:
        self._take_steps()
        self._choice.settle()
        steps = [step for step in self._choice.steps if step.start >= self._window.since]
        if self.request.steps is not None:
            if self.request.keep != ALL:
                self._choice.check(steps)
            if not steps:
                raise TorchProfError(f"nothing is recorded: {self._why_no_step()}")
            if (
                self.request.keep == ALL
                and self.request.at_step is not None
                and steps[0].number != self.request.at_step
            ):
                raise TorchProfError(
                    f"step {self.request.at_step} had begun before the recording, whose first one is {steps[0].number}: "
                    "choose a later one"
                )
        self._window.trim(steps, is_whole=self.request.steps is None)
        self.trace_id = f"{uuid.uuid4().int:032X}"
        self._metadata.note(self.trace_id, [name for name in ("with_stack", "record_shapes") if getattr(self, name)])
        self.profiling_start_time_ns, self.profiling_end_time_ns = self._window.times()
        self._started = self._prepared = True

    def _why_no_step(self) -> str:
        if not self._running.is_running:
            return "the instrumentation ended before the first step had"
        return "no step had ended when it was: the loop paused, or its steps are longer; ask for more seconds, or again"

    # ---- results ----

    def pieces(self, format_name: str) -> Iterable[bytes | memoryview]:
        """Returns the pieces of a file in a format of :data:`FORMATS`."""
        return self._encoded(format_name, detail="frames" if self.with_stack else "ops")

    def _steps(self) -> list[RecordedStep]:
        return list(self._window.steps)

    def _resource(self) -> Resource:
        return self._running.resource

    def _why_nothing(self) -> str:
        return self.error or "the steps are not recorded yet: call wait() first, on another thread than the loop's"

    def _no_steps(self) -> TorchProfError:
        return TorchProfError("no step was recorded whole: record by a number of steps")


class _StepWindow:
    """The recording of a :class:`StepRecording`, cut to its steps."""

    def __init__(self, options: RecordingOptions) -> None:
        self.options = options
        self.steps: Sequence[RecordedStep] = ()
        self.reading = threads.Lock()
        """Held while results are computed."""
        self._parts: list[tuple[int, ProfileSegment]] = []
        """Recordings that run at the same time, and when each had started, Unix ns: the one that is read, and its successor."""
        self._batch: Batch | None = None
        self._limits: tuple[int, int] | None = None

    @property
    def since(self) -> int:
        """Since when everything is recorded, Unix ns; 0 before the start."""
        return self._parts[0][0] if self._parts else 0

    @property
    def _started(self) -> ProfileSegment:
        if not self._parts:
            raise TorchProfError("the recording has not begun")
        return self._parts[0][1]

    def start(self) -> None:
        """Starts it, or a successor of the latest part. Raises as :class:`ProfileSegment` and its ``start``."""
        part = ProfileSegment(self.options)
        part.start()
        self._parts.append((now_ns(), part))

    def renew(self, steps: Sequence[RecordedStep], count: int) -> None:
        """Starts a successor of the latest part once that has all steps that stay, or fills half of the memory; drops older parts.

        Two parts run at the same time, so that each step that fits into half of the memory is whole in one of them.

        Args:
            steps: the latest ended steps that stay, and what is between them.
            count: the fewest of such steps.
        """
        since, latest = self._parts[-1]
        health = latest.health()
        is_half_full = health.memory_bytes >= health.memory_limit // 2
        if is_half_full or (
            sum(step.number >= 0 for step in steps) >= count
            and all(step.number < 0 or step.start >= since for step in steps)
        ):
            self.start()
            while len(self._parts) > 2:  # noqa: PLR2004 - itself and its successor
                self._parts[0][1].stop()
                del self._parts[0]

    def stop(self) -> None:
        """Stops it; what its successor has recorded is dropped."""
        try:
            with ExitStack() as stopping:  # each of them, whatever another one raises
                for _, part in self._parts:
                    stopping.callback(part.stop)
        finally:
            del self._parts[1:]

    def limits(self) -> tuple[int, int]:
        """When the recording began and ended, Unix ns; until now, if it runs."""
        return self._started.times() if self._parts else (0, 0)

    def trim(self, steps: Sequence[RecordedStep], *, is_whole: bool) -> None:
        """Reads the recording, and removes what began outside of the steps, unless all of it ``is_whole``."""
        batch, self.steps = self._started.batch(), steps
        start, end = self.limits() if is_whole else (steps[0].start, steps[-1].end)
        began = batch["start"]
        batch = without(batch, (began < start) | (began > end))
        if batch.samples is not None:
            taken = batch.samples.time
            batch = replace(batch, samples=batch.samples.chosen((taken >= start) & (taken <= end)))
        self._batch, self._limits = batch, (start, end)

    def batch(self) -> Batch:
        """Returns the events of the steps."""
        return self._started.batch() if self._batch is None else self._batch

    def times(self) -> tuple[int, int]:
        """Start of the first step and end of the last, Unix ns."""
        return self.limits() if self._limits is None else self._limits

    def health(self) -> Health:
        """State and figures; the events are those of the steps."""
        state = self._started.health()
        return replace(state, recorded=0 if self._batch is None else len(self._batch))


class _InProgress:
    """The one recording of this process that is in progress."""

    def __init__(self) -> None:
        self._lock = threads.Lock()
        self._recording: StepRecording | None = None

    def begin(self, recording: StepRecording) -> None:
        with self._lock:
            if self._recording is not None:
                raise TorchProfError(
                    "another recording of steps is in progress in this process: wait until it has ended"
                )
            self._recording = recording

    def end(self, recording: StepRecording) -> None:
        with self._lock:
            if self._recording is recording:
                self._recording = None

    def end_at(self, shared: str, number: int, why: str) -> None:
        """Has the recording with a word of its client end with a step.

        Raises:
            TorchProfError: it is not in progress any more.
        """
        with self._lock:
            if self._recording is None or self._recording.request.shared != shared:
                raise TorchProfError("this recording is not in progress any more")
            self._recording.end = number, why

    def after_fork_in_child(self) -> None:
        """Ends the parent's in the child, which does not have its thread."""
        self._lock, recording, self._recording = threads.Lock(), self._recording, None
        if recording is not None:
            recording.leave_to_parent()


in_progress = _InProgress()
"""That of this process."""
process_changes.at_fork(process_changes.Order.STATE, in_child=in_progress.after_fork_in_child)
