"""The arguments of ``TorchInstrumentor().instrument()``, checked, with defaults from the environment."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, Concatenate, Literal, ParamSpec, Protocol

from opentelemetry import metrics, trace

from otel_torchprof import config
from otel_torchprof._export.span_policy import checked_policy
from otel_torchprof._export.unknown_variables import warn_of_unknown_variables
from otel_torchprof._record.frame_filter import ALL_FRAMES, checked_filter
from otel_torchprof._record.source import RecordingOptions

from .step_segments import StepRule

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from typing_extensions import Unpack

    from otel_torchprof._export.span_policy import SpanPolicy
    from otel_torchprof._record.frame_filter import FrameFilter


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

    @config.takes_options(config.InstrumentOptions)
    def __init__(
        self,
        *,
        tracer_provider: trace.TracerProvider | None = None,
        meter_provider: metrics.MeterProvider | None = None,
        frames: FrameFilter | None = None,
        steps: Literal["auto", "program"] | Optimizer | Loader = "auto",
        policy: SpanPolicy | None = None,
        skip_dep_check: bool = False,  # noqa: ARG002 - of BaseInstrumentor, as the next
        raise_exception_on_conflict: bool = False,  # noqa: ARG002
        **given: Unpack[config.InstrumentOptions],
    ) -> None:
        warn_of_unknown_variables()
        if meter_provider is not None and not callable(getattr(meter_provider, "get_meter", None)):
            raise TypeError(f"meter_provider is {meter_provider!r}; it must be a MeterProvider")
        values = config.checked_arguments(Options.__init__, "instrument()", config.InstrumentOptions, given)
        if values["gpu_metrics"] is None:
            values["gpu_metrics"] = config.GPU_DEVICES.read() != "none"
        vars(self).update(values)
        self.tracer_provider = tracer_provider
        self.meter_provider = meter_provider
        self.step_rule = StepRule.checked(steps)
        self.policy = checked_policy(policy)
        self.recording = live_options(self.detail, frames, values)

    if TYPE_CHECKING:

        def __getattr__(self, argument: str) -> Any:
            """Returns the value of an option."""

    def differences(self, other: Options) -> set[str]:
        """Returns the attributes that differ from another object; a provider that is not given is the global one."""
        others = other._resolved()
        return {name for name, value in self._resolved().items() if value != others[name]}

    def _resolved(self) -> dict[str, Any]:
        tracers = self.tracer_provider or trace.get_tracer_provider()
        meters = self.meter_provider or metrics.get_meter_provider()
        return {**vars(self), "tracer_provider": tracers, "meter_provider": meters}


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


def live_options(detail: config.Detail, frames: FrameFilter | None, values: Mapping[str, Any]) -> RecordingOptions:
    """Returns the recording options of a live recording.

    Args:
        detail: level of detail.
        frames: selects calls; None: the environment's filter.
        values: of :class:`LiveOptions <otel_torchprof.config.LiveOptions>`, checked.

    Raises:
        TypeError: ``frames`` is not a filter.
    """
    has_steps_alone = detail == "steps"
    return RecordingOptions(
        operators=detail in {"ops", "frames"},
        phases=detail != "metrics",
        inputs=values["record_shapes"],
        memory=values["profile_memory"],
        frames=detail == "frames",
        frame_filter=checked_filter(frames) if detail == "frames" or frames is not None else ALL_FRAMES,
        device=values["use_device"],
        device_events="off" if has_steps_alone else values["device_events"],
        untimed="detail is 'steps'" if has_steps_alone else "device_events is 'off'",
        all_threads=True,
        is_live=True,
        sources={name: value for name, value in values.items() if name in config.SourceOptions.__annotations__},
    )
