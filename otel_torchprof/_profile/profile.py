"""``profile``: replaces torch's profiler by a change of import."""

from __future__ import annotations

import operator
import uuid
from dataclasses import replace
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

from otel_torchprof import config
from otel_torchprof._answers.kept_memory import MemoryInUse
from otel_torchprof._answers.out_of_memory import notice
from otel_torchprof._export import sdk
from otel_torchprof._export.cycles import Cycles, Move, ProfilerAction, always
from otel_torchprof._export.unknown_variables import warn_of_unknown_variables
from otel_torchprof._model.tree import STEP_PREFIX
from otel_torchprof._native.recorder import now_ns
from otel_torchprof._process.torch_differences import differences
from otel_torchprof._record.compiled_code import read_as_torchs_profile
from otel_torchprof._record.device_source import TimedSteps, checked_device_events
from otel_torchprof._record.frame_filter import ALL_FRAMES, FrameFilter, checked_filter
from otel_torchprof._record.labels import record_function
from otel_torchprof._record.recording import Segments
from otel_torchprof._record.source import RecordingOptions
from otel_torchprof.errors import TorchProfError, warn_caller_once, warn_once

from . import options
from .kineto_event import ProfilerActivity
from .results import ProfileResults, us_since
from .steps import ProfilerSteps

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from types import TracebackType

    from typing_extensions import Self, Unpack

    from otel_torchprof._answers.kept_memory import DeviceMemory
    from otel_torchprof.health import Health, ProfilerStats


class profile(ProfileResults):  # noqa: N801 - torch's name
    """Records torch's operators and labels between start and stop, for averages, traces and spans.

    Takes the arguments of ``torch.autograd.profiler.profile`` and of ``torch.profiler.profile``; ``docs/profile.md`` is
    the guide. Use it as a context manager, or call ``start()`` and ``stop()``. Records the calling thread and the
    threads on which torch continues its work (autograd, ``jit.fork``), as torch does; ``all_threads=True`` records
    every thread. Several profiles may run at the same time, on any threads and in any order; each operator is recorded
    once. Any thread may stop and read a profile. A profile that is entered again keeps its events.

    Inside a span of the application, the profile's spans join that trace (``docs/spans.md``).

    Costs about 25 ns per operator while it runs, besides torch's own cost of calling any observer (40 to 70 ns), and
    more with cold caches; nothing before and after. The first read costs about 30 ns per event
    (``docs/benchmarks.md``).

    Args:
        enabled: False records nothing; everything else works. Default: True.
        use_cuda: deprecated, with torch's warning; up to torch 2.13. Use ``use_device`` or ``activities``.
        use_device: type of device to time: ``cuda``, ``xpu``, ``mtia``, ``hpu`` or the name of torch's PrivateUse1
            backend (``docs/measurements.md``). The stop synchronizes with it. The CUDA activity has the same effect.
        record_shapes: whether to record the shapes of operators' inputs. Default: False.
        with_flops: whether to estimate floating point operations from the shapes, which are then recorded. Default:
            False.
        profile_memory: whether to record allocations and releases. Default: False.
        with_stack: whether to record Python and C calls, and the stack of each operator. Default: False.
        with_modules: whether to record the modules that enclose each operator; deprecated in torch 2.14, with its
            warning.
        use_kineto: selects nothing here; torch's rules for the other arguments depend on it.
        use_cpu: False records no CPU events, and needs another activity. Default: True.
        experimental_config: a torch ``_ExperimentalConfig``; ``trace_only``, ``capture_overload_names`` and
            ``profile_all_threads`` have an effect.
        activities: ProfilerActivity values, of this package or torch, or dictionaries from them to lists of activity
            types.
        activity_filters: such a dictionary, as in torch.autograd's class.
        schedule: function from the number of a step to a :class:`ProfilerAction`; see :func:`schedule`. Default: every
            step.
        on_trace_ready: called with the profile at the end of each cycle, and at a stop that cuts a cycle short.
        execution_trace_observer: object whose ``start``, ``stop`` and ``cleanup`` are called with the recording.
        acc_events: whether to keep the events of earlier cycles of the schedule. Default: False.
        custom_trace_id_callback: function that returns the id of each trace. Default: random ids.
        post_processing_timeout_s: has no effect.
        all_threads: whether to record every thread of the process. Default: False.
        operators: True raises if operators cannot be recorded; False records labels only. Default: None, operators if
            torch is installed.
        memory_limit: limit of the recorder in bytes, per cycle of a schedule; further events are dropped and counted in
            :attr:`health`. Default: ``OTEL_TORCHPROF_MEMORY_LIMIT``, else 512 MiB.
        frames: a :class:`FrameFilter` for ``with_stack``. Default: ``OTEL_TORCHPROF_FRAMES``, else all calls.
        device_events: events to time on the device, at two device events each, some microseconds: ``"ops"`` (operators
            that launch device work, labels and modules), ``"all"`` (all operators except views, as torch's legacy
            profiler), ``"labels"`` (labels and modules) or ``"off"``. Default: ``"ops"``.
        device_events_every: times the device in every n-th step only, from the first recorded step on. Default: 1.
        source_options: options of sources such as ``energy``, as for :class:`TorchInstrumentor`.

    Raises:
        TorchLibraryError: operators are required and cannot be recorded (no compiler); the message names the fix.
        AssertionError, RuntimeError, TypeError, ValueError: a bad argument; torch's own error if torch has one.

    Examples:
        >>> model = torch.nn.Linear(8, 2)
        >>> with otp.profile() as prof:
        ...     y = model(torch.ones(4, 8))
        >>> print(prof.key_averages().table(sort_by="self_cpu_time_total", row_limit=5))
        --...  Name  ...  # of Calls...
        >>> prof.export_chrome_trace("trace.json")
    """

    _segments: Segments

    @config.takes_options(config.SourceOptions)
    def __init__(
        self,
        enabled: bool = True,
        *,
        use_cuda: bool | None = None,
        use_device: str | None = None,
        record_shapes: bool = False,
        with_flops: bool = False,
        profile_memory: bool = False,
        with_stack: bool = False,
        with_modules: bool = False,
        use_kineto: bool = False,
        use_cpu: bool = True,
        experimental_config: Any = None,
        activities: Iterable[Any] | None = None,
        activity_filters: Mapping[Any, Iterable[str]] | None = None,
        schedule: Callable[[int], Any] | None = None,
        on_trace_ready: Callable[[Any], object] | None = None,
        execution_trace_observer: Any = None,
        acc_events: bool = False,
        custom_trace_id_callback: Callable[[], str] | None = None,
        post_processing_timeout_s: float | None = None,
        all_threads: bool = False,
        operators: bool | None = None,
        memory_limit: int | None = None,
        frames: FrameFilter | None = None,
        device_events: config.DeviceEvents | None = None,
        device_events_every: int = 1,
        **source_options: Unpack[config.SourceOptions],
    ) -> None:
        self.acc_events, self.on_trace_ready, self.with_modules = acc_events, on_trace_ready, with_modules
        self.custom_trace_id_callback = custom_trace_id_callback
        self.post_processing_timeout_s = post_processing_timeout_s
        self.execution_trace_observer = execution_trace_observer
        self._step_label: record_function | None = None
        self._kineto_steps, self._active = ProfilerSteps(), False
        events = checked_device_events(device_events, device_events_every)
        self._device_steps = TimedSteps(device_events_every)
        sources = config.checked_arguments(profile.__init__, "profile", config.SourceOptions, source_options)
        if not enabled:
            super().__init__(Segments(RecordingOptions(operators=False)))
            self.enabled, self._cycles = False, Cycles(always)
            return
        options.check_timeout(post_processing_timeout_s)
        options.check_calls(
            execution_trace_observer,
            schedule=schedule,
            on_trace_ready=on_trace_ready,
            custom_trace_id_callback=custom_trace_id_callback,
        )
        chosen = options.checked_choice(
            activities=activities,
            activity_filters=activity_filters,
            use_device=use_device,
            use_cuda=use_cuda,
            use_cpu=use_cpu,
            use_kineto=use_kineto,
            as_torch_profiler=schedule is not None or on_trace_ready is not None,
        )
        experimental = options.checked_config(experimental_config, with_stack=with_stack, with_modules=with_modules)
        super().__init__(
            Segments(
                RecordingOptions(
                    operators=operators,
                    inputs=record_shapes or with_flops,
                    overloads=bool(options.of_config(experimental, "capture_overload_names")),
                    memory=profile_memory,
                    frames=with_stack,
                    collections=bool(options.of_config(experimental, "record_python_gc_info")),
                    frame_filter=checked_filter(frames) if with_stack or frames is not None else ALL_FRAMES,
                    modules=with_modules,
                    device=chosen.device,
                    untimed=chosen.untimed,
                    device_events=events,
                    sources=sources,
                    all_threads=all_threads or bool(options.of_config(experimental, "profile_all_threads")),
                    memory_limit=memory_limit,
                )
            )
        )
        self.record_shapes, self.with_flops = record_shapes, with_flops
        self.profile_memory, self.with_stack = profile_memory, with_stack
        self.experimental_config, self._trace_only = experimental, bool(options.of_config(experimental, "trace_only"))
        self.activities, self.activity_filters = chosen.activities, chosen.filters
        self.use_device, self._kind = chosen.device, chosen.kind
        self.use_cpu, self.use_cuda = ProfilerActivity.CPU in chosen.collected, chosen.device == "cuda"
        self._labels_steps = schedule is not None
        self._cycles = Cycles(schedule or always)
        if execution_trace_observer is None:
            self.execution_trace_observer = options.observer_of_the_environment()

    # ---- recording ----

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # A child that was forked inside the block leaves it too, perhaps by sys.exit(), but only the parent records.
        if self._segments.is_parents:
            return
        try:
            self.stop()
        finally:
            if self.execution_trace_observer is not None:
                self.execution_trace_observer.cleanup()
            if error is not None:
                notice(error, traceback, self._memory_in_use if self.profile_memory else None, is_profile=True)

    def _memory_in_use(self) -> list[DeviceMemory]:
        in_use = MemoryInUse()
        in_use.add(self._batch())
        return in_use.by_device()

    def start(self) -> None:
        """Starts the recording, or the schedule. Events of an earlier recording are kept and joined with the new ones.

        Raises:
            RuntimeError: the profile is running.
            NativeError: 16 recordings are running.
        """
        if not self.enabled:
            return
        if self._active:
            raise TorchProfError("Profiler context manager is not reentrant: this one is running")
        warn_of_unknown_variables()
        self._cycles.begin(self._do)
        self._active = self._started = True
        self._kineto_steps.begin()
        self._begin_step_label()

    def stop(self) -> None:
        """Stops the recording.

        Open events end now and are marked unfinished; a second call has no effect, unless the first was interrupted.

        Raises:
            RuntimeError: the profile was not started, or this process was forked from the recording one.
        """
        if not self.enabled:
            return
        lock: Any = self._segments.stopping
        if lock._is_owned():  # noqa: SLF001 - as threads.Condition does; true if on_trace_ready calls stop()
            return
        with lock:
            if active := self._active:
                self._end()
        if not active and not self._started:
            raise TorchProfError("the profile cannot be stopped: it was not started; use `with profile():` or start()")

    def step(self) -> None:
        """Begins the next step of the loop; each step becomes a trace of its own, and a slice in Chrome JSON.

        The first step begins with the recording. With a schedule the next step may be unrecorded or begin another
        cycle, and steps are labels among the events. Costs some microseconds within a cycle. Has no effect, with one
        warning, while the profile does not run.
        """
        if self.enabled and not self._active:
            warn_once("step() was called before the start or after the stop of a profile, where it has no effect")
            return
        self._end_step_label()
        self._cycles.advance(self._do)
        if self.enabled:
            self._device_steps.choose(self.step_num, self._segments.time_devices)
            self._marks.mark(self.step_num, now_ns())
            self._kineto_steps.step()
            self._begin_step_label()

    def prepare_trace(self) -> None:
        """First half of :meth:`start`: prepares the recording, under a new trace id."""
        self._prepare(new_cycle=False)

    _prepare_trace = prepare_trace

    def start_trace(self) -> None:
        """Second half of :meth:`start`: starts the recording.

        Raises:
            AssertionError: the trace was not prepared; torch's error.
        """
        if self.execution_trace_observer is not None:
            self.execution_trace_observer.start()
        if not self._prepared:
            raise AssertionError("Profiler must be initialized before starting trace")
        self._forget_results()
        self._parent = sdk.current_span()
        begun = perf_counter_ns()
        start_ns = self._segments.begin() if self.use_cpu else now_ns()
        self._note(profiler_enable_call_duration_us=us_since(begun))
        self._device_steps.begin(self.step_num)
        self._marks.open(self.step_num, start_ns)
        self._tracing, self.profiling_start_time_ns = True, perf_counter_ns()
        names = ("profile_memory", "with_stack", "record_shapes", "with_modules", "with_flops")
        self._metadata.note(self.trace_id, [name for name in names if getattr(self, name)])

    _start_trace = start_trace

    def stop_trace(self) -> None:
        """Stops the recording of :meth:`start_trace`, after synchronizing with the device in use.

        Raises:
            AssertionError: the trace was not prepared; torch's error.
        """
        if not self._prepared:
            raise AssertionError("Profiler must be initialized before stopping trace")
        try:
            if self.execution_trace_observer is not None:
                self.execution_trace_observer.stop()
            options.synchronize(self.use_device)
        finally:
            begun = self.profiling_end_time_ns = perf_counter_ns()
            self._tracing = False
            self._marks.close(self._segments.end() if self._segments.running else now_ns())
            self._note(
                profiler_disable_call_duration_us=us_since(begun),
                profiling_window_duration_sec=(begun - self.profiling_start_time_ns) / 1e9,
            )

    def toggle_collection_dynamic(self, enable: bool, activities: Iterable[Any]) -> None:
        """Pauses or resumes the recording, if ``activities`` include the CPU. A paused recording costs nothing.

        A pause ends open events and marks them unfinished. A resumed recording records the calling thread. Has no
        effect before and after the recording.
        """
        if not self._tracing or ProfilerActivity.CPU not in map(options.as_activity, activities):
            return
        if not enable:
            self._segments.end()
        elif not self._segments.running:
            self._forget_results()
            self._segments.begin()
            self._device_steps.choose(self.step_num, self._segments.time_devices)

    # ---- state ----

    @property
    def profiler(self) -> Self | None:
        """The profile itself; None before its start. In torch.profiler's class, the inner profile of torch.autograd."""
        return self if self._prepared else None

    @property
    def is_running(self) -> bool:
        """Whether the profile is started and not stopped; its schedule may skip the current step."""
        return self._active

    @property
    def schedule(self) -> Callable[[int], Any]:
        """The schedule in use. A new one applies from the next step on."""
        return self._cycles.schedule

    @schedule.setter
    def schedule(self, schedule: Callable[[int], Any]) -> None:
        self._cycles.schedule = schedule

    @property
    def step_num(self) -> int:
        """Number of the current step; the first is 0."""
        return self._cycles.step_num

    @step_num.setter
    def step_num(self, number: int) -> None:
        """Sets the number, for loops that count themselves, from 0 or from a checkpoint.

        The schedule is next asked for the step after it.
        """
        self._cycles.step_num = operator.index(number)

    @property
    def record_steps(self) -> bool:
        """Whether steps are labels among the events: True with a schedule."""
        return self._labels_steps

    @property
    def profiler_kind(self) -> Any:
        """Torch's ``ProfilerState`` of the device in use; imports torch."""
        return options.torchs_state(self)

    @property
    def current_action(self) -> ProfilerAction:
        """The schedule's :class:`ProfilerAction` of the current step."""
        return self._cycles.current

    @property
    def health(self) -> Health:
        """State of every source, counts of dropped events, and durations: a :class:`Health`.

        Can be read at any time.
        """
        return replace(self._segments.health(), stats=self._figures)

    def _stats(self) -> ProfilerStats:
        """``health.stats``, under the name in torch.profiler."""
        return self._figures

    # ---- ids and options of the trace ----

    def set_custom_trace_id_callback(self, callback: Callable[[], str] | None) -> None:
        """Sets the function that returns the ids of new traces; None for random ids."""
        self.custom_trace_id_callback = callback

    def default_trace_id(self) -> str:
        """Returns a random trace id: 32 hexadecimal digits, as torch's."""
        return f"{uuid.uuid4().int:032X}"

    def create_trace_id(self) -> str:
        """Returns the id of a new trace: the callback's result, or a random id."""
        return self.custom_trace_id_callback() if self.custom_trace_id_callback else self.default_trace_id()

    def config(self, create_trace_id: bool = False) -> Any:
        """Returns the options of the profile as torch's ``ProfilerConfig``; imports torch.

        Raises:
            ImportError: torch is not installed.
        """
        if create_trace_id:
            self.trace_id = self.create_trace_id()
        return options.torchs_config(self)

    # ---- within ----

    def _do(self, move: Move, by_step: bool) -> None:
        if move is Move.PREPARE:
            self._prepare(new_cycle=by_step)
        elif move is Move.START:
            self.start_trace()
        elif move is Move.STOP:
            self.stop_trace()
        elif self.on_trace_ready is not None:
            self.on_trace_ready(self)

    def _prepare(self, *, new_cycle: bool) -> None:
        begun = perf_counter_ns()
        if new_cycle and self._prepared and not self.acc_events:
            if differences().warns_of_cycles:
                warn_caller_once(
                    "Warning: Profiler clears events at the end of each cycle. Only events from the current cycle will "
                    "be reported. To keep events across cycles, set acc_events=True."
                )
            self._forget_results()
            self._segments.clear()
            self._marks.clear()
        self.trace_id = self.create_trace_id()
        self._segments.prepare()
        self._prepared = True
        self._note(profiler_prepare_call_duration_us=us_since(begun))

    def _end(self) -> None:
        try:
            self._kineto_steps.end()
            self._end_step_label()
            self._cycles.end(self._do)
        except Exception:  # not KeyboardInterrupt: after that, the user calls stop() again
            self._active = self._segments.running  # still running after a RecursionError before the end
            raise
        self._active = False

    def _begin_step_label(self) -> None:
        if self._labels_steps:
            self._step_label = record_function(f"{STEP_PREFIX}{self.step_num}")
            self._step_label.__enter__()

    def _end_step_label(self) -> None:
        label, self._step_label = self._step_label, None
        if label is not None:
            label.__exit__(None, None, None)


_KinetoProfile = profile
"""Torch's base class without schedules; here the same class."""
read_as_torchs_profile(profile)
