"""Encodes spans in Perfetto's own format: a ``perfetto.protos.Trace`` of track events, which https://ui.perfetto.dev opens.

Tracks, slices, arguments and arrows are those of :mod:`.chrome_spans`. Texts are interned: each name, category, key and value that is a
text stands in the file once. Times are Unix ns. The format: https://perfetto.dev/docs/reference/synthetic-track-event.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from otel_torchprof._columns.arrays import distinct_values
from otel_torchprof._model.memory import totals_over_time
from otel_torchprof._model.span_table import AttributeType
from otel_torchprof._native.encoders import PIECE_SIZE, encode_perfetto, encode_perfetto_counter

from .chrome import total_track
from .chrome_spans import Columns, service_name
from .chrome_tracks import Tracks
from .protobuf import message, number

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from .spans import SpanList

Array = npt.NDArray[Any]
_SEQUENCE = 1
_PROCESS = 1
"""The track of the process; further ones have the numbers after it."""
_KEYS = ("trace_id", "span_id", "parent_id", "attributes", "status")
"""Arguments of slices; their iids are in ``otp_perfetto_key``."""
_CLEARED = 1
"""``SEQ_INCREMENTAL_STATE_CLEARED``: what follows is all that the sequence knows."""


class _Field:
    """Numbers of fields of ``perfetto.protos``."""

    PACKET = 1
    SEQUENCE, INTERNED, FLAGS, DESCRIPTOR = 10, 12, 13, 60
    CATEGORIES, NAMES, KEYS, TEXTS = 1, 2, 3, 29
    """Of ``InternedData``."""
    UUID, NAME, PROCESS, THREAD, PARENT, COUNTER = 1, 2, 3, 4, 5, 8
    """Of ``TrackDescriptor``."""


class Counter(NamedTuple):
    """A quantity over time."""

    name: str
    time: npt.NDArray[np.int64]
    """Unix ns, rising."""
    value: npt.NDArray[np.int64]


def encode(spans: SpanList, pid: int, counters: Iterable[Counter] = ()) -> Iterator[bytes]:
    """Encodes spans as a whole file, in pieces of about 1 MiB, natively and without the GIL: some 210 bytes and 0.45 us per span.

    Raises:
        ValueError: the table does not fit together.
        MemoryError: no memory is left.
    """
    process = message(_Field.PROCESS, number(1, pid) + _text(6, service_name(spans.resource)))
    yield _descriptor(_PROCESS, process)
    tracks, tracks_before = Tracks(pid), _PROCESS
    if len(spans):
        columns = Columns(spans)
        order, tids = _by_track(*tracks.place(columns.outlines))
        columns.lay_out(order, tids)
        tids = tids[order]
        first = np.flatnonzero(np.append(True, tids[1:] != tids[:-1]))
        uuids = np.arange(_PROCESS + 1, _PROCESS + 1 + len(first), dtype=np.uint64)
        uuid_of = dict(zip(tids[first].tolist(), uuids.tolist(), strict=True))
        yield b"".join(_track(uuid_of[tid], _text(_Field.NAME, name)) for tid, name in tracks.lanes())
        yield b"".join(_track(uuid_of[tid], _thread(pid, tid, name)) for tid, name in tracks.threads())
        yield from _spans(columns, np.repeat(uuids, np.diff(np.append(first, len(tids)))))
        tracks_before += len(first)
    for uuid, counter in enumerate(counters, tracks_before + 1):
        unit = message(_Field.COUNTER, number(3, 3))  # UNIT_SIZE_BYTES
        yield _track(uuid, _text(_Field.NAME, counter.name) + unit)
        yield from encode_perfetto_counter(counter.time, counter.value, track=uuid, sequence=_SEQUENCE)


def _by_track(order: Array, tids: Array) -> tuple[Array, Array]:
    """The order with the spans of each track behind each other; those of threads are already."""
    of = tids[order]
    runs = of[np.flatnonzero(np.append(True, of[1:] != of[:-1]))]
    is_grouped = len(distinct_values(runs)) == len(runs)
    return order if is_grouped else order[np.argsort(of, kind="stable")], tids


def memory_counters(memory: Mapping[str, Array] | None) -> Iterator[Counter]:
    """The totals of each allocator, from the records of memory of a batch."""
    for total in totals_over_time(memory) if memory is not None and len(memory["time"]) else ():
        time, size = (np.ascontiguousarray(values, dtype=np.int64) for values in (total.time, total.bytes))
        yield Counter(total_track(total), time, size)


def _spans(columns: Columns, track: npt.NDArray[np.uint64]) -> Iterator[bytes]:
    keys = [column.key for column in columns.table.attributes]
    iid_of = {key: iid for iid, key in enumerate(dict.fromkeys((*_KEYS, *keys)), 1)}
    names, first_trace_iid = columns.checked.all_names, len(columns.checked.all_names) + 1
    layout = columns.layout
    traces = distinct_values(columns.table.trace[layout["rows"]]).tolist()
    texts = [(first_trace_iid + trace, columns.table.trace_ids[trace].tobytes().hex()) for trace in traces]
    picked = distinct_values(columns.table.name[layout["rows"]]).tolist()
    values = _texts_in(columns)
    yield from _interned(
        [(_Field.CATEGORIES, iid, text) for iid, text in enumerate(columns.category_names(), 1)]
        + [(_Field.NAMES, name + 1, names[name]) for name in picked]
        + [(_Field.KEYS, iid, key) for key, iid in iid_of.items()]
        + [(_Field.TEXTS, name + 1, names[name]) for name in values]
        + [(_Field.TEXTS, iid, text) for iid, text in texts]
    )
    given = {
        "rows": layout["rows"],
        "track": track,
        "category": layout["category"] + np.uint32(1),
        "key_iids": np.array([iid_of[key] for key in keys], dtype=np.uint32),
        **_flows(layout),
    }
    yield from encode_perfetto(columns.checked.spans, given, sequence=_SEQUENCE, first_trace_iid=first_trace_iid)


def _texts_in(columns: Columns) -> list[int]:
    """The names that are values of attributes of the spans."""
    found = [np.empty(0, np.uint32)]
    found += [column.values for column in columns.table.attributes if column.type is AttributeType.NAME]
    return [int(name) for name in distinct_values(np.concatenate([distinct_values(values) for values in found]))]


def _flows(layout: Mapping[str, Array]) -> dict[str, Array]:
    """The ends of arrows, by the place of the span that they are at."""
    arrows = len(layout["arrow_from"])
    place = np.concatenate((layout["arrow_from"], layout["arrow_to"]))
    order = np.argsort(place, kind="stable")
    number = np.tile(np.arange(1, arrows + 1, dtype=np.uint64), 2)
    is_end = np.repeat(np.array([0, 1], dtype=np.uint8), arrows)
    return {"flow_place": place[order], "flow_id": number[order], "flow_ends": is_end[order]}


def _interned(entries: Iterable[tuple[int, int, str]]) -> Iterator[bytes]:
    """Packets with texts, the first of which begins the sequence."""
    flags, parts, size = _CLEARED, list[bytes](), 0
    for field, iid, text in entries:
        parts.append(message(field, number(1, iid) + _text(2, text)))
        size += len(parts[-1])
        if size > PIECE_SIZE:
            yield _packet(message(_Field.INTERNED, b"".join(parts)) + number(_Field.FLAGS, flags))
            flags, parts, size = 2, [], 0
    yield _packet(message(_Field.INTERNED, b"".join(parts)) + number(_Field.FLAGS, flags))


def _track(uuid: int, rest: bytes) -> bytes:
    """A track of the process."""
    return _descriptor(uuid, rest + number(_Field.PARENT, _PROCESS))


def _thread(pid: int, tid: int, name: str) -> bytes:
    return message(_Field.THREAD, number(1, pid) + number(2, tid) + _text(5, name or f"thread {tid}"))


def _descriptor(uuid: int, rest: bytes) -> bytes:
    return _packet(message(_Field.DESCRIPTOR, number(_Field.UUID, uuid) + rest))


def _text(field: int, value: str) -> bytes:
    return message(field, value.encode("utf-8", "replace"))


def _packet(content: bytes) -> bytes:
    return message(_Field.PACKET, number(_Field.SEQUENCE, _SEQUENCE) + content)
