"""``profile``: torch's profiler, by a change of import."""

from __future__ import annotations

import operator
import uuid
from dataclasses import replace
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

from otel_torchprof import config
from otel_torchprof._events.activities import ProfilerActivity
from otel_torchprof._export import sdk
from otel_torchprof._export.unknown_variables import warn_of_unknown_variables
from otel_torchprof._native.recorder import now_ns
from otel_torchprof._process.caller_warnings import warn_caller_once
from otel_torchprof._process.torch_differences import differences
from otel_torchprof._record.segments import Segments
from otel_torchprof._sampling.cycles import Cycles, Move, ProfilerAction, always
from otel_torchprof._sources.catalog import checked_source_options
from otel_torchprof._sources.device_source import TimedSteps, checked_device_events
from otel_torchprof._sources.frame_filter import ALL_FRAMES, FrameFilter, checked_filter
from otel_torchprof._sources.labels import record_function
from otel_torchprof._sources.recording_options import RecordingOptions
from otel_torchprof._tree.tree import STEP_PREFIX
from otel_torchprof.errors import TorchProfError

from . import options
from .results import ProfileResults, us_since
from .steps import ProfilerSteps

if TYPE_CHECKING:
    import types
    from collections.abc import Callable, Iterable, Mapping

    from typing_extensions import Self, Unpack

    from otel_torchprof._sources.recording_options import SourceOptions
    from otel_torchprof.health import Health, ProfilerStats


class profile(ProfileResults):  # noqa: N801 - torch's name
    """Records what runs between its start and its stop: torch's operators and labels, as averages, traces and spans.

    Takes the arguments of ``torch.autograd.profiler.profile`` and of ``torch.profiler.profile``; ``docs/profile.md`` says what
    each does here. A context manager, or ``start()`` and ``stop()``. Records the calling thread and what torch carries on for
    it (autograd's threads, ``jit.fork``), as torch does; ``all_threads=True`` records every thread. Several may run at the same
    time, on any threads and in any order; each operator is recorded once. May be stopped and read from any thread. Entered
    again after its end it keeps the events that it has.

    Inside a span of the application, its spans join that trace (see ``docs/spans.md``).

    Costs some 25 ns per operator while it runs, over what torch needs to call any observer (40 to 70), and more where caches
    are cold; nothing before and after. Reading costs some 30 ns per event the first time, whatever is read (see
    ``docs/benchmarks.md``).

    Args:
        enabled: False: nothing is recorded, everything else works.
        use_cuda: up to torch 2.13, deprecated, with its warning; use ``use_device`` or ``activities``.
        use_device: ``cuda``, ``xpu``, ``mtia``, ``hpu`` or the name of torch's PrivateUse1 backend: its times are recorded
            (see ``docs/devices.md``), and it is waited for at the end. The CUDA activity means the same.
        record_shapes: keep the shapes of the operators' inputs.
        with_flops: estimate floating point operations from the shapes, which are then kept.
        profile_memory: record allocations and releases.
        with_stack: record Python and C calls, and the stack of each operator.
        with_modules: record the hierarchy of modules around each operator; deprecated by torch 2.14, with its warning.
        use_kineto: chooses nothing here; torch's rules for the other arguments depend on it.
        use_cpu: False: the CPU's events are not recorded, which needs another activity.
        experimental_config: a torch ``_ExperimentalConfig``, of which ``trace_only``, ``capture_overload_names`` and
            ``profile_all_threads`` mean something here.
        activities: ProfilerActivity values, ours or torch's, or dictionaries from them to lists of activity types.
        activity_filters: such a dictionary, as torch.autograd's class has it.
        schedule: gets the number of a step and returns a :class:`ProfilerAction` (see :func:`schedule`).
        on_trace_ready: called with the profile at the end of each cycle, and at the end where that cuts a cycle short.
        execution_trace_observer: an object with ``start``, ``stop`` and ``cleanup``, which are called with the recording.
        acc_events: keep the events of earlier cycles of the schedule.
        custom_trace_id_callback: returns the id of the trace that begins; by default a random one.
        post_processing_timeout_s: has no meaning here, where reading takes no such time.
        all_threads: every thread of the process.
        operators: True: an error where operators cannot be recorded; None (default): labels alone where torch is not
            installed; False: labels alone.
        memory_limit: bytes that may be held in the recorder, by default 512 MiB (``OTEL_TORCHPROF_MEMORY_LIMIT``), by each
            cycle of a schedule. What comes after is dropped and counted: see :attr:`health`.
        frames: with ``with_stack``, which calls are recorded; by default as the environment says (``OTEL_TORCHPROF_FRAMES``),
            else all.
        device_events: for which events the device's time is measured, each at the cost of two events of its own, some
            microseconds: ``"ops"`` (operators that give a device work themselves, labels and modules; default), ``"all"``
            (all operators but views, as torch's legacy engine), ``"labels"`` (labels and modules) or ``"off"``.
        device_events_every: only in every so many steps, from the first recorded one on.
        source_options: what single sources understand: ``energy``, whether to read the energy counters of NVIDIA's GPUs, ten
            times a second, on a thread of its own; by default where the device is ``cuda``.

    Raises:
        TorchLibraryError: operators are wanted and cannot be recorded (no compiler); the message names the fix.
        AssertionError, RuntimeError, TypeError, ValueError: a bad argument; torch's own error where torch has one.
    """

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
        **source_options: Unpack[SourceOptions],
    ) -> None:
        self.acc_events, self.on_trace_ready, self.with_modules = acc_events, on_trace_ready, with_modules
        self.custom_trace_id_callback = custom_trace_id_callback
        self.post_processing_timeout_s = post_processing_timeout_s
        self.execution_trace_observer = execution_trace_observer
        self._step_label: record_function | None = None
        self._kineto_steps, self._active = ProfilerSteps(), False
        events = checked_device_events(device_events, device_events_every)
        self._device_steps = TimedSteps(device_events_every)
        sources = checked_source_options("profile", source_options)
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
        config = options.checked_config(experimental_config, with_stack=with_stack, with_modules=with_modules)
        super().__init__(
            Segments(
                RecordingOptions(
                    operators=operators,
                    inputs=record_shapes or with_flops,
                    overloads=bool(options.of_config(config, "capture_overload_names")),
                    memory=profile_memory,
                    frames=with_stack,
                    collections=bool(options.of_config(config, "record_python_gc_info")),
                    frame_filter=checked_filter(frames) if with_stack or frames is not None else ALL_FRAMES,
                    modules=with_modules,
                    device=chosen.device,
                    untimed=chosen.untimed,
                    device_events=events,
                    sources=sources,
                    all_threads=all_threads or bool(options.of_config(config, "profile_all_threads")),
                    memory_limit=memory_limit,
                )
            )
        )
        self.record_shapes, self.with_flops = record_shapes, with_flops
        self.profile_memory, self.with_stack = profile_memory, with_stack
        self.experimental_config, self._trace_only = config, bool(options.of_config(config, "trace_only"))
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
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: types.TracebackType | None,
    ) -> None:
        # A child that was forked within the block leaves it too, with sys.exit() perhaps: its parent records, not it.
        if self._segments.is_parents:
            return
        try:
            self.stop()
        finally:
            if self.execution_trace_observer is not None:
                self.execution_trace_observer.cleanup()

    def start(self) -> None:
        """Starts recording, or the schedule. What was recorded before is kept, and joined with what comes now.

        Raises:
            RuntimeError: it runs already.
            NativeError: 16 recordings run already.
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
        """Stops recording; a second call does nothing, but the rest of one that was interrupted. Events still open end now and are marked unfinished.

        Raises:
            RuntimeError: not started, or this process was forked from one that recorded.
        """
        if not self.enabled:
            return
        lock: Any = self._segments.stopping
        if lock._is_owned():  # noqa: SLF001 - as threading.Condition asks. What is called when a trace is ready stops it
            return
        with lock:
            if active := self._active:
                self._end()
        if not active and not self._started:
            raise TorchProfError("the profile cannot be stopped: it was not started; use `with profile():` or start()")

    def step(self) -> None:
        """Says that the next step of the loop begins: each step becomes a trace of its own, and a slice in Chrome JSON.

        The first step begins at the start of the recording. With a schedule the next step may be one that is not recorded, or
        the first of another cycle; the steps are then labels among the events too. Costs some microseconds within a cycle.
        Without effect, and said once, while the profile does not run.
        """
        if self.enabled and not self._active:
            config.warn_once(
                "step() was called before the start or after the stop of a profile, where it has no effect"
            )
            return
        self._end_step_label()
        self._cycles.advance(self._do)
        if self.enabled:
            self._device_steps.choose(self.step_num, self._segments.time_devices)
            self._marks.mark(self.step_num, now_ns())
            self._kineto_steps.step()
            self._begin_step_label()

    def prepare_trace(self) -> None:
        """The first half of :meth:`start`: makes the recording ready, under a new trace id."""
        self._prepare(new_cycle=False)

    _prepare_trace = prepare_trace

    def start_trace(self) -> None:
        """The second half of :meth:`start`: records from now on.

        Raises:
            AssertionError: not prepared, as torch's.
        """
        if self.execution_trace_observer is not None:
            self.execution_trace_observer.start()
        if not self._prepared:
            raise AssertionError("Profiler must be initialized before starting trace")
        self._forget_results()
        self._parent = sdk.current_span()
        begun = perf_counter_ns()
        began = self._segments.begin() if self.use_cpu else now_ns()
        self._note(profiler_enable_call_duration_us=us_since(begun))
        self._device_steps.begin(self.step_num)
        self._marks.open(self.step_num, began)
        self._tracing, self.profiling_start_time_ns = True, perf_counter_ns()
        names = ("profile_memory", "with_stack", "record_shapes", "with_modules", "with_flops")
        self._metadata.note(self.trace_id, [name for name in names if getattr(self, name)])

    _start_trace = start_trace

    def stop_trace(self) -> None:
        """Stops what :meth:`start_trace` began, after the device in use has done its work.

        Raises:
            AssertionError: not prepared, as torch's.
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
        """Pauses the recording, or continues with it, where the CPU is among the activities; costs nothing while it pauses.

        What is open at a pause ends there and is marked unfinished. What follows is recorded on the thread that calls this. No
        effect before the recording and after it.
        """
        if not self._tracing or ProfilerActivity.CPU not in map(options.as_activity, activities):
            return
        if not enable:
            self._segments.end()
        elif not self._segments.running:
            self._forget_results()
            self._segments.begin()
            self._device_steps.choose(self.step_num, self._segments.time_devices)

    # ---- where it is ----

    @property
    def profiler(self) -> Self | None:
        """Itself; None before it was begun. In torch.profiler's class this is the profile of torch.autograd inside."""
        return self if self._prepared else None

    @property
    def is_running(self) -> bool:
        """Whether it was started, and not stopped since; a schedule may leave out the step that runs."""
        return self._active

    @property
    def schedule(self) -> Callable[[int], Any]:
        """The schedule that it was given, or one that records every step. Another one is asked from the next step on."""
        return self._cycles.schedule

    @schedule.setter
    def schedule(self, schedule: Callable[[int], Any]) -> None:
        self._cycles.schedule = schedule

    @property
    def step_num(self) -> int:
        """Number of the step that is running; the first is 0."""
        return self._cycles.step_num

    @step_num.setter
    def step_num(self, number: int) -> None:
        """For loops that count by themselves, from 0 or on from a checkpoint. The schedule is asked for the step after it next."""
        self._cycles.step_num = operator.index(number)

    @property
    def record_steps(self) -> bool:
        """Whether steps are labels among the events: where there is a schedule."""
        return self._labels_steps

    @property
    def profiler_kind(self) -> Any:
        """Torch's ``ProfilerState`` for the device that is in use; imports torch."""
        return options.torchs_state(self)

    @property
    def current_action(self) -> ProfilerAction:
        """What the schedule says of that step."""
        return self._cycles.current

    @property
    def health(self) -> Health:
        """What was on, what was off and why, what was dropped, how long its parts took; at any time."""
        return replace(self._segments.health(), stats=self._figures)

    def _stats(self) -> ProfilerStats:
        """As ``health.stats``, under the name that torch.profiler has for it."""
        return self._figures

    # ---- what goes with the trace ----

    def set_custom_trace_id_callback(self, callback: Callable[[], str] | None) -> None:
        """Sets what gives the ids of the traces that begin from now on; None: random ones."""
        self.custom_trace_id_callback = callback

    def default_trace_id(self) -> str:
        """A random id for a trace: 32 hexadecimal digits, as torch's."""
        return f"{uuid.uuid4().int:032X}"

    def create_trace_id(self) -> str:
        """The id for a trace that begins: what the callback returns, or a random one."""
        return self.custom_trace_id_callback() if self.custom_trace_id_callback else self.default_trace_id()

    def config(self, create_trace_id: bool = False) -> Any:
        """The profile's options as torch's ``ProfilerConfig``; imports torch.

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
        except Exception:  # not an interrupt: after that the stop is to be called again
            self._active = self._segments.running  # so it is where too little was left of the stack
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
"""Torch's base class, without schedules: here its one class, which needs none."""
