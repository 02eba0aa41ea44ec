"""The one list of sources: what profiles, streams, the instrumentation and metrics record is chosen there, and options are checked there."""

from __future__ import annotations

import pytest

import otel_torchprof as otp
from otel_torchprof import config, parsers
from otel_torchprof._record import catalog
from otel_torchprof._record.catalog import SOURCES, Entry, SourceRequest, requested
from otel_torchprof._record.source import RecordingOptions, Source
from otel_torchprof.health import ON


class Tides(Source):
    """A source like a stranger's: it labels its start and has a state, a note and an option."""

    def __init__(self, height: int) -> None:
        self.height = height
        self.lives: list[str] = []

    def start(self, _session):
        self.lives.append("start")
        with otp.record_function(f"tide of {self.height}"):
            pass

    def stop(self):
        self.lives.append("stop")

    def states(self):
        return {"tides": ON if self.height else "off: it is low"}

    def notes(self):
        return [f"the tide is at {self.height}"]


TIDES = config.Option(
    "OTEL_TORCHPROF_TIDES",
    "Height of the tide",
    parse=int,
    check=parsers.whole("a whole number", 0),
    argument="tides",
)


@pytest.fixture
def tides(monkeypatch):
    """The list with one more entry, as a new source would add it; what was made of it."""
    made: list[Tides] = []

    def make(request: SourceRequest) -> Source | None:
        if request.options.sources.get("tides") is None:
            return None
        made.append(Tides(request.options.sources["tides"]))
        return made[-1]

    entry = Entry("tides", Source, make, needs_torch=False)
    monkeypatch.setattr(catalog, "SOURCES", (*SOURCES, entry))
    monkeypatch.setattr(config, "OPTIONS", (*config.OPTIONS, TIDES))
    for kind in (config.SourceOptions, config.LiveOptions, config.InstrumentOptions):
        monkeypatch.setitem(kind.__annotations__, "tides", "int")
    return made


def test_a_new_source_in_a_profile(tides):
    """One entry in the list is enough: a profile takes its option, starts and stops it, and has its events, state and note."""
    with otp.profile(operators=False, tides=3) as prof:
        pass
    assert [tide.lives for tide in tides] == [["start", "stop"]]
    assert [event.name for event in prof.events()] == ["tide of 3"]
    assert "the tide is at 3" in prof.health.notes


def test_a_new_source_that_is_off(tides):
    """Where it is off, the health of the profile says why."""
    with otp.profile(operators=False, tides=0) as prof:
        pass
    assert "tides off: it is low" in prof.health.notes


def test_a_new_source_in_a_stream(tides):
    """The same entry serves a live recording, whose health has its state under its name."""
    with otp.stream(detail="modules", tides=4) as running:
        pass
    assert [tide.lives for tide in tides] == [["start", "stop"]]
    assert running.health.sources["tides"] == ON
    assert [event.key for event in running.key_averages()] == ["tide of 4"]


def test_nobody_asked(tides):
    """Without its option it is not made."""
    with otp.profile(operators=False):
        pass
    assert tides == []


@pytest.mark.parametrize("start", [otp.profile, otp.stream], ids=["profile", "stream"])
def test_options_are_checked_by_their_source(tides, start):
    """A wrong value and a wrong name are errors at once, which name both, and what was meant."""
    with pytest.raises(TypeError, match="tides is 'high'; it must be a whole number"):
        start(tides="high")
    with pytest.raises(TypeError, match=f"tidse is no argument of {start.__name__}; did you mean tides?"):
        start(tidse=3)


def test_options_are_declared():
    """What type checkers know of a function's options are arguments of the table."""
    for kind in (config.SourceOptions, config.LiveOptions, config.InstrumentOptions):
        assert {option.argument for option in config.arguments_in(kind)} == set(kind.__annotations__)


def test_the_variable_of_a_new_source(tides, monkeypatch):
    """The same line of the table is read from the environment."""
    monkeypatch.setenv("OTEL_TORCHPROF_TIDES", "5")
    with otp.profile(operators=False) as prof:
        pass
    assert "the tide is at 5" in prof.health.notes


def test_names_are_unique():
    """No two entries have one name."""
    assert len({entry.name for entry in SOURCES}) == len(SOURCES)


def test_what_starts_before_torch():
    """A recording that waits for torch starts first what does not need it, in the order of the list."""
    options = RecordingOptions(is_live=True, frames=True)
    early = [
        type(s).__name__ for s in requested(SourceRequest(options, None, 1 << 20), lambda entry: not entry.needs_torch)
    ]
    late = [type(s).__name__ for s in requested(SourceRequest(options, None, 1 << 20), lambda entry: entry.needs_torch)]
    assert (early, late) == (["CompileEvents"], ["Calls", "Collections"])


def test_health_of_energy():
    """A stream tells of the energy counters where they are to be read, and is silent where somebody said no."""
    states = [otp.stream(**options) for options in ({}, {"energy": True}, {"use_device": "cuda", "energy": False})]
    found = []
    for running in states:
        with running:
            found.append(sorted(name for name in running.health.sources if name in {"energy", "devices"}))
    assert found == [[], ["energy"], ["devices"]]


def test_no_device_no_energy():
    """The energy counters are read where the device is CUDA's or somebody asked, and not where somebody said no."""

    def made(device: str | None, *, is_live: bool, **sources: bool | None) -> bool:
        options = RecordingOptions(device=device, device_events="off", is_live=is_live, sources=sources)
        return any("Energy" in type(s).__name__ for s in requested(SourceRequest(options, None, 1 << 20)))

    for is_live in (False, True):
        assert not made(None, is_live=is_live)
        assert made("cuda", is_live=is_live)
        assert made(None, is_live=is_live, energy=True)
        assert not made("cuda", is_live=is_live, energy=False)
        assert made("cuda", is_live=is_live, energy=None)
