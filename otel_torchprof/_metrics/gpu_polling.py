"""GPU metrics: what NVIDIA's management library reports about the GPUs, as OpenTelemetry metrics."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from otel_torchprof import config
from otel_torchprof._process import fork
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
    """Watches the GPUs: utilisation, memory, PCIe traffic, temperature, power, energy, errors and state.

    Names, units and attributes are those of the semantic conventions (``docs/metrics.md`` lists them). The values are read
    when a metric reader collects, on its thread, all GPUs in one pass; there is no thread of ours, and between two
    collections it costs nothing. Whatever cannot be had, the driver included, is a reason in :attr:`health` and no error.

    Safe to use from any thread, in any number, and as a context manager. In a forked child it continues where its reader does.

    Args:
        meter_provider: which gets the instruments; the global one by default.
        devices: ``"visible"``: those that CUDA shows to this process (``CUDA_VISIBLE_DEVICES``); ``"all"``: those of the
            host. By default what ``OTEL_TORCHPROF_GPU_DEVICES`` says, else ``"visible"``.
        clock: monotonic seconds.
        lock_timeout: seconds that a reader waits for one that reads meanwhile.

    Raises:
        ValueError: ``devices`` is neither.
        TypeError: ``meter_provider`` is none.
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
        self._lock = threading.Lock()
        self._pass: GpuPass | None = None
        self._instruments: Instruments | None = None
        self._state = "off: not started"
        fork.watch(self)

    def start(self, *, look: bool = True) -> Self:
        """Begins to watch; no effect when started. Finds the GPUs and reads them once, so that :attr:`health` can tell.

        ``look=False``: leaves that, and NVML, until a metric reader asks, which may be never.
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
        """Ends it; no effect when stopped. Readers get nothing more from it, and a reading under way is not waited for."""
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
        """In a forked child: with a lock of its own. Called by itself."""
        self._lock = threading.Lock()

    @property
    def health(self) -> GpuHealth:
        """What is on, what is off and why, as of the last reading. Asks nothing of the driver."""
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
