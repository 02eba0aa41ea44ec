"""``stream``: a profile that hands on what it records while it runs, for as long as it takes."""

from __future__ import annotations

import atexit
from dataclasses import replace
from typing import TYPE_CHECKING

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_ON

from otel_torchprof import config
from otel_torchprof._export.provider import Provider
from otel_torchprof._export.unknown_variables import warn_of_unknown_variables
from otel_torchprof._process import fork
from otel_torchprof._process.cleanup import CleanupStack
from otel_torchprof._process.deadline import Deadline
from otel_torchprof._process.finders import is_there
from otel_torchprof._sampling.span_policy import checked_policy
from otel_torchprof._sources.catalog import checked_source_options
from otel_torchprof.errors import TorchProfError

from .instrumentation import Instrumentation
from .live_recording import KINDS
from .options import live_options
from .processor import TorchSpanProcessor
from .unused_processor import unused

if TYPE_CHECKING:
    import types
    from collections.abc import Mapping
    from typing import Any

    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace.export import SpanExporter
    from typing_extensions import Self, Unpack

    from otel_torchprof._events.events import EventList, FunctionEventAvg
    from otel_torchprof._sampling.span_policy import SpanPolicy
    from otel_torchprof._sources.frame_filter import FrameFilter
    from otel_torchprof._sources.recording_options import SourceOptions
    from otel_torchprof.health import ProcessorHealth

_STOP_SECONDS = 30.0
_NOT_STARTED, _IS_STOPPED = "not started", "stopped"


class stream:  # noqa: N801 - beside profile
    """A profile whose memory does not grow: ``with otp.stream(otp.ChromeTraceExporter("trace.json")):``.

    Where :class:`profile` keeps every event until it is asked for them, this sends them as spans while it records, every five
    seconds and whenever some megabytes have come, and keeps only sums. So it can run for hours. What it records, and under
    which parent, is what :class:`TorchInstrumentor` does with the same ``detail``: every thread, steps by :meth:`step` or by the
    program's optimizers, each a trace of its own, all of them sampled. It needs no TracerProvider, leaves the application's alone,
    and may run beside ``TorchInstrumentor``, ``profile`` and other streams. A span of the application that is current is the
    parent of what runs inside; where that was not sampled, nothing in it is recorded.

    With ``detail="frames"`` Python's calls are recorded from the import of torch on; from the start where torch is imported
    already, or not installed.

    The end of the ``with`` block, also by an exception, sends the rest and shuts the exporters down. A stream is started once. A
    forked child is not recorded. Recording costs what the instrumentation costs; the sending is done by two threads of its own,
    and what they cannot keep up with is dropped, the oldest first, and counted. Safe from any thread.

    Args:
        exporters: as for :class:`TorchSpanProcessor`; none where only the averages are wanted.
        detail: ``"steps"``, ``"modules"``, ``"ops"`` or ``"frames"``.
        record_shapes: keep the shapes of operators' inputs.
        frames: which of Python's calls are recorded, with ``"frames"``; by default as the environment says, else all.
        use_device: the type of device whose times are recorded, as for :class:`TorchInstrumentor`.
        device_events: for which events, likewise.
        policy: which steps are traced in full and how much of each; by default as the environment says.
        memory_limit: bytes that the recorder may hold, as for :class:`TorchSpanProcessor`.
        source_options: what single sources understand: ``energy``, as for :class:`TorchInstrumentor`.
        resource: of the spans; by default the one that ``OTEL_RESOURCE_ATTRIBUTES`` and ``OTEL_SERVICE_NAME`` describe.

    Raises:
        TypeError, ValueError: a bad argument; the message names it, its value and what is allowed.
    """

    def __init__(
        self,
        *exporters: SpanExporter,
        detail: config.SpanDetail = "ops",
        record_shapes: bool = False,
        frames: FrameFilter | None = None,
        use_device: str | None = None,
        device_events: config.DeviceEvents | None = None,
        policy: SpanPolicy | None = None,
        memory_limit: int | None = None,
        resource: Resource | None = None,
        **source_options: Unpack[SourceOptions],
    ) -> None:
        if detail not in KINDS:
            raise ValueError(f"detail is {detail!r}; it must be one of {', '.join(map(repr, KINDS))}")
        warn_of_unknown_variables()
        recording = live_options(
            detail,
            record_shapes=record_shapes,
            frames=frames,
            use_device=use_device,
            device_events=device_events,
            sources=checked_source_options("stream", source_options),
        )
        unused.note_recording()
        self._processor = TorchSpanProcessor(*exporters, sdk_spans=False, memory_limit=memory_limit)
        provider = Provider(TracerProvider(sampler=ALWAYS_ON, resource=resource, shutdown_on_exit=False))
        self._off = "the SDK is switched off" if provider.disabled else ""
        if not config.ENABLED.read():
            self._off = f"{config.ENABLED} is false"
        self._instrumentation = Instrumentation(
            provider,
            self._processor,
            detail=detail,
            recording=recording,
            calls_at_once=not is_there("torch"),
            policy=checked_policy(policy),
        )
        self._cleanup = CleanupStack(self)
        self._seconds: float | None = None
        self._state = _NOT_STARTED
        self._last: ProcessorHealth | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: types.TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Records from now on. A stream that is never stopped is when the interpreter ends.

        Raises:
            TorchProfError: it was started before.
            NativeError: there is no room for another recording (16 in a process).
        """
        if self._state is not _NOT_STARTED:
            raise TorchProfError("a stream is started once, since its exporters are shut down at its end: make another")
        self._state = ""
        if self._off:
            return
        fork.watch(self)
        atexit.register(self.stop)
        self._cleanup.push(self._shut_down)
        try:
            self._instrumentation.start()
        except BaseException:
            self._cleanup.close()
            self.stop()
            raise

    def stop(self, timeout: float | None = None) -> None:
        """Ends the recording, sends the rest and shuts the exporters down, within so many seconds.

        By default within 30, or 5 where no receiver has answered so far, as :meth:`TorchSpanProcessor.shutdown`. A second call does
        nothing, but the rest of one that was interrupted.
        """
        if self._state:
            return
        self._last = self._last or self.health
        self._seconds = timeout
        self._cleanup.close()
        # Only now all steps are known.
        self._last = replace(self._last, sources={**self._last.sources, "steps": self._instrumentation.steps_state})
        self._state = _IS_STOPPED
        atexit.unregister(self.stop)

    def _shut_down(self) -> None:
        seconds = _STOP_SECONDS if self._seconds is None else self._seconds
        deadline = Deadline.after(seconds)
        # First: a start that was interrupted may not have told the processor of it.
        self._instrumentation.stop(Deadline.after(seconds / 2))
        if self._seconds is None:
            self._processor.shutdown()
        else:
            self._processor.shutdown_within(deadline.remaining())

    def step(self, attributes: Mapping[str, Any] | None = None) -> None:
        """Says that a step of the loop has ended, and the next begins; from then on nothing else does. Costs some microseconds.

        Args:
            attributes: of the span of the step that has ended: numbers, booleans, texts.
        """
        if not self._state and not self._off:
            self._instrumentation.step(attributes)

    def flush(self, timeout: float = 30.0) -> bool:
        """Sends what has been recorded so far; False when so many seconds were not enough, or an exporter refused."""
        return self._processor.force_flush(round(timeout * 1000))

    def key_averages(self) -> EventList[FunctionEventAvg]:
        """Sums and counts by name, from the start up to now, as ``TorchSpanProcessor.key_averages``; also after the end."""
        return self._processor.key_averages()

    @property
    def steps(self) -> int:
        """Steps that have ended, as far as what was recorded was taken from the recorder."""
        return self._instrumentation.steps

    @property
    def health(self) -> ProcessorHealth:
        """What is on, or was until the end, what is off and why, what was recorded, dropped, sent and refused; at any time."""
        found = self._processor.health
        if self._off or self._state is _NOT_STARTED:
            return replace(found, sources={"recording": f"off: {self._off or self._state}"})
        if self._last is None:
            return found
        sources = {**self._last.sources, "recording": f"off: {self._state}"}
        return replace(found, sources=sources, notes=self._last.notes)

    def after_fork_in_child(self) -> None:
        """In a forked child: nothing is recorded, and nothing of the parent's is sent. Called by itself."""
        if not self._state:
            self._state = "a forked process"
            self._instrumentation.leave_in_child()
