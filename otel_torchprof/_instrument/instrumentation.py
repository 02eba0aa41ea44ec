"""The instrumentation behind ``TorchInstrumentor``: a live recording, and hooks of torch that feed it."""

from __future__ import annotations

import functools
import logging
import weakref
from dataclasses import replace
from typing import TYPE_CHECKING

from otel_torchprof._answers.out_of_memory import Allocations, MemoryWatch
from otel_torchprof._columns.phases import NEXT_STEP, SegmentChange
from otel_torchprof._columns.schema import Kind
from otel_torchprof._export.span_policy import SpanPolicy, StepChoice
from otel_torchprof._model.live_table import CallRules
from otel_torchprof._native import python_sources, torch_library
from otel_torchprof._native.recorder import Session, notes_on_names
from otel_torchprof._process.cleanup import close_due, without_waiting
from otel_torchprof._record import batches
from otel_torchprof._record.carrying import started_threads
from otel_torchprof._record.catalog import SourceRequest, requested
from otel_torchprof._record.contexts import ContextTable
from otel_torchprof._record.function_labels import label_by_environment, notes_of_environment
from otel_torchprof._record.generations import shared as generations
from otel_torchprof._record.module_calls import shared as module_calls
from otel_torchprof._record.recording import Recording
from otel_torchprof._record.step_marks import loop_marks, optimizers_were_made
from otel_torchprof.errors import TorchLibraryError
from otel_torchprof.health import ON
from otel_torchprof.integrations.automatic import shared as frameworks

from .control_verbs import socket as control_socket
from .foresight import Foresight
from .live_recording import LiveRecording
from .step_segments import StepRule

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from opentelemetry.sdk.resources import Resource
    from opentelemetry.trace import SpanContext

    from otel_torchprof._export.provider import Provider
    from otel_torchprof._native.torch_library import TorchLibrary
    from otel_torchprof._process.deadline import Deadline
    from otel_torchprof._ranks.ranks import Ranks
    from otel_torchprof._record.catalog import Entry
    from otel_torchprof._record.source import RecordingOptions, Source
    from otel_torchprof.health import ProcessorHealth

    from .operator_metrics import TorchMetrics
    from .processor import TorchSpanProcessor
    from .step_log import StepLog

KINDS: Mapping[str, tuple[Kind, ...]] = {
    "steps": (Kind.PHASE,),
    "modules": (Kind.PHASE, Kind.MODULE, Kind.LABEL),
    "ops": (Kind.PHASE, Kind.MODULE, Kind.LABEL, Kind.OPERATOR),
    "frames": (Kind.PHASE, Kind.MODULE, Kind.LABEL, Kind.OPERATOR, Kind.FRAME),
}
"""Kinds of events that each level of detail records."""

_WAITING = "off: torch is not imported"
_SLOW_CONTEXTS = "this interpreter's contexts could not be read cheaply: every top-level event asks Python for its span"

_TOP_LEVEL = "they have top-level spans only, unless there was an error"

_logger = logging.getLogger("otel_torchprof")


_numbered: list[tuple[Callable[[], Any], int]] = []
"""The TracerProvider of the latest recording, and the number after its last step; the next recording for it continues there."""


class Instrumentation:
    """The recording between ``instrument()`` and ``uninstrument()`` in one process.

    :meth:`start` and :meth:`stop` may be called repeatedly and from any thread; a stop removes all hooks from torch.

    Args:
        provider: TracerProvider with its sampler, ids and limits.
        processor: gets the spans.
        detail: a key of ``KINDS``.
        recording: options of the recording.
        metrics: metrics of steps and of the recording; None for none.
        ranks: the other ranks of the run; None for none.
        policy: selects the steps that are traced in full, and limits traces.
        calls_at_once: whether Python calls are recorded from the start instead of from the import of torch on, and also outside
            of all other events.
        step_rule: what ends a step.
        is_unwanted: returns whether this process is not to be exported after all; it then stops the instrumentation itself.
    """

    def __init__(
        self,
        provider: Provider,
        processor: TorchSpanProcessor,
        *,
        detail: str,
        recording: RecordingOptions,
        metrics: TorchMetrics | None = None,
        ranks: Ranks | None = None,
        policy: SpanPolicy | None = None,
        calls_at_once: bool = False,
        is_unwanted: Callable[[], bool] = bool,
        step_rule: StepRule = StepRule(),  # noqa: B008 - immutable
    ) -> None:
        self._metrics = metrics
        self._ranks = ranks
        self._policy = policy or SpanPolicy()
        self._calls_at_once = calls_at_once
        self._step_rule = step_rule
        self._first_step = _first_step(provider)
        self._is_unwanted = is_unwanted
        self._provider = provider
        self._processor = processor
        self._detail = detail
        self._options = recording
        self._has_torch = False
        self._recording = Recording()
        self._ended = True
        self._states = _states(detail)
        if recording.device is not None:
            self._states["devices"] = _WAITING
        if recording.reads_energy:
            self._states["energy"] = _WAITING
        # If some steps are not recorded, this must be decided at once when a step begins.
        chooses = not (provider.samples_everything and self._policy.choice().is_all)
        self._asks_at_once = detail != "steps" and chooses
        self._allocations = Allocations(processor.memory_limit)
        self._memory_watch = MemoryWatch(lambda: self.running_step, lambda: self.step_log.latest, self._allocations)
        self._begin()

    def _begin(self) -> None:
        self._program_says = False
        self._live = self._new_recording()

    def _selects(self, choice: StepChoice, step: int) -> bool:
        """Whether a step that has not begun yet will be traced in full, if it is in no span of the application."""
        return choice.selects(step, self._provider.coming_trace_id(step) if choice.ratio < 1 else 0)

    def step(self, attributes: Mapping[str, Any] | None = None) -> None:
        """Ends a step, for ``step()`` of the program. Costs a microsecond if all steps are recorded."""
        self._program_says = True
        self._note(SegmentChange(attributes=dict(attributes)) if attributes else NEXT_STEP)

    def change_segment(self, change: SegmentChange) -> None:
        """Changes the segment, as reported by a framework; ignored once the program has called :meth:`step`."""
        if not self._program_says:
            self._note(change)

    def _note(self, change: SegmentChange) -> None:
        self._live.marks.note(change)
        if self._asks_at_once:
            self._live.take_marks()

    def keep_step(self) -> None:
        """Samples the current step in full, whatever the policy decides. Costs some microseconds."""
        self._live.take_marks()
        self._live.keep_step()

    def _new_recording(self) -> LiveRecording:
        self._contexts = ContextTable()
        self._session = Session(
            self._processor.memory_limit,
            keep_newest=True,
            all_threads=True,
            inputs=self._options.inputs,
            memory=self._options.memory,
            kinds=KINDS[self._detail],
            contexts=True,
            devices=self._options.times_device,
        )
        choice = self._policy.choice()
        self._foresight = None if choice.is_all else Foresight(self._session, functools.partial(self._selects, choice))
        return LiveRecording(
            self._provider,
            self._recording,
            contexts=self._contexts,
            averages=self._processor.averages,
            expects_steps=optimizers_were_made,
            before_drain=self._before_drain,
            budget_bytes=self._processor.memory_limit,
            calls=CallRules(round(self._options.frame_filter.min_duration * 1e9), self._calls_at_once),
            policy=self._policy,
            ranks=self._ranks,
            step_rule=self._step_rule,
            health=self._health,
            mute=self._session.mute_roots,
            foresight=self._foresight,
            on_steps=None if self._metrics is None else self._metrics.add_spans,
            on_look=self._look,
            needs_all_spans=lambda: self._processor.takes_whole_traces,
            first_step=self._first_step,
        )

    @without_waiting
    def start(self) -> None:
        """Starts the recording; hooks of torch are installed as soon as torch is imported."""
        close_due()
        if self._states["labels"] == ON:
            self._recording.cleanup.push(label_by_environment)  # a last time at the stop
            label_by_environment(is_early=True)
        self._ended = False
        if self._ranks is not None:
            self._recording.cleanup.push(self._ranks.stop)
            self._ranks.start()
        with self._recording.lock:
            self._push_hooks()
            self._attach()
        self._recording.when_torch(self._on_torch)

    @property
    def is_running(self) -> bool:
        """Whether it was started and not stopped."""
        return self._recording.running

    def stop(self, deadline: Deadline | None = None) -> None:
        """Removes all hooks from torch, and passes the remaining events to the processor, within 30 seconds.

        The next call, from any thread, completes a stop that was interrupted.
        """
        self._recording.stop()
        if self._ended:
            return
        self._processor.detach(deadline)
        _numbered.clear()
        _numbered.append((_reference(self._provider), self._live.steps.next_number))
        if self._metrics is not None:
            self._metrics.end()
            self._metrics.recorder.source = None
        self._ended = True

    @property
    def health(self) -> ProcessorHealth:
        """That of its processor."""
        return self._processor.health

    def status(self) -> dict[str, Any]:
        """Detail, sources and steps for the control socket. The steps are those that were drained; thread-safe."""
        return {"detail": self._detail, **self.step_log.status(), "sources": dict(self._health()[0])}

    @property
    def step_log(self) -> StepLog:
        """The latest ended steps among the drained events."""
        return self._live.step_log

    def ask_drain(self) -> None:
        """Lets the drain thread drain at its next look, to learn which steps have ended."""
        self._live.ask_drain()

    @property
    def raised(self) -> RecordingOptions:
        """What a recording in more detail takes over: modules only where their hooks are installed, as new ones would recompile a model."""
        return replace(self._options, modules=self._detail != "steps", memory=False)

    @property
    def resource(self) -> Resource:
        """Resource of the spans."""
        return self._provider.resource

    @property
    def steps(self) -> int:
        """Number of ended steps among the drained events."""
        return self._live.steps.completed

    @property
    def running_step(self) -> SpanContext | None:
        """The span of the current step; None without a step, or if it is not exported. Thread-safe."""
        span = self._live.steps.running_span()
        return None if span is None else span.span_context

    def discard(self) -> None:
        """Stops recording and drops all events that were not drained; call :meth:`stop` afterwards."""
        self._live.discard()

    @property
    def steps_state(self) -> str:
        """State of steps for the health report: whether they are detected, and the rule that ends them."""
        return f"{ON}: {self._live.segments.rule}" if self._has_torch else _WAITING

    def leave_in_child(self) -> None:
        """Removes the hooks that a forked child has inherited, if it is not recorded."""
        self._push_hooks()
        self._allocations.leave()
        self._memory_watch.stop()
        self._recording.leave()

    def restart_in_child(self) -> None:
        """Continues in a forked child, which has inherited hooks and observer, with a new recording."""
        if self._ranks is not None:
            self._ranks.after_fork()
        self._allocations.leave()
        if not self.is_running:
            return
        self._first_step = 0
        self._begin()
        self._push_hooks()
        if self._ranks is not None:
            self._recording.cleanup.push(self._ranks.stop)
        self._attach()
        if self._has_torch:
            self._add_sources(lambda entry: self._awaits_torch(entry) and not entry.survives_fork)

    def _attach(self) -> None:
        self._recording.cleanup.push(self._contexts.unfollow)
        self._contexts_are_cheap = self._contexts.follow()
        self._recording.cleanup.push(functools.partial(batches.leave, self._live.requests))
        batches.follow(self._live.requests)
        self._recording.start(self._session)
        if self._foresight is not None:
            self._recording.cleanup.push(self._foresight.stop)
        self._add_sources(lambda entry: not self._awaits_torch(entry))
        loop_marks.add(self)
        if self._step_rule.is_learned:
            frameworks.install(self)
        self._processor.attach(self._live)
        if self._metrics is not None:
            self._recording.cleanup.push(functools.partial(generations.leave, self._metrics.generations.record))
            generations.listen(self._metrics.generations.record)
        self._measure_processor()
        self._recording.cleanup.push(self._memory_watch.stop)
        self._memory_watch.start()
        self._recording.cleanup.push(functools.partial(control_socket.leave, self))
        control_socket.enter(self)

    def _look(self) -> None:
        control_socket.look()
        self._allocations.look()

    def _measure_processor(self) -> None:
        if self._metrics is not None:
            self._metrics.recorder.source = self._processor.figures
            # At exit a MeterProvider is usually shut down before the TracerProvider; a refresh gives it the last steps too.
            self._metrics.refresh = self._processor.refresh

    def move_to(self, processor: TorchSpanProcessor) -> bool:
        """Moves the recording and its averages to another processor; returns False if it does not run."""
        with self._recording.lock:
            if self.is_running:
                self._processor.hand_over(processor)
                self._processor = processor
                self._measure_processor()
            return self.is_running

    def _health(self) -> tuple[Mapping[str, str], tuple[str, ...]]:
        notes = [*notes_of_environment(), *notes_on_names()]
        self._states["steps"] = self.steps_state
        if self._options.memory:
            self._states["memory"] = self._allocations.state
            notes += self._allocations.notes()
        if self._ranks is not None:
            self._states |= self._ranks.state()
        if self._metrics is not None and self._metrics.waits.state:
            self._states["collectives"] = self._metrics.waits.state
        if not self._contexts_are_cheap:
            notes.append(_SLOW_CONTEXTS)
        if (traces := self._live.traces) is not None and traces.count:
            notes.append(
                f"{traces.left_out} of {traces.count} traces without steps are not selected by the policy: {_TOP_LEVEL}"
            )
        self._states |= self._recording.states()
        notes += self._recording.notes()
        if errors := python_sources.errors():
            notes.append(
                f"{errors} times a name or a span could not be asked for: something in Python raised meanwhile"
            )
        return self._states, tuple(notes)

    def _on_torch(self, _torch: Any) -> None:
        self._install_modules()
        self._has_torch = True
        self._add_sources(self._awaits_torch)
        if self._options.memory and (library := self._loaded_library()) is not None:
            self._allocations.start(library)
        self._recording.stop_batches_first()

    def _install_modules(self) -> None:
        started_threads.install(self)
        if self._detail != "steps":
            module_calls.install(self, as_events=True, survives_fork=True)
            self._states["modules"] = ON

    def _awaits_torch(self, entry: Entry) -> bool:
        """Whether a source starts only after the import of torch. Python calls usually do, to leave out the import itself."""
        return entry.needs_torch and not (entry.name in {"frames", "collections"} and self._calls_at_once)

    def _add_sources(self, chooses: Callable[[Entry], bool]) -> None:
        """Starts the requested sources that ``chooses`` selects; one that torch refuses is off, with the reason in health."""
        library = self._loaded_library() if self._has_torch else None
        for source in requested(SourceRequest(self._options, library, self._processor.memory_limit), chooses):
            self._add(source)
        self._states |= self._recording.states()

    def _add(self, source: Source) -> None:
        try:
            self._recording.add(source)
        except TorchLibraryError as error:
            self._library_is_missing(error)

    def _loaded_library(self) -> TorchLibrary | None:
        if not (self._options.operators or self._options.times_device or self._options.memory):
            return None
        try:
            library = torch_library.load()
        except TorchLibraryError as error:
            self._library_is_missing(error)
            return None
        if self._options.operators:
            self._states["operators"] = ON
        return library

    def _library_is_missing(self, error: TorchLibraryError) -> None:
        if self._options.times_device:
            self._states["devices"] = f"off: {error}"
        if self._options.operators:
            self._states["operators"] = f"off: {error}"
            _logger.warning("torch's operators are not recorded, modules and labels are: %s", error)

    def _push_hooks(self) -> None:
        self._recording.cleanup.push(functools.partial(module_calls.remove, self))
        self._recording.cleanup.push(functools.partial(started_threads.remove, self))
        self._recording.cleanup.push(self._leave_frameworks)

    def _leave_frameworks(self) -> None:
        loop_marks.remove(self)
        frameworks.remove(self)

    def _before_drain(self) -> None:
        if self.is_running and self._is_unwanted():
            self.discard()
        if self._states["labels"] == ON and self.is_running:
            label_by_environment(is_early=True)
        if self._ranks is not None:
            self._ranks.look()


def _states(detail: str) -> dict[str, str]:
    """States of the sources before torch is imported."""
    off, waiting = f"off: detail is {detail!r}", _WAITING
    return {
        "steps": waiting,
        "modules": off if detail == "steps" else waiting,
        "labels": off if detail == "steps" else ON,
        "operators": waiting if detail in {"ops", "frames"} else off,
        "frames": waiting if detail == "frames" else off,
    }


def _first_step(provider: Provider) -> int:
    return next((number for reference, number in _numbered if reference() is provider.tracer_provider), 0)


def _reference(provider: Provider) -> Callable[[], Any]:
    try:
        return weakref.ref(provider.tracer_provider)
    except TypeError:  # a class with __slots__ and without weak references
        return lambda: None
