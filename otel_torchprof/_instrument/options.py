"""The arguments of ``TorchInstrumentor().instrument()``, checked, with what the environment says where they do not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from otel_torchprof import config
from otel_torchprof._sampling.span_policy import checked_policy
from otel_torchprof._sources.device_source import checked_device_events
from otel_torchprof._sources.frame_filter import ALL_FRAMES, checked_filter
from otel_torchprof._sources.live_device_source import DeviceChoice

if TYPE_CHECKING:
    from otel_torchprof._sampling.span_policy import SpanPolicy
    from otel_torchprof._sources.frame_filter import FrameFilter


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
        if detail is not None and detail not in config.DETAILS:
            raise ValueError(f"detail is {detail!r}; it must be one of {', '.join(map(repr, config.DETAILS))}")
        if meter_provider is not None and not callable(getattr(meter_provider, "get_meter", None)):
            raise TypeError(f"meter_provider is {meter_provider!r}; it must be a MeterProvider")
        self.overhead = config.OVERHEAD.given("overhead", overhead)
        self.max_operators = config.MAX_OPERATORS.given("max_operators", max_operators)
        self.device = device_choice(use_device, device_events)
        self.export_ranks = config.EXPORT_RANKS.given("export_ranks", export_ranks)
        self.ranks = config.RANKS.given("ranks", ranks)
        self.sigterm_timeout = config.SIGTERM_TIMEOUT.given("sigterm_timeout", sigterm_timeout)
        if gpu_metrics is not None and not isinstance(gpu_metrics, bool):
            raise TypeError(f"gpu_metrics is {gpu_metrics!r}; it must be True, False, or None: as the environment says")
        self.gpu_metrics = config.GPU_DEVICES.read() != "none" if gpu_metrics is None else gpu_metrics
        self.tracer_provider = tracer_provider
        self.meter_provider = meter_provider
        self.detail = config.DETAIL.read() if detail is None else detail
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
    chosen = config.DEVICE.given("use_device", device)
    found = config.DEVICE_EVENTS.read() if events is None else checked_device_events(events, 1)
    return DeviceChoice(chosen, found) if chosen else None
