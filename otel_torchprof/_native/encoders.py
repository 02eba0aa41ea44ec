"""The native encoders: events and spans as Chrome JSON (``encode_chrome.h``, ``device_slices.h``), spans as OTLP, and in Perfetto's format. Thread-safe; without the GIL.

Columns are contiguous arrays of integers, named as in the C struct; indices in them must be in range. Every function raises MemoryError
if no memory is left.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .ffi import ffi, lib
from .loops import Array, pointer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from otel_torchprof._columns.batch import Names

PIECE_SIZE = 1 << 20
"""Bytes after which a piece is handed out."""


class EscapedNames:
    """Names as JSON text, each escaped once; the encoders have a view of it for as long as this object lives."""

    def __init__(self, names: Names) -> None:
        names = names.flat()
        data = np.ascontiguousarray(names.data, dtype=np.uint8)
        raw_ends = np.ascontiguousarray(names.ends, dtype=np.uint64)
        raw = {"data": pointer(data), "ends": pointer(raw_ends), "count": len(raw_ends)}
        self._ends = np.empty(len(raw_ends), dtype=np.uint64)
        self._text = new_buffer()
        _checked(lib.otp_json_escape_names(ffi.new("otp_names *", raw), self._text, pointer(self._ends)))
        self.native: Any = {"data": self._text.data, "ends": pointer(self._ends), "count": len(self._ends)}
        """The fields of an ``otp_names``."""


class SpanTexts(NamedTuple):
    """The texts that are the same for many spans."""

    names: EscapedNames
    """Names of the spans and their attributes."""
    categories: EscapedNames
    keys: Names | None = None
    """Keys of the attributes, in their order, as JSON with the colon."""
    arguments: Names | None = None
    """Arguments of each span as JSON, if they do not come from its columns."""


def encode_events(
    columns: Mapping[str, Array], names: EscapedNames, hierarchies: EscapedNames, *, base_ns: int, pid: int
) -> Iterator[bytes]:
    """Events and their arrows, in pieces. ``columns``: of ``otp_chrome_events``."""
    events = _struct("otp_chrome_events *", columns)
    events.names, events.hierarchies, events.base, events.pid = names.native, hierarchies.native, base_ns, pid
    events.count, events.flow_count = len(columns["start"]), len(columns["flow_row"])
    events.input_word_count = len(columns.get("input_words", ()))
    yield from _pieces(lib.otp_chrome_encode, (events,), events.count)


def encode_device_slices(
    columns: Mapping[str, Array], names: EscapedNames, *, first_arrow: int, base_ns: int, pid: int
) -> Iterator[bytes]:
    """Slices of devices and their arrows, in pieces. ``columns``: of ``otp_chrome_device_slices``."""
    slices = _struct("otp_chrome_device_slices *", columns)
    slices.names, slices.first_arrow_id, slices.base, slices.pid = names.native, first_arrow, base_ns, pid
    slices.count = len(columns["start"])
    yield from _pieces(lib.otp_chrome_encode_device_slices, (slices,), slices.count)


def encode_memory(columns: Mapping[str, Array], *, first_index: int, base_ns: int, pid: int) -> Iterator[bytes]:
    """Encodes allocations and releases, in pieces. ``columns``: of ``otp_chrome_memory``."""
    memory = _struct("otp_chrome_memory *", columns)
    memory.count, memory.first_index = len(columns["time"]), first_index
    memory.base, memory.pid = base_ns, pid
    yield from _pieces(lib.otp_chrome_encode_memory, (memory,), memory.count)


def encode_counter(columns: Mapping[str, Array], name: bytes, *, base_ns: int, pid: int) -> Iterator[bytes]:
    """Samples of one quantity, in pieces. ``columns``: of ``otp_chrome_counter``; ``name``: of its track, as in JSON."""
    counter = _struct("otp_chrome_counter *", columns)
    views = ffi.from_buffer("char[]", name)
    counter.name, counter.name_size = views, len(name)
    counter.count, counter.base, counter.pid = len(columns["time"]), base_ns, pid
    yield from _pieces(lib.otp_chrome_encode_counter, (counter,), counter.count)


def encode_spans(
    spans: SpanColumns, columns: Mapping[str, Array], texts: SpanTexts, *, first_arrow: int, base_ns: int, pid: int
) -> Iterator[bytes]:
    """Spans and the arrows between them, in pieces. ``columns``: of ``otp_chrome_layout``."""
    layout = _struct("otp_chrome_layout *", columns)
    layout.names, layout.categories = texts.names.native, texts.categories.native
    for field in ("keys", "arguments"):
        if (text := getattr(texts, field)) is not None:
            setattr(layout, field, {"data": pointer(text.data), "ends": pointer(text.ends), "count": len(text)})
    layout.row_count, layout.arrow_count = len(columns["rows"]), len(columns["arrow_from"])
    layout.pid, layout.base, layout.first_arrow_id = pid, base_ns, first_arrow
    yield from _pieces(lib.otp_encode_chrome_spans, (spans.native, layout), layout.row_count + layout.arrow_count)


def encode_perfetto(
    spans: SpanColumns, columns: Mapping[str, Array], *, sequence: int, first_trace_iid: int
) -> Iterator[bytes]:
    """Spans as packets of Perfetto's format, in pieces. ``columns``: of ``otp_perfetto_layout``."""
    rows = len(columns["rows"])
    room = np.empty(rows, dtype=np.uint64)
    layout = _struct("otp_perfetto_layout *", {**columns, "open": room})
    layout.row_count, layout.flow_count = rows, len(columns["flow_place"])
    layout.sequence, layout.first_trace_iid = sequence, first_trace_iid
    yield from _pieces(lib.otp_encode_perfetto, (spans.native, layout), rows)


def encode_perfetto_counter(time: Array, value: Array, *, track: int, sequence: int) -> Iterator[bytes]:
    """Samples of one quantity likewise; both arrays are int64."""
    counter = _struct("otp_perfetto_counter *", {"time": time, "value": value})
    counter.count, counter.track, counter.sequence = len(time), track, sequence
    yield from _pieces(lib.otp_encode_perfetto_counter, (counter,), len(time))


def link_targets(spans: SpanColumns, rows: npt.NDArray[np.uint64], link_count: int) -> npt.NDArray[np.int64]:
    """Returns for each link of the spans the position of its target in ``rows``; -1 if it is not there."""
    target = np.empty(link_count, dtype=np.int64)
    _checked(lib.otp_chrome_link_targets(spans.native, pointer(rows), len(rows), pointer(target)))
    return target


def detach_overlapping(order: Array, track: Array, start: Array, end: Array, detached: npt.NDArray[np.uint8]) -> None:
    """Sets ``detached`` to 1 for rows that overlap an earlier one of their track without nesting (``otp_chrome_detach_overlapping``).

    The arrays are of int64; ``order`` has the rows by track, then start.
    """
    arrays = (order, track, start, end, detached)
    _checked(lib.otp_chrome_detach_overlapping(len(order), *map(pointer, arrays)))


def _names(names: Names) -> dict[str, Any]:
    """Returns the fields of an ``otp_names`` that points into the names, which must live as long."""
    view = {"data": _view(_BYTES, names.data), "ends": _view(_ENDS, names.ends), "count": len(names.ends)}
    if (added := names.added) is not None:
        view |= {"more_data": _view(_BYTES, added.data), "more_ends": _view(_ENDS, added.ends)}
    return view


def _view(kind: Any, values: Array) -> Any:
    return ffi.from_buffer(kind, np.ascontiguousarray(values))


def _struct(c_type: str, columns: Mapping[str, Array]) -> Any:
    """Returns a C struct that points into the columns, which must live as long."""
    return ffi.new(c_type, {name: pointer(array) for name, array in columns.items()})


def _pieces(encode: Any, subject: tuple[Any, ...], count: int) -> Iterator[bytes]:
    """Yields the pieces of ``count`` encoded items. The caller keeps the memory alive to which the subject points."""
    encoded = pieces(lambda item, buffer: encode(*subject, item, PIECE_SIZE, buffer), range(count))
    return (bytes(piece) for piece, _ in encoded)


def _checked(result: int) -> int:
    if result < 0:
        raise MemoryError("no memory left to encode the Chrome trace; encode fewer events at a time")
    return result


# ---- Averages of what is left out of steps ----


def encode_averages(columns: Mapping[str, Array], most_bytes: Array, longest_name: int, names: Names) -> list[str]:
    """Returns the text of each group of ``otp_averages``; ``columns``: the other arrays of that struct, by name.

    ``most_bytes``: int64, of the text of each group. ``longest_name``: characters.
    """
    averages = _struct("otp_averages *", {**columns, "most_bytes": most_bytes})
    averages.count, averages.group_count, averages.longest_name = len(columns["name"]), len(most_bytes), longest_name
    averages.wait_count = len(columns["wait_start"])
    averages.names = _names(names)
    out, ends = new_buffer(), np.empty(len(most_bytes), dtype=np.uint64)
    _checked(lib.otp_encode_averages(averages, out, pointer(ends)))
    cuts = [0, *ends.tolist()]
    text = ffi.buffer(out.data, out.size)[:] if out.size else b""
    return [text[begin:end].decode() for begin, end in pairwise(cuts)]


# ---- Spans as OTLP ----


class RequestParts(NamedTuple):
    """Serialized parts shared by all spans of a request (``otp_otlp_common``)."""

    resource: bytes
    resource_schema_url: bytes
    scope: bytes
    scope_schema_url: bytes


class LineParts(NamedTuple):
    """Text of a request before and after its spans (``otp_otlp_json_frame``)."""

    head: bytes
    tail: bytes


def encode_otlp(
    spans: SpanColumns, parts: RequestParts, rows: range, max_bytes: int
) -> Iterator[tuple[memoryview, int]]:
    """Serializes the spans of rows (rising, without gaps) as messages of ``max_bytes``; yields each with its number of spans.

    A message is valid until the next one, see :func:`pieces`.

    Raises:
        MemoryError: no memory is left.
    """
    frame, _alive = _frame("otp_otlp_common *", parts)
    yield from pieces(
        lambda row, buffer: lib.otp_encode_otlp(spans.native, frame, row, rows.stop, max_bytes, buffer), rows
    )


def encode_otlp_json(
    spans: SpanColumns, parts: LineParts, rows: range, max_bytes: int
) -> Iterator[tuple[memoryview, int]]:
    """Like :func:`encode_otlp`, as lines of JSON."""
    frame, _alive = _frame("otp_otlp_json_frame *", parts)
    yield from pieces(
        lambda row, buffer: lib.otp_encode_otlp_json(spans.native, frame, row, rows.stop, max_bytes, buffer), rows
    )


def _frame(c_type: str, parts: RequestParts | LineParts) -> tuple[Any, object]:
    """Returns a struct of ``otp_bytes``, and an object that must live as long."""
    views = {name: ffi.from_buffer("uint8_t[]", part) for name, part in parts._asdict().items()}
    return ffi.new(c_type, {name: {"data": part, "size": len(part)} for name, part in views.items()}), views


# ---- Spans for the native encoders (``otp_spans`` in ``encode.h``) ----


_POINTERS = {name: field.type.item for name, field in ffi.typeof("otp_spans").fields if field.type.kind == "pointer"}
_ARRAYS = {name: ffi.typeof(f"{item.cname}[]") for name, item in _POINTERS.items()}
_BYTES, _ROWS, _ENDS, _TEXT = (ffi.typeof(kind) for kind in ("uint8_t[]", "uint32_t[]", "uint64_t[]", "char[]"))


class SpanAttribute(NamedTuple):
    """One attribute of all spans (``otp_attribute``)."""

    key: bytes
    type: int
    """Type of the values, ``otp_attribute_type``."""
    values: Array
    rows: Array | None
    """Rows with a value, uint32, rising; None: all."""


class SpanColumns:
    """Columns of spans for the encoders, valid while this object lives. Not checked here.

    Args:
        count: number of spans.
        columns: arrays of ``otp_spans`` by name, with the struct's element sizes.
        attributes: the attributes, in order.
        link_count: length of the column ``links``.
        names: names to which the columns point.
    """

    def __init__(
        self,
        count: int,
        columns: Mapping[str, Array],
        attributes: Iterable[SpanAttribute],
        link_count: int,
        names: Names,
    ) -> None:
        self._alive: list[Any] = []
        views = [self._attribute(attribute) for attribute in attributes]
        self.native: Any = ffi.new(
            "otp_spans *",
            {
                **{name: self._array(_ARRAYS[name], values) for name, values in columns.items()},
                "count": count,
                "attributes": self._keep(ffi.new("otp_attribute[]", views)),
                "attribute_count": len(views),
                "link_count": link_count,
                "names": self._names(names),
            },
        )
        """The ``otp_spans *``."""

    def _keep(self, pointer: Any) -> Any:
        self._alive.append(pointer)
        return pointer

    def _array(self, kind: Any, values: Array) -> Any:
        return self._keep(_view(kind, values))

    def _attribute(self, attribute: SpanAttribute) -> dict[str, Any]:
        values = self._array(_TEXT, attribute.values)
        return {
            "key": self._keep(ffi.from_buffer(_TEXT, attribute.key)),
            "key_size": len(attribute.key),
            "type": attribute.type,
            "values": ffi.cast("void *", values),
            "rows": ffi.NULL if attribute.rows is None else self._array(_ROWS, attribute.rows),
            "row_count": 0 if attribute.rows is None else len(attribute.rows),
        }

    def _names(self, names: Names) -> dict[str, Any]:
        view = _names(names)
        self._keep(view)
        return view


# ---- Output of the encoders, in pieces, through a reused buffer ----


_LARGEST_SPARE = 4 << 20
"""Bytes of the largest buffer that is kept for reuse: messages that receivers accept fit into it."""
_spare: list[Any] = []
"""The buffer of the last finished encoding, if not larger than that. Touching the pages of a new one took half of the time of encoding
20,000 spans (measured: 235 instead of 125 ns per span)."""


def pieces(write: Callable[[int, Any], int], items: range) -> Iterator[tuple[memoryview, int]]:
    """Yields each piece with its number of items. A piece is released when the next one is requested: it is not copied out of the buffer.

    ``write`` writes items, from a given one on, into an ``otp_buffer``, and returns the next item, or a negative number if no memory is
    left. It keeps the memory that it reads alive.

    Raises:
        MemoryError: no memory is left.
    """
    try:
        buffer = _spare.pop()
    except IndexError:
        buffer = new_buffer()
    item = items.start
    while item < items.stop:
        buffer.size = 0
        first, item = item, write(item, buffer)
        if item < 0:
            raise MemoryError("no memory left for what is encoded; encode fewer events at a time")
        with memoryview(ffi.buffer(buffer.data, buffer.size)) as piece:
            yield piece, item - first
    if not _spare and buffer.capacity <= _LARGEST_SPARE:
        _spare.append(buffer)


def new_buffer() -> Any:
    """Returns an empty ``otp_buffer`` that is freed with its last reference."""
    return ffi.gc(ffi.new("otp_buffer *"), lib.otp_buffer_free)
