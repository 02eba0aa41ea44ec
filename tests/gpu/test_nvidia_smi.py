"""GPU metrics beside what ``nvidia-smi`` prints, on a machine with an NVIDIA GPU. Runs unattended with `make test-gpu`."""

from __future__ import annotations

import csv
import shutil
import subprocess
import time

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

import otel_torchprof as otp
from otel_torchprof._instrument.gpu_metrics import FRESH
from otel_torchprof._record.energy_source import EnergyCounters

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="there is no nvidia-smi: no NVIDIA driver here"),
]

FIELDS = (
    "uuid",
    "index",
    "name",
    "serial",
    "driver_version",
    "vbios_version",
    "mig.mode.current",
    "memory.total",
    "memory.used",
    "temperature.gpu",
    "power.draw",
    "utilization.gpu",
    "utilization.encoder",
    "utilization.decoder",
    "ecc.errors.corrected.aggregate.total",
    "ecc.errors.uncorrected.aggregate.total",
)
"""What nvidia-smi is asked; it answers in MiB, degrees Celsius, watts and percent, and ``[N/A]`` where it does not know."""
MIB = 1 << 20
LOAD_SECONDS = 3.0


def nvidia_smi():
    """What it says of each card, by UUID; as text, what it does not know as None."""
    command = ["nvidia-smi", f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    rows = csv.reader(printed.splitlines(), skipinitialspace=True)
    return {row[0]: {field: reported(text) for field, text in zip(FIELDS, row, strict=True)} for row in rows}


def reported(text):
    return None if text.startswith("[") or text == "N/A" else text


class Collector:
    """Started metrics of all cards, and what their reader gets."""

    def __init__(self):
        self.reader = InMemoryMetricReader()
        self.provider = MeterProvider([self.reader])
        self.metrics = otp.GpuMetrics(self.provider, devices="all").start()

    def collect(self):
        """Points by UUID, metric and the last attribute that tells series apart."""
        after = time.monotonic() + FRESH
        while time.monotonic() <= after:
            pass  # a pass answers for so long
        (resource,) = self.reader.get_metrics_data().resource_metrics
        further = ("hw.gpu.task", "network.io.direction", "error.type", "hw.state")
        return {
            (
                point.attributes["hw.id"],
                metric.name,
                *(point.attributes[key] for key in further if key in point.attributes),
            ): point
            for metric in resource.scope_metrics[0].metrics
            for point in metric.data.data_points
        }


@pytest.fixture
def collector():
    made = Collector()
    assert made.metrics.health.sources["nvml"] == "on", str(made.metrics.health)
    yield made
    made.metrics.stop()
    made.provider.shutdown()


def show(capsys, title, rows):
    """Prints a table for whoever runs this."""
    with capsys.disabled():
        print(f"\n{title}")  # noqa: T201 - this is what the run is for
        for name, ours, theirs in rows:
            print(f"  {name:<40} {ours!s:>24} {theirs!s:>24}")  # noqa: T201


def test_every_card_is_there(collector):
    """The cards are those of nvidia-smi, with its name, serial number, driver and firmware."""
    points = collector.collect()
    for uuid, card in nvidia_smi().items():
        attributes = points[uuid, "hw.status", "ok"].attributes
        assert attributes["hw.name"] == f"GPU {card['index']}"
        assert attributes["hw.model"] == card["name"]
        assert attributes["hw.driver_version"] == card["driver_version"]
        assert attributes["hw.firmware_version"] == card["vbios_version"]
        assert attributes.get("hw.serial_number") == card["serial"]


def test_values_beside_nvidia_smi(collector, capsys):
    """Each value lies between nvidia-smi's before and after it, with room for what moves in between; both lack the same."""
    before, points, after = nvidia_smi(), collector.collect(), nvidia_smi()
    rows = []
    for uuid, card in before.items():
        split = card["mig.mode.current"] == "Enabled"
        for metric, field, scale, room in (
            (("hw.gpu.memory.limit",), "memory.total", MIB, MIB),
            (("hw.gpu.memory.usage",), "memory.used", MIB, 64 * MIB),
            (("hw.temperature",), "temperature.gpu", 1, 3),
            (("hw.power",), "power.draw", 1, 40),
            (("hw.gpu.utilization", "general"), "utilization.gpu", 0.01, 0.3),
            (("hw.gpu.utilization", "encoder"), "utilization.encoder", 0.01, 0.3),
            (("hw.gpu.utilization", "decoder"), "utilization.decoder", 0.01, 0.3),
            (("hw.errors", "corrected"), "ecc.errors.corrected.aggregate.total", 1, 0),
            (("hw.errors", "uncorrected"), "ecc.errors.uncorrected.aggregate.total", 1, 0),
        ):
            if split and metric[0].startswith("hw.gpu."):
                assert (uuid, *metric) not in points
                continue
            point, theirs = points.get((uuid, *metric)), (card[field], after[uuid][field])
            rows.append((" ".join(metric), None if point is None else point.value, theirs))
            if point is None or None in theirs:
                assert point is None, rows[-1]
                assert None in theirs, rows[-1]
                continue
            numbers = [float(text) * scale for text in theirs]
            low, high = min(numbers) - room, max(numbers) + room
            assert low <= point.value <= high, rows[-1]
    show(capsys, "beside nvidia-smi (before, after)", rows)
    show(capsys, "health", [("", "", line) for line in str(collector.metrics.health).split("; ")])


@pytest.fixture
def cuda():
    torch = pytest.importorskip("torch", reason="no torch here to load the GPU with")
    if not torch.cuda.is_available():
        pytest.skip("torch has no CUDA device here to load")
    return torch


def load(torch, seconds):
    """Keeps the first device busy for so long."""
    a = torch.randn(4096, 4096, device="cuda")
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        for _ in range(20):
            a = torch.tanh(a @ a)
        torch.cuda.synchronize()


def test_a_load_is_seen(collector, cuda, capsys):
    """Under load the device is busy, and its energy counter agrees with its power over the time to a factor of two."""
    counters = EnergyCounters()
    assert counters.health == "on", counters.health
    uuid = counters.devices[0]
    load(cuda, LOAD_SECONDS)  # warm, so that the power is even
    energy, begin = counters.read()[uuid], time.monotonic()
    load(cuda, LOAD_SECONDS)
    points = collector.collect()
    joules, seconds = counters.read()[uuid] - energy, time.monotonic() - begin
    watts = points[uuid, "hw.power"].value
    rows = [("joules, and watts by seconds", joules, watts * seconds)]
    if (uuid, "hw.gpu.utilization", "general") in points:
        busy = points[uuid, "hw.gpu.utilization", "general"].value
        rows.append(("utilization under load", busy, "0.5 or more"))
        assert busy >= 0.5
    show(capsys, f"load for {seconds:.1f} s", rows)
    assert watts * seconds / 2 <= joules <= watts * seconds * 2
    counters.close()


def test_copies_are_seen(collector, cuda, capsys):
    """Bytes copied to the device are in what it received over PCIe, once, where the card counts them."""
    counters = EnergyCounters()
    uuid = counters.devices[0]
    counters.close()
    key = next((key for key in collector.collect() if key[0] == uuid and key[1:] == ("hw.gpu.io", "receive")), None)
    if key is None:
        pytest.skip(f"this card has no counters of bytes: {collector.metrics.health.sources['hw.gpu.io']}")
    source = cuda.empty(256 * MIB, dtype=cuda.uint8, pin_memory=True)
    target = cuda.empty_like(source, device="cuda")
    before = collector.collect()[key].value
    for _ in range(16):
        target.copy_(source, non_blocking=True)
    cuda.cuda.synchronize()
    received = collector.collect()[key].value - before
    show(capsys, "16 copies of 256 MiB", [("bytes received", received, 16 * 256 * MIB)])
    assert 16 * 256 * MIB <= received <= 2 * 16 * 256 * MIB


def test_the_cost_of_a_reading(collector, capsys):
    """A hundred collections and a thousand readings of the energy counters all have their cards; the table says what one took."""
    counters = EnergyCounters()
    begin = time.perf_counter()
    collections = [collector.collect() for _ in range(100)]
    whole = (time.perf_counter() - begin) / 100 - FRESH
    begin = time.perf_counter()
    readings = [counters.read() for _ in range(1000)]
    energy = (time.perf_counter() - begin) / 1000
    show(capsys, "cost", [("a collection, ms", f"{whole * 1e3:.2f}", ""), ("energy, µs", f"{energy * 1e6:.1f}", "")])
    cards = set(collector.metrics.health.devices)
    assert all(cards <= {key[0] for key in points} for points in collections)
    assert all(reading.keys() == readings[0].keys() for reading in readings)
    counters.close()
