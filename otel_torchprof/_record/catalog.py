"""All sources in their start order: the one list that profiles, live recordings and metrics use."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from otel_torchprof._native import torch_library
from otel_torchprof._process import process_changes

from .collective_source import CollectiveSource
from .compile_events import CompileEvents
from .device_source import BYTES_OF_A_TIME, DeviceSource, LiveDeviceSource, LiveEnergySource
from .energy_source import EnergySource
from .phases import Phases
from .samples_source import StackSamples
from .source import Calls, Collections, Memory, Modules, Operators, Source

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from otel_torchprof._native.torch_library import TorchLibrary

    from .source import RecordingOptions


class SourceRequest(NamedTuple):
    """Requested content of a recording, which decides about its sources."""

    options: RecordingOptions
    library: TorchLibrary | None
    """Records torch's operators; None if it is missing or not needed."""
    memory_limit: int
    """Memory limit of the recorder, bytes."""


class Entry(NamedTuple):
    """A source and how it is chosen."""

    name: str
    kind: type[Source]
    """Class of the source; its ``forked`` is called in a forked child."""
    make: Callable[[SourceRequest], Source | None]
    """Creates the source, not started; None if it is not requested or has nothing to record."""
    needs_torch: bool = True
    """Whether a recording that begins before torch is imported waits for the import to start it."""
    survives_fork: bool = False
    """Whether it continues in a forked child without a restart."""


def _energy(request: SourceRequest) -> Source | None:
    options = request.options
    if not options.reads_energy:
        return None
    if not options.is_live:
        return EnergySource()
    is_by_default = options.sources.get("energy") is None
    return LiveEnergySource(options.device if is_by_default or options.device == "cuda" else None)


def _memory(request: SourceRequest) -> Source | None:
    options, library = request.options, request.library
    return Memory(library, all_threads=options.all_threads) if options.memory and library is not None else None


def _operators(request: SourceRequest) -> Source | None:
    options, library = request.options, request.library
    return Operators(library, options.asks()) if options.operators is not False and library is not None else None


def _collectives(request: SourceRequest) -> Source | None:
    options, library = request.options, request.library
    return CollectiveSource(library) if options.operators is not False and library is not None else None


def _devices(request: SourceRequest) -> Source | None:
    options, library = request.options, request.library
    most = request.memory_limit // BYTES_OF_A_TIME
    if options.device is None or (options.times_device and library is None):
        return None
    if options.is_live:
        timed = library if options.times_device else None
        return LiveDeviceSource(timed, options.device, options.device_events, most, untimed=options.untimed)
    if library is None or not options.times_device:
        return None
    return DeviceSource(library, options.device, options.device_events, most)


def _compilations(request: SourceRequest) -> Source | None:
    return CompileEvents() if request.options.compilations else None


def _phases(request: SourceRequest) -> Source | None:
    return Phases() if request.options.phases else None


def _modules(request: SourceRequest) -> Source | None:
    return Modules() if request.options.modules and torch_library.installed_torch() is not None else None


def _collections(request: SourceRequest) -> Source | None:
    return Collections() if request.options.has_collections else None


def _frames(request: SourceRequest) -> Source | None:
    return Calls(request.options.frame_filter) if request.options.frames else None


def _samples(request: SourceRequest) -> Source | None:
    options = request.options
    rate = options.sources.get("sampling", 0)
    if not rate or (options.is_live and not options.phases):
        return None
    return StackSamples(rate, all_threads=options.all_threads, is_live=options.is_live)


SOURCES = (
    Entry("energy", EnergySource, _energy),
    Entry("memory", Memory, _memory),
    Entry("operators", Operators, _operators, survives_fork=True),
    Entry("collectives", CollectiveSource, _collectives),
    Entry("devices", DeviceSource, _devices),
    Entry("phases", Phases, _phases),
    Entry("compilations", CompileEvents, _compilations, needs_torch=False),
    Entry("modules", Modules, _modules),
    # Late to start, so early to stop: the calls that stop the others are not recorded.
    Entry("frames", Calls, _frames),
    # After frames, so that a collection is not recorded as the parent of its callers: see look_at_calls in collections.cc.
    Entry("collections", Collections, _collections),
    Entry("samples", StackSamples, _samples, needs_torch=False),
)
"""A source starts after those before it, stops before them, and is reset after them in a forked child."""
process_changes.at_fork(
    process_changes.Order.SOURCES, in_child=lambda: process_changes.call_each(entry.kind.forked for entry in SOURCES)
)


def requested(request: SourceRequest, chooses: Callable[[Entry], bool] = lambda _entry: True) -> Iterator[Source]:
    """Creates the sources of a recording, not started, in start order.

    Args:
        request: requested content of the recording.
        chooses: filter of the catalog's entries; by default all.
    """
    for entry in SOURCES:
        source = entry.make(request) if chooses(entry) else None
        if source is not None:
            yield source
