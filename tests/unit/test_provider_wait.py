"""Waiting for a TracerProvider: one warning where there is torch and none comes, and none otherwise."""

from __future__ import annotations

import logging
import sys
import threading
import types

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider

from otel_torchprof._instrument import default_processor
from otel_torchprof._instrument.default_processor import ProviderWait
from otel_torchprof.errors import forget_warnings

LONG = 60


class Said(logging.Handler):
    """Keeps what is logged, and lets wait for the first of it."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []
        self.came = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())
        self.came.set()


def join_waits():
    """The thread of a wait that was given up may be about to say something, and the next test would hear it."""
    for thread in threading.enumerate():
        if thread.name == "otel-torchprof-wait":
            thread.join(LONG)
            assert not thread.is_alive()


@pytest.fixture
def said(monkeypatch):
    monkeypatch.setattr(default_processor, "_LOOK_SECONDS", 0.001)
    forget_warnings()
    handler = Said()
    logging.getLogger("otel_torchprof").addHandler(handler)
    yield handler
    join_waits()
    logging.getLogger("otel_torchprof").removeHandler(handler)
    forget_warnings()


@pytest.fixture
def with_torch(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", types.ModuleType("torch"))


@pytest.mark.usefixtures("with_torch")
def test_it_says_once_that_none_comes(said):
    """After a while with torch, and not again at exit."""
    wait = ProviderWait(lambda _: None)
    assert said.came.wait(LONG)
    wait.give_up()
    join_waits()
    wait._at_exit()
    assert len(said.messages) == 1
    assert "no TracerProvider of opentelemetry-sdk is set" in said.messages[0]


@pytest.mark.usefixtures("with_torch")
@pytest.mark.parametrize(
    ("group", "said_of"),
    [
        ("", "opentelemetry-distro is not installed"),
        ("opentelemetry_distro", "no TracerProvider of opentelemetry-sdk is set"),
        ("opentelemetry_configurator", "no TracerProvider of opentelemetry-sdk is set"),
    ],
)
def test_by_opentelemetry_instrument(said, monkeypatch, tmp_path, group, said_of):
    """Started by ``opentelemetry-instrument``, what is missing is the distribution, unless a package has one, of any name."""
    monkeypatch.setitem(sys.modules, "opentelemetry.instrumentation.auto_instrumentation", types.ModuleType("loaded"))
    if group:
        info = tmp_path / "vendor-1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vendor\nVersion: 1\n")
        (info / "entry_points.txt").write_text(f"[{group}]\nvendor = vendor:Vendor\n")
        monkeypatch.syspath_prepend(tmp_path)
    wait = ProviderWait(lambda _: None)
    wait._at_exit()
    wait.give_up()
    assert len(said.messages) == 1
    assert said_of in said.messages[0]


@pytest.mark.usefixtures("with_torch")
def test_one_that_comes_is_handed_on_in_silence(said, monkeypatch):
    """A provider that is set before that is what was waited for, also where the program ends at that moment."""
    provider, found = TracerProvider(shutdown_on_exit=False), threading.Event()
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    wait = ProviderWait(lambda _: found.set())
    assert found.wait(LONG)
    wait._at_exit()
    wait.give_up()
    assert said.messages == []


def test_without_torch_nothing_is_missing(said, monkeypatch):
    """A program that never imports torch has nothing to record, and is told nothing."""
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr(default_processor, "_LOOKS_UNTIL_SAID", 1)
    wait = ProviderWait(lambda _: None)
    wait._at_exit()
    wait.give_up()
    assert said.messages == []
