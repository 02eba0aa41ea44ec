"""The arguments of ``TorchInstrumentor().instrument()``, checked, with what the environment says where they do not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from otel_torchprof import config
from otel_torchprof._distributed.rank_choice import checked_choice
from otel_torchprof._distributed.rank_ids import APART, checked_layout
from otel_torchprof._metrics.operator_metrics import DEFAULT_OPERATORS
from otel_torchprof._sampling.span_policy import checked_policy
from otel_torchprof._sources.device_source import checked_device_events, checked_events
from otel_torchprof._sources.frame_filter import ALL_FRAMES, checked_filter
from otel_torchprof._sources.live_device_source import DeviceChoice

from .live_recording import KINDS

if TYPE_CHECKING:
    from collections.abc import Callable

    from otel_torchprof._sampling.span_policy import SpanPolicy
    from otel_torchprof._sources.frame_filter import FrameFilter

T = TypeVar("T")

_OVERHEAD = 0.01
"""Share of the time that metrics may cost when nobody says otherwise."""
_SIGTERM_TIMEOUT = 5.0
"""Seconds; torchrun and Kubernetes kill what still runs 30 seconds after SIGTERM."""


class Options:
    """The arguments of ``instrument()``, checked.

    Raises:
        TypeError, ValueError: naming the argument, its value and what is allowed.
    """

    def __init__(
        self,
        *,
        tracer_provider: Any = None,
        meter_provider: Any = None,
        detail: str | None = None,
        record_shapes: bool = False,
        frames: FrameFilter | None = None,
        overhead: float | None = None,
        max_operators: int | None = None,
        use_device: str | None = None,
        device_events: str | None = None,
        gpu_metrics: bool | None = None,
        export_ranks: str | float | None = None,
        ranks: str | None = None,
        policy: SpanPolicy | None = None,
        sigterm_timeout: float | None = None,
    ) -> None:
        allowed = ("off", "metrics", *KINDS)
        if detail is not None and detail not in allowed:
            raise ValueError(f"detail is {detail!r}; it must be one of {', '.join(map(repr, allowed))}")
        if meter_provider is not None and not callable(getattr(meter_provider, "get_meter", None)):
            raise TypeError(f"meter_provider is {meter_provider!r}; it must be a MeterProvider")
        self.overhead = _setting("overhead", overhead, config.OVERHEAD, config.share) or _OVERHEAD
        self.max_operators = (
            _setting("max_operators", max_operators, config.MAX_OPERATORS, config.whole_number) or DEFAULT_OPERATORS
        )
        self.device = device_choice(use_device, device_events)
        self.export_ranks = _setting("export_ranks", export_ranks, config.EXPORT_RANKS, checked_choice) or "all"
        self.ranks = _setting("ranks", ranks, config.RANKS, checked_layout) or APART
        timeout = _setting("sigterm_timeout", sigterm_timeout, config.SIGTERM_TIMEOUT, config.seconds)
        self.sigterm_timeout = _SIGTERM_TIMEOUT if timeout is None else timeout
        if gpu_metrics is not None and not isinstance(gpu_metrics, bool):
            raise TypeError(f"gpu_metrics is {gpu_metrics!r}; it must be True, False, or None: as the environment says")
        self.gpu_metrics = config.gpu_devices() != "none" if gpu_metrics is None else gpu_metrics
        self.tracer_provider = tracer_provider
        self.meter_provider = meter_provider
        self.detail = config.detail(allowed) if detail is None else detail
        self.record_shapes = bool(record_shapes)
        self.policy = checked_policy(policy)
        requested = self.detail == "frames" or frames is not None
        self.frame_filter = checked_filter(frames) if requested else ALL_FRAMES


def checked_options(given: dict[str, Any]) -> Options:
    """The arguments of ``instrument()``.

    Raises:
        TypeError, ValueError: one is wrong, or there is none of that name.
    """
    allowed = Options.__init__.__kwdefaults__ or {}
    for name in given:
        if name not in allowed:
            raise TypeError(f"{name} is no argument of instrument(); allowed are {', '.join(allowed)}")
    return Options(**given)


def device_choice(device: str | None, events: str | None) -> DeviceChoice | None:
    """What is timed on devices, as given, else as the environment says.

    Raises:
        TypeError, ValueError: ``use_device`` is no name, ``device_events`` is nothing that can be timed.
    """
    if device is not None and not isinstance(device, str):
        raise TypeError(f"use_device is {device!r}; it must be the name of a type of device, such as 'cuda', or None")
    chosen = _setting("use_device", device, config.DEVICE, config.type_of_device)
    found = checked_device_events(events, 1)
    if events is None:
        found = config.value_of(config.DEVICE_EVENTS, checked_events) or found
    return DeviceChoice(chosen, found) if chosen else None


def _setting(name: str, value: object, setting: config.Setting, parse: Callable[[Any], T]) -> T | None:
    """The keyword, else what the environment says; None where there is neither.

    Raises:
        ValueError: the keyword is wrong.
    """
    if value is None:
        return config.value_of(setting, parse)
    try:
        return parse(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} is {value!r}; {error}") from None
