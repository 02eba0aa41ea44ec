"""GpuMetrics: the SDK's own reader gets the conventions' metrics of the cards that CUDA shows; against a stand-in for NVML."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import weakref
from pathlib import Path

import gpu_collector
import nvml_stand_in
import pytest
from gpu_collector import IDEAL, Collector
from opentelemetry.sdk.metrics.export import Gauge, Sum
from opentelemetry.semconv._incubating.attributes import hw_attributes

import otel_torchprof as otp
from otel_torchprof._instrument.gpu_metrics import GPU_ATTRIBUTES, METRICS
from otel_torchprof.errors import forget_warnings

clock, collector, watch = gpu_collector.clock, gpu_collector.collector, gpu_collector.watch
nvml = nvml_stand_in.nvml
stand_in_library = nvml_stand_in.stand_in_library

CARD = "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6"


def test_every_value_arrives(nvml, collector, watch):
    """A reader gets exactly the series of the table, with NVML's values in the conventions' units."""
    watch()
    assert collector.series() == IDEAL


def test_kinds_and_units(nvml, collector, watch):
    """Gauges are gauges, counters monotonic sums, updowncounters sums that may fall; each with its unit."""
    watch()
    kinds = {
        name: (
            metric.unit,
            "gauge"
            if isinstance(metric.data, Gauge)
            else ("counter" if metric.data.is_monotonic else "updowncounter")
            if isinstance(metric.data, Sum)
            else None,
        )
        for name, metric in collector.collect().items()
    }
    assert kinds == {name: (metric.unit, metric.kind) for name, metric in METRICS.items()}


def test_attributes_are_those_of_the_conventions(nvml, collector, watch):
    """Every series has the GPU's attributes, all of them known to the conventions, and its metric's own ones besides."""
    watch()
    known = {value for key, value in vars(hw_attributes).items() if key.startswith("HW_")}
    assert set(GPU_ATTRIBUTES) <= known
    assert {name for metric in METRICS.values() for name in metric.attributes} <= known | {
        "error.type",
        "network.io.direction",
    }
    own = {
        "hw.id": CARD,
        "hw.type": "gpu",
        "hw.name": "GPU 0",
        "hw.vendor": "NVIDIA",
        "hw.model": "NVIDIA H100 80GB HBM3",
        "hw.serial_number": "1650522003820",
        "hw.driver_version": "580.65.06",
        "hw.firmware_version": "96.00.74.00.1C",
    }
    for name, metric in collector.collect().items():
        for point in metric.data.data_points:
            further = {key: point.attributes[key] for key in METRICS[name].attributes}
            assert dict(point.attributes) == own | further


def test_the_scope_is_ours(nvml, collector, watch):
    """Instruments belong to the package's scope, with its version and the conventions' schema."""
    watch()
    scope = collector.reader.get_metrics_data().resource_metrics[0].scope_metrics[0].scope
    assert (scope.name, scope.version) == ("otel_torchprof", otp.__version__)
    assert scope.schema_url.startswith("https://opentelemetry.io/schemas/")


def test_values_follow_the_card(nvml, collector, watch):
    """Each collection reads anew."""
    watch()
    first = collector.series()
    nvml.set("gpu.0.power", 100000)
    nvml.set("gpu.0.energy", 987655321)
    second = collector.series()
    assert (first["hw.power", "GPU 0"], second["hw.power", "GPU 0"]) == (412.345, 100.0)
    assert second["hw.energy", "GPU 0"] - first["hw.energy", "GPU 0"] == pytest.approx(1.0)


def test_one_collection_is_one_pass(nvml, collector, watch):
    """However many instruments there are, a collection asks each of NVML's questions once, and initialises nothing."""
    watch()
    asked = ("nvmlDeviceGetMemoryInfo_v2", "nvmlDeviceGetPowerUsage", "nvmlDeviceGetCount_v2", "nvmlInitWithFlags")
    before = [nvml.calls(function) for function in asked]
    collector.collect()
    assert [nvml.calls(function) - calls for function, calls in zip(asked, before, strict=True)] == [1, 1, 0, 0]


@pytest.mark.parametrize(
    "choice",
    [
        ({}, {}, ["GPU 0", "GPU 1"]),
        ({"CUDA_VISIBLE_DEVICES": "GPU-aaaa1"}, {}, ["GPU 1"]),
        ({"CUDA_VISIBLE_DEVICES": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, {}, ["GPU 1"]),
        ({"CUDA_VISIBLE_DEVICES": "1"}, {}, []),
        ({"CUDA_VISIBLE_DEVICES": ""}, {}, []),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, {}, []),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, {"devices": "all"}, ["GPU 0", "GPU 1"]),
        ({"CUDA_VISIBLE_DEVICES": "-1", "OTEL_TORCHPROF_GPU_DEVICES": "all"}, {}, ["GPU 0", "GPU 1"]),
        ({"CUDA_VISIBLE_DEVICES": "-1", "OTEL_TORCHPROF_GPU_DEVICES": "ALL"}, {"devices": "visible"}, []),
        ({"OTEL_TORCHPROF_ENABLED": "false"}, {}, []),
    ],
)
def test_which_cards_are_watched(nvml, collector, watch, monkeypatch, choice):
    """Those that CUDA shows, unless the keyword or else the variable asks for all; none where the package is off."""
    variables, options, displayed = choice
    nvml.read("two_cards")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    metrics = watch(**options)
    assert sorted({key[1] for key in collector.series()}) == displayed
    assert len(metrics.health.devices) == len(displayed)
    state = metrics.health.sources["nvml"]
    assert state == "on" if displayed else state.startswith("off: ") and len(state) > len("off: ")


def test_bad_values_are_told(monkeypatch, caplog):
    """A bad keyword raises with name, value and what is allowed; a bad variable is warned of once and ignored."""
    with pytest.raises(ValueError, match="devices is 'some'; allowed are 'visible' and 'all'"):
        otp.GpuMetrics(devices="some")
    with pytest.raises(TypeError, match="meter_provider is 3; allowed are meter providers"):
        otp.GpuMetrics(3)
    monkeypatch.setenv("OTEL_TORCHPROF_GPU_DEVICES", "some")
    forget_warnings()
    otp.GpuMetrics()
    otp.GpuMetrics()
    assert [record.getMessage() for record in caplog.records] == [
        "OTEL_TORCHPROF_GPU_DEVICES='some' is ignored: it must be one of 'visible', 'all', 'none'"
    ]


def test_stop_ends_it(nvml, collector, clock):
    """After stop() readers get nothing and NVML is shut down; stopping and starting again both work, any number of times."""
    metrics = otp.GpuMetrics(collector.provider, clock=clock)
    assert metrics.health.sources["nvml"] == "off: not started"
    metrics.stop()
    for _ in range(3):
        with metrics:
            metrics.start()
            assert collector.series() == IDEAL
            assert nvml.users == 1
        assert collector.series() == {}
        assert nvml.users == 0
        assert metrics.health.sources["nvml"] == "off: stopped"
        metrics.stop()


def test_two_at_a_time(nvml, collector, watch):
    """Two that watch the same GPUs through one provider give each series once, also when the first has stopped."""
    first, second = watch(), watch()
    assert collector.series() == IDEAL
    points = [len(metric.data.data_points) for metric in collector.collect().values()]
    assert sum(points) == len(IDEAL)
    first.stop()
    assert collector.series() == IDEAL
    second.stop()
    assert collector.series() == {}
    assert nvml.users == 0


def test_two_providers(nvml, collector, clock, watch):
    """Each provider's readers get what was started with it."""
    other = Collector(clock)
    watch()
    with otp.GpuMetrics(other.provider, clock=clock):
        assert collector.series() == other.series() == IDEAL
    assert (collector.series(), other.series()) == (IDEAL, {})
    other.provider.shutdown()


def test_a_provider_that_is_shut_down(nvml, clock):
    """A provider may be shut down before us, and is not kept alive by us."""
    mine = Collector(clock)
    metrics = otp.GpuMetrics(mine.provider, clock=clock).start()
    mine.provider.shutdown()
    metrics.stop()
    assert nvml.users == 0
    watched = weakref.ref(mine.provider)
    del mine, metrics
    gc.collect()
    assert watched() is None


GLOBAL_PROVIDER = """
import nvml_stand_in
from opentelemetry import metrics
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
import otel_torchprof as otp

nvml_stand_in.StandIn(library).read("data_centre")
early = otp.GpuMetrics().start()
reader = InMemoryMetricReader()
metrics.set_meter_provider(MeterProvider([reader]))
late = otp.GpuMetrics().start()
named = otp.GpuMetrics(metrics.get_meter_provider()).start()
for each in (None, early, late, named):
    if each is not None:
        each.stop()
    data = reader.get_metrics_data()
    print(len(data.resource_metrics[0].scope_metrics[0].metrics) if data else 0)
"""


def test_the_global_provider_may_come_later(stand_in_library):
    """Instruments made before the application sets its provider serve those that are started after it too, in any order."""
    helpers = Path(nvml_stand_in.__file__).parent
    paths = os.pathsep.join([str(helpers.parent.parent), str(helpers)])
    environment = os.environ | {"LD_LIBRARY_PATH": str(stand_in_library.parent), "PYTHONPATH": paths}
    program = f"library = {str(stand_in_library)!r}\n{GLOBAL_PROVIDER}"
    command = [sys.executable, "-W", "error", "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.stdout.split(), done.stderr) == (["10", "10", "10", "0"], "")
