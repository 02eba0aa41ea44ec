"""``load``: a trace file as a profile, with the same methods and the same code."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from opentelemetry.sdk.resources import Resource

from otel_torchprof._columns.arrays import distinct_values, is_any_of
from otel_torchprof._columns.schema import Kind
from otel_torchprof._encode.chrome import OWN_METADATA
from otel_torchprof._export.formats import needs_spans
from otel_torchprof._files.attribute_keys import MERGED_RANKS, OTHER, RANK
from otel_torchprof._files.box_reading import is_box, problems_of, read_box, table_of_box
from otel_torchprof._files.repeating import EventTimes, may_repeat, repeating_steps
from otel_torchprof._files.trace_batch import batch_of
from otel_torchprof._files.trace_columns import read_columns
from otel_torchprof._model.devices import device_name
from otel_torchprof._model.step_spans import RecordedStep
from otel_torchprof._process import threads
from otel_torchprof._process.free_memory import free_memory
from otel_torchprof.errors import TorchProfError
from otel_torchprof.health import ON, Health

from .results import ProfileResults

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from otel_torchprof._columns.batch import Array, Batch
    from otel_torchprof._export.byte_stream import ByteStream
    from otel_torchprof._files.repeating import RepeatingSteps
    from otel_torchprof._files.trace_batch import TraceTable

_NONE = "off: the trace has none"


def load(path: str | os.PathLike[str], *, memory_limit: int | None = None) -> LoadedProfile:
    """Reads a file as a profile: a Chrome trace of this package or of ``torch.profiler``, OTLP of this package, a black box.

    OTLP is that of ``export_otlp``, of :class:`OTLPFileExporter` or of a Collector's file exporter, as protobuf or as lines
    of JSON. Any file may be compressed with gzip or zstd. The result has the methods of a finished :class:`profile`. What
    the file does not have is missing in the results: ``health.notes`` lists events that are in none of them, and
    unreadable parts with their places. An event that stands for several calls has their number as ``count``. Costs some
    2 us per event, and 170 bytes at the peak.

    Args:
        path: path of the file.
        memory_limit: most bytes of the columns. Default: half of the free memory.

    Raises:
        TorchProfError: nothing of the file can be read; names the file, the place and the way out.
        ValueError: the limit is no number of bytes.

    Examples:
        >>> with otp.profile() as prof:
        ...     y = torch.ones(3) + 1
        >>> prof.export_chrome_trace("trace.json")
        >>> [average.count for average in otp.load("trace.json").key_averages() if average.key == "aten::add"]
        [1]
    """
    return load_watched(os.fspath(path), checked_limit(memory_limit))


def load_watched(name: str, limit: int, watch: Callable[[ByteStream], None] = lambda _stream: None) -> LoadedProfile:
    """:func:`load`, with the most bytes of the columns; ``watch`` gets the open file, to display how much has been read."""
    if Path(name).is_dir():
        raise TorchProfError(f"{name!r} is a folder: load_ranks reads the traces of all ranks in it")
    if is_box(name):
        return _loaded_box(name, limit)
    trace = read_columns(name, limit, watch)
    if trace.figures.unusable and not len(trace.rows["start"]):
        raise TorchProfError("; ".join(trace.problems))
    table = batch_of(name, trace)
    is_summed = bool(trace.resources) and table.batch.memory is not None
    problems = [*trace.problems, *table.problems]
    notes = [
        *problems,
        *(["allocations are sums per event, at its end: OTLP has no others"] if is_summed else []),
        *_reduced(table.batch),
    ]
    return LoadedProfile(name, table, _health(notes, trace.nbytes, limit), is_partial=bool(problems))


def _reduced(batch: Batch) -> Iterator[str]:
    """Yields what a file with reduced traces does not have any more."""
    if batch.reductions is None:
        return
    calls = batch.reductions["calls"][batch.reductions["event"] > 0]
    aggregated, collapsed = sum(calls[calls > 1].tolist()), sum(batch.reductions["collapsed"].tolist())
    yield (
        f"averages count {aggregated:,} calls aggregated into {int((calls > 1).sum()):,} events, and {collapsed:,} "
        "collapsed: single durations, order and shapes of these are not in the file"
    )


def checked_limit(memory_limit: int | None) -> int:
    """Returns the most bytes of columns, by default half of the free memory. Raises ValueError."""
    limit = free_memory() // 2 if memory_limit is None else memory_limit
    if not isinstance(limit, int) or limit <= 0:
        raise ValueError(f"memory_limit is {memory_limit!r}; it must be a number of bytes above 0, or None")
    return limit


def _loaded_box(name: str, limit: int) -> LoadedProfile:
    contents = read_box(name)
    if (size := Path(name).stat().st_size) > limit:
        raise TorchProfError(f"{name!r} has {size:,} bytes, more than the limit of {limit:,}")
    table = table_of_box(contents)
    problems = problems_of(contents)
    return LoadedProfile(name, table, _health(problems, size, limit), is_partial=bool(problems))


def _health(problems: Sequence[str], nbytes: int, limit: int) -> Health:
    return Health(_NONE, _NONE, 0, {}, nbytes, limit, notes=tuple(problems))


def _device_of(batch: Batch) -> str | None:
    """Name of the type of the devices that worked; None without any."""
    for columns in (batch.work, batch.devices):
        if columns is not None and len(columns["start"]):
            return device_name(columns["device_type"].item(0))
    return None


def _repeating(batch: Batch) -> RepeatingSteps | None:
    """Steps of a file that marks none."""
    names = {number: batch.names[number] for number in distinct_values(batch["name"]).tolist()}
    marks = np.flatnonzero(is_any_of(batch["name"], [number for number, name in names.items() if may_repeat(name)]))
    return repeating_steps(batch.names, EventTimes(*(batch[c] for c in ("name", "start", "end", "thread"))), marks)


class _LoadedRecording:
    """A recording that was read from a file."""

    def __init__(self, table: TraceTable, health: Health) -> None:
        self._table, self._health = table, health
        self.reading = threads.Lock()
        """Held while the profile computes its results."""

    def batch(self) -> Batch:
        """Returns all events."""
        return self._table.batch

    def times(self) -> tuple[int, int]:
        """Returns start and end of the recording, Unix ns."""
        return self._table.window

    def health(self) -> Health:
        """What was read, and what was not."""
        batch, left_out = self._table.batch, self._table.left_out
        is_label = batch["kind"] == Kind.LABEL
        notes = list(self._health.notes)
        if left_out:
            notes.append(f"not in the profile: {', '.join(f'{kind} ({n:,})' for kind, n in left_out.most_common())}")
        start, end = self._table.window
        return replace(
            self._health,
            operators=ON if (batch["kind"] == Kind.OPERATOR).any() else _NONE,
            labels=ON if is_label.any() else _NONE,
            devices=Health.devices if _device_of(batch) is None else ON,
            recorded=len(batch) + (0 if batch.memory is None else len(batch.memory["time"])),
            dropped=batch.dropped,
            start_ns=start,
            stop_ns=end,
            notes=tuple(notes),
        )


class LoadedProfile(ProfileResults):
    """A profile from a trace file: see :func:`load`. Thread-safe.

    Examples:
        >>> with otp.profile() as prof:
        ...     y = torch.ones(3) + 1
        >>> prof.export_chrome_trace("trace.json")
        >>> otp.load("trace.json")
        <profile of ... events from 'trace.json'>
    """

    def __init__(self, path: str, table: TraceTable, health: Health, *, is_partial: bool = False) -> None:
        super().__init__(_LoadedRecording(table, health))
        members = table.metadata
        self.path = path
        """Path of the file."""
        self._table, self._is_partial = table, is_partial
        self.record_shapes, self.with_flops = table.batch.inputs is not None, table.with_flops
        self.profile_memory = table.batch.memory is not None
        self.with_stack = table.batch.frame_info is not None or bool(members.get("with_stack"))
        self.use_device = _device_of(table.batch)
        self.trace_id = str(members.get("trace_id", ""))
        self._metadata.entries.update({key: value for key, value in members.items() if key not in OWN_METADATA})
        self._metadata.entries |= {"with_flops": 1} if self.with_flops else {}
        self._labels_steps, self._has_modules = table.has_step_labels, table.has_modules
        self._prepared, self._pid = True, table.pid
        self.profiling_start_time_ns, self.profiling_end_time_ns = table.window
        self._repeating = None if table.steps else _repeating(table.batch)

    @property
    def health(self) -> Health:
        """What was read; ``notes`` say what was not, and where."""
        known = self._segments.health()
        notes = known.notes if self._repeating is None else (*known.notes, self._repeating.rule)
        return replace(known, stats=self._figures, notes=notes)

    @property
    def labels_steps(self) -> bool:
        """Whether the steps are labels among the events, as with a schedule and in traces of ``torch.profiler``."""
        return self._labels_steps

    @property
    def is_partial(self) -> bool:
        """Whether a part of the file could not be read: ``health.notes`` says which."""
        return self._is_partial

    @property
    def steps(self) -> tuple[RecordedStep, ...]:
        """As of a profile. Where the file marks none, those between steps of an optimizer, or batches of a loader: ``health.notes`` say so."""
        found = self._repeating
        if found is None:
            return super().steps
        thread = self._table.batch.threads[found.thread].ident
        times = zip(found.start.tolist(), found.end.tolist(), strict=True)
        return tuple(RecordedStep(number, start, end, thread) for number, (start, end) in enumerate(times))

    @property
    def rank(self) -> int | None:
        """Rank of the process; None if the file does not say it, or has events of several ranks."""
        return self._table.rank

    @property
    def is_merged(self) -> bool:
        """Whether ``otel-torchprof merge`` wrote it, from the files of several ranks."""
        other = self._table.metadata.get(OTHER)
        return isinstance(other, dict) and MERGED_RANKS in other

    @property
    def reductions(self) -> Mapping[str, Array] | None:
        """The calls that events stand for as numpy arrays by name: see ``docs/columns.md``. None where each event is one call."""
        return self._table.batch.reductions

    @property
    def has_requests(self) -> bool:
        """Whether the file has spans of a service: traces that are not those of steps."""
        spans = self._table.batch.spans
        return spans is not None and spans.has_requests

    @property
    def needs_spans(self) -> bool:
        """Whether its Chrome JSON is one of spans: see :func:`~otel_torchprof._export.formats.needs_spans`."""
        return needs_spans(self._table.batch, [] if self._labels_steps else self._table.steps)

    def __repr__(self) -> str:
        return f"<profile of {len(self.events())} events from {self.path!r}>"

    def __str__(self) -> str:
        """As ``repr``, not the table of all events as torch has it: a file may have millions."""
        return repr(self)

    def _step_span_ids(self) -> Mapping[int, tuple[bytes, bytes]]:
        """None: the ids of the spans that the file is about are not kept."""
        return {}

    def _steps(self) -> list[RecordedStep]:
        return list(self._table.steps)

    def _resource(self) -> Resource:
        """The resource in the file, else that of this process; with the rank that the file has."""
        resource = Resource(self._table.resource) if self._table.resource else super()._resource()
        has_rank = self.rank is None or RANK in resource.attributes
        return resource if has_rank else resource.merge(Resource({RANK: self.rank}))

    def _no_steps(self) -> TorchProfError:
        return TorchProfError(f"{self.path!r} has no steps, which an explanation compares; its averages can be read")
