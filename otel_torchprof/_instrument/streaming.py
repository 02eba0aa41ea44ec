"""``stream``: a profile that sends spans while it records, for runs of any length."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_ON

from otel_torchprof import config, parsers
from otel_torchprof._columns.phases import with_loaded
from otel_torchprof._export.provider import Provider
from otel_torchprof._export.sdk import span_limits_of_environment
from otel_torchprof._export.span_policy import checked_policy
from otel_torchprof._export.unknown_variables import warn_of_unknown_variables
from otel_torchprof._process import process_changes
from otel_torchprof._process.after_import import is_there
from otel_torchprof._process.cleanup import CleanupStack
from otel_torchprof._process.deadline import Deadline
from otel_torchprof.errors import TorchProfError, checked

from .instrumentation import KINDS, Instrumentation
from .options import live_options
from .processor import TorchSpanProcessor, unused

if TYPE_CHECKING:
    import types
    from collections.abc import Callable, Mapping
    from typing import Any

    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace.export import SpanExporter
    from typing_extensions import Self, Unpack

    from otel_torchprof._export.span_policy import SpanPolicy
    from otel_torchprof._profile.events import EventList, FunctionEventAvg
    from otel_torchprof._record.frame_filter import FrameFilter
    from otel_torchprof.health import ProcessorHealth

_STOP_SECONDS = 30.0
_NOT_STARTED, _IS_STOPPED = "not started", "stopped"


class stream:  # noqa: N801 - beside profile
    """Profiles with constant memory: ``with otp.stream(otp.ChromeTraceExporter("trace.json")):``.

    :class:`profile` keeps every event until it is read. A stream sends its events as spans every five seconds, and
    whenever some megabytes have accumulated, and keeps only sums, so it can run for hours. It records the same events
    with the same parents as :class:`TorchInstrumentor` with that ``detail``: every thread, with steps by :meth:`step`
    or by the program's optimizers. Each step is a trace, and all are sampled. A stream needs no TracerProvider, leaves
    the application's alone, and may run beside ``TorchInstrumentor``, ``profile`` and other streams. The current span
    of the application is the parent of the work inside it; inside an unsampled span nothing is recorded.

    With ``detail="frames"`` Python calls are recorded from the import of torch on, or from the start if torch is
    imported or not installed.

    The end of the ``with`` block, even by an exception, sends the remaining spans and shuts the exporters down. A
    stream can be started once. It does not record forked children. Recording costs what the instrumentation costs. Two
    background threads send; events that they cannot keep up with are dropped, oldest first, and counted. Thread-safe.

    Args:
        exporters: as for :class:`TorchSpanProcessor`; none if only averages are needed.
        detail: ``"steps"``, ``"modules"``, ``"ops"`` or ``"frames"``. Default: ``"ops"``.
        frames: a :class:`FrameFilter` for ``"frames"``. Default: ``OTEL_TORCHPROF_FRAMES``, else all calls.
        policy: a :class:`SpanPolicy`. Default: ``OTEL_TORCHPROF_POLICY``.
        memory_limit: limit of the recorder in bytes, as for :class:`TorchSpanProcessor`.
        resource: resource of the spans. Default: ``OTEL_RESOURCE_ATTRIBUTES`` and ``OTEL_SERVICE_NAME``.
        options: ``record_shapes``, ``profile_memory``, ``use_device``, ``device_events``, and options of sources such as ``energy``, as for
            :class:`TorchInstrumentor`.

    Raises:
        TypeError, ValueError: a bad argument; the message has its name, its value and the allowed values.

    Examples:
        >>> with otp.stream(otp.OTLPFileExporter("trace.otlp")) as recording:
        ...     for _ in range(3):
        ...         y = torch.ones(3) + 1
        ...         recording.step()
        >>> [average.count for average in recording.key_averages() if average.key == "aten::add"]
        [3]
    """

    @config.takes_options(config.LiveOptions)
    def __init__(
        self,
        *exporters: SpanExporter,
        detail: config.SpanDetail = "ops",
        frames: FrameFilter | None = None,
        policy: SpanPolicy | None = None,
        memory_limit: int | None = None,
        resource: Resource | None = None,
        **options: Unpack[config.LiveOptions],
    ) -> None:
        detail = checked("detail", detail, parsers.one_of(*KINDS))
        warn_of_unknown_variables()
        values = config.checked_arguments(stream.__init__, "stream", config.LiveOptions, options)
        recording = live_options(detail, frames, values)
        unused.note_recording()
        self._processor = TorchSpanProcessor(*exporters, sdk_spans=False, memory_limit=memory_limit)
        limits = span_limits_of_environment()
        provider = Provider(TracerProvider(ALWAYS_ON, resource, shutdown_on_exit=False, span_limits=limits))
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
        self._call_off_exit: Callable[[], None] | None = None
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
        """Starts the recording. A stream that is still running at the exit of the interpreter is stopped then.

        Raises:
            TorchProfError: the stream was started before.
            NativeError: 16 recordings are running in this process.
        """
        if self._state is not _NOT_STARTED:
            raise TorchProfError("a stream is started once, since its exporters are shut down at its end: make another")
        self._state = ""
        if self._off:
            return
        process_changes.watch(self)
        self._call_off_exit = process_changes.before_exit(self.stop)
        self._cleanup.push(self._shut_down)
        try:
            self._instrumentation.start()
        except BaseException:
            self._cleanup.close()
            self.stop()
            raise

    def stop(self, timeout: float | None = None) -> None:
        """Stops the recording, sends the remaining spans and shuts the exporters down.

        A second call has no effect, unless the first was interrupted.

        Args:
            timeout: limit in seconds. Default: 30, or 5 if no receiver has responded, as
                :meth:`TorchSpanProcessor.shutdown`.
        """
        if self._state:
            return
        self._last = self._last or self.health
        self._seconds = timeout
        self._cleanup.close()
        # After the cleanup, when all steps are known.
        self._last = replace(self._last, sources={**self._last.sources, "steps": self._instrumentation.steps_state})
        self._state = _IS_STOPPED
        if self._call_off_exit is not None:
            self._call_off_exit()

    def _shut_down(self) -> None:
        seconds = _STOP_SECONDS if self._seconds is None else self._seconds
        deadline = Deadline.after(seconds)
        # First: an interrupted start may not have attached the processor.
        self._instrumentation.stop(Deadline.after(seconds / 2))
        if self._seconds is None:
            self._processor.shutdown()
        else:
            self._processor.shutdown_within(deadline.remaining())

    def step(
        self,
        attributes: Mapping[str, Any] | None = None,
        *,
        tokens: int | None = None,
        samples: int | None = None,
    ) -> None:
        """Ends the current step of the loop and begins the next one; after the first call nothing else ends a step.

        Costs some microseconds.

        Args:
            attributes: attributes for the span of the ended step: numbers, booleans, texts.
            tokens: as of :meth:`TorchInstrumentor.step`.
            samples: likewise.

        Raises:
            TypeError, ValueError: ``tokens`` or ``samples`` is no integer, less than 0, or 2**63 or more.
        """
        if not self._state and not self._off:
            self._instrumentation.step(with_loaded(attributes, tokens, samples))

    def flush(self, timeout: float = 30.0) -> bool:
        """Sends everything that was recorded so far.

        Args:
            timeout: limit in seconds. Default: 30.

        Returns:
            False after the timeout, or if an exporter failed; else True.
        """
        return self._processor.force_flush(round(timeout * 1000))

    def key_averages(self) -> EventList[FunctionEventAvg]:
        """Returns sums and counts by name since the start, as :meth:`TorchSpanProcessor.key_averages`.

        Also after the end.
        """
        return self._processor.key_averages()

    @property
    def steps(self) -> int:
        """Number of ended steps among the drained events."""
        return self._instrumentation.steps

    @property
    def health(self) -> ProcessorHealth:
        """State of every source, and counts of recorded, dropped, sent and refused events and spans.

        Also after the end.
        """
        health = self._processor.health
        if self._off or self._state is _NOT_STARTED:
            return replace(health, sources={"recording": f"off: {self._off or self._state}"})
        if self._last is None:
            return health
        sources = {**self._last.sources, "recording": f"off: {self._state}"}
        return replace(health, sources=sources, notes=self._last.notes)

    def after_fork_in_child(self) -> None:
        """Stops the stream in a forked child, which records nothing and sends nothing of the parent.

        Called automatically.
        """
        if not self._state:
            self._state = "a forked process"
            self._instrumentation.leave_in_child()
