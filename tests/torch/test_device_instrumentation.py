"""Times and energy of devices in an instrumented program: on spans, in averages, as metrics."""

from __future__ import annotations

import threading

import nvml_stand_in
import pytest
import torch
from device_profiles import DEVICE, tensor
from instrumented import Instrumented
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from providers import instrumented
from torch_metrics import points

import otel_torchprof as otp
from otel_torchprof._record import device_source

pytestmark = pytest.mark.simulated_device

nvml = nvml_stand_in.nvml
stand_in_library = nvml_stand_in.stand_in_library


def durations(service):
    """(name, torch.device.duration in us or None) of every span, by begin."""
    spans = sorted(service.spans(), key=lambda span: span.start_time)
    return [(span.name, micro(span.attributes.get("torch.device.duration"))) for span in spans]


def micro(seconds):
    return None if seconds is None else round(seconds * 1e6, 3)


def test_operators_in_a_request(simulated):
    """Operators inside a span of the application have the device's time, and the processor's averages add it up."""
    a = tensor(4, 4)
    simulated.duration(31_000, "aten::mm")
    service = Instrumented()
    with service.on("ops", use_device=DEVICE):
        with service.tracer.start_as_current_span("request"):
            torch.mm(a, a)
        found = durations(service)
        (average,) = [one for one in service.processor.key_averages() if one.key == "aten::mm"]
        assert service.processor.health.sources["devices"] == "on"
    assert found == [("aten::mm", 31.0)]
    assert average.device_time_total == pytest.approx(31.0)
    assert simulated.counts()["alive"] == 0


def test_modules_over_many_drains(simulated):
    """A module whose operators were sent before it ended has the time of its own marks, and so has its phase; none comes too late or twice."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()).to(DEVICE)
    x = tensor(2, 4)
    simulated.duration(5_000)
    service = Instrumented()

    class Flushing(torch.nn.Module):
        def forward(self, x):
            service.provider.force_flush()
            return x

    model.append(Flushing())
    with service.on("modules", use_device=DEVICE), torch.no_grad():
        for _ in range(3):
            with service.tracer.start_as_current_span("request"):
                model(x)
        found = durations(service)
    assert [time for name, time in found if name == "torch.phase.inference"] == [10.0] * 3
    assert [time for name, time in found if name == "Sequential"] == [10.0] * 3
    assert [time for name, time in found if name == "0"] == [5.0] * 3


def test_what_the_device_has_not_done_is_waited_for(simulated, monkeypatch):
    """A drain waits for the device on its own thread, not the program's; what does not come in time has no time."""
    monkeypatch.setattr(device_source, "WAIT_SECONDS", 0.01)
    a = tensor(4, 4)
    me = threading.get_native_id()
    service = Instrumented()
    with service.on("ops", use_device=DEVICE), service.tracer.start_as_current_span("request"):
        torch.mm(a, a)
        assert durations(service) == [("aten::mm", 5.0)]
        simulated.manual()
        before = simulated.counts(me)["synchronizes"]
        torch.add(a, a)
        assert durations(service)[1:] == [("aten::add", None)]
        simulated.complete_all()
        simulated.instant()
        torch.mul(a, a)
        assert durations(service)[2:] == [("aten::mul", 5.0)]
        assert simulated.counts(me)["synchronizes"] == before


def test_a_device_that_is_used_later(simulated, monkeypatch):
    """Before the program uses the device nothing of it is asked; from then on there are times."""
    module = getattr(torch, DEVICE)
    in_use = False
    monkeypatch.setattr(module, "is_initialized", lambda: in_use)
    a = tensor(4, 4)
    service = Instrumented()
    with service.on("ops", use_device=DEVICE), service.tracer.start_as_current_span("request"):
        torch.add(a, a)
        assert durations(service) == [("aten::add", None)]
        assert "not used" in service.processor.health.sources["devices"]
        assert simulated.counts()["records_timed"] == 0
        in_use = True
        service.provider.force_flush()
        torch.mm(a, a)
        assert durations(service)[1:] == [("aten::mm", 5.0)]


def test_operators_as_metrics(simulated):
    """With detail metrics the device's time of operators is a counter of its own."""
    a = tensor(4, 4)
    simulated.duration(31_000, "aten::mm")
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader], shutdown_on_exit=False)
    with instrumented(meter_provider=provider, detail="metrics", overhead=1.0, use_device=DEVICE) as instrumentor:
        for _ in range(3):
            torch.mm(a, a)
            instrumentor.step()
        found = {at["torch.op.name"]: value for at, value in points(reader, "torch.op.device.time")}
        assert instrumentor.health.sources["devices"] == "on"
    provider.shutdown()
    assert found["aten::mm"] == pytest.approx(93e-6)
    assert simulated.counts()["alive"] == 0


def test_steps_have_energy(simulated, nvml, monkeypatch):
    """With steps alone and a device of NVIDIA's the span of a step has the joules of its time, and nothing is marked."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    nvml.set("gpu.0.energy", 1_000_000)
    service = Instrumented()
    with service.on("steps", use_device="cuda"):
        torch.ones(2)
        otp.TorchInstrumentor().step()
        nvml.set("gpu.0.energy", 3_000_000)
        service.provider.force_flush()
        otp.TorchInstrumentor().step()
        assert service.processor.health.sources["energy"] == "on"
    spans = [span for span in service.spans_at_end() if span.name == "torch.step"]
    assert any(span.attributes.get("torch.device.energy", 0) > 0 for span in spans)
    assert simulated.counts()["records_timed"] == 0


def test_gpu_metrics_come_with_a_meter_provider(simulated, nvml):
    """A meter provider gets the GPUs' metrics too, until the program is no longer instrumented, unless they are not wanted."""
    for requested, expected in ((None, 1), (False, 0)):
        reader = InMemoryMetricReader()
        provider = MeterProvider([reader], shutdown_on_exit=False)
        with instrumented(meter_provider=provider, detail="metrics", gpu_metrics=requested):
            assert len(points(reader, "hw.power")) == expected
        assert not points(reader, "hw.power")
        provider.shutdown()


def test_environment(simulated, monkeypatch):
    """The variables name the device and what is timed; a bad one is ignored."""
    a = tensor(4, 4)
    monkeypatch.setenv("OTEL_TORCHPROF_DEVICE", f"{DEVICE},events=labels")
    service = Instrumented()
    with service.on("ops"):
        with otp.record_function("label"):
            torch.mm(a, a)
        found = durations(service)
    assert found[0] == ("label", 5.0)
    assert simulated.counts()["records_timed"] - 2 <= 10, "one pair, and a calibration at begin and end"


@pytest.mark.parametrize(
    ("detail", "options", "said"),
    [
        ("ops", {"use_device": "nothing"}, "off: torch has no device named 'nothing'"),
        ("steps", {"use_device": DEVICE}, "off: detail is 'steps'"),
        ("ops", {"use_device": DEVICE, "device_events": "off"}, "off: device_events is 'off'"),
    ],
)
def test_why_a_device_is_not_timed(simulated, detail, options, said):
    """Health names the reason that holds: a name that torch does not have, the detail, or the option."""
    service = Instrumented()
    with service.on(detail, **options):
        service.provider.force_flush()
        assert service.processor.health.sources["devices"] == said
        assert service.processor.health.sources["energy"].startswith("off: NVIDIA's library knows no ")


def test_metrics_read_no_energy(simulated, monkeypatch):
    """With metrics, where no span could have joules, nobody reads the counters."""
    monkeypatch.setattr(device_source, "_is_in_use", lambda device: True)
    options = {"detail": "metrics", "use_device": "cuda", "gpu_metrics": False}
    with instrumented(meter_provider=MeterProvider(), **options) as instrumentor:
        assert "energy" not in instrumentor.health.sources
        assert "otel-torchprof-energy" not in [thread.name for thread in threading.enumerate()]
