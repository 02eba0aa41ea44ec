"""GPU metrics: reports values of NVIDIA's management library as OpenTelemetry metrics."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from otel_torchprof import config
from otel_torchprof._process import process_changes, threads
from otel_torchprof.health import GpuHealth

from .gpu_metrics import instruments_of
from .gpu_pass import LOCK_TIMEOUT, Found, GpuPass, Look, sources
from .gpu_quantities import METRICS

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from opentelemetry.metrics import MeterProvider
    from typing_extensions import Self

    from .gpu_metrics import Instruments

_KILLED = f"off: {config.ENABLED} is false"


class GpuMetrics:
    """Reports GPU metrics: utilization, memory, PCIe traffic, temperature, power, energy, errors and state.

    Names, units and attributes follow the semantic conventions; ``docs/metrics.md`` lists them. All GPUs are read in
    one pass when a metric reader collects, on its thread. There is no background thread, and no cost between two
    collections. If a value or the driver is not available, :attr:`health` has the reason; it is not an error.

    Thread-safe; several may run, and it is a context manager. In a forked child it continues if its reader does.

    Args:
        meter_provider: provider of the instruments. Default: the global one.
        devices: ``"visible"``, the GPUs that CUDA shows to this process (``CUDA_VISIBLE_DEVICES``), or ``"all"``, those
            of the host. Default: ``OTEL_TORCHPROF_GPU_DEVICES``, else ``"visible"``.
        clock: function that returns monotonic seconds.
        lock_timeout: seconds that a reader waits for another one. Default: 0.5.

    Raises:
        ValueError: ``devices`` is another value.
        TypeError: ``meter_provider`` is not a MeterProvider.

    Examples:
        >>> with otp.GpuMetrics() as metrics:
        ...     print(metrics.health)
        nvml o...
    """

    def __init__(
        self,
        meter_provider: MeterProvider | None = None,
        *,
        devices: str | None = None,
        clock: Callable[[], float] = time.monotonic,
        lock_timeout: float = LOCK_TIMEOUT,
    ) -> None:
        if meter_provider is not None and not hasattr(meter_provider, "get_meter"):
            raise TypeError(
                f"meter_provider is {meter_provider!r}; allowed are meter providers, and None: the global one"
            )
        if devices not in {None, *config.GPU_CHOICES}:
            raise ValueError(f"devices is {devices!r}; allowed are {' and '.join(map(repr, config.GPU_CHOICES))}")
        self._provider = meter_provider
        self._everything = (devices or config.GPU_DEVICES.read()) == "all"
        self._clock = clock
        self._lock_timeout = lock_timeout
        self._lock = threads.Lock()
        self._pass: GpuPass | None = None
        self._instruments: Instruments | None = None
        self._state = "off: not started"
        process_changes.watch(self)

    def start(self, *, look: bool = True) -> Self:
        """Starts the metrics and returns self; has no effect while they run.

        Args:
            look: whether to find and read the GPUs once now, so that :attr:`health` has their state; False loads NVML
                only when a reader collects. Default: True.
        """
        with self._lock:
            if self._pass is not None:
                return self
            if not config.ENABLED.read():
                self._state = _KILLED
                return self
            watched = GpuPass(everything=self._everything, clock=self._clock, lock_timeout=self._lock_timeout)
            instruments = instruments_of(self._provider)
            self._pass, self._instruments = watched, instruments
        instruments.add(watched.points)
        if look:
            watched.look()
        return self

    def stop(self) -> None:
        """Stops the metrics; has no effect while they are stopped. Does not wait for a running collection."""
        with self._lock:
            watched, instruments = self._pass, self._instruments
            self._pass = self._instruments = None
            if watched is None:
                return
            self._state = "off: stopped"
        if instruments is not None:
            instruments.remove(watched.points)
        watched.close()

    def after_fork_in_child(self) -> None:
        """Gives a forked child its own lock. Called automatically."""
        self._lock = threads.Lock()

    @property
    def health(self) -> GpuHealth:
        """State of every metric, as of the last reading: a :class:`GpuHealth`. Does not call the driver."""
        watched = self._pass
        found, look = (Found(off=self._state), Look(0.0)) if watched is None else (watched.found, watched.last)
        states, notes = sources(found, look, METRICS)
        return GpuHealth(states, tuple(found.gpus), notes)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()
