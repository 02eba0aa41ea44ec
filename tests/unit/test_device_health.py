"""What health says of devices, energy and GPUs, and what is refused of the arguments about them."""

from __future__ import annotations

import logging
import sys

import forked_programs
import nvml_stand_in
import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

import otel_torchprof as otp
from otel_torchprof import config
from otel_torchprof.errors import forget_warnings
from otel_torchprof.health import Health

nvml = nvml_stand_in.nvml
stand_in_library = nvml_stand_in.stand_in_library


@pytest.fixture
def instrumentor():
    """The instrumentor, switched off afterwards."""
    instance = otp.TorchInstrumentor()
    yield instance
    logging.getLogger("opentelemetry.instrumentation.instrumentor").disabled = True
    instance.uninstrument()
    logging.getLogger("opentelemetry.instrumentation.instrumentor").disabled = False


def test_printed_where_it_matters():
    """The printed line names devices and energy where they were asked for, on or off, and else is silent."""
    plain = Health("on", "on", 0, {}, 0, 1 << 20)
    assert "devices" not in str(plain)
    assert "energy" not in str(plain)
    asked = Health("on", "on", 0, {}, 0, 1 << 20, devices="on", energy="off: Not Supported")
    assert str(asked).startswith("operators on; labels on; devices on; energy off: Not Supported; 0 events")


def test_a_device_that_is_not_there():
    """A device that was asked for and cannot be had is named with that reason, after the stop too."""
    with pytest.warns(UserWarning, match="not a valid device option"):
        prof = otp.profile(operators=False, use_device="nothing")
    with prof:
        pass
    assert prof.health.devices == "off: there is no nothing here that torch can use"
    assert prof.health.devices in str(prof.health)


def test_switched_off(monkeypatch):
    """With the package switched off, energy that was asked for is off for that reason."""
    monkeypatch.setenv(config.ENABLED.variable, "false")
    with otp.profile(energy=True) as prof:
        pass
    assert prof.health.energy == "off: OTEL_TORCHPROF_ENABLED is false"
    metrics = otp.GpuMetrics().start()
    metrics.stop()
    assert "OTEL_TORCHPROF_ENABLED" in str(metrics.health)


@pytest.mark.parametrize("value", ["yes", 1, "off"])
def test_energy_is_a_yes_or_a_no(value):
    """What is neither is refused, with the argument's name and what is allowed."""
    with pytest.raises(TypeError, match=r"energy is .*; it must be True, False, or None"):
        otp.profile(energy=value)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"use_device": "cuda:0"}, ValueError, "use_device is 'cuda:0'; allowed is the name of a type of device"),
        ({"use_device": ""}, ValueError, "use_device is ''; allowed is"),
        ({"use_device": 3}, TypeError, "use_device is 3"),
        ({"device_events": "kernels"}, ValueError, "device_events is 'kernels'"),
        ({"gpu_metrics": "none"}, TypeError, "gpu_metrics is 'none'; it must be True, False, or None"),
        ({"overhead": "much"}, ValueError, "overhead is 'much'; allowed is a number above 0, up to 1"),
        ({"max_operators": "many"}, ValueError, "max_operators is 'many'; allowed is a whole number above 0"),
        ({"energy": "much"}, TypeError, "energy is 'much'; it must be True, False, or None"),
        (
            {"enargy": True},
            TypeError,
            r"enargy is no argument of instrument\(\); did you mean energy\? allowed are tracer_provider, .*energy, .*use_device",
        ),
    ],
)
def test_arguments_of_instrument(instrumentor, arguments, error, text):
    """A wrong argument is refused with its name, its value and what is allowed."""
    with pytest.raises(error, match=text):
        instrumentor.instrument(detail="metrics", skip_dep_check=True, **arguments)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        (config.OVERHEAD, "much"),
        (config.MAX_OPERATORS, "many"),
        (config.DEVICE, "cuda:1"),
    ],
)
def test_variables(setting, value, monkeypatch, caplog):
    """A variable that is wrong is ignored, and the warning says what is allowed."""
    monkeypatch.setenv(setting.variable, f"{setting.key}={value}" if setting.key else value)
    forget_warnings()
    with caplog.at_level(logging.WARNING, "otel_torchprof"):
        assert setting.read() == setting.fallback
    assert f"{setting}={value!r} is ignored: allowed is" in caplog.text


def test_gpus_of_an_instrumented_program(nvml, instrumentor):
    """The instrumentor's health tells of the GPU metrics that it has started: on, and what a GPU does not have."""
    nvml.read("little")
    instrumentor.instrument(
        meter_provider=MeterProvider([InMemoryMetricReader()]), detail="metrics", skip_dep_check=True
    )
    assert instrumentor.health.sources["gpus"] == "on"
    assert any(note.startswith("hw.energy off: ") for note in instrumentor.health.notes)


def test_no_driver(nvml, instrumentor):
    """Without a driver it says why, in one word of the line and not per metric."""
    nvml.fail("nvmlInitWithFlags", nvml_stand_in.DRIVER_NOT_LOADED)
    instrumentor.instrument(
        meter_provider=MeterProvider([InMemoryMetricReader()]), detail="metrics", skip_dep_check=True
    )
    assert instrumentor.health.sources["gpus"].startswith("off: ")
    assert not any(note.startswith("hw.") for note in instrumentor.health.notes)


def test_before_torch_is_imported():
    """A program that is instrumented before it imports torch is told that devices wait for that."""
    script = (
        "import otel_torchprof as otp\n"
        "from opentelemetry.sdk.metrics import MeterProvider\n"
        "otp.TorchInstrumentor().instrument(meter_provider=MeterProvider(), detail='metrics', use_device='cuda', skip_dep_check=True)\n"
        "print(otp.TorchInstrumentor().health)"
    )
    said = forked_programs.run([sys.executable, "-c", script], check=True).stdout
    assert "devices off: torch is not imported" in said


@pytest.mark.parametrize(
    ("variables", "options", "said"),
    [
        ({"OTEL_TORCHPROF_ENABLED": "false"}, {"detail": "metrics"}, "off: OTEL_TORCHPROF_ENABLED is false"),
        ({}, {"detail": "off"}, "off: detail is 'off'"),
        ({"OTEL_SDK_DISABLED": "true"}, {"detail": "metrics"}, "off: the MeterProvider is switched off"),
        ({}, {"detail": "steps"}, "off: no TracerProvider of opentelemetry-sdk is set yet"),
    ],
)
def test_why_nothing_is_recorded(instrumentor, monkeypatch, variables, options, said):
    """A program that was instrumented and records nothing is told why, until it is uninstrumented."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    if options["detail"] == "metrics":
        options = {**options, "meter_provider": MeterProvider()}
    instrumentor.instrument(skip_dep_check=True, **options)
    assert instrumentor.health.sources == {"recording": said}
    instrumentor.uninstrument()
    assert instrumentor.health.sources == {"recording": "off: not instrumented"}


@pytest.mark.parametrize("name", ["t.html", "t.json", "t.raw.json.gz"])
def test_a_timeline_of_what_is_switched_off(monkeypatch, tmp_path, caplog, name):
    """A program that is switched off from outside writes an empty timeline where it would have written one, and does not fail."""
    monkeypatch.setenv(config.ENABLED.variable, "false")
    with otp.profile(record_shapes=True, profile_memory=True, with_stack=True) as prof:
        pass
    with pytest.warns(FutureWarning), caplog.at_level(logging.WARNING, "otel_torchprof"):
        prof.export_memory_timeline(str(tmp_path / name), "cpu")
    assert (tmp_path / name).stat().st_size > 0
    assert "OTEL_TORCHPROF_ENABLED is false" in caplog.text
