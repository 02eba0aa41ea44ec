"""A processor that never gets an event is reported, unless that may be intended; whole programs are in tests/torch/test_wrong_setups.py."""

from __future__ import annotations

import sys
import types

import pytest

import otel_torchprof as otp
from otel_torchprof._instrument.processor import unused
from otel_torchprof.errors import forget_warnings


@pytest.fixture(autouse=True)
def uninstrumented(monkeypatch):
    """A process with torch that has never instrumented it, and has started no other."""
    monkeypatch.setattr(unused, "_has_recording", False)
    monkeypatch.setattr(unused, "_has_processor", False)
    monkeypatch.setitem(sys.modules, "torch", types.ModuleType("torch"))
    for name in [name for name in sys.modules if name.startswith("multiprocessing.popen_")]:
        monkeypatch.delitem(sys.modules, name)
    forget_warnings()
    yield
    forget_warnings()


def said(caplog) -> list[str]:
    return [message for message in caplog.messages if "nothing was ever given" in message]


def test_it_is_said_at_exit(caplog):
    """No shutdown says it, since the program may instrument torch afterwards; its exit does, once."""
    for processor in (otp.TorchSpanProcessor(), otp.TorchSpanProcessor()):
        processor.shutdown()
    assert said(caplog) == []
    unused.warn()
    assert len(said(caplog)) == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("OTEL_TORCHPROF_ENABLED", "false"),
        ("OTEL_TORCHPROF_DETAIL", "off"),
        ("OTEL_SDK_DISABLED", "true"),
        ("OTEL_PYTHON_DISABLED_INSTRUMENTATIONS", "requests, torch"),
    ],
)
def test_where_recording_is_switched_off(caplog, monkeypatch, name, value):
    """Who has switched it off is told nothing."""
    monkeypatch.setenv(name, value)
    otp.TorchSpanProcessor().shutdown()
    unused.warn()
    assert said(caplog) == []


def test_without_torch(caplog, monkeypatch):
    """A process that never imported torch has nothing to record."""
    monkeypatch.delitem(sys.modules, "torch")
    otp.TorchSpanProcessor().shutdown()
    unused.warn()
    assert said(caplog) == []


def test_one_that_sends_the_applications_spans(caplog):
    """It may be there for these alone."""
    otp.TorchSpanProcessor(sdk_spans=True).shutdown()
    unused.warn()
    assert said(caplog) == []


def test_where_recording_was_asked_for(caplog):
    """A stream, or an instrumentation that stays off, has found the way, whatever other processors are for."""
    processor = otp.TorchSpanProcessor()
    otp.stream()
    processor.shutdown()
    unused.warn()
    assert said(caplog) == []
