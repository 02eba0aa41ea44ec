"""Formats of files, by name: what ``export_as``, ``convert``, ``record -o`` and ``%%torchprof -o`` write.

A new one is an encoder in ``_encode`` and an entry of :data:`FORMATS`; with an exporter here, which writes it while a program runs, also
one of ``run -o`` and ``recover -o``. Importing this module imports neither.
"""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from otel_torchprof import config

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope

    from otel_torchprof._columns.batch import Batch
    from otel_torchprof._model.event_table import EventTable
    from otel_torchprof._model.span_table import SpanTable
    from otel_torchprof._model.step_spans import RecordedStep


@dataclass(frozen=True)
class FormatInput:
    """A recording as the input of formats."""

    batch: Batch
    """All events. :func:`~otel_torchprof._model.tree.nested_rows` has those that nest, by thread."""
    steps: list[RecordedStep]
    """Steps that are not events."""
    spans: Callable[[], SpanTable]
    """Returns the events as spans."""
    resource: Callable[[], Resource]
    scope: Callable[[], InstrumentationScope]
    events: Callable[[], EventTable]
    """Returns the displayed events with the step, phase and module of each."""
    devices_of: Batch | None = None
    """Batch with the device times, if these are not in ``batch``."""
    metadata: Mapping[str, Any] | None = None
    """Metadata from the user."""
    call_stacks: bool = False
    """Whether each event gets its stack as text."""
    window: tuple[int, int] | None = None
    """Start and end of the recording, Unix ns."""
    pid: int | None = None
    """Id of the recorded process; None: this one."""
    step_spans: Callable[[], Mapping[int, tuple[bytes, bytes]]] = dict
    """Returns trace and span id of the span of each step by its number; -1: of the span of a recording without steps."""


class FileExporter(NamedTuple):
    """An exporter that writes files."""

    load: Callable[[], Callable[..., SpanExporter]]
    """Imports and returns its class, whose first argument is a path."""
    path: config.Option | None = None
    """Option with the path if the argument is missing."""

    @property
    def options(self) -> list[config.Option]:
        """Further arguments: parts of the variable of the path."""
        return [] if self.path is None else list(config.fields_in(self.path.variable).values())


class Format(NamedTuple):
    """A format of files."""

    encode: Callable[[FormatInput], Iterable[bytes | memoryview]]
    """Returns the pieces of a file, each valid until the next one."""
    suffixes: tuple[str, ...]
    """Suffixes of file names, without ``.gz``, which compresses them."""
    reader: str
    """Name of a program that opens such files, for messages."""
    exporter: FileExporter | None = None
    """None: made of a finished recording only, and not read by :func:`otel_torchprof.load`."""
    is_compressed: bool = False
    """Whether files are compressed within, so that none has a name in ``.gz``."""
    lacks: str = ""
    """What the files do not have, for messages; empty if that depends on the recording."""

    @property
    def endings(self) -> tuple[str, ...]:
        """The suffixes, also of compressed files."""
        return tuple(
            f"{suffix}{gz}" for suffix in self.suffixes for gz in ("", *(() if self.is_compressed else (".gz",)))
        )


def needs_spans(batch: Batch, steps: Iterable[RecordedStep]) -> bool:
    """Whether Chrome JSON is written as spans: for attributes of steps, for requests, and for spans that stand for several calls, which do not nest in time."""
    has_requests = batch.spans is not None and batch.spans.has_requests
    return has_requests or batch.reductions is not None or any(step.attributes for step in steps)


def _chrome(recorded: FormatInput) -> Iterable[bytes]:
    from otel_torchprof._encode import chrome, chrome_spans, spans

    if needs_spans(recorded.batch, recorded.steps):
        metadata = chrome.checked_metadata(recorded.metadata) | chrome.dropped_member(recorded.batch)
        reduced = spans.SpanList(recorded.spans(), resource=recorded.resource(), scope=recorded.scope())
        encoder = chrome_spans.ChromeSpans(recorded.pid, metadata)
        return itertools.chain(encoder.encode(reduced, begin=True), [chrome_spans.CLOSING])
    return chrome.encode(
        recorded.batch,
        steps=recorded.steps,
        metadata=recorded.metadata,
        call_stacks=recorded.call_stacks,
        devices_of=recorded.devices_of,
        window=recorded.window,
        pid=recorded.pid,
    )


def _chrome_exporter() -> type[SpanExporter]:
    from .chrome import ChromeTraceExporter

    return ChromeTraceExporter


def _otlp(recorded: FormatInput) -> Iterable[memoryview]:
    from otel_torchprof._encode import otlp

    return _uncounted(otlp.encode_counted(recorded.spans(), resource=recorded.resource(), scope=recorded.scope()))


def _otlp_json(recorded: FormatInput) -> Iterable[memoryview]:
    from otel_torchprof._encode import otlp_json

    return _uncounted(otlp_json.encode_counted(recorded.spans(), resource=recorded.resource(), scope=recorded.scope()))


def _uncounted(counted: Iterable[tuple[memoryview, int]]) -> Iterable[memoryview]:
    return (message for message, _ in counted)


def _perfetto(recorded: FormatInput) -> Iterable[bytes]:
    from otel_torchprof._encode import perfetto, spans

    listed = spans.SpanList(recorded.spans(), resource=recorded.resource(), scope=recorded.scope())
    pid = os.getpid() if recorded.pid is None else recorded.pid
    return perfetto.encode(listed, pid, perfetto.memory_counters(recorded.batch.memory))


def _pprof(recorded: FormatInput) -> Iterable[bytes]:
    from otel_torchprof._encode import pprof

    return pprof.encode(recorded.events(), recorded.window or (0, 0))


def _otlp_profiles(recorded: FormatInput) -> Iterable[bytes]:
    from otel_torchprof._encode import otlp_profiles

    window, spans = recorded.window or (0, 0), recorded.step_spans()
    return otlp_profiles.encode(recorded.events(), window, spans, recorded.resource(), recorded.scope())


def _parquet(recorded: FormatInput) -> Iterable[bytes]:
    from otel_torchprof._encode import arrow

    return arrow.parquet(recorded.events())


def _otlp_exporter() -> type[SpanExporter]:
    from .otlp_file import OTLPFileExporter

    return OTLPFileExporter


FILE_EXPORTERS: Mapping[str, FileExporter] = {
    "chrome": FileExporter(_chrome_exporter, config.CHROME_TRACE),
    "otlp_file": FileExporter(_otlp_exporter, config.OTLP_FILE),
}
"""Exporters by name in ``OTEL_TRACES_EXPORTER``."""

_SUMS = "sums by stack, step and phase: no single events in the output"
FORMATS: Mapping[str, Format] = {
    "chrome": Format(_chrome, (".json",), "Perfetto", FILE_EXPORTERS["chrome"]),
    "otlp": Format(_otlp, (".otlp",), "OpenTelemetry", FILE_EXPORTERS["otlp_file"]),
    "otlp_json": Format(_otlp_json, (".jsonl",), "OpenTelemetry", FILE_EXPORTERS["otlp_file"]),
    "perfetto": Format(_perfetto, (".pftrace",), "Perfetto"),
    "pprof": Format(_pprof, (".pb",), "pprof", lacks=_SUMS),
    "otlp_profiles": Format(_otlp_profiles, (".otlp-profiles",), "the OpenTelemetry Collector", lacks=_SUMS),
    "parquet": Format(
        _parquet,
        (".parquet",),
        "DuckDB and pandas",
        is_compressed=True,
        lacks="one table, of events: no samples of stacks and no single allocations in the output",
    ),
}
"""Formats by name."""

TRACES: Mapping[str, Format] = {name: each for name, each in FORMATS.items() if each.exporter is not None}
"""Formats that are written while a program runs, and read."""


def endings_of(formats: Mapping[str, Format]) -> tuple[str, ...]:
    """Endings of names of files in some formats."""
    return tuple(ending for file_format in formats.values() for ending in file_format.endings)


ENDINGS = endings_of(FORMATS)
"""Endings of names of files in all formats."""
TRACE_ENDINGS = endings_of(TRACES)
"""Endings of names of files in the formats of :data:`TRACES`."""


def format_of(path: str, formats: Mapping[str, Format] = FORMATS) -> str | None:
    """Returns the name of the format of a file with this name; None for an unknown suffix."""
    return next((name for name, file_format in formats.items() if path.endswith(file_format.endings)), None)


def endings_help(formats: Mapping[str, Format] = FORMATS) -> str:
    """Returns the suffixes by what opens the files, for the help of commands: ``.json for Perfetto``."""
    by_reader: dict[str, list[str]] = {}
    for file_format in formats.values():
        suffixes = (f"{suffix} (not .gz)" if file_format.is_compressed else suffix for suffix in file_format.suffixes)
        by_reader.setdefault(file_format.reader, []).extend(suffixes)
    texts = (f"{' or '.join(suffixes)} for {reader}" for reader, suffixes in by_reader.items())
    return f"{', '.join(texts)}, each also with .gz"
