"""The instruments of the GPU metrics, once per meter provider.

Instruments cannot be taken back, and a second one of the same name is not asked. So a provider gets each once, and they ask
whoever is started at that time.
"""

from __future__ import annotations

import logging
import weakref
from typing import TYPE_CHECKING, Any

from opentelemetry.metrics import CallbackOptions, MeterProvider, Observation, get_meter_provider

from otel_torchprof._export.sdk import SCHEMA_URL
from otel_torchprof._process import process_changes, threads
from otel_torchprof.version import __version__

from .gpu_quantities import METRICS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from .gpu_quantities import GpuMetric, Point

_logger = logging.getLogger("otel_torchprof")


_lock = threads.Lock()


def _in_child() -> None:
    global _lock  # noqa: PLW0603 - another thread of the parent may have held it
    _lock = threads.Lock()


process_changes.at_fork(process_changes.Order.STATE, in_child=_in_child)
_by_provider: weakref.WeakKeyDictionary[MeterProvider, Instruments] = weakref.WeakKeyDictionary()


class Instruments:
    """One provider's instruments, and who is asked for their values. Safe to use from any thread."""

    def __init__(self, provider: MeterProvider) -> None:
        self._sources: tuple[Callable[[str], Sequence[Point]], ...] = ()
        meter = provider.get_meter("otel_torchprof", __version__, SCHEMA_URL)
        create: dict[str, Callable[..., Any]] = {
            "gauge": meter.create_observable_gauge,
            "counter": meter.create_observable_counter,
            "updowncounter": meter.create_observable_up_down_counter,
        }
        for metric in METRICS.values():
            create[metric.kind](metric.name, [self._callback(metric)], metric.unit, metric.description)

    def add(self, source: Callable[[str], Sequence[Point]]) -> None:
        """From now on this one is asked too."""
        with _lock:
            self._sources += (source,)

    def remove(self, source: Callable[[str], Sequence[Point]]) -> None:
        """It is asked no more."""
        with _lock:
            self._sources = tuple(each for each in self._sources if each != source)

    def _callback(self, metric: GpuMetric) -> Callable[[CallbackOptions], Iterable[Observation]]:
        def observe(_: CallbackOptions) -> list[Observation]:
            seen: dict[frozenset[tuple[str, str]], Observation] = {}
            for source in self._sources:
                for point in source(metric.name):
                    # Two that watch the same GPU tell the same of it: one is enough.
                    series = frozenset(point.attributes.items())
                    seen.setdefault(series, Observation(point.value, dict(point.attributes)))
            return list(seen.values())

        return observe


def instruments_of(provider: MeterProvider | None) -> Instruments:
    """The instruments of a provider; of the global one for None.

    The global one may be a stand-in, until the application sets its own: then the instruments made with the stand-in move over.
    """
    own = provider or get_meter_provider()
    with _lock:
        found = _by_provider.get(own)
        if found is None and own is get_meter_provider():
            found = next((each for key, each in _by_provider.items() if _stands_in(key)), None)
        if found is None:
            found = Instruments(own)
        _by_provider[own] = found
        return found


def _stands_in(provider: MeterProvider) -> bool:
    return type(provider).__module__.startswith("opentelemetry.metrics.") and "Proxy" in type(provider).__name__
