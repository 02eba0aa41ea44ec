"""GPU metrics: reports values of NVIDIA's management library as OpenTelemetry metrics."""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from opentelemetry.metrics import CallbackOptions, MeterProvider, Observation, get_meter_provider

from otel_torchprof import config
from otel_torchprof._export.sdk import SCHEMA_URL
from otel_torchprof._process import process_changes, threads
from otel_torchprof._record.nvml import Gpu, Nvml, RefusedError, VisibleDevices, visible
from otel_torchprof.health import GpuHealth
from otel_torchprof.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from types import TracebackType

    from typing_extensions import Self

_logger = logging.getLogger("otel_torchprof")

# ---- The instruments of the GPU metrics, once per meter provider ----
# Instruments cannot be removed, and the callbacks of a second one of the same name are not called. So each provider gets one
# set, whose callbacks call all GpuMetrics that are running.


_lock = threads.Lock()


def _in_child() -> None:
    global _lock  # noqa: PLW0603 - another thread of the parent may have held it
    _lock = threads.Lock()


process_changes.at_fork(process_changes.Order.STATE, in_child=_in_child)
_by_provider: weakref.WeakKeyDictionary[MeterProvider, Instruments] = weakref.WeakKeyDictionary()


class Instruments:
    """The instruments of a provider, and the sources of their values. Thread-safe."""

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
        """Adds a source: a function that returns the points of a metric."""
        with _lock:
            self._sources += (source,)

    def remove(self, source: Callable[[str], Sequence[Point]]) -> None:
        """Removes a source."""
        with _lock:
            self._sources = tuple(other for other in self._sources if other != source)

    def _callback(self, metric: GpuMetric) -> Callable[[CallbackOptions], Iterable[Observation]]:
        def observe(_: CallbackOptions) -> list[Observation]:
            seen: dict[frozenset[tuple[str, str]], Observation] = {}
            for source in self._sources:
                for point in source(metric.name):
                    # Sources with the same GPU report the same series: one is enough.
                    series = frozenset(point.attributes.items())
                    seen.setdefault(series, Observation(point.value, dict(point.attributes)))
            return list(seen.values())

        return observe


def instruments_of(provider: MeterProvider | None) -> Instruments:
    """The instruments of a provider; for None, of the global one.

    Until the application sets its own global provider, that is the API's proxy, whose instruments then move to the new provider.
    """
    own = provider or get_meter_provider()
    with _lock:
        instruments_of_provider = _by_provider.get(own)
        if instruments_of_provider is None and own is get_meter_provider():
            instruments_of_provider = next(
                (instruments for key, instruments in _by_provider.items() if _is_proxy(key)), None
            )
        if instruments_of_provider is None:
            instruments_of_provider = Instruments(own)
        _by_provider[own] = instruments_of_provider
        return instruments_of_provider


def _is_proxy(provider: MeterProvider) -> bool:
    return type(provider).__module__.startswith("opentelemetry.metrics.") and "Proxy" in type(provider).__name__


# ---- One pass over all GPUs, shared by the instruments of one collection ----


NOT_OPENED = "off: not opened"
"""State before the first pass."""

FRESH = 0.05
"""Seconds for which the readings of a pass are reused: the callbacks of one collection follow each other at once."""
REDISCOVERY = 30.0
"""Seconds between two searches for GPUs that appeared or came back."""
LOCK_TIMEOUT = 0.5
"""Seconds to wait for a pass on another thread."""
BUDGET = 1.0
"""Seconds after which a pass makes no further call; a single call may take longer."""


@dataclass
class GpuReadings:
    """Readings of one pass."""

    at: float
    points: dict[str, list[Point]] = field(default_factory=lambda: defaultdict(list))
    """Points by metric."""
    missing: dict[str, dict[str, str]] = field(default_factory=lambda: defaultdict(dict))
    """By metric and GPU, why there is no value; the part of the metric, if only one is missing, follows the GPU."""


_NOTHING = GpuReadings(float("-inf"))


@dataclass
class FoundGpus:
    """The GPUs to read."""

    gpus: dict[str, Gpu] = field(default_factory=dict)
    """Cards, by UUID."""
    instances: frozenset[str] | None = None
    """UUIDs of the MIG devices to read; None: all of these cards."""
    lost: set[str] = field(default_factory=set)
    """UUIDs of cards that no longer respond."""
    off: str = NOT_OPENED
    """Why there are no GPUs; empty if there are some."""
    notes: tuple[str, ...] = ()


class GpuPass:
    """Reads all GPUs at once on the calling thread, at most once per :data:`FRESH`.

    Thread-safe. No method raises. A call that hangs in the driver blocks only its own thread: others get no readings after a short
    wait, and :meth:`close` leaves the shutdown of NVML to that thread.

    Args:
        everything: whether to read all GPUs of the host, or only those that CUDA shows to this process.
        clock: returns monotonic seconds.
        lock_timeout: seconds to wait for another thread's pass.
    """

    def __init__(self, *, everything: bool, clock: Callable[[], float], lock_timeout: float = LOCK_TIMEOUT) -> None:
        self._clock = clock
        self._lock_timeout = lock_timeout
        # Read once, as CUDA does.
        self._text = None if everything else os.environ.get("CUDA_VISIBLE_DEVICES")
        self._order = os.environ.get("CUDA_DEVICE_ORDER")
        self._nvml = Nvml()
        self._known: dict[str, Gpu] = {}
        self._chosen: VisibleDevices | None = None
        self._rediscovery = float("-inf")
        self._closed = False
        self._lock = threads.Lock()
        self._hangs = False
        self.discovery = FoundGpus()
        self.last = _NOTHING
        process_changes.watch(self)

    def after_fork_in_child(self) -> None:
        """Renews the lock, which another thread of the parent may have held; NVML is opened again at the next pass."""
        self._lock = threads.Lock()
        self._hangs = False
        self._rediscovery = float("-inf")
        self.last = _NOTHING

    def points(self, metric: str) -> Sequence[Point]:
        """The current points of a metric; empty if there are none, or if another pass takes too long."""
        return self.look().points.get(metric, ())

    def look(self) -> GpuReadings:
        """Returns the readings of the last pass if it is recent, else of a new pass."""
        look = self.last
        if self._closed or self._clock() - look.at < FRESH:
            return _NOTHING if self._closed else look
        if not self._lock.acquire(timeout=0 if self._hangs else self._lock_timeout):
            self._hangs = True
            return _NOTHING
        try:
            if not self._closed and self._clock() - self.last.at >= FRESH:
                self.last = self._pass()
        except Exception:
            _logger.exception("The GPUs could not be read")
            return _NOTHING
        else:
            return self.last
        finally:
            self._hangs = False
            self._lock.release()
            self._close_if_asked()

    def close(self) -> None:
        """Stops reading, and shuts NVML down, at once or when a running pass returns."""
        self._closed = True
        self._close_if_asked()

    def _close_if_asked(self) -> None:
        if self._closed and self._lock.acquire(blocking=False):
            try:
                self._nvml.close()
            finally:
                self._lock.release()

    def _pass(self) -> GpuReadings:
        """Reads all GPUs; call it with the lock."""
        begin = self._clock()
        if begin >= self._rediscovery:
            self._discover()
            self._rediscovery = begin + REDISCOVERY
        look = GpuReadings(begin)
        for card in self.discovery.gpus.values():
            self._read_card(card, look, begin + BUDGET)
        look.at = self._clock()
        return look

    def _discover(self) -> None:
        """Searches for GPUs.

        Initialises NVML again after a GPU was lost, which has an effect only if nothing else in this process uses NVML.
        """
        before = self.discovery
        try:
            if before.lost:
                self._nvml.close()
            self._nvml.open()
            cards, silent = self._nvml.cards(self._known)
        except RefusedError as refusal:
            self._say_off(refusal)
            self.discovery = FoundGpus(lost=before.lost, off=f"off: {refusal}")
            return
        self._known.update({card.uuid: card for card in cards})
        chosen = self._choose(cards)
        uuids = {gpu.parent or gpu.uuid: None for gpu in chosen.gpus}
        listed = {card.uuid for card in cards}
        lost = {uuid for uuid in uuids if uuid not in listed}
        notes = [*silent, *([chosen.reason] if chosen.reason else [])]
        notes += [f"{self._known[uuid].name} ({uuid}) is lost" for uuid in lost]
        instances = frozenset(gpu.uuid for gpu in chosen.gpus if gpu.parent)
        self.discovery = FoundGpus(
            {uuid: self._known[uuid] for uuid in uuids},
            instances or None,
            lost,
            "" if uuids else f"off: {chosen.reason or '; '.join(silent) or 'there is no GPU'}",
            tuple(notes),
        )

    def _choose(self, cards: list[Gpu]) -> VisibleDevices:
        """The GPUs to read.

        CUDA's selection is fixed as soon as it has a GPU: after a loss, the same numbers would mean other GPUs.
        """
        if self._text is None:
            return VisibleDevices(tuple(self._known.values()))
        if self._chosen is None or not self._chosen.gpus:
            self._chosen = visible(cards, self._text, self._order)
        return self._chosen

    def _say_off(self, refusal: RefusedError) -> None:
        reason = f"off: {refusal}"
        if self.discovery.off != reason:
            level = logging.INFO if refusal.expected else logging.WARNING
            _logger.log(level, "GPU metrics are off: %s", refusal)

    def _read_card(self, card: Gpu, look: GpuReadings, deadline: float) -> None:
        if card.uuid in self.discovery.lost:
            _lose(look, card)
            return
        displayed = self.discovery.instances
        instances = [instance for instance in card.instances if displayed is None or instance.uuid in displayed]
        try:
            for quantity in QUANTITIES:
                gpus = instances if card.mig and quantity.by_instance else [card]
                for gpu in gpus:
                    self._read(quantity, gpu, look, deadline)
                if not gpus:
                    _miss(look, quantity, card, "the card is split by MIG and has no MIG device")
        except RefusedError as refusal:
            self.discovery.lost.add(card.uuid)
            _logger.warning("%s (%s) is lost: %s", card.name, card.uuid, refusal)
            _lose(look, card)

    def _read(self, quantity: Quantity, gpu: Gpu, look: GpuReadings, deadline: float) -> None:
        """Reads one quantity of one GPU.

        Raises:
            RefusedError: the GPU is lost.
        """
        if self._clock() > deadline:
            _miss(look, quantity, gpu, f"NVML took longer than {BUDGET:g} s for what comes before it")
            return
        try:
            _add(look, gpu, quantity.read(self._nvml, gpu))
        except RefusedError as refusal:
            if refusal.lost:
                raise
            _miss(look, quantity, gpu, str(refusal))
            if not self._nvml.is_open:
                self._rediscovery = float("-inf")


def _add(look: GpuReadings, gpu: Gpu, values: Values) -> None:
    base = attributes_of(gpu)
    for metric, series in values.items():
        look.points[metric] += [Point(value, base | further) for value, further in series]


def _lose(look: GpuReadings, card: Gpu) -> None:
    """Reports a card as lost, and removes what the pass has read of it before."""
    for metric, points in look.points.items():
        of_others = [p for p in points if card.uuid not in {p.attributes["hw.id"], p.attributes.get("hw.parent")}]
        look.points[metric] = of_others
    for quantity in QUANTITIES:
        if "hw.status" not in quantity.metrics:
            _miss(look, quantity, card, "the GPU is lost")
    _add(look, card, status("failed"))


def _miss(look: GpuReadings, quantity: Quantity, gpu: Gpu, reason: str) -> None:
    for metric in quantity.metrics:
        look.missing[metric][f"{gpu.name}{quantity.detail}"] = reason


def sources(
    found: FoundGpus, look: GpuReadings, metrics: Mapping[str, object]
) -> tuple[dict[str, str], tuple[str, ...]]:
    """The state of NVML and of each metric, and notes on missing parts of metrics that are on."""
    states = {"nvml": found.off or "on"}
    notes = list(found.notes)
    for metric in metrics:
        missing = look.missing.get(metric, {})
        if look.points.get(metric):
            states[metric] = "on"
            notes += [f"{metric} of {part}: {reason}" for part, reason in missing.items()]
        else:
            states[metric] = found.off or f"off: {next(iter(missing.values()), 'not read yet')}"
    return states, tuple(notes)


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
        discovery, look = (
            (FoundGpus(off=self._state), GpuReadings(0.0)) if watched is None else (watched.discovery, watched.last)
        )
        states, notes = sources(discovery, look, METRICS)
        return GpuHealth(states, tuple(discovery.gpus), notes)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()


# ---- the GPU metrics, in one table, and how each is read ----


STATES = ("ok", "degraded", "failed")
"""Values of ``hw.state``; ``failed`` is a GPU that NVML has lost, or that needs a reset."""


class GpuMetric(NamedTuple):
    """A metric and its instrument."""

    name: str
    kind: str
    """``gauge``, ``counter`` or ``updowncounter``."""
    unit: str
    description: str
    attributes: tuple[str, ...]
    """Attributes besides those of the GPU."""
    source: str
    """NVML's function, for the documentation."""


class Point(NamedTuple):
    """A value of a series."""

    value: float
    attributes: Mapping[str, str]


_TABLE = (
    GpuMetric(
        "hw.gpu.utilization",
        "gauge",
        "1",
        "Fraction of time spent in a specific task.",
        ("hw.gpu.task",),
        "`nvmlDeviceGetUtilizationRates`, `...EncoderUtilization`, `...DecoderUtilization`",
    ),
    GpuMetric("hw.gpu.memory.usage", "updowncounter", "By", "GPU memory used.", (), "`nvmlDeviceGetMemoryInfo_v2`"),
    GpuMetric(
        "hw.gpu.memory.limit", "updowncounter", "By", "Size of the GPU memory.", (), "`nvmlDeviceGetMemoryInfo_v2`"
    ),
    GpuMetric("hw.gpu.memory.utilization", "gauge", "1", "Fraction of GPU memory used.", (), "usage divided by limit"),
    GpuMetric(
        "hw.gpu.io",
        "counter",
        "By",
        "Received and transmitted bytes by the GPU.",
        ("network.io.direction",),
        "`nvmlDeviceGetFieldValues`: PCIe byte counters",
    ),
    GpuMetric(
        "hw.temperature",
        "gauge",
        "Cel",
        "Temperature in degrees Celsius.",
        ("hw.sensor_location",),
        "`nvmlDeviceGetTemperature`",
    ),
    GpuMetric(
        "hw.power",
        "gauge",
        "W",
        "Instantaneous power consumed by the component.",
        (),
        "`nvmlDeviceGetPowerUsage`: whole board",
    ),
    GpuMetric(
        "hw.energy",
        "counter",
        "J",
        "Energy consumed by the component.",
        (),
        "`nvmlDeviceGetTotalEnergyConsumption`: since the driver was loaded",
    ),
    GpuMetric(
        "hw.errors",
        "counter",
        "{error}",
        "Number of errors encountered by the component.",
        ("error.type",),
        "`nvmlDeviceGetTotalEccErrors`: over the card's lifetime, `corrected` and `uncorrected`",
    ),
    GpuMetric(
        "hw.status",
        "updowncounter",
        "1",
        "Operational status: 1 (true) or 0 (false) for each of the possible states.",
        ("hw.state",),
        "`failed`: GPU is lost or needs a reset; `degraded`: `nvmlDeviceGetRemappedRows`, "
        "`...RetiredPagesPendingStatus`; else `ok`",
    ),
)

METRICS: Mapping[str, GpuMetric] = {metric.name: metric for metric in _TABLE}
"""Metrics by name."""

GPU_ATTRIBUTES: Mapping[str, str] = {
    "hw.id": "NVML's UUID of the card (`GPU-...`) or MIG device (`MIG-...`)",
    "hw.type": "`gpu`",
    "hw.name": "`GPU 0`, `GPU 0 MIG 1`, numbered as in `nvidia-smi`",
    "hw.vendor": "`NVIDIA`",
    "hw.model": "product name",
    "hw.serial_number": "serial number of the board; missing on consumer cards",
    "hw.driver_version": "driver version",
    "hw.firmware_version": "VBIOS version",
    "hw.parent": "`hw.id` of the card, on MIG devices only",
}
"""Attributes of every series, if NVML reports them, and their meanings."""


def attributes_of(gpu: Gpu) -> dict[str, str]:
    """The attributes of all series of a GPU."""
    reported = (gpu.uuid, "gpu", gpu.name, "NVIDIA", gpu.model, gpu.serial, gpu.driver, gpu.firmware, gpu.parent)
    return {key: value for key, value in zip(GPU_ATTRIBUTES, reported, strict=True) if value}


Values = dict[str, "list[tuple[float, dict[str, str]]]"]
"""By metric, value and further attributes of each series."""


class Quantity(NamedTuple):
    """Values that are read from NVML together."""

    metrics: tuple[str, ...]
    """Metrics of these values."""
    read: Callable[[Nvml, Gpu], Values]
    detail: str = ""
    """Part of the metric, for messages; empty for the whole metric."""
    by_instance: bool = False
    """Whether to read it from MIG devices, if there are any, instead of their card: both would count twice."""


def _utilization(task: str) -> Quantity:
    name = "hw.gpu.utilization"
    return Quantity(
        (name,), lambda nvml, gpu: {name: [(nvml.utilization(gpu, task), {"hw.gpu.task": task})]}, f" ({task})"
    )


def _memory(nvml: Nvml, gpu: Gpu) -> Values:
    used, total = nvml.memory(gpu)
    values: Values = {"hw.gpu.memory.usage": [(used, {})], "hw.gpu.memory.limit": [(total, {})]}
    if total:
        values["hw.gpu.memory.utilization"] = [(used / total, {})]
    return values


def _io(nvml: Nvml, gpu: Gpu) -> Values:
    moved = nvml.transferred(gpu).items()
    return {"hw.gpu.io": [(value, {"network.io.direction": direction}) for direction, value in moved]}


def _errors(nvml: Nvml, gpu: Gpu) -> Values:
    return {"hw.errors": [(value, {"error.type": kind}) for kind, value in nvml.errors(gpu).items()]}


def status(state: str) -> Values:
    """The series of ``hw.status`` of a GPU in this state."""
    return {"hw.status": [(int(name == state), {"hw.state": name}) for name in STATES]}


def _simple(name: str, read: Callable[[Nvml, Gpu], float], attributes: dict[str, str] | None = None) -> Quantity:
    return Quantity((name,), lambda nvml, gpu: {name: [(read(nvml, gpu), attributes or {})]})


QUANTITIES = (
    Quantity(("hw.status",), lambda nvml, gpu: status(nvml.status(gpu))),
    Quantity(("hw.gpu.memory.usage", "hw.gpu.memory.limit", "hw.gpu.memory.utilization"), _memory, by_instance=True),
    *(_utilization(task) for task in ("general", "encoder", "decoder")),
    _simple("hw.temperature", lambda nvml, gpu: nvml.temperature(gpu), {"hw.sensor_location": "GPU"}),
    _simple("hw.power", lambda nvml, gpu: nvml.power(gpu)),
    _simple("hw.energy", lambda nvml, gpu: nvml.energy(gpu)),
    Quantity(("hw.errors",), _errors),
    Quantity(("hw.gpu.io",), _io),
)


def gpu_metrics_markdown() -> str:
    """The tables for the documentation."""

    def rows() -> Iterator[str]:
        yield "| Metric | Instrument | Unit | Further attributes | From NVML |"
        yield "| --- | --- | --- | --- | --- |"
        for metric in _TABLE:
            further = ", ".join(f"`{name}`" for name in metric.attributes)
            yield f"| `{metric.name}` | {metric.kind} | `{metric.unit}` | {further} | {metric.source} |"
        yield ""
        yield "| Attribute of every series | Meaning |"
        yield "| --- | --- |"
        for name, meaning in GPU_ATTRIBUTES.items():
            yield f"| `{name}` | {meaning} |"
        yield ""

    return "\n".join(rows())
