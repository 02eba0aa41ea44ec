"""The arguments of ``TorchInstrumentor().instrument()``, checked, with defaults from the environment."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, Concatenate, Literal, ParamSpec, Protocol

from opentelemetry import metrics, trace

from otel_torchprof import config
from otel_torchprof._export.unknown_variables import warn_of_unknown_variables
from otel_torchprof._sampling.span_policy import checked_policy
from otel_torchprof._sources.catalog import checked_source_options
from otel_torchprof._sources.device_source import checked_device_events
from otel_torchprof._sources.frame_filter import ALL_FRAMES, checked_filter
from otel_torchprof._sources.recording_options import RecordingOptions, SourceOptions
from otel_torchprof.parsers import nearest

from .step_segments import StepRule

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from typing_extensions import Unpack

    from otel_torchprof._sampling.span_policy import SpanPolicy
    from otel_torchprof._sources.frame_filter import FrameFilter
    from otel_torchprof.parsers import BlackBoxOptions


_P = ParamSpec("_P")


class Optimizer(Protocol):
    """The part of torch's ``Optimizer`` that the instrumentation needs."""

    param_groups: Any

    def step(self) -> Any:
        """Updates the parameters."""


class Loader(Protocol):
    """The part of a ``DataLoader`` that the instrumentation needs."""

    dataset: Any

    def __iter__(self) -> Any:
        """Iterates over the batches."""


class Options:
    """The checked arguments of ``instrument()``, and the source of its signature.

    Raises:
        TypeError, ValueError: a bad argument; the message has its name, its value and the allowed values.
    """

    def __init__(
        self,
        *,
        tracer_provider: trace.TracerProvider | None = None,
        meter_provider: metrics.MeterProvider | None = None,
        detail: config.Detail | None = None,
        record_shapes: bool = False,
        frames: FrameFilter | None = None,
        overhead: float | None = None,
        max_operators: int | None = None,
        use_device: str | None = None,
        device_events: config.DeviceEvents | None = None,
        gpu_metrics: bool | None = None,
        export_ranks: config.ExportRanks | float | None = None,
        ranks: config.RankTraces | None = None,
        steps: Literal["auto", "program"] | Optimizer | Loader = "auto",
        loader_workers: bool | None = None,
        policy: SpanPolicy | None = None,
        sigterm_timeout: float | None = None,
        blackbox: str | BlackBoxOptions | None = None,
        skip_dep_check: bool = False,  # noqa: ARG002 - of BaseInstrumentor, as the next
        raise_exception_on_conflict: bool = False,  # noqa: ARG002
        **source_options: Unpack[SourceOptions],
    ) -> None:
        warn_of_unknown_variables()
        if detail is not None and detail not in config.DETAILS:
            raise ValueError(f"detail is {detail!r}; it must be one of {', '.join(map(repr, config.DETAILS))}")
        if meter_provider is not None and not callable(getattr(meter_provider, "get_meter", None)):
            raise TypeError(f"meter_provider is {meter_provider!r}; it must be a MeterProvider")
        self.overhead = config.OVERHEAD.given(overhead)
        self.max_operators = config.MAX_OPERATORS.given(max_operators)
        self.export_ranks = config.EXPORT_RANKS.given(export_ranks)
        self.ranks = config.RANKS.given(ranks)
        self.step_rule = StepRule.checked(steps)
        self.blackbox: BlackBoxOptions | None = config.BLACK_BOX.given(blackbox)
        self.sigterm_timeout = config.SIGTERM_TIMEOUT.given(sigterm_timeout)
        if gpu_metrics is not None and not isinstance(gpu_metrics, bool):
            raise TypeError(f"gpu_metrics is {gpu_metrics!r}; it must be True, False, or None: as the environment says")
        if loader_workers is not None and not isinstance(loader_workers, bool):
            raise TypeError(
                f"loader_workers is {loader_workers!r}; it must be True, False, or None: as the environment says"
            )
        self.loader_workers = config.LOADER_WORKERS.read() if loader_workers is None else loader_workers
        self.gpu_metrics = config.GPU_DEVICES.read() != "none" if gpu_metrics is None else gpu_metrics
        self.tracer_provider = tracer_provider
        self.meter_provider = meter_provider
        self.detail = config.DETAIL.read() if detail is None else detail
        self.policy = checked_policy(policy)
        self.recording = live_options(
            self.detail,
            record_shapes=record_shapes,
            frames=frames,
            use_device=use_device,
            device_events=device_events,
            sources=checked_source_options("instrument()", source_options),
        )

    def differences(self, other: Options) -> set[str]:
        """Returns the attributes that differ from another object; a provider that is not given is the global one."""
        others = other._resolved()
        return {name for name, value in self._resolved().items() if value != others[name]}

    def _resolved(self) -> dict[str, Any]:
        tracers = self.tracer_provider or trace.get_tracer_provider()
        meters = self.meter_provider or metrics.get_meter_provider()
        return {**vars(self), "tracer_provider": tracers, "meter_provider": meters}


def checked_options(given: Mapping[str, Any]) -> Options:
    """Checks the arguments of ``instrument()``.

    Raises:
        TypeError, ValueError: an argument is wrong or unknown.
    """
    allowed = (*(Options.__init__.__kwdefaults__ or {}), *SourceOptions.__annotations__)
    for name in given:
        if name not in allowed:
            near = nearest(name, allowed)
            hint = f"did you mean {near}? " if near else ""
            raise TypeError(f"{name} is no argument of instrument(); {hint}allowed are {', '.join(allowed)}")
    return Options(**given)


def takes_arguments_of(
    function: Callable[_P, object],
) -> Callable[[Callable[..., None]], Callable[Concatenate[Any, _P], None]]:
    """Gives a method the signature of another function, for documentation, editors and type checkers."""

    def decorate(method: Callable[..., None]) -> Callable[Concatenate[Any, _P], None]:
        own = next(iter(inspect.signature(method).parameters.values()))
        signature = inspect.signature(function)
        method.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=[own, *signature.parameters.values()], return_annotation="None"
        )
        return method

    return decorate


def live_options(
    detail: config.Detail,
    *,
    record_shapes: bool,
    frames: FrameFilter | None,
    use_device: str | None,
    device_events: str | None,
    sources: SourceOptions,
) -> RecordingOptions:
    """Returns the recording options of a live recording: the arguments, else the environment.

    Raises:
        TypeError, ValueError: ``use_device`` is not a name, ``device_events`` is unknown, or ``frames`` is not a
            filter.
    """
    if use_device is not None and not isinstance(use_device, str):
        raise TypeError(
            f"use_device is {use_device!r}; it must be the name of a type of device, such as 'cuda', or None"
        )
    device = config.DEVICE.given(use_device)
    events = config.DEVICE_EVENTS.read() if device_events is None else checked_device_events(device_events, 1)
    has_steps_alone = detail == "steps"
    return RecordingOptions(
        operators=detail in {"ops", "frames"},
        phases=detail != "metrics",
        inputs=bool(record_shapes),
        frames=detail == "frames",
        frame_filter=checked_filter(frames) if detail == "frames" or frames is not None else ALL_FRAMES,
        device=device or None,
        device_events="off" if has_steps_alone else events,
        untimed="detail is 'steps'" if has_steps_alone else "device_events is 'off'",
        all_threads=True,
        is_live=True,
        sources=sources,
    )
