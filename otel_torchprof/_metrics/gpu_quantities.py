"""The GPU metrics, in one table, and how each is read.

Source of names, kinds, units and attributes: OpenTelemetry's semantic conventions for hardware metrics.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from otel_torchprof._sources.nvml import Gpu, Nvml

STATES = ("ok", "degraded", "failed")
"""Of ``hw.state``; ``failed`` is a GPU that NVML has lost, or that needs a reset."""


class GpuMetric(NamedTuple):
    """One instrument."""

    name: str
    kind: str
    """``gauge``, ``counter`` or ``updowncounter``."""
    unit: str
    description: str
    attributes: tuple[str, ...]
    """Besides those of the GPU."""
    source: str
    """Of NVML's functions, which; for the documentation."""


class Point(NamedTuple):
    """One value of one series."""

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
"""By name."""

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
"""What every series has, where NVML tells it."""


def attributes_of(gpu: Gpu) -> dict[str, str]:
    """What identifies a GPU's series."""
    reported = (gpu.uuid, "gpu", gpu.name, "NVIDIA", gpu.model, gpu.serial, gpu.driver, gpu.firmware, gpu.parent)
    return {key: value for key, value in zip(GPU_ATTRIBUTES, reported, strict=True) if value}


Values = dict[str, "list[tuple[float, dict[str, str]]]"]
"""By metric: value and further attributes of each series."""


class Quantity(NamedTuple):
    """What NVML is asked at once."""

    metrics: tuple[str, ...]
    """What comes of it."""
    read: Callable[[Nvml, Gpu], Values]
    detail: str = ""
    """Which part of its metric it is."""
    by_instance: bool = False
    """Asked of the MIG devices where there are any, and not of their card: together they would count twice."""


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
        for m in _TABLE:
            further = ", ".join(f"`{name}`" for name in m.attributes)
            yield f"| `{m.name}` | {m.kind} | `{m.unit}` | {further} | {m.source} |"
        yield ""
        yield "| Attribute of every series | Meaning |"
        yield "| --- | --- |"
        for name, meaning in GPU_ATTRIBUTES.items():
            yield f"| `{name}` | {meaning} |"
        yield ""

    return "\n".join(rows())
